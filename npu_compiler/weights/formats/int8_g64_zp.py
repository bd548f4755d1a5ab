"""int8_g64_zp: groups of 64 of 8-bit numbers with a float32 scale and a zero point."""

from __future__ import annotations

from ..bytes import Int8Zero

FORMAT = Int8Zero("int8_g64_zp", 64)
