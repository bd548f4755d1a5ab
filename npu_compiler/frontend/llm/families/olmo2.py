"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLP, and over whole queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys


def _read(keys: Keys) -> Mapping[str, Any]:
    return attention_bias(keys)


register(
    Family(
        "olmo2",
        defaults={"rms_norm_eps": 1e-5},
        fixed={"norm": "rms_float32", "block": "post_norm", "qk_norm": "projection"},
        read=_read,
        gguf=GGUF("olmo2", tensors=gguf_names(post_attention_layernorm="post_attention_norm")),
    )
)
