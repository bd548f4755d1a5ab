"""Reductions: accumulators, the scalar loops over the reduced dims, and guards that become bounds of these loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...graph import affine, expr
from ...graph.affine import Affine
from ...graph.expr import Expr, const
from ...support import dtypes
from ..codegen.nest import Step, identity_element
from ..codegen.row_passes import Pass
from .blocks import LANE_TYPE, Block, vector_kind
from .plan import Plan
from .render import Renderer

OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "argmax": "Max", "argmin": "Min"}
Clips = dict[int, list[tuple[int, Affine]]]  # dim -> (coefficient, rest): coefficient * index + rest >= 0


def is_long(plan: Plan, s: Step, count: int) -> bool:
    """Whether a sum is so long that partial sums are flushed into wider totals. ``count``: independent accumulators."""
    terms = plan.nest.points(plan.inner_reductions) * (1 if plan.across_rows else plan.lane_steps(count))
    return s.reduce == "sum" and dtypes.is_float(s.value.dtype) and terms > plan.sequential


def accumulator(plan: Plan, s: Step, count: str, along: bool = False) -> str:
    """Return the C++ type of a reduction's accumulator. ``count``: independent vectors, as C++ text. ``along``: the
    lanes are combined at the end of the row."""
    kind = vector_kind(s.value.dtype)
    kind = "vi32" if kind == "mask" else kind
    if s.reduce in ("argmax", "argmin"):
        return f"ArgReduction<{OPS[s.reduce]}, {kind}, {plan.position_kind}, {count}>"
    if is_long(plan, s, int(count) if along else 1):
        return f"LongSum<{kind}, {count}, {'true' if along else 'false'}>"
    return f"Reduction<{OPS[s.reduce]}, {kind}, {count}>"


def waiting_type(plan: Plan, s: Step) -> str:
    """Return the C++ type of the numbers that an accumulator keeps in memory from one block of rows to the next."""
    return "double" if is_long(plan, s, 1) else LANE_TYPE[vector_kind(s.value.dtype)]


def waiting(plan: Plan, p: Pass, method: str) -> str:
    """Return the line that loads or saves the accumulators of a tile between two blocks of rows. After 'save', the tile
    waits for the next block."""
    (d,) = plan.inner_reductions
    at = "b - lo" if plan.lane_blocks > 1 else "b"
    calls = " ".join(f"f{s.number}.{method}(w{s.number} + {at}, L);" for s in p.reductions)
    if method == "load":
        return f"if (p{d} > 0) {{ {calls} }}"
    return f"if (p{d} + {plan.rows_at_once} < {plan.nest.size[d]}) {{ {calls} return; }}"


@contextmanager
def reduction_loops(plan: Plan, render: Renderer, block: Block, p: Pass, clips: Clips, steps: int) -> Iterator[Block]:
    """Emit scalar loops over the reduced dims except the lane dim, and yield the innermost block.

    ``steps``: additions to a partial sum in the innermost block. If partial sums would get too long, a loop is split
    into blocks that flush them into the totals at their end.
    """
    size = plan.nest.size
    count = 1 if plan.across_rows else plan.unroll[plan.row.passes.index(p)]
    carry = [f"f{s.number}.carry();" for s in p.reductions if is_long(plan, s, count)]
    cut, length = _cut(plan, steps) if carry and not plan.rows_at_once else (None, 0)
    with ExitStack() as stack:
        for d in plan.inner_reductions:
            low, high = _bounds(size[d], clips.get(d, []), render, block)
            if plan.rows_at_once:  # the loop over all lanes is in a loop over blocks of rows
                stack.callback(block.items.extend, carry)
                low = f"scalar_max<long>({low}, p{d})" if d in clips else f"p{d}"
                end = f"p{d} + {plan.rows_at_once}"
                high = f"scalar_min<long>({high}, {end})" if d in clips or size[d] % plan.rows_at_once else end
            elif d == cut:
                header = f"for (long p{d} = {low}; p{d} < {high}; p{d} += {length}) {{"
                block = stack.enter_context(block.child(header))
                stack.callback(block.items.extend, carry)
                low, high = f"p{d}", f"scalar_min<long>(p{d} + {length}, {high})"
            header = f"for (long i{d} = {low}, e{d} = {high}; i{d} < e{d}; i{d}++) {{"
            block = stack.enter_context(block.child(header, binds=frozenset((d,))))
        yield block


def _cut(plan: Plan, steps: int) -> tuple[int | None, int]:
    """Return the dim of the loop that flushes partial sums, and the number of iterations between two flushes."""
    if steps > plan.sequential:
        return None, 0  # the lane loop flushes
    for d in reversed(plan.inner_reductions):
        if steps * plan.nest.size[d] > plan.sequential:
            return d, plan.sequential // steps
        steps *= plan.nest.size[d]
    return None, 0


def _bounds(size: int, clips: list[tuple[int, Affine]], render: Renderer, block: Block) -> tuple[str, str]:
    low, high = "0", str(size)
    for c, rest in clips:
        text = render.offset(rest if c < 0 else Affine({}, 0).plus(rest, -1), block)
        if c > 0:
            low = f"scalar_max<long>({low}, {text if c == 1 else f'ceil_quotient({text}, {c})'})"
        else:
            high = f"scalar_min<long>({high}, {text if c == -1 else f'floor_quotient({text}, {-c})'} + 1)"
    if not clips:
        return low, high
    names = render.name("lo"), render.name("hi")
    block.items.append(f"const long {names[0]} = {low}, {names[1]} = {high};")
    return names


def clip(plan: Plan, p: Pass, values: dict[int, Expr]) -> tuple[dict[int, Expr], Clips]:
    """Turn conditions into loop bounds if the argument of every reduction is its identity element where they fail.

    ``values``: the argument of each reduction by stage number. They are returned without those conditions.
    """
    guards: dict[int, list[Expr]] = {}
    for s in p.reductions:
        e = values[s.number]
        neutral = const(identity_element(s.reduce, e.dtype), e.dtype)
        if s.reduce in ("argmax", "argmin") or e.op != "where" or e.args[2] is not neutral:
            return values, {}
        guards[s.number] = affine.conjuncts(e.args[0])
    if not guards or p.saves or p.stores:
        return values, {}
    clips: Clips = {}
    done: set[Expr] = set()
    for c in next(iter(guards.values())):
        found = _loop_bound(plan, c)
        if found is not None and all(c in g for g in guards.values()):
            d, form = found
            rest = Affine({t: k for t, k in form.terms.items() if t is not expr.index(d)}, form.const)
            clips.setdefault(d, []).append((form.coefficient(d), rest))
            done.add(c)
    out = {}
    for n, conditions in guards.items():
        inner, neutral = values[n].args[1:]
        for c in reversed([c for c in conditions if c not in done]):
            inner = expr.where(c, inner, neutral)
        out[n] = inner
    return out, clips


def _loop_bound(plan: Plan, c: Expr) -> tuple[int, Affine] | None:
    """Return the dim of the loop that a condition bounds, and the affine form that must be >= 0 in it; None if it
    bounds no loop."""
    for form in affine.as_bounds(c):
        dims = {t.value for t in form.terms if t.op == "index"}
        own = [d for d in plan.inner_reductions if d in dims]
        if own and not form.opaque() and plan.lane not in dims:
            return own[-1], form
    return None
