"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): a llama with four scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys

_SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logit_scale")


def _read(keys: Keys) -> Mapping[str, Any]:
    return {
        "attention_scale": keys.number("attention_scale", 1.0),
        "embedding_scale": keys.number("embedding_scale", 1.0),
        "residual_scale": keys.number("residual_scale", 1.0),
        "logit_scale": 1 / keys.number("logit_scale", 1.0),
        **attention_bias(keys),
        "mlp_bias": keys.flag("mlp_bias", False),
    }


register(
    Family(
        "granite",
        aliases={
            "attention_scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        settings=_SCALES,
        read=_read,
        gguf=GGUF(
            "granite",
            tensors=replace(gguf_names(), interleaved=True),
            present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        ),
    )
)
