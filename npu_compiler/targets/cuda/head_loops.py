"""Loop nests that read the results of a product head by head, such as rotary embeddings and cache updates: how their
points follow from rows and columns of the product.

Points are computed in pairs, half a head apart: a rotary embedding reads the product at both of their columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ...graph import affine, expr
from ...graph.affine import Affine
from ...graph.expr import Expr
from ...schedule.anchors import GemmWithLoops
from ...schedule.kernel import Loops, Operand
from ...support import dtypes
from ..codegen.nest import Access, Nest, build_nest, fold_single_points
from ..simt.kernels.scatter import is_elementwise, own_and_updates, sole_index, stores_rows
from ..simt.lang.vectorize import is_along, vector_width

WIDTH = 8  # columns of a vector
HEADS = (64, 128)  # supported head sizes


class Digit(NamedTuple):
    """Index ``dim`` of a nest is a row, or a column, // ``divisor`` % ``size``."""

    dim: int
    divisor: int
    size: int


@dataclass(frozen=True)
class HeadLoops:
    """A loop nest over all rows of a product, and over ``width`` columns from column ``first`` on.

    ``nest``: has two steps, for the two points of a pair. Its inputs ``near`` and ``near`` + 1 are the product at these
    points. ``lane``: the dim of columns in half a head. ``rows``, ``columns``: the other dims, as digits of the row and
    of the distance from column ``first``. ``update``: the row dim whose index is looked up in memory, by the load
    ``place``, where a row is stored; several rows may have one place.
    """

    loops: Loops
    nest: Nest
    lane: int
    near: int
    first: int
    width: int
    rows: tuple[Digit, ...]
    columns: tuple[Digit, ...]
    update: int | None = None
    place: Expr | None = None

    def loads(self) -> list[Expr]:
        """Return every load of the two steps, also of their addresses, that does not read the product."""
        found = (x for s in self.nest.steps for e in s.exprs() for x in expr.walk(e) if x.op == "load")
        return [x for x in dict.fromkeys(found) if 0 <= x.value.operand < self.near]


def heads_of(kernel: GemmWithLoops) -> tuple[int, tuple[HeadLoops, ...]]:
    """Return (columns of a head, the consumers of the product in the order of their columns). The consumers do not
    overlap and read whole heads; (0, ()) if they do not, or read the product in another way."""
    result = kernel.product.outputs[0]
    nests = [_nest(c) for c in kernel.consumers]
    known = [(c, n) for c, n in zip(kernel.consumers, nests, strict=True) if n is not None]
    distances = {d for _, n in known for d in _distances(n, result)} - {0}
    whole = result.contiguous and result.offset == 0 and math.prod(result.shape) == math.prod(result.buffer.shape)
    if len(known) < len(nests) or len(distances) != 1 or not whole:
        return 0, ()
    head = 2 * distances.pop()
    if head not in HEADS or result.shape[-1] % head:
        return 0, ()
    halves = [kernel.inputs[n] for n in kernel.halves]
    found = [_head_loops(c, n, result, head, halves.__contains__) for c, n in known]
    heads = sorted((x for x in found if x is not None), key=lambda x: x.first)
    apart = all(a.first + a.width <= b.first for a, b in itertools.pairwise(heads))
    return (head, tuple(heads)) if len(heads) == len(found) and apart else (0, ())


def _nest(loops: Loops) -> Nest | None:
    """Return the nest of ``loops`` if it is a single step without reductions."""
    nest = build_nest(loops)
    if nest.reduced or nest.empty:
        return None
    fold_single_points(nest)
    return nest if len(nest.steps) == 1 else None


def _products(nest: Nest, result: Operand) -> list[Expr]:
    """Return the loads of ``result``."""
    found = (x for e in nest.steps[0].exprs() for x in expr.walk(e) if x.op == "load" and x.value.operand >= 0)
    return [x for x in dict.fromkeys(found) if nest.inputs[x.value.operand].buffer.id == result.buffer.id]


