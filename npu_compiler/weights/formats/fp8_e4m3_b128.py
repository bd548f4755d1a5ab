"""fp8_e4m3_b128: 8-bit floating point numbers (e4m3) with a float32 scale for blocks of 128 rows and 128 columns."""

from __future__ import annotations

from ..bytes import FP8

FORMAT = FP8("fp8_e4m3_b128", 128, rows=128)
