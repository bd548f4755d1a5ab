"""Reductions with few results of very many elements: workgroups reduce parts of each, and a second kernel reduces
those. A kernel with several passes over few long rows is taken apart first: one kernel for each reduction, and one for
what is stored."""

from __future__ import annotations

import math
from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.kernel import LoopBody, Loops, Operand, Stage
from ....schedule.schedule import Schedule
from ...codegen.nest import identity_element
from ..kernels.loops import VECTOR_REDUCTION, VECTOR_ROWS, columns_at_once
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite

MIN_POINTS = 1 << 12  # of a part
# Columns of a large matrix, whose sums would keep too few threads busy, have parts that a thread reduces for a vector
# of columns.
MIN_COLUMN_POINTS, MIN_COLUMN_TERMS = 1 << 22, 16
KINDS = ("sum", "prod", "max", "min")


def split_reduction(schedule: Schedule, dialect: Dialect) -> None:
    """Split the first reduced dim of a single sum, product, maximum or minimum into parts if there are too few rows to
    keep the compute units busy. A second kernel reduces the parts."""
    compute_units = dialect.device.compute_units
    loops = [k for k in schedule.kernels if isinstance(k, Loops)]
    passes = {k: _passes(schedule, k, compute_units) for k in loops}
    schedule.rewrite({k: [s for p in made for s in _split(schedule, p, compute_units)] for k, made in passes.items()})


REWRITE = DialectRewrite(
    "split_reduction",
    "workgroups share the reduction of few long rows, and threads that of the columns of a large matrix",
    split_reduction,
)


def _passes(schedule: Schedule, k: Loops, compute_units: int) -> list[Loops]:
    """Return ``k`` itself, or a kernel for each of its reductions and for its stores, in order."""
    body = k.body
    folds = [s for s in body.stages if s.kind == "reduce"]
    if body.serial or not folds or 0 in body.domain or not all(s.reduce in KINDS for s in folds) or _is_plain(body):
        return [k]
    points = math.prod(body.domain[d] for d in body.axes)
    rows = math.prod(body.domain) // points
    if points < 2 * MIN_POINTS or 2 * rows > compute_units:
        return [k]
    if {o.buffer.id for o in k.outputs} & {o.buffer.id for o in k.inputs}:
        return [k]  # a pass would read what another one has replaced
    kept = [d for d in range(len(body.domain)) if d not in body.axes]
    place = (expr.const(0, "int64"), *map(expr.index, kept))
    shape = (1, *(body.domain[d] for d in kept))
    made: list[Operand] = []
    known: dict[Expr, Expr] = {}  # the stages so far: loads of what was made, temporaries as expressions
    kernels: list[Loops] = []

    def kernel(
        domain: tuple[int, ...], axes: tuple[int, ...], stages: list[Stage], outputs: tuple[Operand, ...]
    ) -> None:
        inner = LoopBody(domain, axes, tuple(stages))
        label = f"{k.label}_{len(kernels)}"
        kernels.append(_without_unused(replace(k, label=label, inputs=(*k.inputs, *made), outputs=outputs, body=inner)))

    for n, s in enumerate(body.stages):
        e = expr.rewrite(s.expr, known.get)
        if s.kind == "temp":
            known[expr.stage(n, s.expr.dtype)] = e
        elif s.kind == "reduce":
            result = schedule.memory(e.dtype, shape, s.reduce)
            stored = Stage("store", expr.stage(0, e.dtype), index=place, output=0, per_row=True)
            kernel(body.domain, body.axes, [replace(s, expr=e), stored], (result,))
            known[expr.stage(n, e.dtype)] = expr.load(len(k.inputs) + len(made), e.dtype, place)
            made.append(result)
    row = {d: expr.index(at) for at, d in enumerate(kept)}
    for per_row, domain, dims in ((True, shape[1:], row), (False, body.domain, {})):
        stores = [s for s in body.stages if s.kind == "store" and s.per_row == per_row]
        written = sorted({s.output for s in stores})
        stages = [
            Stage("store", expr.substitute(expr.rewrite(s.expr, known.get), dims), output=written.index(s.output),
                  index=tuple(expr.substitute(i, dims) for i in s.index))
            for s in stores
        ]  # fmt: skip
        if stages:
            kernel(domain, (), stages, tuple(k.outputs[n] for n in written))
    return [*(replace(p, flops=0) for p in kernels[:-1]), kernels[-1]]


