"""int8_g64: groups of 64 of 8-bit numbers with a float32 scale."""

from __future__ import annotations

from ..bytes import Int8

FORMAT = Int8("int8_g64", 64)
