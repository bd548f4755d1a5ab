"""int4_g128_zp: groups of 128 numbers of 4 bits with a float16 scale and a zero point."""

from __future__ import annotations

from ..groups import Int4Zero

FORMAT = Int4Zero(128, "int4_g128_zp")
