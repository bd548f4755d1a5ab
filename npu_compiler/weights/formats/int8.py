"""int8: rows of 8-bit numbers with a float32 scale."""

from __future__ import annotations

from ..bytes import Int8

FORMAT = Int8("int8", 0)
