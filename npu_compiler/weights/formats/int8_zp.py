"""int8_zp: rows of 8-bit numbers with a float32 scale and a zero point."""

from __future__ import annotations

from ..bytes import Int8Zero

FORMAT = Int8Zero("int8_zp", 0)
