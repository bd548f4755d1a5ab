"""Models of transformers as GGUF files: names of the package ``gguf``, weights as llama.cpp's converter leaves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.frontend.llm import LLMConfig
from npu_compiler.frontend.llm.modules import inverse_frequencies
from npu_compiler.weights.format import block_format

_LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "<|end|>"]


def write_gguf(path: Path, model: Any, arch: str, half: bool = False, blocks: str | Mapping[str, str] = "") -> Path:
    """The model as a file of architecture ``arch``; ``half``: matrices in float16; ``blocks``: in this GGML type, or in
    types by a part of the tensor's name in the file, '' for all others."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    c, said = LLMConfig.from_hf(model.config.to_dict()), model.config.to_dict()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    if c.norm.startswith("rms"):
        writer.add_layer_norm_rms_eps(c.norm_eps)
    else:
        writer.add_layer_norm_eps(c.norm_eps)
    _add_rope(writer, c)
    if any(c.windows):
        writer.add_sliding_window(max(filter(None, c.windows)))
    if c.attention_softcap:
        writer.add_attn_logit_softcapping(c.attention_softcap)
    if c.logit_softcap:
        writer.add_final_logit_softcapping(c.logit_softcap)
    if "logit_scale" in said:
        writer.add_logit_scale(said["logit_scale"])
    if "logits_scaling" in said:
        writer.add_logit_scale(said["logits_scaling"])
        writer.add_embedding_scale(said["embedding_multiplier"])
        writer.add_residual_scale(said["residual_multiplier"])
        writer.add_attention_scale(said["attention_multiplier"])
    if "use_parallel_residual" in said:
        writer.add_parallel_residual(said["use_parallel_residual"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(_LETTERS)
    writer.add_token_types([1] * 28 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(28)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, c.num_layers)
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[architecture]}
    for name, tensor in model.state_dict().items():
        if name in ("lm_head.weight", "embed_out.weight") and c.tied_embedding:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"{arch} has no name for {name}"
        generic = ".".join("{bid}" if part.isdigit() else part for part in stored.rsplit(".", 1)[0].split("."))
        assert generic in known, f"{stored} is not a tensor of {arch}"
        array = _converted(name, tensor.numpy(), arch, c)
        if blocks and array.ndim > 1:
            types = {"": blocks} if isinstance(blocks, str) else blocks
            kind = gguf.GGMLQuantizationType[next(t for part, t in types.items() if part in stored)]
            try:
                data = gguf.quants.quantize(array, kind)
            except NotImplementedError:  # the package only reads this type
                data = block_format(kind.name.lower()).encode(array)
            writer.add_tensor(stored, data, raw_dtype=kind)
        else:
            writer.add_tensor(stored, array.astype(np.float16) if half and array.ndim > 1 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: Any, c: LLMConfig) -> None:
    import gguf

    rope = c.rope or c.window_rope
    if rope is None:
        return
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.dim)
    if rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_positions)
    if rope.kind == "llama3":  # the converter stores what plain frequencies are divided by
        plain = inverse_frequencies(dataclasses.replace(rope, kind="default"), 1)
        writer.add_tensor("rope_freqs.weight", (plain / inverse_frequencies(rope, 1)).numpy())


def _converted(name: str, array: np.ndarray, arch: str, c: LLMConfig) -> np.ndarray:
    """What llama.cpp's converter makes of a weight, by its architecture."""
    if arch in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):  # rotary pairs side by side
        heads = c.num_heads if "q_proj" in name else c.num_kv_heads
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch.startswith("gemma") and "norm" in name:
        return array + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return np.ascontiguousarray(array.T)
    if arch == "gptneox" and "query_key_value" in name:  # from head by head to all queries, all keys, all values
        return array.reshape(c.num_heads, 3, c.head_dim, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    return array
