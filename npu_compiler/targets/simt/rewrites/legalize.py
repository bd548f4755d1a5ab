"""Kernels as the scheduler made them -> kernels that suit a GPU: what it cannot fuse comes apart again, and long sums
and sorts are cut where most cores would be idle."""

from __future__ import annotations

import math
from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.kernel import (
    Attention,
    CombineAttention,
    Conv2d,
    FusedLoops,
    Gemm,
    Kernel,
    LoopBody,
    Loops,
    Operand,
    Schedule,
    Sort,
    Stage,
)
from ..kernels.attention import MOST_ROWS
from ..kernels.flash import is_flash
from ..kernels.gemm import WIDE_ROWS, product_of
from ..kernels.gemv import is_gemv, takes_prologue
from ..kernels.loops import shares_launch
from ..kernels.sorts import split_sort
from ..lang.dialect import Dialect
from .dual_conv import join_shortcuts
from .fuse_decode_attention import join_attention
from .split_reduction import split_fold
from .split_rms_norm import divide_norms

KEYS_OF_A_SPLIT = 32
MOST_SPLITS = 128


def refine(schedule: Schedule, dialect: Dialect) -> None:
    """Rewrite the kernels of an entry point; memory is not planned yet."""
    _drop_position_masks(schedule)
    join_attention(schedule, dialect)
    join_shortcuts(schedule, dialect)
    kernels: list[Kernel] = []
    for k in schedule.kernels:
        if isinstance(k, Attention):
            kernels += _split_attention(schedule, k, dialect)
        elif isinstance(k, Gemm | Conv2d):
            if isinstance(k, Gemm) and k.prologue is not None and not takes_prologue(k, dialect):
                before, k = _apart(schedule, k)
                kernels.append(before)
            kernels += _split_product(schedule, k, dialect)
        elif isinstance(k, Loops):
            kernels += split_fold(schedule, k, dialect.cores)
        elif isinstance(k, Sort):
            kernels += split_sort(schedule, k)
        elif isinstance(k, FusedLoops):
            for part in _unfused(k, dialect):
                kernels += split_fold(schedule, part, dialect.cores) if isinstance(part, Loops) else [part]
        else:
            kernels.append(k)
    schedule.kernels = kernels
    divide_norms(schedule, dialect)


def _drop_position_masks(schedule: Schedule) -> None:
    """A mask that only says "keys up to the query's own position" is cheaper to decide than to read."""
    made = {o.buffer.id: p for k in schedule.kernels for p in k.members for o in p.outputs}
    for k in schedule.kernels:
        if isinstance(k, Attention) and k.limited and not k.by_position:
            mask, positions = k.inputs[3], k.inputs[4]
            producer = made.get(mask.buffer.id)
            if isinstance(producer, Loops) and _compares_positions(producer, mask, positions):
                schedule.rewrite({k: (replace(k, inputs=(*k.inputs[:3], positions), by_position=True),)})
    read = {o.buffer.id for k in schedule.kernels for o in k.inputs}
    read |= {b.id for _, b in schedule.outputs}
    schedule.rewrite({p: () for k in schedule.kernels for p in k.members if not _is_used(p, read)})


def _is_used(k: Kernel, read: set[int]) -> bool:
    return any(o.buffer.kind != "arena" or o.buffer.id in read for o in k.outputs)


def _compares_positions(k: Loops, mask: Operand, positions: Operand) -> bool:
    """Whether ``k`` fills ``mask`` [.., SQ, SK] with ``key <= positions[query]``."""
    if k.body.axes or len(k.body.stages) != 1 or positions not in k.inputs:
        return False
    (out,), (stage,) = k.outputs, k.body.stages
    rank = len(out.shape)
    dims = [n for n in out.shape if n != 1]
    same = (out.buffer, out.offset, out.contiguous, mask.contiguous) == (mask.buffer, mask.offset, True, True)
    if (
        not same
        or rank < 2
        or math.prod(mask.shape) != math.prod(out.shape)
        or dims != [n for n in mask.shape if n != 1]
    ):
        return False
    row = expr.identity_index(out.shape)[rank - 2]
    seen = expr.load(k.inputs.index(positions), "int64", (row,))
    whole = out.shape[-2:] == mask.shape[-2:] and stage.index == expr.identity_index(out.shape)
    return whole and stage.expr in (
        Expr("le", "bool", (expr.index(rank - 1), seen)),
        Expr("ge", "bool", (seen, expr.index(rank - 1))),
    )


