"""Scalar expressions: interning, exact simplification, traversal, evaluation in numpy, text and serialisation."""

from __future__ import annotations

import copy
import math
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.graph import expr
from npu_compiler.graph.expr import Expr, const, fn, index, load, where
from npu_compiler.graph.expr_interp import evaluate, most_held
from npu_compiler.graph.scalar_ops import SCALAR_OPS, takes

i, j = index(0), index(1)
x = load(0, "float32", (i,))
n = load(0, "int64", (i,))
VALUES = np.array([-2.5, -0.0, 0.0, 1.0, np.nan, np.inf], np.float32)


def test_equal_expressions_are_one_object() -> None:
    assert x * 2.0 + 1.0 is load(0, "float32", (index(0),)) * 2.0 + 1.0
    assert pickle.loads(pickle.dumps(x + 1.0)) is x + 1.0
    assert copy.deepcopy(x) is x
    # equal in Python, but different literals
    assert const(0.0, "float32") is not const(-0.0, "float32")
    assert const(1, "int64") is not const(True, "bool")
    assert const(math.nan, "float32") is const(math.nan, "float32")


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (n + 0, n),
        (n * 1, n),
        (0 * n, const(0, "int64")),
        (n % 1, const(0, "int64")),
        (x * 1.0, x),
        (const(7, "int64") // 2, const(3, "int64")),
        (const(-7, "int64") % 4, const(1, "int64")),
        (where(const(True, "bool"), x, 0.0), x),
        ((x < 0.0) & True, x < 0.0),
        ((x < 0.0) | True, const(True, "bool")),
    ],
)
def test_exact_identities_are_applied(made: Expr, same: Expr) -> None:
    assert made is same


@pytest.mark.parametrize("made", [x + 0.0, x * 0.0, x - x, x / x, fn("floordiv")(0, n), n // 0])
def test_identities_that_change_a_result_are_not_applied(made: Expr) -> None:
    assert any(node.op == "load" for node in expr.walk(made))


def test_threads_make_one_object_of_equal_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(weakref.WeakValueDictionary[Any, Expr]):
        def get(self, key: Any, default: Any = None) -> Any:  # another thread looks before this one adds what it missed
            found = super().get(key, default)
            time.sleep(0.002)
            return found

    monkeypatch.setattr(expr, "_interned", Slow())
    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, made := list(pool.map(lambda _: index(77), range(4)))))) == 1, made


def test_arguments_have_one_dtype_that_the_op_takes() -> None:
    assert (x + 1).args[1] is const(1, "float32")  # a Python number takes the dtype of the other argument
    assert (x < 1).dtype == "bool" and where(x < 1, n, 0).dtype == "int64"
    with pytest.raises(AssertionError, match="mixed dtypes"):
        _ = x + n
    with pytest.raises(TypeError, match="no meaning"):
        fn("and")(x, x)
    with pytest.raises(ValueError, match="does not fit"):
        const(2**64, "int64")


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_the_table_says_which_dtypes_an_op_takes(dtype: str) -> None:
    for name, op in SCALAR_OPS.items():
        if name in ("where", "cast"):  # their arguments differ in dtype
            continue
        operands = [load(k, dtype, (i,)) for k in range(op.arity)]
        if takes(name, dtype):
            arrays = [np.ones(3, dtype)] * op.arity
            assert evaluate(expr.call(name, *operands), (3,), arrays).shape == (3,)
        else:
            with pytest.raises(TypeError):
                expr.call(name, *operands)


def test_walk_lists_arguments_first_and_each_node_once() -> None:
    e = (x + 1.0) * (x + 1.0)
    order = expr.walk(e)
    assert order[-1] is e and len(set(order)) == len(order)
    assert all(order.index(a) < order.index(node) for node in order for a in node.args)


def test_substitution_replaces_indices_and_loads() -> None:
    e = load(0, "float32", (i, j)) + load(1, "float32", (j,))
    assert expr.substitute(e, {0: j, 1: i}) is load(0, "float32", (j, i)) + load(1, "float32", (i,))
    assert expr.substitute(e, loads=lambda found: x if found.value == 1 else None) is load(0, "float32", (i, j)) + x
    assert expr.operands(e) == [0, 1]


def test_roundings_inside_a_kernel_are_dropped() -> None:
    assert expr.drop_roundings(x.cast("float16").cast("float32") + 1.0) is x + 1.0
    narrow = load(0, "float16", (i,))
    assert expr.drop_roundings(narrow.cast("float32")) is narrow.cast("float32")  # reads half-precision memory
    assert expr.drop_roundings(x.cast("float16")) is x.cast("float16")  # rounds the stored result


def test_cost_counts_arithmetic_not_loads() -> None:
    assert expr.cost(x) == 0 and expr.cost(x + 1.0) == 1 and expr.cost(fn("exp")(x)) == 16


