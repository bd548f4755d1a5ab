"""Index arithmetic: affine forms, intervals, and simplifications that the ranges of the indices decide."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.graph import affine, expr
from npu_compiler.graph.affine import Affine
from npu_compiler.graph.expr import Expr, const, fn, index, load, where
from npu_compiler.graph.expr_interp import evaluate

i, j = index(0), index(1)
RANGES = {0: (0, 5), 1: (0, 3)}
at = load(0, "int64", (i,))


@pytest.mark.parametrize(
    ("e", "terms", "constant"),
    [
        (i * 4 + j - 3, {i: 4, j: 1}, -3),
        (2 * (i - j) - (i * 2), {j: -2}, 0),
        (-(i + 1) * 3, {i: -3}, -3),
        (i * j + 1, {i * j: 1}, 1),
        (i // 2 * 6, {i // 2: 6}, 0),
    ],
)
def test_affine_forms(e: Expr, terms: dict[Expr, int], constant: int) -> None:
    form = affine.affine(e)
    assert (form.terms, form.const) == (terms, constant)
    assert affine.affine(form.build()) == form
    assert form.opaque() == [t for t in terms if t not in (i, j)]


def test_forms_are_canonical() -> None:
    assert affine.simplify(j + 2 + i * 4 - 2, {}) is affine.simplify(4 * i + j, {})


@pytest.mark.parametrize(
    ("e", "bound"),
    [
        (i * 4 + j, (0, 23)),
        (i - j, (-3, 5)),
        (i * i, (0, 25)),
        (fn("abs")(i - 3), (0, 3)),
        ((i - 8) // 4, (-2, -1)),
        (i % 4, (0, 3)),
        (fn("minimum")(i, 2), (0, 2)),
        (where(i < 2, j + 10, i), (0, 13)),
        ((i < 2).cast("int64"), (0, 1)),
        (at + 1, None),  # depends on data
    ],
)
def test_intervals(e: Expr, bound: tuple[int, int] | None) -> None:
    assert affine.interval(e, RANGES) == bound


@pytest.mark.parametrize(
    ("e", "fits"),
    [
        (i * 4 + j, True),
        (i * (2**31 // 5), True),
        (i * (2**31 // 5 + 1), False),
        ((i * 2**31) // 2**31, False),  # the result fits, a part of it does not
        (at, False),  # read from memory
    ],
)
def test_int32_holds_an_expression_and_its_parts(e: Expr, fits: bool) -> None:
    assert affine.fits_int32(e, RANGES) is fits


@pytest.mark.parametrize(
    ("e", "simple"),
    [
        ((i < 6) & (j >= 0), const(True, "bool")),
        ((i > 5) | (j < 2), j < 2),
        (~(i < 0), const(True, "bool")),
        (where(i <= 5, at, 0), at),
        (fn("maximum")(i, 0), i),
        (fn("minimum")(i + 10, j), j),
        (fn("abs")(i - 9), i * -1 + 9),
        ((i * 8 + j) // 4, i * 2),
        ((i * 8 + j) % 4, j),
        ((i * 4 + j + 8) // 4, i + 2),
        (fn("idiv")(i * 4 + j, 4), i),
        (at * 2 - at, at),
    ],
)
def test_ranges_decide_guards_clamps_and_divisions(e: Expr, simple: Expr) -> None:
    assert affine.simplify(e, RANGES) is simple


@pytest.mark.parametrize("e", [i < 3, fn("maximum")(i, 2), (i + j) // 4, fn("idiv")(i + -1, 2), at % 4])
def test_what_the_ranges_leave_open_stays(e: Expr) -> None:
    assert affine.simplify(e, RANGES) is e


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-20, 20), st.integers(1, 6))
def test_division_by_a_constant(a: int, b: int, c: int, k: int) -> None:
    form = Affine({i: a, j: b}, c)
    whole, rest = affine.divide_affine(form, k)
    assert rest.plus(whole, k) == form.plus(Affine({}, 0))
    assert all(coefficient % k for coefficient in rest.terms.values()) and 0 <= rest.const < k


def test_guards_as_bounds() -> None:
    guard = (i >= 1) & (j < 3) & (i * 2 > j)
    bounds = [b for c in affine.conjuncts(guard) for b in affine.as_bounds(c)]
    assert [(b.terms, b.const) for b in bounds] == [({i: 1}, -1), ({j: -1}, 2), ({i: 2, j: -1}, -1)]
    assert affine.as_bounds(fn("eq")(i, 1)) == [] and affine.as_bounds(load(0, "float32", (i,)) < 1.0) == []


# -- random expressions -----------------------------------------------------------------------------------------------
SIZES = {0: 6, 1: 4}


@st.composite
def index_expressions(draw: st.DrawFn, depth: int = 3) -> Expr:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([index(0), index(1), const(draw(st.integers(-7, 7)), "int64")]))
    a, b = draw(index_expressions(depth - 1)), draw(index_expressions(depth - 1))
    op = draw(st.sampled_from(["add", "sub", "mul", "floordiv", "remainder", "minimum", "maximum", "where", "abs"]))
    if op == "abs":
        return fn(op)(a)
    if op in ("floordiv", "remainder"):
        return fn(op)(a, draw(st.integers(1, 6)))
    if op == "where":
        test = fn(draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])))(a, b)
        return where(test & (index(0) >= 1) if draw(st.booleans()) else test, a, b)
    return fn(op)(a, b)


@settings(max_examples=300, deadline=None)
@given(index_expressions())
def test_simplified_indices_are_equal_and_inside_their_interval(e: Expr) -> None:
    ranges = {d: (0, n - 1) for d, n in SIZES.items()}
    values = evaluate(e, tuple(SIZES.values()), [])
    np.testing.assert_array_equal(evaluate(affine.simplify(e, ranges), tuple(SIZES.values()), []), values)
    bound = affine.interval(e, ranges)
    assert bound is not None and bound[0] <= values.min() and values.max() <= bound[1]
    points = affine.breakpoints([e], 0, 0, SIZES[0])
    assert all(0 < p < SIZES[0] for p in points)
    for low, high in zip([0, *points], [*points, SIZES[0]], strict=True):  # what holds in a piece only
        piece = expr.substitute(affine.simplify(e, {**ranges, 0: (low, high - 1)}), {0: index(0) + low})
        found = evaluate(piece, (high - low, SIZES[1]), [])
        np.testing.assert_array_equal(np.broadcast_to(found, values[low:high].shape), values[low:high])


def test_two_clamps_bound_what_is_read() -> None:
    read = load(0, "int64", [i])
    clamped = fn("minimum")(fn("maximum")(read, 0), 26)
    assert affine.interval(clamped, RANGES) == (0, 26)
    assert affine.interval(fn("maximum")(read, 0), RANGES) is None
    assert affine.fits_int32(clamped // 9, RANGES)
    assert not affine.fits_int32(clamped, RANGES)  # its operand has 64 bits


def test_forms_are_kept_as_long_as_their_expressions() -> None:
    e = index(0) * 12345 + fn("floordiv")(index(1), 54321)
    assert affine.affine(e) is affine.affine(e)
    affine.affine(e.args[1])  # its own term
    seen = weakref.ref(e), weakref.ref(e.args[1])
    gc.disable()  # references alone must end them
    try:
        del e
        assert [r() for r in seen] == [None, None]
    finally:
        gc.enable()
