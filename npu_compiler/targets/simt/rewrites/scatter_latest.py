"""Updates that overwrite elements at data-dependent indices: the last update of each element is found first.

Threads raise a number of every element to the largest number of its updates, in any order. Each element is then
computed by its last update, or keeps its value if it has none.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.kernel import Kernel, LoopBody, Loops, Operand, ScatterUpdates, Stage, recast
from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule
from ...codegen.nest import build_nest
from ..kernels.scatter import stores_rows
from .scatter_sums import MAX_PLACES, MIN_UPDATES, copy_before, scattered_store, updates_in_order, zeros


def scatter_latest(schedule: Schedule) -> None:
    """Replace large scatters, whose updates one thread of a column would make in order, by three kernels each."""
    new: dict[Kernel, list[Kernel]] = {}
    for number, k in enumerate(schedule.kernels):
        if isinstance(k, Loops) and _overwrites(k):
            copy = copy_before(schedule.kernels[:number], k.outputs[0])
            new[k] = _split(schedule, k, copy.inputs[0] if copy is not None else k.outputs[0])
            if copy is not None:
                new[copy] = []
    schedule.rewrite(new)


REWRITE = ScheduleRewrite(
    "scatter_latest",
    "if several updates may write one element, the last one is found first, and only that one is stored",
    scatter_latest,
)


def _overwrites(k: Loops) -> bool:
    """Whether ``k`` is a scatter of enough updates, which do not depend on what it writes."""
    out = k.outputs[0]
    if scattered_store(k) is None or not out.shape or any(o.buffer.id == out.buffer.id for o in k.inputs):
        return False
    few_places = math.prod(out.shape) <= MAX_PLACES * math.prod(k.body.domain)
    return few_places and updates_in_order(k) >= MIN_UPDATES and not stores_rows(build_nest(k))


def _split(schedule: Schedule, k: Loops, base: Operand) -> list[Kernel]:
    (stage,), domain, out = k.body.stages, k.body.domain, k.outputs[0]
    latest = schedule.memory("int32", out.shape, f"{k.label}_latest")
    number: Expr = expr.const(0, "int64")
    for d, n in enumerate(domain):
        number = number * n + expr.index(d)
    body = replace(k.body, stages=(replace(stage, expr=(number + 1).cast("int32")),), serial=False)
    find = recast(k, ScatterUpdates, inputs=(*k.inputs, latest), outputs=(latest,), body=body, computes="latest")
    return [zeros(k, latest), find, _result(k, latest, base)]


def _result(k: Loops, latest: Operand, base: Operand) -> Loops:
    """Return the kernel that computes each element by its last update."""
    (stage,), domain, out = k.body.stages, k.body.domain, k.outputs[0]
    here = expr.identity_index(out.shape)
    found = expr.load(len(k.inputs), "int32", here)
    number, at = found - 1, {}
    for d in reversed(range(len(domain))):
        at[d] = (number % domain[d]).cast("int64")
        number = number // domain[d]
    kept = expr.load(len(k.inputs) + 1, out.dtype, here)
    value = expr.where(expr.fn("eq")(found, 0), kept, expr.substitute(stage.expr, at).cast(out.dtype))
    body = LoopBody(out.shape, (), (Stage("store", value, output=0, index=here),))
    return replace(k, label=f"{k.label}_result", inputs=(*k.inputs, latest, base), body=body)
