"""Gemma 1 (https://arxiv.org/abs/2403.08295)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys


def _read(keys: Keys) -> Mapping[str, Any]:
    own = {"embedding_scale": keys.integer("hidden_size") ** 0.5, **attention_bias(keys)}
    # The first releases say 'gelu' and mean the approximation by tanh.
    return {**own, "activation": "gelu_tanh"} if keys.text("hidden_act", "gelu") == "gelu" else own


register(
    Family(
        "gemma",
        defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        fixed={"norm": "rms_unit_offset", "round_embedding_scale": True},
        read=_read,
        gguf=GGUF(
            "gemma",
            tensors=replace(gguf_names(), norm_shift=-1.0),
            complete=lambda config: {"hidden_act": "gelu_pytorch_tanh"},
        ),
    )
)
