"""q5_0: blocks of 32 elements as codes of 5 bits with one float16 scale: GGUF's type of that name."""

from __future__ import annotations

from ..blocks import Scaled


class Q5_0(Scaled):
    name = "q5_0"
    bits = 5
    block_bytes = 22
    gguf_type = 6


FORMAT = Q5_0()
