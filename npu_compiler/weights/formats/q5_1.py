"""q5_1: blocks of 32 elements as codes of 5 bits with a float16 scale and minimum: GGUF's type of that name."""

from __future__ import annotations

from ..blocks import ScaledFrom


class Q5_1(ScaledFrom):
    name = "q5_1"
    bits = 5
    block_bytes = 24
    gguf_type = 7


FORMAT = Q5_1()
