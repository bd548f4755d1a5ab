"""int4_g128: groups of 128 numbers of 4 bits with a float16 scale."""

from __future__ import annotations

from ..groups import Int4

FORMAT = Int4(128, "int4_g128")
