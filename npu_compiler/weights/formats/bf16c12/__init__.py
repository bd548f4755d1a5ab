"""bf16c12: bfloat16 weights in 12 bits, without loss, for products that are limited by memory bandwidth.

The low byte of a bfloat16 (an exponent bit and the mantissa) is random. Its high byte (sign and seven exponent bits) is
not: the weights of a matrix have few distinct high bytes, so a 4-bit code replaces them. Elements without a code are
*outliers*: they are zero in the main stream, and a list of fixed length holds them, so that sizes do not depend on
values. Packing weights with more outliers than the list holds raises ``IncompressibleError``; trained models fill at
most a quarter of it.

An outlier is zero in the main stream, so an infinite activation produces NaN there (inf * 0).
"""

from __future__ import annotations

from ...format import WeightFormat
from .panels import Panels
from .rows4 import Rows4


class Bf16c12(WeightFormat):
    """The format bf16c12; see the module."""

    name = "bf16c12"
    dtypes = ("bfloat16",)
    layouts = (Panels(), Rows4())


FORMAT = Bf16c12()
