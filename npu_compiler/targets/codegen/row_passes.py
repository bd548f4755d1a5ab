"""Passes over a row: which stages share a pass, and which values are kept in scratch memory between passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ...graph import affine, expr
from ...graph.expr import Expr
from .nest import Nest, Step

SCRATCH_LIMIT = 256 << 10  # bytes of saved temporaries per row; the others are recomputed
WORTH_SAVING = 6  # scalar operations of a temporary that is saved


@dataclass
class Pass:
    """One pass over the reduced dims: reductions, temporaries to save, results to store."""

    reductions: list[Step] = field(default_factory=list)
    saves: list[Step] = field(default_factory=list)
    stores: list[Step] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        """All steps of the pass: reductions, saved values and stores."""
        return [*self.reductions, *self.saves, *self.stores]


@dataclass
class Row:
    """The passes over a row, and the ``stores`` that are executed once after them. ``saved``: dtypes of the stages that
    are kept in scratch memory."""

    passes: list[Pass] = field(default_factory=list)
    stores: list[Step] = field(default_factory=list)
    saved: dict[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        """The steps of all passes, and the stores after them."""
        return [s for p in self.passes for s in p.steps] + self.stores

    def number(self, n: int) -> Pass:
        """Return pass ``n``, and create the passes up to it if they do not exist."""
        while len(self.passes) <= n:
            self.passes.append(Pass())
        return self.passes[n]


def scratch_item(dtype: str) -> int:
    """Return the bytes of one saved value of ``dtype``."""
    return 8 if dtype in ("float64", "int64") else 4


def make_row(nest: Nest, lanes_per_point: int, scratch: int = SCRATCH_LIMIT) -> Row:
    """Assign the stages to as few passes as their dependences allow.

    ``lanes_per_point``: values that are saved per point. ``scratch``: bytes of saved values per row; 0: all are
    recomputed.
    """
    if not nest.reduced:
        return Row(stores=nest.steps)
    row = Row()
    ready: dict[int, int] = {}  # stage -> the first pass that can use it
    temps: dict[int, Step] = {}

    def first_pass(s: Step) -> int:
        used = [x.value for e in s.exprs() for x in expr.walk(e) if x.op == "stage"]
        return max((ready[n] for n in used), default=0)

    inputs = {op.buffer.id for op in nest.inputs}
    late: list[Step] = []
    for s in nest.steps:
        at = first_pass(s)
        if s.kind == "reduce":
            row.number(at).reductions.append(s)
            ready[s.number] = at + 1
        elif s.kind == "temp":
            ready[s.number] = at
            temps[s.number] = s
        elif s.per_row:
            row.stores.append(s)
        elif nest.outputs[s.output].buffer.id in inputs:
            late.append(s)  # the memory is also an input, so it is written in the last pass
        else:
            row.number(at).stores.append(s)
    if late:
        row.number(max(len(row.passes) - 1, *map(first_pass, late))).stores.extend(late)
    budget = scratch // (nest.points(nest.reduction_dims) * lanes_per_point)
    budget = _save_or_recompute(row, temps, ready, budget)
    if lanes_per_point == 1:
        _save_common(row, nest, max([s.number for s in nest.steps], default=0) + 1, budget)
    return row


def _save_or_recompute(row: Row, temps: dict[int, Step], ready: dict[int, int], budget: int) -> int:
    """Decide which temporaries are saved in scratch memory. Replace the others, and uses in the pass that computes a
    saved one, by their expressions.

    ``budget``: bytes per point. Returns the remaining budget.
    """
    needed: dict[int, int] = {}  # temp -> last pass that reads it
    for number, p in enumerate(row.passes):
        waiting = [e for s in p.steps for e in s.exprs()]
        for e in waiting:
            for x in expr.walk(e):
                if x.op == "stage" and x.value in temps:
                    needed[x.value] = number
                    waiting.append(temps[x.value].value)
    for n, s in temps.items():
        item = scratch_item(s.value.dtype)
        if needed.get(n, 0) > ready[n] and expr.cost(s.value) >= WORTH_SAVING and item <= budget:
            row.saved[n] = s.value.dtype
            row.passes[ready[n]].saves.append(s)
            budget -= item

    def resolve(e: Expr, at: int) -> Expr:
        def step(x: Expr) -> Expr | None:
            if x.op != "stage" or x.value not in temps or (x.value in row.saved and ready[x.value] < at):
                return None
            return resolve(temps[x.value].value, at)

        return expr.rewrite(e, step)

    steps = [(s, at) for at, p in enumerate(row.passes) for s in p.steps] + [(s, len(row.passes)) for s in row.stores]
    for s, at in steps:
        s.map(partial(resolve, at=at))
    return budget


def _save_common(row: Row, nest: Nest, number: int, budget: int) -> None:
    """Save expressions that several passes would recompute from two or more loads, such as a residual sum."""
    dims = set(nest.reduction_dims)
    where: dict[Expr, set[int]] = {}
    for at, p in enumerate(row.passes):
        for e in (e for s in p.steps for e in s.exprs()):
            for x in expr.walk(e):
                where.setdefault(x, set()).add(at)
    found: dict[Expr, frozenset[int]] = {}
    for x, passes in where.items():
        inside = expr.walk(x)
        streams = sum(y.op == "load" and _moves(y, dims) for y in inside)
        plain = x.op not in ("load", "where", "cast") and all(y.op != "stage" and y.dtype != "bool" for y in inside)
        if len(passes) > 1 and streams > 1 and plain:
            found[x] = frozenset(passes)
    made: dict[Expr, Expr] = {}
    for x in sorted(found, key=lambda x: (-len(found[x]), -len(expr.walk(x)))):
        apart = all(x not in expr.walk(y) and y not in expr.walk(x) for y in made)
        if apart and scratch_item(x.dtype) <= budget:
            budget -= scratch_item(x.dtype)
            row.saved[number] = x.dtype
            row.passes[min(found[x])].saves.append(Step(number, "temp", x))
            made[x] = expr.stage(number, x.dtype)
            number += 1
    for at, p in enumerate(row.passes):
        later = {x: s for x, s in made.items() if at > min(found[x])}
        for s in p.steps:
            s.map(partial(expr.rewrite, f=later.get))


def _moves(load: Expr, dims: set[int]) -> bool:
    """Whether the address of a load depends on one of the reduced ``dims``."""
    return any(affine.affine(load.args[0]).coefficient(d) for d in dims)
