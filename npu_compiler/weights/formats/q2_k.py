"""q2_k: codes of 2 bits; 16 share a scale and a minimum of 4 bits, 256 two float16 numbers. As in GGUF."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..blocks import Parts, Read
from ..large_blocks import LargeFrom, crumb_bytes, crumbs


class Q2_K(LargeFrom):
    name = "q2_k"
    bits = 2
    sub_block = 16
    block_bytes = 84
    scale_fields = (1,)  # the minimum in the high half of the byte
    top_scale = 15
    error = 0.45  # half a step, and half a unit of scale and minimum
    gguf_type = 10

    def pair(self, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return scales[..., 0] & np.uint8(15), scales[..., 0] >> np.uint8(4)

    def pair_of(self, scale: Read) -> tuple[Any, Any]:
        return scale(0) & 15, scale(0) >> 4

    def paired(self, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        return (scale | minimum << np.uint8(4))[..., None]

    def split(self, blocks: np.ndarray) -> Parts:
        codes = crumbs(blocks[..., 16:80]).reshape(*blocks.shape[:-1], 16, 16)
        return Parts(codes, blocks[..., 80:], blocks[..., :16, None])

    def join(self, parts: Parts) -> np.ndarray:
        codes = parts.codes.reshape(*parts.codes.shape[:-2], 256)
        return np.concatenate([parts.scales[..., 0], crumb_bytes(codes), parts.head], -1)


FORMAT = Q2_K()
