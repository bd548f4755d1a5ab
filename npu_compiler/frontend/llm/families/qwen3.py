"""Qwen 3, the dense models (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import GGUF, Family, attention_bias, register
from ..keys import Keys
from ..windows import late_layers


def _read(keys: Keys) -> Mapping[str, Any]:
    return {"windows": late_layers(keys), **attention_bias(keys)}


register(
    Family(
        "qwen3",
        defaults={"sliding_window": 4096, "head_dim": 128},
        fixed={"qk_norm": "head"},
        read=_read,
        gguf=GGUF("qwen3", present={"attention_bias": "blk.0.attn_q.bias"}),
    )
)
