"""fp8_e4m3: rows of 8-bit floating point numbers (e4m3) with a float32 scale.

A matrix with one scale has the same scale in every row.
"""

from __future__ import annotations

from ..bytes import FP8

FORMAT = FP8("fp8_e4m3", 0)
