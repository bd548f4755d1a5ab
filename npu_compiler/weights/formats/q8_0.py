"""q8_0: blocks of 32 elements as 8-bit numbers with one float16 scale: GGUF's type of that name."""

from __future__ import annotations

from ..bytes import Half8


class Q8_0(Half8):
    gguf_type = 8


FORMAT = Q8_0("q8_0", 32)
