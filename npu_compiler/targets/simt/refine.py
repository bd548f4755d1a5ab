"""Kernels as the scheduler made them -> kernels that suit a GPU: what it cannot fuse comes apart again, and long sums
are cut where most cores would be idle."""

from __future__ import annotations

import math
from dataclasses import replace

from ... import expr
from ...compose import bundled
from ...kernel import Buffer, Kernel, Operand, Schedule, contiguous_strides
from .attention import MOST_ROWS
from .dialect import Dialect
from .gemv import takes_prologue
from .loops import is_pointwise

KEYS_OF_A_SPLIT = 32
MOST_SPLITS = 64


def refine(schedule: Schedule, dialect: Dialect) -> None:
    """Rewrite the kernels of an entry point; memory is not planned yet."""
    kernels: list[Kernel] = []
    for k in schedule.kernels:
        if k.kind == "attention":
            kernels += _split_attention(schedule, k, dialect)
        elif k.kind == "bundle":
            kernels += _unbundle(k, dialect)
        elif k.prologue is not None and not takes_prologue(k, dialect):
            kernels += _apart(schedule, k)
        else:
            kernels.append(k)
    schedule.kernels = kernels


def _unbundle(k: Kernel, dialect: Dialect) -> list[Kernel]:
    """Only pointwise kernels share a launch: the threads of a group must go the same way. And only as many as a kernel
    has parameters for."""
    packs: list[list[Kernel]] = [[]]
    room = most = dialect.most_params - 1  # the last is for the report of an index out of range
    for part in filter(is_pointwise, k.parts):
        operands = len(part.inputs) + len(part.outputs)
        if operands > room:
            packs.append([])
            room = most
        packs[-1].append(part)
        room -= operands
    apart = [p for p in k.parts if not is_pointwise(p)]
    return [*apart, *(bundled(p) if len(p) > 1 else p[0] for p in packs if p)]


def _apart(schedule: Schedule, k: Kernel) -> list[Kernel]:
    """The prologue as a kernel before its product."""
    assert k.prologue is not None and k.epilogue is not None
    out = k.prologue.outputs[0]
    row = replace(out, buffer=new_buffer(schedule, out.dtype, out.buffer.shape, out.buffer.name).buffer)
    first = replace(k.prologue, outputs=[row])
    shift = k.fixed - 1
    epilogue = expr.substitute(k.epilogue, loads=lambda x: expr.load(x.value - shift, x.dtype, x.args))
    return [first, replace(k, inputs=[row, *k.inputs[k.fixed :]], prologue=None, epilogue=epilogue)]


def new_buffer(schedule: Schedule, dtype: str, shape: tuple[int, ...], name: str) -> Operand:
    """A block of the arena."""
    number = max((b.id for b in schedule.buffers), default=-1) + 1
    buffer = Buffer(number, "arena", dtype, shape, name)
    schedule.buffers.append(buffer)
    return Operand(buffer, shape, contiguous_strides(shape))


def _split_attention(schedule: Schedule, k: Kernel, dialect: Dialect) -> list[Kernel]:
    """Few queries of many keys: groups share the keys, and a second kernel brings their parts together."""
    q, keys, out = k.inputs[0], k.inputs[1], k.outputs[0]
    b, h, sq, _ = q.shape
    groups = b * keys.shape[1] * -(-(h // keys.shape[1] * sq) // MOST_ROWS)
    splits = min(MOST_SPLITS, keys.shape[2] // KEYS_OF_A_SPLIT, dialect.cores * 2 // groups)
    if splits < 2 or math.prod(out.shape) == 0:
        return [k]
    parts = new_buffer(schedule, "float32", (splits, b, h, sq, out.shape[3] + 2), "parts")
    first = replace(k, outputs=[parts], attrs={**k.attrs, "splits": splits})
    merge = Kernel(f"{k.name}_merge", "attention_merge", [parts], [out], epilogue=k.epilogue, sources=k.sources)
    return [first, merge]
