"""Static memory plan: every intermediate gets a fixed offset in one arena. Buffers that are never alive at the same
time may share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..support.ordering import phases
from .kernel import Kernel, Unpack
from .schedule import Schedule


def assign_phases(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with numbered phases (:func:`npu_compiler.support.ordering.phases` of their buffers)."""
    numbers = phases(({o.buffer.id for o in k.inputs}, {o.buffer.id for o in k.outputs}) for k in kernels)
    return [replace(k, phase=phase) for k, phase in zip(kernels, numbers, strict=True)]


def lifetimes(kernels: Sequence[Kernel]) -> dict[int, tuple[int, int]]:
    """Return by buffer id the first and the last phase that access each arena buffer. An early kernel may write from
    the phase of the early kernel before it on, whose successors start after all earlier kernels have ended."""
    life: dict[int, tuple[int, int]] = {}
    early = 0
    for k in kernels:
        start = k.phase
        if isinstance(k, Unpack) and k.early:
            start, early = early, k.phase
        for op in (*k.inputs, *k.outputs):
            if op.buffer.kind == "arena":
                first, _ = life.get(op.buffer.id, (start, k.phase))
                life[op.buffer.id] = (0, kernels[-1].phase) if op.buffer.persistent else (first, k.phase)
    return life


def plan_memory(schedule: Schedule, align: int, share: bool = True) -> None:
    """Give every arena buffer an offset in bytes, a multiple of ``align``: largest first, each in the lowest gap that
    fits. Sets ``schedule.arena_bytes``. Without ``share``, no two buffers share memory, so that after a run the arena
    still holds what each kernel wrote.

    Greedy by size, after Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020).
    """
    schedule.kernels = assign_phases(schedule.kernels)
    life = lifetimes(schedule.kernels)
    if not share:
        life = {id: (0, schedule.kernels[-1].phase) for id in life}
    size = {b.id: -(-max(b.nbytes, 1) // align) * align for b in schedule.buffers}
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    for b in sorted((b for b in schedule.buffers if b.id in life), key=lambda b: (-size[b.id], life[b.id])):
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
    new = {b.id: replace(b, offset=offsets.get(b.id, 0)) for b in schedule.buffers if b.kind != "arena" or b.id in life}
    schedule.buffers = list(new.values())
    schedule.kernels = [k.on_buffers(lambda b: new[b.id]) for k in schedule.kernels]
    schedule.inputs = [(n, new[b.id]) for n, b in schedule.inputs]
    schedule.outputs = [(n, new[b.id]) for n, b in schedule.outputs]
    schedule.arena_bytes = max((end for _, end, _, _ in placed), default=0)
