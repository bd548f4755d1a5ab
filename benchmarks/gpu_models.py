"""The models of ``gpu.py``: Qwen2.5-1.5B, ResNets and denoisers with random weights, as our programs and in plain
PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_int8
import numpy as np
import torch
import torch.nn.functional as F
from gpu_denoisers import DENOISERS, denoiser
from llm_cpu import MODELS
from torch import nn

from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_compiler.weights.files import WeightSource
from npu_compiler.weights.format import BlockFormat

QWEN = MODELS["qwen2.5-1.5b"]
PREFILLS = (128, 512, 2048)
SHORT, LONG = 2048, 32768  # lengths of our caches
# Each as the only copy of the weights; behind a plus sign, the type of activations.
FORMATS = ("bf16c12", "int4_g128", "q4_k", "q8_0", "fp8_e4m3", "fp8_e4m3+fp8")
RESNETS = [(name, batch) for name in ("resnet18", "resnet50") for batch in (1, 256)]


def cache_length(position: int) -> int:
    """Return the length of the cache in which a token is decoded at ``position``."""
    return SHORT if position < SHORT else LONG


# -- our programs --------------------------------------------------------------------------------------------------
def programs(work: Path) -> dict[str, Path]:
    """Return the file of each program, by name."""
    names = [f"qwen_{n}" for n in (SHORT, LONG)] + [f"{name}_{batch}" for name, batch in (*RESNETS, *DENOISERS.items())]
    names += [f"qwen-{format}_{SHORT}" for format in FORMATS]
    return {name: work / f"{name}.npubin" for name in names}


def program_of(part: str) -> str:
    """Return the name of the program that a part of gpu.py runs; of 8-bit networks, the part's; '': it runs none."""
    kind, _, rest = part.partition("-")
    size, _, format = rest.partition("-")
    if kind == "bandwidth":
        return ""
    if kind == "cold":
        return f"qwen_{SHORT}"
    if kind in ("decode", "prefill"):
        length = cache_length(int(size)) if kind == "decode" else SHORT
        return f"qwen-{format}_{length}" if format else f"qwen_{length}"
    return part if format else f"{kind}_{size}"


def compile_missing(work: Path, parts: Collection[str]) -> None:
    """Write the programs of ``parts`` that are not in ``work`` yet. It needs no GPU."""
    from npu_runtime.llm.loader import save_manifest

    work.mkdir(parents=True, exist_ok=True)
    needed = {program_of(part) for part in parts}
    for name, path in programs(work).items():
        if name not in needed or path.exists():
            continue
        model, _, size = name.rpartition("_")
        if model.startswith("qwen"):
            compile_qwen(int(size), model.partition("-")[2]).save(path)
            save_manifest(qwen_manifest(int(size)), path)
        elif model in DENOISERS:
            compile_denoiser(model).save(path)
        else:
            compile_resnet(model, int(size)).save(path)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    for name in (name for name in gpu_int8.NAMES if f"{name}-{gpu_int8.BATCH}-int8" in needed):
        for path in gpu_int8.compile_quantised(work, name):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def compile_qwen(length: int, format: str = "") -> Any:
    """Compile Qwen2.5-1.5B with caches of ``length`` and weights in ``format``, one of ``FORMATS``; '': in bf16c12, and
    the elements as well. Long caches get no prefill, which is not measured there."""
    from npu_compiler.frontend.llm import llm_graphs
    from npu_compiler.pipeline import compile_entries

    chunks, (weights, _, activations) = PREFILLS if length == SHORT else (), format.partition("+")
    return compile_entries(
        llm_graphs(qwen_config(), max_len=length, chunks=chunks, device_sampling=bool(chunks)),
        "cuda",
        weights=weights or "bf16c12",
        speed_over_memory=not format,
        activations=activations or None,
    )


