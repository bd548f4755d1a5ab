"""q4_0: blocks of 32 elements as codes of 4 bits with one float16 scale: GGUF's type of that name."""

from __future__ import annotations

from ..blocks import Scaled


class Q4_0(Scaled):
    name = "q4_0"
    bits = 4
    block_bytes = 18
    gguf_type = 2


FORMAT = Q4_0()