def test_integer_division_rounds_as_its_name_says() -> None:
    a = np.array([7, -7, 7, -7])
    b = np.array([2, 2, -2, -2])
    for name, want in (("idiv", [3, -3, -3, 3]), ("floordiv", [3, -4, -4, 3]), ("remainder", [1, 1, -1, -1]),
                       ("fmod", [1, -1, 1, -1])):  # fmt: skip
        found = evaluate(fn(name)(n, load(1, "int64", (i,))), (4,), [a, b])
        assert found.tolist() == want, name


def test_extremes_and_comparisons_treat_nan_as_pytorch() -> None:
    assert np.isnan(evaluate(expr.maximum(x, 0.0), (6,), [VALUES])[4])
    assert evaluate(x < 1.0, (6,), [VALUES]).tolist() == [True, True, True, False, False, False]


def test_a_load_out_of_range_is_an_error_unless_a_where_drops_it() -> None:
    shifted = load(0, "float32", (i - 1,))
    guarded = where(i >= 1, shifted, 9.0)
    assert evaluate(guarded * 2.0, (3,), [VALUES]).tolist() == [18.0, -5.0, -0.0]
    with pytest.raises(IndexError, match="out of range"):
        evaluate(shifted, (3,), [VALUES])
    with pytest.raises(IndexError):  # in the branch that is taken
        evaluate(where(i >= 0, shifted, 9.0), (3,), [VALUES])
    with pytest.raises(IndexError):  # the index of a gather is data
        evaluate(load(0, "float32", (load(1, "int64", (i,)),)), (1,), [VALUES, np.array([6])])


def test_an_empty_domain_and_given_stages() -> None:
    assert evaluate(x, (0,), [np.empty(0, np.float32)]).shape == (0,)
    total = expr.stage(0, "float32")
    assert evaluate(x / total, (2,), [np.float32([2, 4])], {total: np.float32([2])}).tolist() == [1.0, 2.0]


@st.composite
def float_expressions(draw: st.DrawFn, depth: int = 4) -> Expr:
    """Expressions over two operands [3, 4] and their indices."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        leaves = [load(0, "float32", (i, j)), load(1, "float32", (i, j)), const(draw(st.floats(-4, 4)), "float32")]
        return draw(st.sampled_from([*leaves, (i * 4 + j).cast("float32")]))
    a, b = draw(float_expressions(depth - 1)), draw(float_expressions(depth - 1))
    op = draw(st.sampled_from(["add", "sub", "mul", "div", "maximum", "minimum", "neg", "exp", "where"]))
    if op == "where":
        return where(a < b, b, a)
    return fn(op)(a) if SCALAR_OPS[op].arity == 1 else fn(op)(a, b)


@settings(max_examples=60, deadline=None)
@given(float_expressions())
def test_a_whole_domain_equals_its_points(e: Expr) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(2)]
    whole = evaluate(e, (3, 4), arrays)
    for at in np.ndindex(3, 4):
        point = expr.substitute(e, {d: const(p, "int64") for d, p in enumerate(at)})
        np.testing.assert_array_equal(evaluate(point, (), arrays), whole[at])
    assert 0 <= most_held(e) <= len(expr.walk(e))


@settings(max_examples=60, deadline=None)
@given(float_expressions())
def test_lists_restore_the_expression(e: Expr) -> None:
    assert expr.from_list(expr.to_list(e)) is e
    assert expr.rewrite(e, lambda node: None) is e


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "non-empty list"),
        ([["load", "float32", []]], r"row 0: expected \[op, dtype, args, value\]"),
        ([["evil", "float32", [], 0]], "row 0: unknown op"),
        ([["index", "int64", [], 0], ["neg", "int64", [1], None]], "row 1: arguments must be earlier rows"),
        ([["index", "int64", [], 0], ["add", "int64", [0], None]], "row 1: add takes 2 arguments"),
        ([["index", "int64", [], -1]], "row 0: index needs a number"),
        ([["const", "float32", [], "1"]], "row 0: const needs a number"),
    ],
)
def test_malformed_lists_are_refused(rows: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expr.from_list(rows)


def test_text_is_short_even_if_shared_parts_repeat() -> None:
    e = x
    for _ in range(40):
        e = e * e + e
    assert len(expr.render(e, 200)) < 2000
    assert (
        expr.render(where(x > 0.0, x, load(1, "float32", (i + 1,)))) == "where((in0[i0] > 0.0), in0[i0], in1[(i0 + 1)])"
    )


def test_a_replacement_is_not_replaced_again() -> None:
    """``i + j`` with ``j`` 0 simplifies to the replacement of ``i``, whose number is that of another index."""
    k = index(2)
    dims = {0: k, 1: const(0, "int64"), 2: i}
    assert expr.substitute(i + j, dims) is k
    assert expr.substitute(load(0, "float32", (i + j, k)), dims) is load(0, "float32", (k, i))
    swapped = expr.substitute(load(0, "float32", (i + 0, j)) + load(1, "float32", (j, i)), {0: j, 1: i})
    assert swapped is load(0, "float32", (j, i)) + load(1, "float32", (i, j))
