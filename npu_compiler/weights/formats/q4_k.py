"""q4_k: codes of 4 bits; 32 share a scale and a minimum of 6 bits, 256 two float16 numbers. As in GGUF."""

from __future__ import annotations

import numpy as np

from ..blocks import Parts
from ..large_blocks import LargeFrom, nibble_bytes, nibbles


def six_bits(raw: np.ndarray) -> np.ndarray:
    """Return the 8 scales and minimums of 6 bits, uint8 [..., 8, 2], of 12 bytes [..., 12]."""
    scales, minimums, rest = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    high = [(part >> np.uint8(6)) << np.uint8(4) for part in (scales, minimums)]
    late = (rest & np.uint8(15) | high[0], rest >> np.uint8(4) | high[1])
    early = (scales & np.uint8(63), minimums & np.uint8(63))
    return np.stack([np.concatenate(pair, -1) for pair in zip(early, late, strict=True)], -1)


def six_bit_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the bytes [..., 12] of :func:`six_bits`."""
    (scales, minimums), (late, late_minimums) = (
        (part[..., 0], part[..., 1]) for part in (numbers[..., :4, :], numbers[..., 4:, :])
    )
    first = [x | y >> np.uint8(4) << np.uint8(6) for x, y in ((scales, late), (minimums, late_minimums))]
    return np.concatenate([*first, late & np.uint8(15) | (late_minimums & np.uint8(15)) << np.uint8(4)], -1)


class Q4_K(LargeFrom):
    name = "q4_k"
    bits = 4
    sub_block = 32
    block_bytes = 144
    error = 0.1  # half a step, and half a unit of scale and minimum
    gguf_type = 12

    def split(self, blocks: np.ndarray) -> Parts:
        codes = nibbles(blocks[..., 16:], 32).reshape(*blocks.shape[:-1], 8, 32)
        return Parts(codes, blocks[..., :4], six_bits(blocks[..., 4:16]))

    def join(self, parts: Parts) -> np.ndarray:
        codes = parts.codes.reshape(*parts.codes.shape[:-2], 256)
        return np.concatenate([parts.head, six_bit_bytes(parts.scales), nibble_bytes(codes, 32)], -1)


FORMAT = Q4_K()