def _unfused(k: FusedLoops, dialect: Dialect) -> list[Kernel]:
    """Kernels share a launch whose threads need not meet: those of a group must go the same way. And only as many as a
    kernel has parameters for."""
    packs: list[list[Loops]] = [[]]
    room = most = dialect.most_params - 1  # the last is for the report of an index out of range
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
    return first, replace(k, inputs=(row, *k.inputs[k.rhs :]), prologue=None, epilogue=epilogue)


def _split_attention(schedule: Schedule, k: Attention, dialect: Dialect) -> list[Kernel]:
    """Few queries of many keys: groups share the keys, and a second kernel brings their parts together."""
    q, keys, out = k.inputs[0], k.inputs[1], k.outputs[0]
    if math.prod(out.shape) == 0:
        return [k]
    b, h, sq, _ = q.shape
    groups = b * keys.shape[1] * -(-(h // keys.shape[1] * sq) // MOST_ROWS)
    splits = min(MOST_SPLITS, keys.shape[2] // KEYS_OF_A_SPLIT, dialect.cores * 2 // groups)
    if splits < 2 or is_flash(k, dialect):
        return [k]
    parts = schedule.memory("float32", (splits, b, h, sq, out.shape[3] + 2), "parts")
    first = replace(k, outputs=(parts,), splits=splits)
    second = CombineAttention(
        label=f"{k.label}_merge",
        number=k.number,
        inputs=(parts,),
        outputs=(out,),
        epilogue=k.epilogue,
        sources=k.sources,
    )
    return [first, second]


# -- few results of long sums -------------------------------------------------------------------------------------
LEAST_TERMS = 256  # of a part of a sum
MOST_PARTS = 16


def _split_product(schedule: Schedule, k: Gemm | Conv2d, dialect: Dialect) -> list[Kernel]:
    """Groups share the sums of a result; a second kernel adds their parts, in order, and goes on with the epilogue."""
    if (isinstance(k, Gemm) and is_gemv(k)) or dialect.special_for(k) is not None:
        return [k]
    p = product_of(k)
    if k.inputs[k.rhs].dtype not in dialect.matrix_types or p.m <= WIDE_ROWS or p.batch > 1:
        return [k]
    if p.n == 0:
        return [k]
    tiles = -(-p.m // 64) * -(-p.n // 128)
    splits = min(dialect.cores // tiles, p.k // LEAST_TERMS, MOST_PARTS)
    if splits < 2:
        return [k]
    out = k.outputs[0]
    parts = schedule.memory("float32", (splits, p.m, p.n), "parts")
    first = replace(k, inputs=k.inputs[: k.rhs + 1], outputs=(parts,), splits=splits, epilogue=expr.acc())
    first = replace(first, dual=False, n=p.n) if isinstance(first, Gemm) else replace(first, image=out.shape)
    return [first, _sum_of_parts(k, parts, p.lanes)]


def _sum_of_parts(k: Gemm | Conv2d, parts: Operand, lanes: int) -> Loops:
    out, rank = k.outputs[0], len(k.outputs[0].shape)
    row: Expr = expr.const(0, "int64")
    for d, n in enumerate(out.shape[:-1]):
        row = row * n + expr.index(d)
    stages, sums = [], {}
    for lane in range(lanes):
        column = expr.index(rank - 1) * lanes + lane
        sums[lane] = expr.stage(lane, "float32")
        stages.append(Stage("reduce", expr.load(0, "float32", (expr.index(rank), row, column)), reduce="sum"))
    shift = k.rhs
    value = expr.rewrite(k.epilogue, lambda x: sums[x.value].cast(x.dtype) if x.op == "acc" else None)
    value = expr.substitute(value, loads=lambda x: expr.load(x.value - shift, x.dtype, x.args))
    index = expr.identity_index(out.shape)
    stages.append(Stage("store", value.cast(out.dtype), output=0, index=index, per_row=True))
    body = LoopBody((*out.shape, parts.shape[0]), (rank,), tuple(stages))
    inputs = (parts, *k.inputs[k.rhs + 1 :])
    return Loops(label=f"{k.label}_sum", number=k.number, inputs=inputs, outputs=(out,), body=body, sources=k.sources)
