"""q6_k: codes of 6 bits; 16 share a scale of 8 bits, 256 a float16 number. As in GGUF."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..blocks import Parts
from ..large_blocks import LargeScaled, crumb_bytes, crumbs, nibble_bytes, nibbles


class Q6_K(LargeScaled):
    name = "q6_k"
    bits = 6
    sub_block = 16
    block_bytes = 210
    top_scale = 127
    error = 0.04  # a step for the largest magnitude with the other sign, and half a unit of the scale
    gguf_type = 14

    def signed(self, scales: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(scales[..., 0]).view(np.int8).astype(np.float32)

    def signed_of(self, byte: Any) -> Any:
        return (byte ^ 128) - 128

    def stored(self, numbers: np.ndarray) -> np.ndarray:
        return np.clip(numbers, -128, 127).astype(np.int8).view(np.uint8)[..., None]

    def split(self, blocks: np.ndarray) -> Parts:
        codes = nibbles(blocks[..., :128], 64) | crumbs(blocks[..., 128:192]) << np.uint8(4)
        return Parts(codes.reshape(*blocks.shape[:-1], 16, 16), blocks[..., 208:], blocks[..., 192:208, None])

    def join(self, parts: Parts) -> np.ndarray:
        codes = parts.codes.reshape(*parts.codes.shape[:-2], 256)
        low, high = nibble_bytes(codes & np.uint8(15), 64), crumb_bytes(codes >> np.uint8(4))
        return np.concatenate([low, high, parts.scales[..., 0], parts.head], -1)


FORMAT = Q6_K()
