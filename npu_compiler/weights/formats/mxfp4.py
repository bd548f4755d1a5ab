"""mxfp4: blocks of 32 numbers of 4 bits (e2m1) with a power of two as scale: the OCP microscaling format, as in GGUF.

The values are twice those of e2m1, so the scale of the byte e is 2^(e - 128). Source: OCP Microscaling Formats
Specification 1.0.
"""

from __future__ import annotations

import numpy as np

from ..blocks import Listed


class MXFP4(Listed):
    name = "mxfp4"
    values = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    block_bytes = 17
    scale_fields = (1,)
    error = 0.2 + 2**-20  # half of the gap between 8 and 12, at 10
    floor = 2**-126
    gguf_type = 39

    def scale_of(self, scales: np.ndarray) -> np.ndarray:
        bits = scales[..., 0].astype(np.uint32)
        subnormal = np.uint32(1 << 21) << np.minimum(bits, 1)
        return np.where(bits < 2, subnormal, np.maximum(bits, 1) - 1 << np.uint32(23)).view(np.float32)

    def scale_bytes(self, top: np.ndarray) -> np.ndarray:
        """The smallest power of two whose 12-fold is at least the largest magnitude."""
        fraction, exponent = np.frexp(np.abs(top) / np.float32(12))
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
        return np.clip(exponent + 128, 0, 254).astype(np.uint8)[..., None]


FORMAT = MXFP4()
