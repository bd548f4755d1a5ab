"""Gemma 2 (https://arxiv.org/abs/2408.00118): norms on both sides, soft caps, every other layer has a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys
from ..windows import all_but_every_nth


def read_scales(keys: Keys) -> dict[str, Any]:
    """Return the scales, soft caps and biases that Gemma 2 and 3 have in common."""
    return {
        "attention_scale": keys.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": keys.optional_number("attn_logit_softcapping"),
        "logit_softcap": keys.optional_number("final_logit_softcapping"),
        "embedding_scale": keys.integer("hidden_size") ** 0.5,
        **attention_bias(keys),
    }


def attention_scalar(config: Mapping[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """Return 'query_pre_attn_scalar', which GGUF files lack: for the 27B model the hidden size divided by the number of
    heads, for others the size of a head."""
    heads, hidden = config.get("num_attention_heads", 0), config.get("hidden_size", 0)
    large = config.get("num_hidden_layers") == layers_of_27b and heads
    return {"query_pre_attn_scalar": hidden // heads if large else config.get("head_dim", 256)}


register(
    Family(
        "gemma2",
        aliases={"hidden_act": "hidden_activation"},
        defaults={
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        settings=("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        fixed={"norm": "rms_unit_offset", "block": "sandwich_norm", "round_embedding_scale": True},
        read=lambda keys: {**read_scales(keys), "windows": all_but_every_nth(keys)},
        gguf=GGUF(
            "gemma2",
            tensors=replace(gguf_names(post_attention_layernorm="post_attention_norm"), norm_shift=-1.0),
            complete=lambda config: attention_scalar(config, layers_of_27b=46),
        ),
    )
)  # fmt: skip
