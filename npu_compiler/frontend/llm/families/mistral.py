"""Mistral 7B and its successors (https://arxiv.org/abs/2310.06825). GGUF files call them 'llama'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import Family, register
from ..keys import Keys
from ..windows import alike, window_size


def _read(keys: Keys) -> Mapping[str, Any]:
    return {"windows": alike(keys, window_size(keys))}


register(Family("mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}, read=_read))
