"""The use of memory: the blocks of an arena and the owners of its peak, weights and states."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.artifact.describe import lifetimes
from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.artifact.validate import nbytes
from npu_compiler.support import buffer_kinds
from npu_compiler.support.text import tensor_text

from .records import Arena, Block, Held


def arena_of(program: CompiledProgram, entry: EntryPoint, first_row: int = 0) -> Arena:
    """Return the arena of an entry point, whose kernels are rows from ``first_row`` on."""
    buffers = {b.id: b for b in program.buffers}
    blocks = [
        Block(b.name, tensor_text(b.shape, b.dtype), b.offset, nbytes(b.shape, b.dtype), first, last)
        for b, first, last in lifetimes(buffers, entry)
    ]
    live = [0] * (len(entry.calls) + 1)
    for b in blocks:
        for at in range(b.first, b.last + 1):
            live[at] += b.nbytes
    peak = max(range(len(live)), key=live.__getitem__)
    owners = sorted((n for n, b in enumerate(blocks) if b.first <= peak <= b.last), key=lambda n: -blocks[n].nbytes)
    rows = tuple(range(first_row, first_row + len(entry.calls)))
    return Arena(program.name, entry.arena_bytes, tuple(blocks), peak, live[peak], tuple(owners), rows)


def held_by(programs: Sequence[CompiledProgram], entries: Sequence[EntryPoint]) -> tuple[Held, ...]:
    """Return the weights, constants and states that the entry points read or write, the largest first."""
    used = {id for e in entries for c in e.calls for id in (*c.inputs, *c.outputs)} | {
        id for e in entries for _, id in e.updates
    }
    found = [
        Held(b.name, b.kind, tensor_text(b.shape, b.dtype), nbytes(b.shape, b.dtype), b.format)
        for p in programs
        for b in p.buffers
        if b.kind in buffer_kinds.SHARED and (len(programs) > 1 or b.id in used)
    ]
    return tuple(sorted(found, key=lambda h: -h.nbytes))
