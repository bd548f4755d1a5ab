"""bf16c12: bfloat16 weights in 12 bits, without loss, for products that wait for memory.

The low byte of a bfloat16 (an exponent bit and the mantissa) is noise. Its high byte (sign and seven exponent bits) is
not: the weights of a matrix have few different ones, which a 4-bit code names. Elements without a code are *outliers*:
they are stored as zero in the main stream and listed apart, in a list of fixed length, so that sizes do not depend on
values. Weights with more outliers than the list holds raise ``IncompressibleError`` when they are packed; trained
models fill a quarter of it at most.

An outlier is zero in the main stream, so an infinite activation produces NaN there (inf * 0).
"""

from __future__ import annotations

from ...format import WeightFormat
from .panels import Panels
from .rows4 import Rows4


class Bf16c12(WeightFormat):
    name = "bf16c12"
    dtypes = ("bfloat16",)
    layouts = (Panels(), Rows4())


FORMAT = Bf16c12()
