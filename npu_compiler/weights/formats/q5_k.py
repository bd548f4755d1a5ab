"""q5_k: codes of 5 bits; 32 share a scale and a minimum of 6 bits, 256 two float16 numbers. As in GGUF."""

from __future__ import annotations

import numpy as np

from ..blocks import Parts
from ..large_blocks import LargeFrom, nibble_bytes, nibbles, top_bit_bytes, top_bits
from .q4_k import six_bit_bytes, six_bits


class Q5_K(LargeFrom):
    name = "q5_k"
    bits = 5
    sub_block = 32
    block_bytes = 176
    error = 0.06  # half a step, and half a unit of scale and minimum
    gguf_type = 13

    def split(self, blocks: np.ndarray) -> Parts:
        codes = nibbles(blocks[..., 48:], 32) | top_bits(blocks[..., 16:48]) << np.uint8(4)
        return Parts(codes.reshape(*blocks.shape[:-1], 8, 32), blocks[..., :4], six_bits(blocks[..., 4:16]))

    def join(self, parts: Parts) -> np.ndarray:
        codes = parts.codes.reshape(*parts.codes.shape[:-2], 256)
        high, low = top_bit_bytes(codes >> np.uint8(4)), nibble_bytes(codes & np.uint8(15), 32)
        return np.concatenate([parts.head, six_bit_bytes(parts.scales), high, low], -1)


FORMAT = Q5_K()
