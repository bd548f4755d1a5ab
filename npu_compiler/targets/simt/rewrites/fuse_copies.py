"""A copy computes its source instead of reading it from memory, if only the copy reads it.

Copies are added when kernels are scheduled, after fusion: of views that strides cannot express, and of images that get
the layout of a convolution of few channels. An image that is quantised, padded and copied is then read and written
once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.kernel import Loops, Operand, Stage
from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule
from .producers import only_producer

MAX_REPEATS = 2  # points of the copy for a point of its source, which may be computed for each


def fuse_copies(schedule: Schedule) -> None:
    """Replace copies and the pointwise kernels that compute their sources by one kernel each."""
    for k in [k for k in schedule.kernels if isinstance(k, Loops) and k.label == "copy"]:
        copy = k
        while (found := _fused(schedule, copy)) is not None:
            fused, source = found
            schedule.rewrite({copy: (fused,), source: ()})
            copy = fused


REWRITE = ScheduleRewrite(
    "fuse_copies",
    "a copy, for example of an image, computes its source instead of reading it",
    fuse_copies,
)


def _fused(schedule: Schedule, copy: Loops) -> tuple[Loops, Loops] | None:
    """Return (the kernel that replaces the copy, the source that it computes), or None."""
    stage = _store(copy)
    loads = [x for x in expr.walk(stage.expr) if x.op == "load"] if stage is not None else []
    if stage is None or len(loads) != 1 or len(copy.inputs) != 1:
        return None
    found = only_producer(schedule, copy, copy.inputs[0])
    source = found[1] if found is not None else None
    made = _store(source) if isinstance(source, Loops) else None
    if not isinstance(source, Loops) or made is None:
        return None
    order = _order(copy.inputs[0], source.outputs[0])
    if order is None:
        return None
    if math.prod(copy.body.domain) > MAX_REPEATS * math.prod(source.body.domain):
        return None
    value = made.expr.cast(source.outputs[0].dtype)

    def through(load: Expr) -> Expr:
        return expr.substitute(value, {d: load.args[n] for d, n in enumerate(order)})

    body = replace(copy.body, stages=(replace(stage, expr=expr.substitute(stage.expr, loads=through)),))
    sources = tuple(dict.fromkeys((*source.sources, *copy.sources)))
    fused = replace(copy, inputs=source.inputs, body=body, sources=sources)
    return None if fused.overwrites_inputs else (fused, source)  # as a state's update that reads it in another order


def _order(read: Operand, written: Operand) -> list[int] | None:
    """Return the dim of ``read`` for each dim of ``written``, if they are the same elements, else None."""
    if (read.buffer, read.offset, len(read.shape)) != (written.buffer, written.offset, len(written.shape)):
        return None
    left, order = list(enumerate(zip(read.shape, read.strides, strict=True))), []
    for dim in zip(written.shape, written.strides, strict=True):
        found = next((x for x in left if x[1] == dim), None)
        if found is None:
            return None
        left.remove(found)
        order.append(found[0])
    return order


def _store(k: Loops) -> Stage | None:
    """Return the only stage of a kernel that stores each point of its result once, or None."""
    if len(k.body.stages) != 1 or k.body.axes or k.body.serial or len(k.outputs) != 1:
        return None
    (stage,) = k.body.stages
    whole = stage.kind == "store" and stage.index == expr.identity_index(k.outputs[0].shape)
    return stage if whole and k.body.domain == k.outputs[0].shape else None