def compile_resnet(name: str, batch: int) -> Any:
    """Compile a ResNet of :mod:`npusim.models` in float16."""
    import npu_compiler
    from npusim import models

    model = getattr(models, name)().half().eval()
    return npu_compiler.compile(npu_compiler.capture(model, (torch.zeros(batch, 3, 224, 224).half(),)), target="cuda")


def compile_denoiser(name: str) -> Any:
    """Compile a model of :mod:`gpu_denoisers`."""
    import npu_compiler

    model, inputs = denoiser(name)
    return npu_compiler.compile(npu_compiler.capture(model, example_kwargs=inputs), target="cuda")


def qwen_config() -> Any:
    """Return the configuration of Qwen2.5-1.5B."""
    from npu_compiler.frontend.llm.config import LLMConfig

    return LLMConfig.from_hf(QWEN)


def qwen_manifest(length: int) -> Any:
    """Return the manifest of a program whose context is ``length``."""
    from npu_runtime.llm.manifest import ModelManifest

    return ModelManifest("qwen2.5-1.5b", length, QWEN["max_position_embeddings"], identity=qwen_config().identity())


def qwen_weights() -> dict[str, torch.Tensor]:
    """Return random bfloat16 weights on the GPU, by the checkpoint's names."""
    from npu_compiler.frontend.llm.config import parameter_shapes

    generator = torch.Generator("cuda").manual_seed(0)
    made = {}
    for key, shape in parameter_shapes(qwen_config()).items():
        x = torch.randn(shape, generator=generator, device="cuda")
        x = 1 + 0.1 * x if "norm" in key else (0.02 if len(shape) > 1 else 0.1) * x
        made[key] = x.bfloat16()
    return made


class Quantized(WeightSource):
    """Weights whose matrices are in blocks of a format, which programs read as they are."""

    def __init__(self, weights: dict[str, torch.Tensor], format: BlockFormat):
        self.origin, self.format = f"the weights in {format.name}", format
        self._weights = {k: w.cpu() for k, w in weights.items()}
        matrices = [k for k, w in weights.items() if w.ndim == 2]
        with ThreadPoolExecutor(8) as pool:
            made = pool.map(lambda k: format.encode(self._weights[k].float().numpy()), matrices)
            self._blocks = dict(zip(matrices, made, strict=True))

    def names(self) -> Iterable[str]:
        return self._weights

    def spec(self, name: str) -> tuple[tuple[int, ...], str]:
        return tuple(self._weights[name].shape), "bfloat16"

    def read(self, name: str) -> np.ndarray:
        return tensor_to_numpy(self._weights[name])

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        return self._blocks.get(name) if format is self.format else None

    def decoded(self) -> dict[str, torch.Tensor]:
        """Return the numbers that the blocks stand for, in float32 on the GPU, and all other weights."""
        made = {k: w.float().cuda() for k, w in self._weights.items() if k not in self._blocks}
        for key, blocks in self._blocks.items():
            made[key] = torch.from_numpy(self.format.decode(blocks, self._weights[key].shape[1])).cuda()
        return made


def resnet(name: str) -> nn.Module:
    """Return a float16 model on the GPU: random weights, and batch norm statistics that keep activations in scale."""
    from npusim import models

    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)().cuda()
    return with_statistics(model, torch.randn(16, 3, 224, 224, device="cuda")).half()


def with_statistics(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Return ``model`` in eval mode with random scales, shifts and the statistics of ``images`` in its batch norms."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = None
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.2, 0.2)
    with torch.no_grad():
        model.train()(images)
    return model.eval()


