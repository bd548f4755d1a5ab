"""The loop nest of a ``loops`` kernel in normal form: flat addresses, split and collapsed dims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...graph import affine, expr
from ...graph.affine import Affine
from ...graph.expr import Expr, const
from ...schedule.kernel import Loops, Operand, Stage
from ...support import dtypes

ZERO = const(0, "int64")


class Access(NamedTuple):
    """The value of a flattened load. Its arguments are an offset in elements and then the checked indices.

    ``operand``: the input's number, or ``~n`` for output n. ``checks``: (size, stride) of each checked index; an index
    that is not below its size is replaced by 0 and reported, and index * stride is added to the offset. ``guarded``:
    the offset may be outside the operand if the enclosing ``where`` does not take this branch.
    """

    operand: int
    guarded: bool
    checks: tuple[tuple[int, int], ...]


@dataclass
class Step:
    """A stage with flat addresses. ``target``: the address of a store, as a load of operand ``~output``."""

    number: int
    kind: str
    value: Expr
    reduce: str = ""
    output: int = -1
    target: Expr | None = None
    per_row: bool = False

    def exprs(self) -> list[Expr]:
        """Return the value and, for a store, its target."""
        return [self.value] if self.target is None else [self.value, self.target]

    def map(self, f: Callable[[Expr], Expr]) -> None:
        """Apply ``f`` to both expressions."""
        self.value = f(self.value)
        self.target = f(self.target) if self.target is not None else None


@dataclass
class Nest:
    """A loop nest in normal form. Dims have arbitrary numbers.

    ``order``: the dims, outermost first. ``size``: iterations of each. ``reduced``: the dims that are reduced.
    ``serial``: iterations must run in order, except along the ``parallel`` dims. ``position``: the flat position over
    the reduced dims, for argmax.
    """

    inputs: Sequence[Operand]
    outputs: Sequence[Operand]
    order: list[int]
    size: dict[int, int]
    reduced: set[int]
    steps: list[Step]
    serial: bool
    position: Expr = ZERO
    parallel: set[int] = field(default_factory=set)  # along these, iterations of a serial nest are independent
    unindexed: set[int] = field(default_factory=set)  # those of them on which no other index of a store depends
    empty: bool = False  # whether a dim has no iterations

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The inclusive range of every index."""
        return {d: (0, n - 1) for d, n in self.size.items()}

    @property
    def rows(self) -> list[int]:
        """The dims that are not reduced, outermost first."""
        return [d for d in self.order if d not in self.reduced]

    @property
    def reduction_dims(self) -> list[int]:
        """The reduced dims, outermost first."""
        return [d for d in self.order if d in self.reduced]

    def points(self, dims: Sequence[int]) -> int:
        """Return the number of points over ``dims``."""
        return math.prod(self.size[d] for d in dims)

    def exprs(self) -> Iterator[Expr]:
        """Yield every expression of the nest."""
        for s in self.steps:
            yield from s.exprs()
        yield self.position

    def map(self, f: Callable[[Expr], Expr]) -> None:
        """Apply ``f`` to every expression."""
        for s in self.steps:
            s.map(f)
        self.position = f(self.position)


def build_nest(kernel: Loops) -> Nest:
    """Return the normal form of a ``loops`` kernel: flat addresses without divisions, collapsed dims."""
    body = kernel.body
    size = dict(enumerate(body.domain))
    stages, axes = list(enumerate(body.stages)), set(body.axes)
    if any(size[d] == 0 for d in axes):
        stages, axes = _without_points(stages), set()
        size = {d: n for d, n in size.items() if d not in body.axes}
    nest = Nest(kernel.inputs, kernel.outputs, list(size), size, axes, [], body.serial)
    nest.empty = 0 in size.values()
    if nest.empty:
        return nest
    for d in body.axes:
        if d in axes:
            nest.position = nest.position * size[d] + expr.index(d)
    places: dict[int, tuple[Expr, ...]] = {}
    for n, s in stages:
        if s.kind == "store":
            places[n] = s.index
        nest.steps.append(Step(n, s.kind, s.expr, s.reduce, s.output, None, s.per_row or not axes))
    _drop_unit_dims(nest, places)
    while _split_dim(nest, places):
        pass
    _flatten(nest, places)
    nest.map(lambda e: affine.simplify(e, nest.ranges))
    while _collapse_pair(nest):
        pass
    return nest


