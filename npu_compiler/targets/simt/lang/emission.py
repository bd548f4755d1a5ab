"""What becomes of a kernel: its text, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

from .program import TileMap


@dataclass(frozen=True)
class Emission:
    """A kernel as text under the name ``@NAME@``, and how to launch it. ``operands``: what to pass, in order: input n
    as n, output n as ``~n``. ``shared``: bytes of shared memory to ask for at launch. ``checks``: a last parameter,
    ``int* bad``, is set to 1 when an index is out of range. ``groups`` 0: nothing to do. ``maps``: further
    parameters, by the operand each is of."""

    text: str
    operands: tuple[int, ...]
    groups: int
    threads: int
    shared: int = 0
    checks: bool = False
    maps: tuple[tuple[int, TileMap], ...] = ()