# -- the same decoder in plain PyTorch -----------------------------------------------------------------------------
class Attention(nn.Module):
    """Attention with one matmul for q, k and v, and caches of fixed length for keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int):
        super().__init__()
        self.split, self.size = [heads * size, kv_heads * size, kv_heads * size], size
        self.qkv = nn.Linear(width, sum(self.split))
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor,
        positions: torch.Tensor, mask: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in self.qkv(x).split(self.split, -1))
        keys[:, :, positions] = rotate(k, *rope)
        values[:, :, positions] = v
        y = F.scaled_dot_product_attention(rotate(q, *rope), keys, values, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to ``x`` [1, heads, N, D]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + QWEN["rms_norm_eps"])
        return y.to(x.dtype) * self.weight


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int, inner: int):
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attention = Attention(width, heads, kv_heads, size)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), *rest)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Qwen2.5-1.5B with static caches of ``length``, the form that torch.compile handles best. (token ids [1, N],
    positions [N]) -> the last token's logits [1, vocab]."""

    def __init__(self, length: int):
        super().__init__()
        c = QWEN
        width, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        size = width // heads
        self.embedding = nn.Embedding(c["vocab_size"], width)
        sizes = width, heads, kv_heads, size, c["intermediate_size"]
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(width)
        frequencies = c["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for i in range(len(self.blocks)):
            for kind in "kv":
                self.register_buffer(f"{kind}{i}", torch.zeros(1, kv_heads, length, size))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        rope = self.cos[positions].to(x.dtype), self.sin[positions].to(x.dtype)
        mask = (torch.arange(self.cos.shape[0], device=ids.device) <= positions[:, None])[None, None]
        for i, block in enumerate(self.blocks):
            x = block(x, rope, getattr(self, f"k{i}"), getattr(self, f"v{i}"), positions, mask)
        return F.linear(self.norm(x[:, -1]), self.embedding.weight)


def decoder(weights: dict[str, torch.Tensor], length: int, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return the model with the checkpoint's weights and zero caches."""
    with weights["model.norm.weight"].device:
        model = Decoder(length)
    cos, sin = model.cos, model.sin
    model = model.to(dtype).eval()
    model.cos, model.sin = cos, sin  # positions beyond 256 need float32
    w = weights.__getitem__
    with torch.no_grad():
        model.embedding.weight.copy_(w("model.embed_tokens.weight"))
        model.norm.weight.copy_(w("model.norm.weight"))
        for i, block in enumerate(model.blocks):
            at = f"model.layers.{i}."
            for kind in ("weight", "bias"):
                parts = [w(f"{at}self_attn.{x}_proj.{kind}") for x in "qkv"]
                getattr(block.attention.qkv, kind).copy_(torch.cat(parts))
            block.attention.out.weight.copy_(w(f"{at}self_attn.o_proj.weight"))
            block.gate_up.weight.copy_(torch.cat([w(f"{at}mlp.{x}_proj.weight") for x in ("gate", "up")]))
            block.down.weight.copy_(w(f"{at}mlp.down_proj.weight"))
            block.norm1.weight.copy_(w(f"{at}input_layernorm.weight"))
            block.norm2.weight.copy_(w(f"{at}post_attention_layernorm.weight"))
    return model


class QuantisedRows(nn.Linear):
    """A layer whose activations are quantised as ``npu_compiler.passes.quantize_activations`` does. In the last row,
    the first ``exempt`` results come from activations as they are: they belong to products of one row."""

    exempt = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        top = wide.abs().amax(-1, keepdim=True)
        q = (wide * (torch.full_like(top, 448) / top)).to(torch.float8_e4m3fn).float()
        y = F.linear(q, self.weight.float()) * (top / 448)
        y = (y if self.bias is None else y + self.bias).to(x.dtype)
        if self.exempt:
            y[:, -1, : self.exempt] = super().forward(x[:, -1:])[:, 0, : self.exempt]
        return y


def quantise_rows(model: Decoder) -> None:
    """Quantise the activations of a prompt. In the last block, programs compute queries, the output of attention and
    the MLP for the last token only."""
    for block in model.blocks:
        layers = (block.attention.qkv, block.attention.out, block.gate_up, block.down)
        for layer in layers:
            layer.__class__ = QuantisedRows
            if block is model.blocks[-1]:
                layer.exempt = block.attention.split[0] if layer is layers[0] else layer.out_features
