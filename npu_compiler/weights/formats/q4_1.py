"""q4_1: blocks of 32 elements as codes of 4 bits with a float16 scale and minimum: GGUF's type of that name."""

from __future__ import annotations

from ..blocks import ScaledFrom


class Q4_1(ScaledFrom):
    name = "q4_1"
    bits = 4
    block_bytes = 20
    gguf_type = 3


FORMAT = Q4_1()
