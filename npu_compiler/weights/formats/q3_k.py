"""q3_k: codes of 3 bits; 16 share a scale of 6 bits, 256 a float16 number. As in GGUF."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..blocks import Parts
from ..large_blocks import LargeScaled, crumb_bytes, crumbs, top_bit_bytes, top_bits


class Q3_K(LargeScaled):
    name = "q3_k"
    bits = 3
    sub_block = 16
    block_bytes = 110
    top_scale = 31
    error = 0.28  # a step for the largest magnitude with the other sign, and half a unit of the scale
    gguf_type = 11

    def signed(self, scales: np.ndarray) -> np.ndarray:
        return scales[..., 0].astype(np.float32) - np.float32(32)

    def signed_of(self, byte: Any) -> Any:
        return byte - 32

    def stored(self, numbers: np.ndarray) -> np.ndarray:
        return (np.clip(numbers, -32, 31) + np.float32(32)).astype(np.uint8)[..., None]

    def split(self, blocks: np.ndarray) -> Parts:
        low, high = blocks[..., 96:104], blocks[..., 104:108]
        lows = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], -1)
        highs = np.concatenate([high >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], -1)
        codes = crumbs(blocks[..., 32:96]) | top_bits(blocks[..., :32]) << np.uint8(2)
        scales = (lows | highs << np.uint8(4))[..., None]
        return Parts(codes.reshape(*blocks.shape[:-1], 16, 16), blocks[..., 108:], scales)

    def join(self, parts: Parts) -> np.ndarray:
        codes, scales = parts.codes.reshape(*parts.codes.shape[:-2], 256), parts.scales[..., 0]
        lows, highs = scales & np.uint8(15), (scales >> np.uint8(4)).reshape(*scales.shape[:-1], 4, 4)
        low = lows[..., :8] | lows[..., 8:] << np.uint8(4)
        high = np.bitwise_or.reduce(highs << np.array([[0], [2], [4], [6]], np.uint8), -2)
        masks = top_bit_bytes(codes >> np.uint8(2))
        return np.concatenate([masks, crumb_bytes(codes & np.uint8(3)), low, high, parts.head], -1)


FORMAT = Q3_K()