def _address(nest: Nest, x: Expr) -> Affine:
    """Return the address of load ``x`` in the buffer of its operand."""
    form = affine.affine(x.args[0])
    return Affine(form.terms, form.const + nest.inputs[x.value.operand].offset)


def _distances(nest: Nest, result: Operand) -> set[int]:
    """Return the distances in elements between the loads of ``result`` and its load without conditions."""
    loads = _products(nest, result)
    own = next((_address(nest, x) for x in loads if not x.value.guarded), None)
    return {abs(_address(nest, x).const - own.const) for x in loads} if own is not None else set()


def _head_loops(
    loops: Loops, nest: Nest, result: Operand, head: int, halves: Callable[[Operand], bool]
) -> HeadLoops | None:
    """Return how ``loops`` reads ``result``, or None if it does so in an unsupported way. ``halves``: whether the rows
    of an operand are two equal halves."""
    own = next((x for x in _products(nest, result) if not x.value.guarded), None)
    if own is None:
        return None
    address, scatter = _address(nest, own), _scatter(nest)
    digits = _digits(nest, address, result)
    if digits is None or scatter is None:
        return None
    rows, columns = digits
    lane, width = columns[0].dim, math.prod(d.size for d in columns)
    if columns[0].size % head or address.const % head or (update := scatter[0]) not in (None, *(d.dim for d in rows)):
        return None
    near = len(nest.inputs)
    far, outer = _split(nest, lane, head, halves)
    index = _head(nest, outer) * head + expr.index(lane)
    if not _specialise(nest, expr.substitute(address.build(), {lane: index}), result, far, lane):
        return None
    columns = tuple(d for d in (Digit(outer, head, columns[0].size // head), *columns[1:]) if d.size > 1)
    made = HeadLoops(loops, nest, lane, near, address.const, width, rows, columns, update, scatter[1])
    return made if _has_vectors(made) else None


def _scatter(nest: Nest) -> tuple[int | None, Expr | None] | None:
    """Return (row dim, load of the place of a row) of a scatter, (None, None) if ``nest`` is none, and None if its
    places depend on anything but an input of the program, which may be read before preceding kernels end."""
    if not nest.serial or is_elementwise(nest):
        return None, None
    own, updates = own_and_updates(nest)
    target = nest.steps[0].target
    if target is None or not stores_rows(nest) or len(updates) != 1:
        return None
    place = sole_index(expr.substitute(target, {d: expr.const(0, "int64") for d in own}))
    if place is None or place.value.checks or not nest.inputs[place.value.operand].buffer.is_input:
        return None
    return updates[0], place


def _digits(nest: Nest, address: Affine, result: Operand) -> tuple[tuple[Digit, ...], tuple[Digit, ...]] | None:
    """Return the digits of the row and of the column of the points of a nest that reads ``address`` of ``result``, each
    element of some columns once; else None. The first digit is the innermost."""
    pitch = result.shape[-1]
    if address.opaque() or not 0 <= address.const < pitch or set(nest.order) != {t.value for t in address.terms}:
        return None
    dims = sorted((address.coefficient(d), d) for d in nest.order)
    columns = _mixed_radix(nest, [(c, d) for c, d in dims if c < pitch])
    rows = _mixed_radix(nest, [(c // pitch, d) for c, d in dims if c >= pitch])
    if not columns or rows is None or any(c >= pitch and c % pitch for c, _ in dims):
        return None
    inside = address.const + math.prod(d.size for d in columns) <= pitch
    whole = pitch * math.prod(d.size for d in rows) == math.prod(result.shape)
    return (rows, columns) if inside and whole else None


def _mixed_radix(nest: Nest, dims: Sequence[tuple[int, int]]) -> tuple[Digit, ...] | None:
    """Return the digits of dims with (coefficient, dim) in ascending order, if together they count without gaps."""
    digits, product = [], 1
    for coefficient, d in dims:
        if coefficient != product:
            return None
        digits.append(Digit(d, product, nest.size[d]))
        product *= nest.size[d]
    return tuple(digits)


def _split(nest: Nest, lane: int, head: int, halves: Callable[[Operand], bool]) -> tuple[int, int]:
    """Divide dim ``lane`` into heads, the two halves of a head, and the columns of a half, which stay ``lane``.
    Operands with equal ``halves`` are read in the first one. Return the new dims (half, head)."""
    far, outer = max(nest.size) + 1, max(nest.size) + 2
    nest.size |= {outer: nest.size[lane] // head, far: 2, lane: head // 2}
    index = _head(nest, outer) * head + expr.index(far) * (head // 2) + expr.index(lane)

    def in_first_half(x: Expr) -> Expr | None:
        operand = nest.inputs[x.value.operand] if x.value.operand >= 0 else None
        if operand is None or operand.shape[-1] != head or not operand.contiguous or not halves(operand):
            return None
        form = affine.affine(x.args[0])
        terms = {t: c for t, c in form.terms.items() if t is not expr.index(far)}
        rows = [c for t, c in terms.items() if t is not expr.index(lane)]
        along = (form.coefficient(far), form.coefficient(lane)) == (head // 2, 1)
        if not along or any(c % head for c in (*rows, form.const)):
            return None
        return Expr("load", x.dtype, (Affine(terms, form.const).build(), *x.args[1:]), x.value)

    nest.map(lambda e: expr.substitute(e, {lane: index}, in_first_half))
    return far, outer


def _head(nest: Nest, outer: int) -> Expr:
    """Return the index of dim ``outer``, or 0 if it has no other value."""
    return expr.index(outer) if nest.size[outer] > 1 else expr.const(0, "int64")


def _specialise(nest: Nest, own: Expr, result: Operand, far: int, lane: int) -> bool:
    """Replace the step of ``nest`` by those of the near and the far half. In these, two new inputs are ``result`` at
    the address ``own`` of the near point, and of the far one. Return whether no other element of it is read."""
    base, near, half = affine.affine(own), len(nest.inputs), nest.size[lane]
    strange = False

    def in_register(x: Expr) -> Expr | None:
        nonlocal strange
        if x.value.operand < 0 or nest.inputs[x.value.operand].buffer.id != result.buffer.id:
            return None
        apart = _address(nest, x).plus(base, -1)
        strange |= bool(apart.terms or x.value.checks) or apart.const not in (0, half)
        return Expr("load", x.dtype, (expr.index(lane),), Access(near + (apart.const == half), False, ()))

    def of_half(n: int, e: Expr) -> Expr:
        known = affine.simplify(expr.substitute(e, {far: expr.const(n, "int64")}), nest.ranges)
        return expr.substitute(known, loads=in_register)

    steps = [replace(nest.steps[0]) for _ in (0, 1)]
    for n, step in enumerate(steps):
        step.map(partial(of_half, n))
    nest.steps, nest.inputs = steps, (*nest.inputs, result, result)
    return not strange


def _has_vectors(made: HeadLoops) -> bool:
    """Whether neighbours along the lane are neighbours in memory, or one element, for every load and store."""
    lane, nest = made.lane, made.nest
    for x in made.loads():
        inside = (y for a in (*affine.affine(x.args[0]).opaque(), *x.args[1:]) for y in expr.walk(a))
        if x.value.guarded or any(y is expr.index(lane) for y in inside):
            return False
        if affine.affine(x.args[0]).coefficient(lane) not in (0, 1):
            return False
        wide = dtypes.DTYPES[x.dtype].size * WIDTH > 16  # arrays of the caller are only aligned to 16 bytes
        if wide and is_along(x, lane) and nest.inputs[x.value.operand].buffer.kind == "input":
            return False
    stored = all(s.target is not None and is_along(s.target, lane) for s in nest.steps)
    return stored and vector_width(nest, made.loops, nest.steps, lane, made.near, WIDTH) == WIDTH
