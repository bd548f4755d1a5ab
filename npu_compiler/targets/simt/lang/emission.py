"""The text of a kernel's function, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

from .program import TileMap


@dataclass(frozen=True)
class Emission:
    """A kernel's function under the name ``@NAME@``, and how to launch it.

    ``operands``: the pointers to pass, in order: input n as n, output n as ``~n``. ``workgroups``: their number; 0:
    nothing to launch. ``threads``: of a workgroup. ``shared``: bytes of shared memory to request at launch. ``checks``:
    the next parameter is ``int* bad``: its first int is set to 1 if an index is out of range, the second if an integer
    is divided by zero. ``maps``: the last parameters, as (operand, tensor map).
    """

    text: str
    operands: tuple[int, ...]
    workgroups: int
    threads: int
    shared: int = 0
    checks: bool = False
    maps: tuple[tuple[int, TileMap], ...] = ()
