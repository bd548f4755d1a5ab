"""Phi 3 and 4 (https://arxiv.org/abs/2404.14219): fused projections, a part of each head rotates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, gguf_names, register
from ..keys import Keys
from ..rope import rope_settings, scaled_rope
from ..tensor_map import TensorMap
from ..windows import alike, window_size

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def _read(keys: Keys) -> Mapping[str, Any]:
    settings = rope_settings(keys)
    if settings.has("short_factor"):  # older configs call this kind 'su' or 'yarn'
        settings = Keys({**settings.values, "rope_type": "longrope"}, settings.path)
    original = keys.integer("original_max_position_embeddings", 4096)
    rope = scaled_rope(keys, settings, partial=True, original=original)
    return {"rope": rope, "windows": alike(keys, window_size(keys))}


register(
    Family(
        "phi3",
        defaults={"rms_norm_eps": 1e-5},
        read=_read,
        tensors=TensorMap(fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP}),
        gguf=GGUF("phi3", tensors=replace(gguf_names(), fused={"attn_qkv": _QKV, "ffn_up": _GATE_UP})),
    )
)
