"""Qwen 1.5 to 2.5 (https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import GGUF, Family, register
from ..keys import Keys
from ..windows import late_layers


def _read(keys: Keys) -> Mapping[str, Any]:
    return {"windows": late_layers(keys)}


register(
    Family(
        "qwen2",
        defaults={"sliding_window": 4096},
        fixed={"qkv_bias": True},
        read=_read,
        gguf=GGUF("qwen2"),
    )
)
