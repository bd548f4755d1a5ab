"""Takes apart fusions that the GPU targets have no kernels for."""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....schedule.anchors import Gemm
from ....schedule.buffers import contiguous_strides
from ....schedule.kernel import FusedLoops, Kernel, Loops, Operand
from ....schedule.schedule import Schedule
from ..kernels.gemv import supports_prologue
from ..kernels.loops import shares_launch
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite


def legalize(schedule: Schedule, dialect: Dialect) -> None:
    """Make separate kernels of loop nests that cannot share a launch, and of prologues that a product cannot
    compute."""
    new: dict[Kernel, list[Kernel]] = {}
    for k in schedule.kernels:
        if isinstance(k, FusedLoops):
            new[k] = _unfused(k, dialect)
        elif isinstance(k, Gemm) and k.prologue is not None and not supports_prologue(k, dialect):
            new[k] = [*_apart(schedule, k)]
    schedule.rewrite(new)


REWRITE = DialectRewrite(
    "legalize",
    "fused loops and prologues that a GPU kernel cannot run become kernels of their own",
    legalize,
    required="the GPU targets have no kernels for the fused forms",
)


def _unfused(k: FusedLoops, dialect: Dialect) -> list[Kernel]:
    """Return the kernels of ``k``: those that :func:`shares_launch` stay together, as many as a kernel has parameters
    for; the others become separate kernels."""
    packs: list[list[Loops]] = [[]]
    room = limit = dialect.max_params - 1  # the last parameter is the flag for an index out of range
    for part in filter(shares_launch, k.parts):
        operands = len(part.inputs) + len(part.outputs)
        if operands > room:
            packs.append([])
            room = limit
        packs[-1].append(part)
        room -= operands
    apart = [p for p in k.parts if not shares_launch(p)]
    return [*apart, *(FusedLoops.of(p) if len(p) > 1 else p[0] for p in packs if p)]


def _apart(schedule: Schedule, k: Gemm) -> tuple[Loops, Gemm]:
    """Return the prologue and its product as two kernels."""
    assert k.prologue is not None
    out = k.prologue.outputs[0]
    row = replace(out, buffer=schedule.memory(out.dtype, out.buffer.shape, out.buffer.name).buffer)
    first = replace(k.prologue, outputs=(row,))
    shift = k.rhs - 1
    epilogue = expr.substitute(k.epilogue, loads=lambda x: expr.load(x.value - shift, x.dtype, x.args))
    shape = k.batch, k.m, k.k
    left = Operand(row.buffer, shape, contiguous_strides(shape))
    return first, replace(k, inputs=(left, *k.inputs[k.rhs :]), prologue=None, epilogue=epilogue)