def identity_element(kind: str, dtype: str) -> Any:
    """Return the result of reduction ``kind`` over no elements."""
    if kind in ("sum", "prod", "argmax", "argmin"):
        return int(kind == "prod")
    least, greatest = dtypes.extremes(dtype)
    return least if kind == "max" else greatest


def _without_points(stages: list[tuple[int, Stage]]) -> list[tuple[int, Stage]]:
    """Return the stages of a kernel whose reduced dims are empty: reductions become constants, and stores within a row
    are removed."""
    made: dict[Expr, Expr] = {}
    kept = []
    for n, s in stages:
        if s.kind == "reduce":
            dtype = "int64" if s.reduce in ("argmax", "argmin") else s.expr.dtype
            made[expr.stage(n, dtype)] = const(identity_element(s.reduce, dtype), dtype)
        elif s.kind == "store" and s.per_row:
            kept.append((n, Stage("store", expr.rewrite(s.expr, made.get), output=s.output, index=s.index)))
    return kept


# -- dims ---------------------------------------------------------------------------------------------------------
Places = dict[int, tuple[Expr, ...]]


def _substitute(nest: Nest, places: Places, dims: dict[int, Expr]) -> None:
    nest.map(lambda e: expr.substitute(e, dims))
    for n, idx in places.items():
        places[n] = tuple(expr.substitute(i, dims) for i in idx)


def _drop_unit_dims(nest: Nest, places: Places) -> None:
    unit = [d for d, n in nest.size.items() if n == 1]
    _substitute(nest, places, {d: ZERO for d in unit})
    for d in unit:
        nest.order.remove(d)
        del nest.size[d]
        nest.reduced.discard(d)


