"""What the GPU kernels cannot run fused comes apart again."""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....schedule.buffers import contiguous_strides
from ....schedule.kernel import FusedLoops, Gemm, Kernel, Loops, Operand
from ....schedule.schedule import Schedule
from ..kernels.gemv import supports_prologue
from ..kernels.loops import shares_launch
from ..lang.dialect import Dialect


def legalize(schedule: Schedule, dialect: Dialect) -> None:
    """Loop nests that cannot share a launch, and prologues that a product cannot compute, become kernels."""
    new: dict[Kernel, list[Kernel]] = {}
    for k in schedule.kernels:
        if isinstance(k, FusedLoops):
            new[k] = _unfused(k, dialect)
        elif isinstance(k, Gemm) and k.prologue is not None and not supports_prologue(k, dialect):
            new[k] = [*_apart(schedule, k)]
    schedule.rewrite(new)


def _unfused(k: FusedLoops, dialect: Dialect) -> list[Kernel]:
    """Kernels share a launch whose threads need not meet: those of a group must go the same way. And only as many as a
    kernel has parameters for."""
    packs: list[list[Loops]] = [[]]
    room = most = dialect.max_params - 1  # the last is for the report of an index out of range
    for part in filter(shares_launch, k.parts):
        operands = len(part.inputs) + len(part.outputs)
        if operands > room:
            packs.append([])
            room = most
        packs[-1].append(part)
        room -= operands
    apart = [p for p in k.parts if not shares_launch(p)]
    return [*apart, *(FusedLoops.of(p) if len(p) > 1 else p[0] for p in packs if p)]


def _apart(schedule: Schedule, k: Gemm) -> tuple[Loops, Gemm]:
    """The prologue as a kernel before its product."""
    assert k.prologue is not None
    out = k.prologue.outputs[0]
    row = replace(out, buffer=schedule.memory(out.dtype, out.buffer.shape, out.buffer.name).buffer)
    first = replace(k.prologue, outputs=(row,))
    shift = k.rhs - 1
    epilogue = expr.substitute(k.epilogue, loads=lambda x: expr.load(x.value - shift, x.dtype, x.args))
    shape = k.batch, k.m, k.k
    left = Operand(row.buffer, shape, contiguous_strides(shape))
    return first, replace(k, inputs=(left, *k.inputs[k.rhs :]), prologue=None, epilogue=epilogue)
