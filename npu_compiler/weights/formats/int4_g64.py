"""int4_g64: groups of 64 numbers of 4 bits with a float16 scale."""

from __future__ import annotations

from ..groups import Int4

FORMAT = Int4(64, "int4_g64")
