"""iq4_nl: blocks of 32 elements as one of 16 unevenly spaced values times a float16 scale: GGUF's type of that name."""

from __future__ import annotations

import numpy as np

from ..blocks import Listed, half_bytes


class IQ4_NL(Listed):
    name = "iq4_nl"
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    block_bytes = 18
    scale_fields = (2,)
    error = 14 / 127 + 2**-7  # that of an element with the largest magnitude and the other sign
    floor = 2**-17
    gguf_type = 20

    def scale_bytes(self, top: np.ndarray) -> np.ndarray:
        return half_bytes(top / np.float32(self.values[0]))


FORMAT = IQ4_NL()
