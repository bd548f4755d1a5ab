"""Additions at data-dependent indices: threads make them in any order, with exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.kernel import Kernel, LoopBody, Loops, Operand, ScatterResult, ScatterUpdates, Stage, recast
from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule
from ...codegen.nest import build_nest
from ..kernels.scatter import count_updates

MIN_UPDATES = 32  # of a place; fewer are made in order, by one kernel instead of four
MAX_PLACES = 2  # per update, because every place of a float takes 12 bytes of scratch memory


def scatter_sums(schedule: Schedule) -> None:
    """Replace scattered additions of float32, int32 and int64, whose order a kernel would have to keep, by kernels in
    which the order does not matter: integers wrap around, and floats are added up in fixed point."""
    new: dict[Kernel, list[Kernel]] = {}
    for number, k in enumerate(schedule.kernels):
        if isinstance(k, Loops):
            *first, result = new[k] = _split(schedule, k)
            copy = copy_before(schedule.kernels[:number], k.outputs[0])
            if isinstance(result, ScatterResult) and copy is not None:
                new[copy] = []
                new[k] = [*first, replace(result, inputs=(*result.inputs[:2], copy.inputs[0]))]
    schedule.rewrite(new)


REWRITE = ScheduleRewrite(
    "scatter_sums",
    "threads add scattered updates in any order, with exact arithmetic",
    scatter_sums,
)


def copy_before(kernels: Sequence[Kernel], out: Operand) -> Loops | None:
    """Return the last of ``kernels`` that accesses the buffer of ``out`` if it only copies another operand into ``out``
    and no later one writes that operand's buffer."""
    written: set[int] = set()
    for k in reversed(kernels):
        if any(o.buffer.id == out.buffer.id for o in (*k.inputs, *k.outputs)):
            if not isinstance(k, Loops) or k.outputs != (out,) or len(k.inputs) != 1 or len(k.body.stages) != 1:
                return None
            (stage,), index = k.body.stages, expr.identity_index(out.shape)
            plain = (k.inputs[0].shape, k.body.domain, stage.index) == (out.shape, out.shape, index)
            same = stage.expr is expr.load(0, out.dtype, index) and k.inputs[0].buffer.id not in written
            return k if plain and same else None
        written.update(o.buffer.id for o in k.outputs)
    return None


def _split(schedule: Schedule, k: Loops) -> list[Kernel]:
    update = _update(k)
    if update is None:
        return [k]
    out, body, in_order = k.outputs[0], k.body, updates_in_order(k)
    if in_order < MIN_UPDATES:
        return [k]
    body = replace(body, stages=(replace(body.stages[0], expr=update),), serial=False)
    inputs = k.inputs[:-1]
    if out.dtype != "float32":
        return [recast(k, ScatterUpdates, body=body, computes="integers")]
    if math.prod(out.shape) > MAX_PLACES * math.prod(body.domain):
        return [k]
    bits = in_order.bit_length()
    magnitudes, sums = (schedule.memory(t, out.shape, f"{k.label}_sums") for t in ("int32", "int64"))
    magnitude = recast(
        k, ScatterUpdates, inputs=(*inputs, magnitudes), outputs=(magnitudes,), body=body, computes="magnitudes"
    )
    fixed = replace(
        magnitude, inputs=(*inputs, magnitudes, sums), outputs=(sums,), computes="fixed_point", carry_bits=bits
    )
    result = recast(k, ScatterResult, inputs=(magnitudes, sums, out), flops=0, carry_bits=bits)
    return [zeros(k, magnitudes, sums), magnitude, fixed, result]


def scattered_store(k: Loops) -> Stage | None:
    """Return the only stage of a kernel that stores at data-dependent indices, else None."""
    stage, *others = k.body.stages
    return stage if k.body.serial and not others and not k.body.axes and stage.kind == "store" else None


def updates_in_order(k: Loops) -> int:
    """Return how many updates a thread would make one after another; 0 if there are too many updates or places for 32
    bits, or none."""
    updates, places = math.prod(k.body.domain), math.prod(k.outputs[0].shape)
    return count_updates(build_nest(k)) if updates > 0 and max(updates, places) < 1 << 31 else 0


def _update(k: Loops) -> Expr | None:
    """Return what ``k`` adds to the element at its place, or None if it does something else. Its output is then also
    its last input, which it reads nowhere else."""
    stage, out = scattered_store(k), k.outputs[0]
    if stage is None or stage.expr.op != "add":
        return None
    if out.dtype not in ("float32", "int32", "int64") or not out.shape or k.inputs[-1] != out:
        return None
    number = len(k.inputs) - 1
    place = expr.load(number, out.dtype, stage.index)
    if place not in stage.expr.args or any(o.buffer.id == out.buffer.id for o in k.inputs[:-1]):
        return None
    (update, *more) = [a for a in stage.expr.args if a is not place]
    reads = any(x.op == "load" and x.value == number for e in (update, *stage.index) for x in expr.walk(e))
    return None if more or reads else update


def zeros(k: Loops, *memory: Operand) -> Loops:
    """Return a kernel that fills ``memory`` with zeros."""
    shape = memory[0].shape
    place = expr.identity_index(shape)
    stages = (Stage("store", expr.const(0, o.dtype), output=n, index=place) for n, o in enumerate(memory))
    body = LoopBody(shape, (), tuple(stages))
    return Loops(label=f"{k.label}_zeros", inputs=(), outputs=memory, sources=k.sources, body=body)
