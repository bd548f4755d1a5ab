"""Integer index arithmetic: affine forms, intervals, and the simplifications they prove."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import expr
from .expr import Expr, const

Ranges = Mapping[int, tuple[int, int]]  # inclusive bounds of each iteration index

MAX_QUOTIENTS = 4  # of a division that is split into one case each
INT32 = (-(2**31), 2**31 - 1)  # inclusive bounds of the type
INT64 = (-(2**63), 2**63 - 1)
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))


@dataclass(frozen=True)
class Affine:
    """``const + sum(coefficient * term)``; a term is an ``index`` leaf or an int64 expression that is not affine."""

    terms: dict[Expr, int]
    const: int

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """Return ``self + factor * other``."""
        terms = dict(self.terms)
        for t, c in other.terms.items():
            terms[t] = _wrapped(terms.get(t, 0) + factor * c)
        return Affine({t: c for t, c in terms.items() if c}, _wrapped(self.const + factor * other.const))

    def coefficient(self, dim: int) -> int:
        """Return the coefficient of iteration index ``dim``; 0 if it does not occur."""
        return self.terms.get(expr.index(dim), 0)

    def opaque(self) -> list[Expr]:
        """Return the terms that are not plain indices."""
        return [t for t in self.terms if t.op != "index"]

    def build(self) -> Expr:
        """Return the form as an int64 expression, with its terms in canonical order."""
        plain = sorted((t for t in self.terms if t.op == "index"), key=lambda t: t.value)
        products = [t if self.terms[t] == 1 else t * self.terms[t] for t in (*plain, *self.opaque())]
        if self.const or not products:
            products.append(const(self.const, "int64"))
        total = products[0]
        for product in products[1:]:
            total = total + product
        return total


def _wrapped(n: int) -> int:
    """Return ``n`` as int64 arithmetic computes it, modulo 2^64."""
    return n if INT64[0] <= n <= INT64[1] else (n - INT64[0]) % 2**64 + INT64[0]


def affine(e: Expr) -> Affine:
    """Return the affine form of an int64 expression; a non-affine expression is its own single term. Both are equal
    modulo 2^64, so a proof about the form is one about the expression only if :func:`exact` is true."""
    form = e._affine
    if form is None:
        form = _affine(e)
        if e not in form.terms:  # a cycle of references would keep the expression alive
            e._affine = form
    return form


def _affine(e: Expr) -> Affine:
    if e.op == "const":
        return Affine({}, e.value)
    if e.op == "neg":
        return Affine({}, 0).plus(affine(e.args[0]), -1)
    if e.op in ("add", "sub"):
        return affine(e.args[0]).plus(affine(e.args[1]), 1 if e.op == "add" else -1)
    if e.op == "mul":
        for x, y in (e.args, e.args[::-1]):
            factor = affine(y)
            if not factor.terms:
                return Affine({}, 0).plus(affine(x), factor.const)
    return Affine({e: 1}, 0)


def interval(e: Expr, ranges: Ranges) -> tuple[int, int] | None:
    """Return inclusive bounds of an int64 expression over ``ranges``, or None if it depends on data, or may leave the
    range of the type: it wraps around then."""
    bound = _interval(e, ranges)
    return bound if bound is not None and INT64[0] <= bound[0] and bound[1] <= INT64[1] else None


def exact(e: Expr, ranges: Ranges) -> bool:
    """Whether the affine form of an int64 expression has its value, because nothing wraps around: it is bounded, or its
    own term."""
    return e in affine(e).terms or interval(e, ranges) is not None


def _interval(e: Expr, ranges: Ranges) -> tuple[int, int] | None:
    if e.op in ("const", "index"):
        return (e.value, e.value) if e.op == "const" else ranges[e.value]
    if e.op in ("add", "sub", "mul", "neg"):
        form = affine(e)
        if list(form.terms) != [e]:
            low = high = form.const
            for t, c in form.terms.items():
                bound = interval(t, ranges)
                if bound is None:
                    return None
                low += min(c * bound[0], c * bound[1])
                high += max(c * bound[0], c * bound[1])
            return low, high
    if e.op == "cast":
        return (0, 1) if e.args[0].dtype == "bool" else _selected(e.args[0])
    if e.op == "abs":
        bound = interval(e.args[0], ranges)
        return bound and (max(0, bound[0], -bound[1]), max(-bound[0], bound[1]))
    if e.op == "remainder" and e.args[1].op == "const" and e.args[1].value > 0:
        return 0, e.args[1].value - 1
    if e.op in ("minimum", "maximum"):
        least, most = _sides(e, ranges)
        return None if least is None or most is None else (least, most)
    if e.op not in ("floordiv", "idiv", "fmod", "where", "mul"):
        return None
    a, b = (interval(x, ranges) for x in e.args[-2:])
    if a is None or b is None:
        return None
    return _combine(e.op, a, b)


def _selected(e: Expr) -> tuple[int, int] | None:
    """Return integers that bound ``where(x >= low & x <= high, x, other)``, whose x is not NaN then, else None."""
    if e.op != "where" or e.args[2].op != "const" or not math.isfinite(e.args[2].value):
        return None
    condition, x, other = e.args
    parts, bounds = [condition], {}
    while parts:
        part = parts.pop()
        if part.op == "and":
            parts += part.args
        elif part.op in ("ge", "le") and part.args[0] is x and part.args[1].op == "const":
            bounds[part.op] = part.args[1].value
    if len(bounds) < 2 or not all(map(math.isfinite, bounds.values())):
        return None
    return math.floor(min(bounds["ge"], other.value)), math.ceil(max(bounds["le"], other.value))


def _sides(e: Expr, ranges: Ranges) -> tuple[int | None, int | None]:
    """Return the lower and the upper bound of an int64 expression; None: unknown. Two clamps bound what is read."""
    if e.op not in ("minimum", "maximum"):
        return interval(e, ranges) or (None, None)
    lows, highs = zip(*(_sides(a, ranges) for a in e.args), strict=True)
    known = [[x for x in side if x is not None] for side in (lows, highs)]
    if e.op == "minimum":
        return (min(known[0]) if len(known[0]) == 2 else None), min(known[1], default=None)
    return max(known[0], default=None), (max(known[1]) if len(known[1]) == 2 else None)


def fits_int32(e: Expr, ranges: Ranges) -> bool:
    """Whether an int64 index expression can be computed in int32: it and its operands fit in 32 bits over ``ranges``.

    A value that is read has 64 bits, and what is computed from it fits only if it is clamped.
    """
    if e.op in ("load", "stage"):
        return False
    bounds = [interval(x, ranges) for x in (e, *e.args) if x.dtype == "int64"]
    return all(b is not None and INT32[0] <= b[0] and b[1] <= INT32[1] for b in bounds)


def _combine(op: str, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    if op == "where":
        return min(a[0], b[0]), max(a[1], b[1])
    if op == "mul":
        corners = [x * y for x in a for y in b]
        return min(corners), max(corners)
    if b[0] <= 0 or (op != "floordiv" and a[0] < 0):
        return None
    if op == "fmod":
        return 0, min(a[1], b[1] - 1)
    corners = [x // y for x in a for y in b]
    return min(corners), max(corners)


def difference(e: Expr) -> Affine:
    """Return left side minus right side of an int64 comparison, minimum or maximum."""
    return affine(e.args[0]).plus(affine(e.args[1]), -1)


def _decide(op: str, low: int, high: int) -> bool | None:
    """Return ``d op 0`` if it has the same value for every d in [low, high], else None."""
    if low > high:
        return None
    apart, zero = low > 0 or high < 0, low == high == 0
    always = {"lt": high < 0, "le": high <= 0, "gt": low > 0, "ge": low >= 0, "eq": zero, "ne": apart}
    never = {"lt": low >= 0, "le": low > 0, "gt": high <= 0, "ge": high < 0, "eq": apart, "ne": zero}
    return True if always[op] else False if never[op] else None


def simplify(e: Expr, ranges: Ranges) -> Expr:
    """Return an equal expression over ``ranges`` without guards, clamps and divisions that the ranges decide. Indices
    become canonical."""

    def step(x: Expr) -> Expr | None:
        if x.op in ("and", "or") and x.dtype == "bool":
            return _fold_logic(x)
        if x.op == "not" and x.dtype == "bool" and x.args[0].op == "const":
            return const(not x.args[0].value, "bool")
        if x.op in COMPARISONS and x.args[0].dtype == "int64":
            bound = _difference_interval(x, ranges)
            known = bound and _decide(x.op, *bound)
            return const(known, "bool") if known is not None else None
        if x.op == "abs" and x.dtype == "int64":
            bound = interval(x.args[0], ranges)
            sign = bound and (1 if bound[0] >= 0 else -1 if bound[1] <= 0 else 0)
            return affine(x.args[0] * sign).build() if sign else None
        if x.dtype != "int64" or len(x.args) != 2 or x.op == "load":
            return None
        if x.op in ("floordiv", "remainder", "idiv", "fmod"):
            return _divide(x, ranges)
        if x.op in ("minimum", "maximum"):
            bound = _difference_interval(x, ranges)
            if bound and (bound[1] <= 0 or bound[0] >= 0):
                return x.args[(x.op == "minimum") != (bound[1] <= 0)]
        return affine(x).build() if x.op in ("add", "sub", "mul", "neg") else None

    return expr.rewrite(e, step)


def _difference_interval(x: Expr, ranges: Ranges) -> tuple[int, int] | None:
    """Return bounds of the left side minus the right side of ``x``, or None if they are unknown or a side may wrap."""
    return interval(difference(x).build(), ranges) if all(exact(a, ranges) for a in x.args) else None


def _fold_logic(x: Expr) -> Expr | None:
    for a, b in (x.args, x.args[::-1]):
        if a.op == "const":
            return b if a.value == (x.op == "and") else a
    return None


def _divide(x: Expr, ranges: Ranges) -> Expr | None:
    """Apply (a k + r) // k = a + q and (a k + r) % k = r - q k where q k <= r < (q + 1) k, unless a k + r may wrap."""
    k = x.args[1].value if x.args[1].op == "const" else 0
    bound = interval(x.args[0], ranges)
    if x.op in ("idiv", "fmod"):  # equal to floordiv and remainder from 0 on
        if k <= 0 or bound is None or bound[0] < 0:
            return None
        x = Expr("floordiv" if x.op == "idiv" else "remainder", "int64", x.args)
    if k <= 0 or not exact(x.args[0], ranges):
        return None
    whole, rest = divide_affine(affine(x.args[0]), k)
    low_high = interval(rest.build(), ranges)
    if low_high is None or low_high[0] // k != low_high[1] // k:
        return x
    q = Affine({}, low_high[0] // k)
    return (whole.plus(q) if x.op == "floordiv" else rest.plus(q, -k)).build()


def divide_affine(a: Affine, k: int) -> tuple[Affine, Affine]:
    """Return (whole, rest) with ``a = whole * k + rest``; ``rest`` has only the terms that k does not divide."""
    whole = Affine({t: c // k for t, c in a.terms.items() if c % k == 0}, a.const // k)
    return whole, a.plus(whole, -k)


def conjuncts(guard: Expr) -> list[Expr]:
    """Return the conditions that ``and`` joins."""
    if guard.op == "and" and guard.dtype == "bool":
        return [c for a in guard.args for c in conjuncts(a)]
    return [guard]


def as_bounds(c: Expr) -> list[Affine]:
    """Return a comparison as affine forms that must all be >= 0; empty if it is not an int64 inequality."""
    if c.op not in ("lt", "le", "gt", "ge") or c.args[0].dtype != "int64":
        return []
    d = difference(c)
    if c.op in ("lt", "le"):
        d = Affine({}, 0).plus(d, -1)
    return [Affine(d.terms, d.const - (c.op in ("lt", "gt")))]


def breakpoints(exprs: Iterable[Expr], dim: int, low: int, high: int) -> list[int]:
    """Return the positions of index ``dim`` inside (low, high) where the form of the expression changes: at a
    comparison, an absolute value, a clamp or a quotient of it."""
    points: set[int] = set()
    for e in exprs:
        for x in expr.walk(e):
            for d, shifts in _turns(x, low, high, dim):
                c, k = d.coefficient(dim), d.const
                if c and len(d.terms) == 1:
                    # the first position where c i + k - shift changes sign
                    points |= {-((k - s) // c) if c > 0 else (k - s) // -c + 1 for s in shifts}
    return sorted(p for p in points if low < p < high)


def _turns(x: Expr, low: int, high: int, dim: int) -> list[tuple[Affine, tuple[int, ...]]]:
    """Return (affine form, constants) pairs: ``x`` changes where the form minus a constant changes its sign."""
    if x.op in COMPARISONS and x.args[0].dtype == "int64":
        return [(difference(x), (0,) if x.op in ("lt", "ge") else (1,) if x.op in ("le", "gt") else (0, 1))]
    if x.dtype != "int64":
        return []
    if x.op == "abs":
        return [(affine(x.args[0]), (0,))]
    if x.op in ("minimum", "maximum"):
        return [(difference(x), (0,))]
    if x.op in ("floordiv", "remainder") and x.args[1].op == "const" and x.args[1].value > 0:
        d, k = affine(x.args[0]), x.args[1].value
        ends = sorted((d.coefficient(dim) * i + d.const) // k for i in (low, high - 1))
        return (
            [(d, tuple(k * q for q in range(ends[0] + 1, ends[1] + 1)))] if ends[1] - ends[0] <= MAX_QUOTIENTS else []
        )
    return []
