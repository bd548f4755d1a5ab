"""GGUF files of the benchmarks' architectures with random weights, in bfloat16 or in the mixes of ``llama-quantize``.

Speed does not depend on the values, so a few million are quantised for each type and reused, rotated by whole blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MIXES = ("q4_0", "q4_1", "q4_k_m", "q8_0")
_VALUES = 1 << 22  # quantised once for each type

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(key: str) -> str:
    """Return the name of a tensor in a GGUF file, by that in the hub's format."""
    name, kind = key.rsplit(".", 1)
    if not name.startswith("model.layers."):
        return f"{_GGUF_NAMES[name]}.{kind}"
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.{kind}"


def block_type(mix: str, name: str, columns: int, layers: int) -> str:
    """Return the type that ``llama-quantize`` chooses for a matrix, given the name of the mix and tied embeddings."""
    if mix == "q8_0":
        return mix
    if name == "token_embd.weight":
        return "q6_k" if columns % 256 == 0 else "q8_0"
    if mix != "q4_k_m":
        return mix
    layer, inner = int(name.split(".")[1]), name.split(".")[2]
    often = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "q6_k" if often and inner in ("attn_v", "ffn_down") else "q4_k"


def quantised_file(folder: Path, config: dict[str, Any], mix: str) -> Path:
    """Return ``folder / 'model.gguf'``, a model with random weights in a mix of :data:`MIXES`. Writes it if missing."""
    from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes

    path = folder / "model.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        blocks = _RandomBlocks()
        writer = _Writer(path, config)
        rng = np.random.default_rng(1)
        for number, (key, shape) in enumerate(parameter_shapes(LLMConfig.from_hf(config)).items()):
            name = gguf_name(key)
            if len(shape) == 1:
                values = rng.standard_normal(shape) * 0.02 + ("norm" in name)
                writer.add(name, values.astype(np.float32))
            else:
                kind = block_type(mix, name, shape[1], config["num_hidden_layers"])
                writer.add(name, blocks.tensor(kind, shape, number), kind)
        writer.close()
    return path


def bfloat16_file(folder: Path, config: dict[str, Any]) -> Path:
    """Write ``model.gguf`` beside the checkpoint ``model.safetensors`` in ``folder``, in bfloat16."""
    import ml_dtypes  # noqa: F401  registers the name bfloat16 with numpy, which safetensors looks up
    import safetensors.numpy

    path = folder / "model.gguf"
    writer = _Writer(path, config)
    for key, array in safetensors.numpy.load_file(folder / "model.safetensors").items():
        name = gguf_name(key)
        if array.ndim == 1:
            writer.add(name, array.astype(np.float32))
        else:
            writer.add(name, np.ascontiguousarray(writer.rotated(name, array)).view(np.uint8), "bf16")
    writer.close()
    return path


class _RandomBlocks:
    """Blocks of normally distributed values, made once for each type."""

    def __init__(self) -> None:
        self.values = (np.random.default_rng(0).standard_normal(_VALUES) * 0.02).astype(np.float32)
        self.made: dict[str, np.ndarray] = {}

    def tensor(self, kind: str, shape: tuple[int, ...], number: int) -> np.ndarray:
        """Return the bytes of tensor ``number``, uint8 [rows, bytes of a row]."""
        from npu_compiler.weights.format import block_format

        format = block_format(kind)
        if kind not in self.made:
            encoded = format.encode(self.values.reshape(-1, 4096))
            self.made[kind] = encoded.reshape(-1, format.row_bytes(format.block))
        blocks, count = self.made[kind], shape[0] * shape[1] // format.block
        rolled = np.roll(blocks, 1013 * number, 0)
        repeats = -(-count // len(rolled))
        return np.concatenate([rolled] * repeats)[:count].reshape(shape[0], -1)


class _Writer:
    """A GGUF file under construction; it appears under its name when it is complete."""

    def __init__(self, path: Path, config: dict[str, Any]):
        import gguf

        self.gguf, self.path, self.config = gguf, path, config
        w = self.writer = gguf.GGUFWriter(path.with_suffix(".gguf.part"), config["model_type"])
        w.add_block_count(config["num_hidden_layers"])
        w.add_context_length(config["max_position_embeddings"])
        w.add_embedding_length(config["hidden_size"])
        w.add_feed_forward_length(config["intermediate_size"])
        w.add_head_count(config["num_attention_heads"])
        w.add_head_count_kv(config["num_key_value_heads"])
        w.add_layer_norm_rms_eps(config["rms_norm_eps"])
        w.add_rope_freq_base(config["rope_theta"])
        w.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
        w.add_vocab_size(config["vocab_size"])
        w.add_tokenizer_model("no_vocab")

    def rotated(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a matrix with the order of rows that GGUF's 'llama' has: it rotates neighbouring elements."""
        kind = name.split(".")[-2]
        if self.config["model_type"] != "llama" or kind not in ("attn_q", "attn_k"):
            return array
        n = self.config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        return array.reshape(n, 2, array.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(array.shape)

    def add(self, name: str, array: np.ndarray, kind: str = "") -> None:
        """Add a float32 vector, or the bytes of a matrix of type ``kind``."""
        raw = self.gguf.GGMLQuantizationType[kind.upper()] if kind else None
        self.writer.add_tensor(name, array, raw_dtype=raw)

    def close(self) -> None:
        """Write the file."""
        w = self.writer
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        self.path.with_suffix(".gguf.part").rename(self.path)
