"""Fewer launches: a small kernel runs inside the kernel that reads it, or beside kernels that access other data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeGuard

from ..graph import expr
from ..target_config import TargetConfig
from .anchors import Gemm
from .kernel import Buffer, FusedLoops, Kernel, Loops
from .memory_planner import assign_barrier_groups
from .rewrite import ScheduleRewrite
from .schedule import Schedule

MAX_FLOPS = 1 << 18  # of a prologue: repeating it in every thread must cost less than a barrier
MAX_READERS = 2
MAX_PARTS = 16  # limit for a fused kernel


def common_rewrites(config: TargetConfig) -> tuple[ScheduleRewrite, ...]:
    """Return the fusions that every target may run; a field of ``config`` limits each."""
    return (
        ScheduleRewrite(
            "fuse_prologue",
            "a row norm joins the products of few rows that read it",
            partial(fuse_prologues, max_rows=config.prologue_rows),
        ),
        ScheduleRewrite(
            "horizontal_fusion",
            "small loop nests that access different data share a launch",
            partial(fuse_horizontally, max_points=config.bundle_points if config.bundles else -1),
        ),
    )


def fuse_prologues(schedule: Schedule, max_rows: int) -> None:
    """Compute left operands inside the matrix products of at most ``max_rows`` rows that read them.

    An example is a row norm before a projection in a decode step: each thread repeats the few operations on the row
    instead of waiting for the one thread that would do them.
    """
    for producer in list(schedule.kernels):
        made = _result(producer)
        if made is None or producer.flops > MAX_FLOPS:
            continue
        kernels = schedule.kernels
        if any(k is not producer and any(o.buffer.id == made.id for o in k.outputs) for k in kernels):
            continue  # a scatter writes the buffer, too
        readers = [k for k in kernels if any(o.buffer.id == made.id for o in k.inputs)]
        products = [k for k in readers if isinstance(k, Gemm) and _reads_as_left(k, made, max_rows)]
        if not 0 < len(readers) <= MAX_READERS or len(products) < len(readers):
            continue
        assert isinstance(producer, Loops)
        at = kernels.index(producer)
        if all(_unchanged(kernels[at : kernels.index(k)], producer) for k in products):
            schedule.rewrite({k: (_with_prologue(k, producer),) for k in products} | {producer: ()})


def _result(k: Kernel) -> Buffer | None:
    """Return the arena buffer that a loops kernel fills completely, or None if it writes anything else."""
    if not isinstance(k, Loops) or len(k.outputs) != 1 or k.body.serial:
        return None
    out = k.outputs[0]
    whole = out.contiguous and math.prod(out.shape) == math.prod(out.buffer.shape)
    fresh = all(o.buffer.id != out.buffer.id for o in k.inputs)
    return out.buffer if out.buffer.kind == "arena" and whole and fresh else None


def _reads_as_left(k: Gemm, left: Buffer, max_rows: int) -> bool:
    """Whether a product of few rows reads ``left`` only as its left operand, in dense rows."""
    if k.prologue is not None or k.batch * k.m > max_rows:
        return False
    alone = all(o.buffer.id != left.id for o in k.inputs[1:])
    return alone and k.inputs[0].offset == 0 and k.batch == 1 and k.lda == k.k


def _unchanged(between: list[Kernel], producer: Kernel) -> bool:
    read = {o.buffer.id for o in producer.inputs}
    return not any(o.buffer.id in read for k in between for o in k.outputs)


def _with_prologue(gemm: Gemm, producer: Loops) -> Gemm:
    out = producer.outputs[0]
    scratch = Buffer(-1, "scratch", out.dtype, out.buffer.shape, out.buffer.name)
    prologue = replace(producer, outputs=(replace(out, buffer=scratch),))
    shift = len(producer.inputs) - 1
    epilogue = expr.substitute(gemm.epilogue, loads=lambda x: expr.load(x.value + shift, x.dtype, x.args))
    sources = tuple(dict.fromkeys((*producer.sources, *gemm.sources)))
    inputs = (*producer.inputs, *gemm.inputs[1:])
    flops = gemm.flops + producer.flops
    return replace(gemm, inputs=inputs, epilogue=epilogue, prologue=prologue, sources=sources, flops=flops)


def fuse_horizontally(schedule: Schedule, max_points: int) -> None:
    """Fuse the loops kernels of each phase that have up to ``max_points`` points (rotary embeddings, cache updates).

    Those that need no earlier kernel, such as the angles of rotary embeddings, follow the first of them.
    """

    def is_small(k: Kernel) -> TypeGuard[Loops]:
        return isinstance(k, Loops) and math.prod(k.body.domain) <= max_points

    ordered = _independent_first(schedule.kernels, is_small)
    groups: dict[int, list[Kernel]] = {}
    for k, numbered in zip(ordered, assign_barrier_groups(ordered), strict=True):
        groups.setdefault(numbered.barrier_group, []).append(k)
    kernels: list[Kernel] = []
    for members in groups.values():
        small = [k for k in members if is_small(k)][:MAX_PARTS]
        if len(small) > 1:
            members = [FusedLoops.of(small), *(k for k in members if k not in small)]
        kernels += members
    schedule.kernels = kernels


def _independent_first(kernels: Sequence[Kernel], is_small: Callable[[Kernel], bool]) -> list[Kernel]:
    """Return the kernels in an order in which small ones that touch nothing that an earlier one writes, nor write what
    one reads, follow the first small one."""
    read: set[int] = set()
    written: set[int] = set()
    ordered: list[Kernel] = []
    after: int | None = None
    for k in kernels:
        inputs, outputs = ({o.buffer.id for o in side} for side in (k.inputs, k.outputs))
        independent = not inputs & written and not outputs & (read | written)
        read |= inputs
        written |= outputs
        if after is not None and independent and is_small(k):
            ordered.insert(after, k)
            after += 1
            continue
        ordered.append(k)
        if after is None and is_small(k):
            after = len(ordered)
    return ordered
