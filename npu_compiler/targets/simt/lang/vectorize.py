"""The points of a ``loops`` kernel's nest that a thread takes: one, or neighbours that every access takes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....graph import affine, expr
from ....graph.expr import Expr
from ....schedule.kernel import Kernel
from ....support import dtypes
from ...codegen.nest import Nest, Step, accesses, use_counts
from .function import Pointers, Scope
from .scalar import Scalars, before_storage, combine, kind_of, storage, stored

LINE = 128  # bytes that are read or written at once
GATHERED = 8  # so many neighbours a thread collects for one store


def scalars_for(nest: Nest, function: Scope, steps: Sequence[Step], numbers: dict[int, int] | None = None) -> Scalars:
    """``numbers``: the function's operand for each of the nest's, if they differ."""
    uses = use_counts([e for s in steps for e in s.exprs()])
    return Scalars(nest, Pointers(function, numbers), function.lines, uses)


def vector_width(
    nest: Nest, kernel: Kernel, steps: Sequence[Step], lane: int, registers: int = 2**31, most: int = 0
) -> int:
    """Neighbours along ``lane`` that every access can take at once, or 1: in up to 16 bytes, or ``most`` if given.
    Operands from number ``registers`` on are not in memory. A few neighbours may also be gathered from anywhere."""
    widest = most or 8
    found: set[Expr] = {x for s in steps for e in s.exprs() for x in expr.walk(e) if x.op == "load"}
    found = {x for x in found if x.value.operand < registers}
    for x in found:
        form = affine.affine(x.args[0])
        inside = [t for t in (*form.opaque(), *x.args[1:]) if any(y is expr.index(lane) for y in expr.walk(t))]
        c = form.coefficient(lane)
        if not inside and c not in (0, 1) and x.value.operand >= 0 and nest.size[lane] <= GATHERED:
            continue
        if inside or c not in (0, 1):
            return 1
        if c and x.value.guarded:
            found_condition = condition_of(steps, x)
            widest = min(widest, same_for(found_condition[0], lane)) if found_condition else 1
        if c:
            op = kernel.inputs[x.value.operand] if x.value.operand >= 0 else kernel.outputs[~x.value.operand]
            beside = (k for t, k in form.terms.items() if t is not expr.index(lane))
            step = math.gcd(*beside, form.const, op.offset, *(k for _, k in x.value.checks)) or 16
            widest = min(widest, most or 16 // dtypes.DTYPES[x.dtype].size, step & -step)
    n = nest.size[lane]
    while n % widest:
        widest //= 2
    return max(widest, 1) if any(affine.affine(x.args[0]).coefficient(lane) for x in found) else 1


def store_width(nest: Nest, kernel: Kernel, lane: int) -> int:
    """Neighbours that a thread takes: what it stores is up to 16 bytes. It may load more at once, of wider types, from
    memory that is ours: other arrays may begin at any multiple of 16 bytes."""
    sizes = [dtypes.DTYPES[kernel.outputs[s.output].dtype].size for s in nest.steps if s.target is not None]
    most = min(8, 16 // max(sizes, default=2))
    read = [nest.inputs[x.value.operand] for x, _ in accesses(nest) if x.value.operand >= 0 and is_along(x, lane)]
    theirs = any(o.buffer.kind == "input" and dtypes.DTYPES[o.dtype].size * most > 16 for o in read)
    return vector_width(nest, kernel, nest.steps, lane, most=0 if theirs else most)


def condition_of(steps: Sequence[Step], x: Expr) -> tuple[Expr, bool] | None:
    """(condition, its value) under which ``x`` is read, if a single ``where`` states it."""
    around = {y for s in steps for e in s.exprs() for y in expr.walk(e) if any(a is x for a in expr.walk(y))}
    wheres = [y for y in around if y.op == "where"]
    if len(wheres) != 1:
        return None
    inside = [any(a is x for a in expr.walk(arm)) for arm in wheres[0].args]
    return None if inside not in ([False, True, False], [False, False, True]) else (wheres[0].args[0], inside[1])


def same_for(condition: Expr, lane: int) -> int:
    """For how many neighbours along ``lane``, from a multiple of as many on, ``condition`` is the same."""
    if not any(y is expr.index(lane) for y in expr.walk(condition)):
        return 1 << 30
    if condition.op == "and":
        return min(same_for(a, lane) for a in condition.args)
    if condition.op in ("lt", "ge") and condition.args[0].dtype == "int64":
        form = affine.affine(condition.args[0] - condition.args[1])
        if form.coefficient(lane) == 1 and len(form.terms) == 1 and form.const:
            return form.const & -form.const
    return 1


class Points:
    """What a thread does at ``width`` neighbouring points along ``lane``; ``i{lane}`` is the first. With ``apart``,
    reductions fold every neighbour into a variable of its own, ``f{number}[..]``."""

    def __init__(self, s: Scalars, nest: Nest, lane: int, width: int, apart: bool = False):
        self.s, self.nest, self.lane, self.width, self.apart = s, nest, lane, width, apart
        self.inner = max(nest.size, default=0) + 1  # the position inside the vector, as a dim of its own
        s.ranges = {**s.ranges, self.inner: (0, width - 1)}

    @property
    def shift(self) -> dict[int, Expr]:
        """From the first point to the one at ``inner``."""
        return {self.lane: expr.index(self.lane) + expr.index(self.inner)} if self.width > 1 else {}

    def run(self, steps: Sequence[Step], position: Expr | None = None, sink: str = "", turn: str = "") -> None:
        """Stores are made, and reductions folded into the variables ``f{number}``. With ``sink``, what would be stored
        goes into that float array instead, of output n into the one named ``{sink}n``; with ``turn``, vectors and their
        places go into element ``turn`` of the arrays ``made{n}`` and ``place{n}``, of the n-th step."""
        s, width = self.s, self.width
        if width == 1:
            for step in steps:
                if sink and step.target is not None:
                    s.out.add(f"{sink}{step.output or ''}[0] = {s.text(step.value, 'float')};")
                else:
                    self._one(step, step.value, step.target, position)
            return
        stores: list[tuple[str, Step]] = []
        bound = dict(s.bound)
        shift = self.shift
        for x in {x: None for st in steps for x in expr.walk(st.value) if x.op == "load"}:
            known = x in s.bound or expr.substitute(x, shift) in s.bound
            if affine.affine(x.args[0]).coefficient(self.lane) == 1 and not known:
                s.bound[expr.substitute(x, shift)] = stored(f"{self._vector(steps, x)}.v[i{self.inner}]", x.dtype)
        for st in steps:
            if st.target is not None and not sink:
                name = s.name()
                s.out.add(f"Vec<{dtypes.DTYPES[st.target.dtype].ctype}, {width}> {name};")
                stores.append((name, st))
        s.out.add("#pragma unroll")
        with s.scope(f"for (int i{self.inner} = 0; i{self.inner} < {width}; i{self.inner}++) {{"):
            for st in steps:
                value = expr.substitute(st.value, shift)
                if st.target is None:
                    self._one(st, value, None, expr.substitute(position, shift) if position is not None else None)
                elif sink:
                    s.out.add(f"{sink}{st.output or ''}[i{self.inner}] = {s.text(value, 'float')};")
                else:
                    name = next(n for n, other in stores if other is st)
                    value = before_storage(value) if value.dtype == st.target.dtype else value
                    text = storage(s.text(value, kind_of(st.target.dtype)), st.target.dtype)
                    s.out.add(f"{name}.v[i{self.inner}] = {text};")
        for n, (name, st) in enumerate(stores):
            assert st.target is not None
            if turn:
                s.out.add(f"made{n}[{turn}] = {name};", f"place{n}[{turn}] = {s.address(st.target)};")
                continue
            ctype = dtypes.DTYPES[st.target.dtype].ctype
            s.out.add(f"*(DEVICE Vec<{ctype}, {width}>*)({s.pointers[~st.output]} + {s.address(st.target)}) = {name};")
        s.bound = bound

    def _vector(self, steps: Sequence[Step], x: Expr) -> str:
        """A variable with the neighbours that load ``x`` begins; anything where it is not read."""
        s, name = self.s, self.s.name()
        vector = f"Vec<{dtypes.DTYPES[x.dtype].ctype}, {self.width}>"
        pointer = s.pointers[x.value.operand]
        if not x.value.guarded:
            s.out.add(f"const {vector} {name} = *(DEVICE const {vector}*)({pointer} + {s.address(x)});")
            return name
        found = condition_of(steps, x)
        assert found is not None
        condition, value = found
        s.out.add(f"{vector} {name} = {{}};")
        with s.scope(f"if ({'' if value else '!'}({s.text(condition, 'bool')})) {{"):
            s.out.add(f"{name} = *(DEVICE const {vector}*)({pointer} + {s.address(x)});")
        return name

    def _one(self, step: Step, value: Expr, target: Expr | None, position: Expr | None) -> None:
        s = self.s
        if target is not None:
            s.store(target, value, target.dtype)
            return
        register, name = kind_of(step.value.dtype), f"f{step.number}" + (f"[i{self.inner}]" if self.apart else "")
        text = s.text(value, register)
        if step.reduce.startswith("arg"):
            assert position is not None
            s.out.add(f"{step.reduce}_step({name}, q{step.number}, {text}, {s.text(position, 'int')});")
        else:
            s.out.add(f"{name} = {combine(step.reduce, register, name, text)};")


def decode(s: Scalars, nest: Nest, dims: Sequence[int], flat: str, width: int = 1) -> None:
    """Variables ``i{dim}`` of ``dims``, the last of which varies fastest (in steps of ``width``)."""
    unit = 1
    for d in reversed(dims):
        n = nest.size[d] // (width if d == dims[-1] else 1)
        text = flat if unit == 1 else f"{flat} / {unit}u"
        outermost = d == dims[0]
        text = text if outermost else f"({text}) % {n}u" if unit > 1 else f"{text} % {n}u"
        times = f" * {width}" if d == dims[-1] and width > 1 else ""
        s.out.add(f"const int i{d} = (int)({text}){times};")
        unit *= n


def memory_order(nest: Nest, dims: Sequence[int], loads: bool = False) -> list[int]:
    """``dims`` with those of small strides last: of the stores, or else of the loads."""
    weight = {d: 0.0 for d in dims}
    for x, _ in accesses(nest):
        form = affine.affine(x.args[0])
        if (x.value.operand < 0) != loads:
            for d in dims:
                c = abs(form.coefficient(d))
                weight[d] = max(weight[d], c) if c else weight[d]
    return sorted(dims, key=lambda d: -weight[d])


def point_order(nest: Nest) -> list[int]:
    """All dims in the order in which threads take the points: neighbours store to neighbouring places, and where these
    make whole lines, lines that load the same follow each other."""
    order = memory_order(nest, nest.order)
    run = order[-1:]
    stores = [x for x, _ in accesses(nest) if x.value.operand < 0]
    whole = [nest.size[d] * dtypes.DTYPES[x.dtype].size for x in stores for d in run if is_along(x, d)]
    if len(whole) < len(stores) or min(whole, default=0) < LINE:
        return order
    return [*memory_order(nest, order[:-1], loads=True), *run]


def is_along(x: Expr, d: int) -> bool:
    """Whether neighbours along ``d`` are neighbours in memory."""
    return affine.affine(x.args[0]).coefficient(d) == 1
