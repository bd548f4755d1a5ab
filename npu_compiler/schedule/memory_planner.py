"""Static memory plan: every intermediate gets a fixed offset in one arena. Buffers that are never alive at the same
time may share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..graph import expr
from ..support.ordering import barrier_groups
from .anchors import Contraction
from .kernel import Kernel, Operand, Unpack
from .schedule import Schedule


def assign_barrier_groups(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with their barrier groups (:func:`npu_compiler.support.ordering.barrier_groups`)."""
    numbers = barrier_groups(({o.buffer.id for o in k.inputs}, {o.buffer.id for o in k.outputs}) for k in kernels)
    return [replace(k, barrier_group=n) for k, n in zip(kernels, numbers, strict=True)]


def lifetimes(kernels: Sequence[Kernel]) -> dict[int, tuple[int, int]]:
    """Return by buffer id the first and the last phase that access each arena buffer. An early kernel may write from
    the phase of the early kernel before it on, whose successors start after all earlier kernels have ended."""
    life: dict[int, tuple[int, int]] = {}
    early = 0
    for k in kernels:
        start = k.barrier_group
        if isinstance(k, Unpack) and k.early:
            start, early = early, k.barrier_group
        for op in (*k.inputs, *k.outputs):
            if op.buffer.kind == "arena":
                first, _ = life.get(op.buffer.id, (start, k.barrier_group))
                life[op.buffer.id] = (
                    (0, kernels[-1].barrier_group) if op.buffer.persistent else (first, k.barrier_group)
                )
    return life


def in_place(kernels: Sequence[Kernel]) -> dict[int, int]:
    """Return by buffer id of a result the buffer whose memory it may take: a residual that the epilogue of its kernel
    reads at the index that it writes, and that is not accessed from then on. Of a chain, all take the first one's."""
    life = lifetimes(kernels)
    users: dict[tuple[int, int], int] = {}  # by buffer and phase
    for k in kernels:
        for op in (*k.inputs, *k.outputs):
            users[op.buffer.id, k.barrier_group] = users.get((op.buffer.id, k.barrier_group), 0) + 1
    taken: dict[int, int] = {}
    for k in kernels:
        if not isinstance(k, Contraction) or k.splits > 1 or k.extra_stages or not _whole(k.outputs[0]):
            continue
        out = k.outputs[0]
        for i, op in enumerate(k.inputs[k.rhs + 1 :], k.rhs + 1):
            same = (op.shape, op.dtype) == (out.shape, out.dtype) and _whole(op)
            if not same or life[op.buffer.id][1] != k.barrier_group or life[out.buffer.id][0] != k.barrier_group:
                continue
            loads = [x for x in expr.walk(k.epilogue) if x.op == "load" and x.value == i]
            alone = users[op.buffer.id, k.barrier_group] == users[out.buffer.id, k.barrier_group] == 1
            if alone and all(x.args == expr.identity_index(out.shape) for x in loads):
                taken[out.buffer.id] = taken.get(op.buffer.id, op.buffer.id)
                break
    return taken


def _whole(op: Operand) -> bool:
    """Whether an operand is all of an arena buffer, in row-major order."""
    b = op.buffer
    return b.kind == "arena" and not b.persistent and op.shape == b.shape and op.contiguous


def plan_memory(schedule: Schedule, align: int, share: bool = True, residuals: bool = False) -> None:
    """Give every arena buffer an offset in bytes, a multiple of ``align``: largest first, each in the lowest gap that
    fits. Sets ``schedule.arena_bytes``. Without ``share``, no two buffers share memory, so that after a run the arena
    still holds what each kernel wrote. ``residuals``: results take the memory of residuals (:func:`in_place`).

    Greedy by size, after Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020).
    """
    schedule.kernels = assign_barrier_groups(schedule.kernels)
    life = lifetimes(schedule.kernels)
    if not share:
        life = {id: (0, schedule.kernels[-1].barrier_group) for id in life}
    taken = in_place(schedule.kernels) if share and residuals else {}
    for id, first in taken.items():
        life[first] = (min(life[first][0], life[id][0]), max(life[first][1], life[id][1]))
    size = {b.id: -(-max(b.nbytes, 1) // align) * align for b in schedule.buffers}
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    apart = [b for b in schedule.buffers if b.id in life and b.id not in taken]
    for b in sorted(apart, key=lambda b: (-size[b.id], life[b.id])):
        first, last = life[b.id]
        at = 0
        for offset, end, f, la in sorted(placed):
            if f > last or la < first:
                continue
            if offset - at >= size[b.id]:
                break
            at = max(at, end)
        offsets[b.id] = at
        placed.append((at, at + size[b.id], first, last))
    offsets |= {id: offsets[first] for id, first in taken.items()}
    new = {b.id: replace(b, offset=offsets.get(b.id, 0)) for b in schedule.buffers if b.kind != "arena" or b.id in life}
    schedule.buffers = list(new.values())
    schedule.kernels = [k.on_buffers(lambda b: new[b.id]) for k in schedule.kernels]
    schedule.inputs = [(n, new[b.id]) for n, b in schedule.inputs]
    schedule.outputs = [(n, new[b.id]) for n, b in schedule.outputs]
    schedule.arena_bytes = max((end for _, end, _, _ in placed), default=0)
