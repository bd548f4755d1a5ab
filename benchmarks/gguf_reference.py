"""Logits of a GGUF model computed by PyTorch eager on the dequantised weights, in float32 and in bfloat16 side by side.

The package ``gguf`` dequantises one layer at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16")


class _Tensors:
    """The tensors of a file, as float32."""

    def __init__(self, path: Path):
        import gguf

        self.dequantize = gguf.quants.dequantize
        self.found = {t.name: t for t in gguf.GGUFReader(path).tensors}
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def matrix(self, name: str) -> Any:
        """Return a tensor in the shape that PyTorch expects."""
        import torch

        t = self.found[name]
        if t.data.dtype == np.float32:
            return torch.from_numpy(np.array(t.data))
        rows = np.array_split(t.data, max(1, len(t.data) // 512))
        parts = self.pool.map(lambda part: self.dequantize(part, t.tensor_type), rows)
        return torch.from_numpy(np.concatenate(list(parts)))


def reference_logits(path: Path, tokens: list[int], positions: list[int]) -> dict[str, np.ndarray]:
    """Return the logits float32 [positions, vocab] after ``positions`` of ``tokens``, by dtype. The architecture is
    'llama' or 'qwen2'. Raises ``ValueError`` for others."""
    import torch

    from npu_compiler.frontend.llm.gguf_file import GGUFFile, hf_config

    config = hf_config(GGUFFile(path))
    if config["model_type"] not in ("llama", "qwen2"):
        raise ValueError(f"{path} is a {config['model_type']}; the reference computes llama and qwen2")
    tensors = _Tensors(path)
    table = tensors.matrix("token_embd.weight")
    with torch.no_grad():
        state = {d: table[tokens].to(getattr(torch, d)) for d in DTYPES}
        for layer in range(config["num_hidden_layers"]):
            names = [n for n in tensors.found if n.startswith(f"blk.{layer}.")]
            w = {n.split(".", 2)[2]: tensors.matrix(n) for n in names}
            for d, x in state.items():
                state[d] = _layer(x, {n: t.to(x.dtype) for n, t in w.items()}, config)
        head = tensors.matrix("output.weight") if "output.weight" in tensors.found else table
        norm = tensors.matrix("output_norm.weight")
        return {
            d: (_norm(x[positions], norm.to(x.dtype), config) @ head.to(x.dtype).T).float().numpy()
            for d, x in state.items()
        }


def _norm(x: Any, w: Any, config: dict[str, Any]) -> Any:
    wide = x.float()
    return w * (wide * (wide.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()).to(x.dtype)


def _rotated(x: Any, config: dict[str, Any]) -> Any:
    """Rotate [heads, tokens, elements] by position: neighbouring elements for 'llama', halves for 'qwen2'."""
    import torch

    n, size = x.shape[1:]
    angles = torch.arange(n)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if config["model_type"] == "llama":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _layer(x: Any, w: dict[str, Any], config: dict[str, Any]) -> Any:
    from torch.nn.functional import linear, scaled_dot_product_attention, silu

    n = len(x)

    def project(y: Any, name: str) -> Any:
        return linear(y, w[f"{name}.weight"], w.get(f"{name}.bias"))

    y = _norm(x, w["attn_norm.weight"], config)
    heads = (config["num_attention_heads"], *[config["num_key_value_heads"]] * 2)
    q, k, v = (project(y, f"attn_{name}").view(n, h, -1).transpose(0, 1) for name, h in zip("qkv", heads, strict=True))
    mixed = scaled_dot_product_attention(
        _rotated(q, config)[None], _rotated(k, config)[None], v[None], is_causal=True, enable_gqa=True
    )
    x = x + project(mixed[0].transpose(0, 1).reshape(n, -1), "attn_output")
    y = _norm(x, w["ffn_norm.weight"], config)
    return x + project(silu(project(y, "ffn_gate")) * project(y, "ffn_up"), "ffn_down")