def _split(schedule: Schedule, k: Loops, compute_units: int) -> list[Loops]:
    """Return ``k`` itself, or the two kernels."""
    body = k.body
    if body.serial or not body.axes or not _is_plain(body) or 0 in body.domain:
        return [k]
    fold, axis = body.stages[0], body.axes[0]
    points = math.prod(body.domain[d] for d in body.axes)
    rows, n = math.prod(body.domain) // points, body.domain[axis]
    if 2 * rows <= compute_units:
        parts = min(n, points // MIN_POINTS, 2 * compute_units // rows)
    else:
        parts = _parts_of_columns(k, rows, points)
    if parts < 2:
        return [k]
    length = -(-n // parts)
    parts = -(-n // length)
    kept = [d for d in range(len(body.domain)) if d not in body.axes]
    shape = (parts, *(body.domain[d] for d in kept))
    made = schedule.memory(fold.expr.dtype, shape, "parts")
    at = expr.index(0) * length + expr.index(axis + 1)
    e = expr.substitute(fold.expr, {d: at if d == axis else expr.index(d + 1) for d in range(len(body.domain))})
    if parts * length > n:
        e = expr.where(at < n, e, expr.const(identity_element(fold.reduce, e.dtype), e.dtype))
    place = (expr.index(0), *(expr.index(d + 1) for d in kept))
    stages = (replace(fold, expr=e), Stage("store", expr.stage(0, e.dtype), index=place, output=0, per_row=True))
    domain = (parts, *(length if d == axis else m for d, m in enumerate(body.domain)))
    inner = LoopBody(domain, tuple(d + 1 for d in body.axes), stages)
    first = replace(k, label=f"{k.label}_parts", outputs=(made,), body=inner)
    outer = tuple(parts if d == axis else 1 if d in body.axes else m for d, m in enumerate(body.domain))
    together = expr.load(len(k.inputs), e.dtype, (expr.index(axis), *(expr.index(d) for d in kept)))
    last = replace(
        k, inputs=(*k.inputs, made), flops=0,
        body=LoopBody(outer, body.axes, (replace(fold, expr=together), *body.stages[1:])),
    )  # fmt: skip
    return [first, _without_unused(last)]


def _parts_of_columns(k: Loops, rows: int, points: int) -> int:
    """Return into how many parts each of ``rows`` reductions of ``points`` is split if they are columns, else 1."""
    width = columns_at_once(k) if rows * points >= MIN_COLUMN_POINTS else 0
    if width < 2 or 4 * rows > VECTOR_ROWS * width:
        return 1
    least, n = max(-(-VECTOR_ROWS * width // rows), -(-points // VECTOR_REDUCTION)), k.body.domain[k.body.axes[0]]
    parts = next((p for p in range(least, 2 * least) if n % p == 0), least)
    return parts if parts * MIN_COLUMN_TERMS <= n else 1


def _is_plain(body: LoopBody) -> bool:
    """Whether the stages are one reduction, and stores once per row."""
    fold, *rest = body.stages
    return fold.kind == "reduce" and fold.reduce in KINDS and all(s.kind == "store" and s.per_row for s in rest)


def _without_unused(k: Loops) -> Loops:
    """Return the kernel without inputs that no expression loads."""
    exprs: list[Expr] = [e for s in k.body.stages for e in (s.expr, *s.index)]
    used = sorted({x.value for e in exprs for x in expr.walk(e) if x.op == "load"})
    number = {old: new for new, old in enumerate(used)}

    def moved(e: Expr) -> Expr:
        return expr.substitute(e, loads=lambda x: expr.load(number[x.value], x.dtype, x.args))

    stages = tuple(replace(s, expr=moved(s.expr), index=tuple(map(moved, s.index))) for s in k.body.stages)
    return replace(k, inputs=tuple(k.inputs[n] for n in used), body=replace(k.body, stages=stages))
