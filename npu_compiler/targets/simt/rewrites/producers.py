"""Finds kernels whose result only one other kernel reads, so that the two can be fused."""

from __future__ import annotations

from ....schedule.kernel import Kernel, Operand
from ....schedule.schedule import Schedule


def only_producer(schedule: Schedule, reader: Kernel, op: Operand) -> tuple[Kernel, Kernel] | None:
    """Return (kernel, its member) that writes ``op``'s buffer, if ``reader`` could compute it instead.

    The member is the kernel itself, or a part of fused loops. Returns None if several kernels write the buffer, if
    others read it, or if inputs of the member are overwritten before ``reader`` runs.
    """
    at, id = schedule.kernels.index(reader), op.buffer.id
    flat = [(n, p) for n, k in enumerate(schedule.kernels) for p in k.members]
    writers = [(n, p) for n, p in flat if any(o.buffer.id == id for o in p.outputs)]
    read_by_others = any(o.buffer.id == id for _, p in flat if p is not reader for o in p.inputs)
    if len(writers) != 1 or read_by_others or id in {b.id for _, b in schedule.outputs}:
        return None
    n, producer = writers[0]
    read = {o.buffer.id for o in producer.inputs}
    changed = any(o.buffer.id in read for k in schedule.kernels[n + 1 : at] for o in k.outputs)
    return (schedule.kernels[n], producer) if n < at and not changed else None
