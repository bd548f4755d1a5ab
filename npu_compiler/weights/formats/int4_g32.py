"""int4_g32: groups of 32 numbers of 4 bits with a float16 scale."""

from __future__ import annotations

from ..groups import Int4

FORMAT = Int4(32, "int4_g32")
