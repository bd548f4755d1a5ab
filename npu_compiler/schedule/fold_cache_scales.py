"""Attention over a cache of 8-bit numbers with a scale for each row reads the numbers and the scales themselves, so
that the decoded cache is neither computed nor stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..graph import expr
from ..passes.patterns import sides, strip
from ..support.dtypes import FLOAT8
from .anchors import Attention
from .kernel import Kernel, Loops, Operand
from .rewrite import ScheduleRewrite
from .schedule import Schedule


def fold_cache_scales(schedule: Schedule, folds: Callable[[Attention], bool]) -> None:
    """Replace decoded keys and values by 8-bit numbers and scales in attention kernels. Remove kernels whose results
    are no longer read."""
    made: dict[int, Kernel] = {o.buffer.id: p for k in schedule.kernels for p in k.members for o in p.outputs}
    for k in schedule.kernels:
        if isinstance(k, Attention) and not k.scaled and folds(k):
            held = [_numbers_and_scales(made.get(op.buffer.id), op) for op in k.inputs[1:3]]
            keys, values = held
            if keys is not None and values is not None:
                inputs = (k.inputs[0], keys[0], values[0], *k.inputs[3:], keys[1], values[1])
                schedule.rewrite({k: (replace(k, inputs=inputs, scaled=True),)})
    schedule.remove_unused()


def _numbers_and_scales(producer: Kernel | None, decoded: Operand) -> tuple[Operand, Operand] | None:
    """Return the int8 or float8 operand [B, H, S, D] and the scales [B, H, S, 1] whose product ``producer`` stores in
    ``decoded``, or None."""
    if not isinstance(producer, Loops) or producer.body.axes or len(producer.body.stages) != 1:
        return None
    (out,), (stage,) = producer.outputs, producer.body.stages
    shape = decoded.shape
    if out.shape != shape or (out.buffer, out.offset, out.strides) != (decoded.buffer, decoded.offset, decoded.strides):
        return None
    every, row = expr.identity_index(shape), expr.identity_index((*shape[:-1], 1))
    if stage.index != every:
        return None
    for codes, scale in sides(stage.expr, "mul"):
        load = codes.args[0] if codes.op == "cast" and codes.args[0].op == "load" else None
        scale = strip(scale)
        if load is None or load.dtype not in ("int8", FLOAT8) or scale.op != "load":
            continue
        if (load.args, scale.args) != (every, row):
            continue
        numbers, scales = producer.inputs[load.value], producer.inputs[scale.value]
        if numbers.shape == shape and numbers.strides[-1] == 1 and scales.dtype == "float32" and scales.contiguous:
            return numbers, scales
    return None


def fold_cache_scales_if(folds: Callable[[Attention], bool]) -> ScheduleRewrite:
    """Return the rewrite for a target whose kernels decode the cache if ``folds`` returns True for the attention."""
    summary = "attention decodes a cache of 8-bit numbers itself"
    return ScheduleRewrite("fold_cache_scales", summary, lambda schedule: fold_cache_scales(schedule, folds))