def _split_dim(nest: Nest, places: Places) -> bool:
    """Replace a dim by two where ``i // k`` or ``i % k`` would need a division. Return whether one was split."""
    nest.map(lambda e: affine.simplify(e, nest.ranges))
    for n, idx in places.items():
        places[n] = tuple(affine.simplify(i, nest.ranges) for i in idx)
    for e in [*nest.exprs(), *(i for idx in places.values() for i in idx)]:
        for x in expr.walk(e):
            if x.op not in ("floordiv", "remainder") or x.dtype != "int64" or x.args[1].op != "const":
                continue
            found = _divisor(nest, x)
            if found is None:
                continue
            d, k = found
            high, low = max(nest.size) + 1, max(nest.size) + 2
            at = nest.order.index(d)
            nest.order[at : at + 1] = [high, low]
            nest.size |= {high: nest.size.pop(d) // k, low: k}
            if d in nest.reduced:
                nest.reduced = (nest.reduced - {d}) | {high, low}
            _substitute(nest, places, {d: expr.index(high) * k + expr.index(low)})
            return True
    return False


def _divisor(nest: Nest, x: Expr) -> tuple[int, int] | None:
    k = x.args[1].value
    if k <= 0:
        return None
    _, rest = affine.divide_affine(affine.affine(x.args[0]), k)
    if len(rest.terms) != 1 or rest.const:
        return None
    ((term, c),) = rest.terms.items()
    if term.op != "index" or c <= 0 or k % c:
        return None
    n = nest.size[term.value]
    return (term.value, k // c) if n % (k // c) == 0 and n > k // c else None


def _collapse_pair(nest: Nest) -> bool:
    """Merge two dims that every index expression visits like one longer dim. Return whether a pair was merged."""
    forms = [f for e in nest.exprs() for f in _index_forms(e)]
    for a in nest.order:
        for b in nest.order:
            if a == b or (a in nest.reduced) != (b in nest.reduced):
                continue
            if nest.serial and nest.order.index(b) != nest.order.index(a) + 1:
                continue
            if all(f.coefficient(a) == f.coefficient(b) * nest.size[b] for f in forms):
                _fix_index(nest, a)
                nest.size[b] *= nest.size.pop(a)
                nest.order.remove(a)
                for kept in (nest.parallel, nest.unindexed):
                    if a not in kept:
                        kept.discard(b)
                nest.reduced.discard(a)
                return True
    return False


def _fix_index(nest: Nest, dim: int) -> None:
    nest.map(lambda e: expr.substitute(e, {dim: ZERO}))


def _index_forms(e: Expr) -> list[Affine]:
    """Return the affine form of every maximal int64 expression in ``e``."""
    forms: list[Affine] = []
    seen: set[Expr] = set()

    def visit(x: Expr) -> None:
        if x in seen:
            return
        seen.add(x)
        if x.dtype == "int64" and x.op in ("index", "add", "sub", "mul", "neg"):
            form = affine.affine(x)
            if list(form.terms) != [x] or x.op == "index":
                forms.append(form)
                for t in form.opaque():
                    visit(t)
                return
        for a in x.args:
            visit(a)

    visit(e)
    return forms


# -- addresses ----------------------------------------------------------------------------------------------------
def _flatten(nest: Nest, places: Places) -> None:
    """Turn multi-dimensional loads and stores into offsets, and decide which indices must be checked."""
    ranges = nest.ranges
    memo: dict[tuple[Expr, bool], Expr] = {}

    def address(op: Operand, number: int, dtype: str, idx: Sequence[Expr], raw: Sequence[Expr], guarded: bool) -> Expr:
        offset: Expr = ZERO
        unsafe = False
        checked: list[Expr] = []
        checks: list[tuple[int, int]] = []
        for i, original, n, stride in zip(idx, raw, op.shape, op.strides, strict=True):
            bound = affine.interval(original, ranges)
            if bound is None or ((bound[0] < 0 or bound[1] >= n) and not guarded):
                checked.append(i)
                checks.append((n, stride))
                continue
            unsafe |= bound[0] < 0 or bound[1] >= n
            offset = offset + i * stride
        return Expr("load", dtype, (offset, *checked), Access(number, unsafe, tuple(checks)))

    def visit(x: Expr, guarded: bool) -> Expr:
        key = (x, guarded)
        if key not in memo:
            if not x.args and x.op != "load":
                memo[key] = x
            elif x.op == "where":
                arms = [visit(a, True) for a in x.args[1:]]
                memo[key] = Expr("where", x.dtype, (visit(x.args[0], guarded), *arms))
            else:
                args = [visit(a, guarded) for a in x.args]
                if x.op == "load":
                    memo[key] = address(nest.inputs[x.value], x.value, x.dtype, args, x.args, guarded)
                else:
                    memo[key] = Expr(x.op, x.dtype, args, x.value)
        return memo[key]

    parallel, unindexed = set(nest.order), set(nest.order)
    for s in nest.steps:
        s.value = visit(s.value, False)
        if s.number in places:
            op, raw = nest.outputs[s.output], places[s.number]
            s.target = address(op, ~s.output, op.dtype, [visit(i, False) for i in raw], raw, False)
            own = [i for i in raw if i.op == "index"]
            parallel &= {i.value for i in own}
            unindexed &= {i.value for i in own if sum(_uses(j, i) for j in raw) == 1}
    nest.parallel, nest.unindexed = parallel, unindexed


def _uses(e: Expr, leaf: Expr) -> bool:
    return any(x is leaf for x in expr.walk(e))


# -- queries of targets ----------------------------------------------------------------------------------------------
def fold_single_points(nest: Nest) -> None:
    """In a nest without reduced dims, replace reductions by their arguments and temporaries by their expressions."""
    made: dict[Expr, Expr] = {}
    for s in nest.steps:
        s.value = expr.rewrite(s.value, made.get)
        if s.target is not None:
            s.target = expr.rewrite(s.target, made.get)
        elif s.reduce in ("argmax", "argmin"):
            made[expr.stage(s.number, "int64")] = expr.const(0, "int64")
        else:
            made[expr.stage(s.number, s.value.dtype)] = s.value
        s.per_row = True
    nest.steps = [s for s in nest.steps if s.kind == "store"]


def accesses(nest: Nest) -> list[tuple[Expr, bool]]:
    """Return every distinct load and every store target, each with whether it is executed only once per row."""
    seen: dict[Expr, bool] = {}
    for s in nest.steps:
        for e in (s.value, *([s.target] if s.target is not None else [])):
            for x in expr.walk(e):
                if x.op == "load":
                    seen[x] = seen.get(x, True) and s.per_row
    return list(seen.items())


def use_counts(exprs: list[Expr]) -> Counter[Expr]:
    """Return how often each subexpression occurs as an argument or a root."""
    counts: Counter[Expr] = Counter(exprs)
    seen: set[Expr] = set()
    for e in exprs:
        for x in expr.walk(e):
            if x not in seen:
                seen.add(x)
                counts.update(x.args)
    return counts
