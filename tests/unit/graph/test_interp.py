"""The meaning of primitives: every one against its definition, written as loops over elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from npu_compiler.graph import interp
from npu_compiler.graph.expr import index, load
from npu_compiler.graph.graph import Graph, Value

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def inputs(graph: Graph, *arrays: np.ndarray) -> list[Value]:
    return [graph.input(f"x{k}", a.shape, a.dtype.name) for k, a in enumerate(arrays)]


def run(graph: Graph, out: Value, *arrays: np.ndarray) -> np.ndarray:
    graph.outputs = [("y", out)]
    return interp.run(graph, {f"x{k}": a for k, a in enumerate(arrays)})["y"]


@pytest.mark.parametrize(("left", "right"), [((2, 3), (3, 4)), ((5, 1, 2, 3), (4, 3, 2)), ((2, 0), (0, 3))])
def test_matmul_broadcasts_batches(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b, graph = floats(*left), floats(*right), Graph()
    found = run(graph, graph.matmul(*inputs(graph, a, b)), a, b)
    np.testing.assert_allclose(found, np.einsum("...mk,...kn->...mn", a, b), rtol=1e-5, atol=1e-6)


def test_half_types_accumulate_in_float32() -> None:
    a, graph = np.full((1, 4096), 0.1, np.float16), Graph()
    (x,) = inputs(graph, a)
    assert x.matmul(x.transpose(0, 1)).dtype == x.sum((1,)).dtype == "float32"
    np.testing.assert_allclose(run(graph, x.sum((1,)), a), [[4096 * float(np.float16(0.1))]], rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "filters", "groups", "stride", "padding", "dilation"),
    [
        ((1, 5, 4, 3), (2, 3, 2), 1, (1, 1), (0, 0, 0, 0), (1, 1)),
        ((2, 6, 5, 4), (6, 3, 3), 2, (2, 1), (1, 0, 2, 1), (1, 1)),
        ((1, 7, 7, 2), (2, 3, 1), 2, (1, 2), (0, 1, 0, 0), (2, 3)),
    ],
)
def test_conv2d(
    size: tuple[int, ...], filters: tuple[int, int, int], groups: int, stride: tuple[int, int],
    padding: tuple[int, int, int, int], dilation: tuple[int, int],
) -> None:  # fmt: skip
    k, r, s = filters
    image, weight, graph = floats(*size), floats(k, r, s, size[3] // groups), Graph()
    out = graph.conv2d(*inputs(graph, image, weight), stride, padding, dilation, groups)
    found = run(graph, out, image, weight)
    want = np.zeros(out.shape)
    for b, oh, ow, o in np.ndindex(*out.shape):
        first = o // (k // groups) * weight.shape[3]
        for ih, iw, c in np.ndindex(*weight.shape[1:]):
            y = oh * stride[0] - padding[0] + ih * dilation[0]
            x = ow * stride[1] - padding[1] + iw * dilation[1]
            if 0 <= y < size[1] and 0 <= x < size[2]:
                want[b, oh, ow, o] += image[b, y, x, first + c] * weight[o, ih, iw, c]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def softmax_average(q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: Sequence[bool]) -> np.ndarray:
    """Attention of one query over the visible keys; zeros if there are none."""
    seen = [n for n, v in enumerate(visible) if v]
    weights = [math.exp(float(q @ keys[n])) for n in seen]
    return sum((w * values[n] for w, n in zip(weights, seen, strict=True)), np.zeros(values.shape[1])) / (
        sum(weights) or 1
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_shares_heads_and_hides_keys(causal: bool) -> None:
    q, k, v = floats(1, 4, 3, 2), floats(1, 2, 5, 2), floats(1, 2, 5, 6)
    mask = np.array([[True, False, True, True, False], [False] * 5, [True] * 5])[None, None]
    graph = Graph()
    found = run(graph, graph.attention(*inputs(graph, q, k, v, mask), 1.0, causal), q, k, v, mask)
    assert found.shape == (1, 4, 3, 6)
    for h, at in itertools.product(range(4), range(3)):
        visible = [bool(mask[0, 0, at, n]) and (not causal or n <= at) for n in range(5)]
        want = softmax_average(q[0, h, at], k[0, h // 2], v[0, h // 2], visible)
        np.testing.assert_allclose(found[0, h, at], want, rtol=1e-5, atol=1e-6)


def test_reductions_keep_dims_and_take_the_first_extreme() -> None:
    a, graph = np.array([[3, 1, 3], [2, 3, 0]], np.int64), Graph()
    (x,) = inputs(graph, a)
    cases: dict[str, tuple[tuple[int, ...], Any]] = {
        "sum": ((1,), [[7], [5]]), "prod": ((0,), [[6, 3, 0]]), "max": ((0, 1), [[3]]), "min": ((1,), [[1], [0]]),
        "argmax": ((0, 1), [[0]]), "argmin": ((1,), [[1], [2]]),
    }  # fmt: skip
    for kind, (axes, want) in cases.items():
        assert run(graph, graph.reduce(kind, x, axes), a).tolist() == want, kind
    empty = np.empty((2, 0), np.float32)
    graph = Graph()
    (x,) = inputs(graph, empty)
    assert run(graph, x.sum((1,)), empty).tolist() == [[0], [0]]


def test_views() -> None:
    a, graph = floats(2, 3, 4), Graph()
    (x,) = inputs(graph, a)
    np.testing.assert_array_equal(run(graph, x.permute(2, 0, 1).reshape(4, 6), a), a.transpose(2, 0, 1).reshape(4, 6))
    np.testing.assert_array_equal(run(graph, x.slice(1, -2, 9).slice(2, 0, 4, 3), a), a[:, -2:, ::3])
    np.testing.assert_array_equal(run(graph, x.slice(0, 1, 1), a), a[1:1])
    np.testing.assert_array_equal(
        run(graph, x.slice(1, 0, 1).expand(5, 2, 3, 4), a), np.broadcast_to(a[:, :1], (5, 2, 3, 4))
    )


def test_scatter_keeps_the_last_value_or_adds_all() -> None:
    base, src, at = floats(4), np.float32([1, 2, 4]), np.array([2, 0, 2])
    for mode, want in (("set", [2, base[1], 4, base[3]]), ("add", [base[0] + 2, base[1], base[2] + 5, base[3]])):
        graph = Graph()
        b, s, positions = inputs(graph, base, src, at)
        out = graph.scatter(b, s, [positions], [load(0, "int64", (index(0),))], mode)
        np.testing.assert_allclose(run(graph, out, base, src, at), want, rtol=1e-6)
        with pytest.raises(IndexError, match=r"out of range along dim 0 of \[4\]"):
            run(graph, out, base, src, np.array([0, 4, 1]))


@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable_and_nan_is_the_largest(descending: bool) -> None:
    a = np.float32([[2, np.nan, 1, 2, -np.inf]])
    for dtype in ("float32", "bfloat16"):
        graph = Graph()
        (x,) = inputs(graph, a)
        values, places = graph.sort(x.cast(dtype), 1, descending, 3)
        graph.outputs = [("values", values), ("places", places)]
        found = interp.run(graph, {"x0": a})
        assert found["places"].tolist() == [[1, 0, 3] if descending else [4, 2, 0]]
        want = [np.nan, 2, 2] if descending else [-np.inf, 1, 2]
        np.testing.assert_array_equal(found["values"].astype(np.float32), [want])


def test_scan_and_concat() -> None:
    a, graph = np.float32([[3, 1], [2, 5]]), Graph()
    (x,) = inputs(graph, a)
    assert run(graph, graph.scan("max", x, 1), a).tolist() == [[3, 3], [2, 5]]
    assert run(graph, graph.scan("sum", x, 0), a).tolist() == [[3, 1], [5, 6]]
    assert run(graph, graph.concat([x, x.slice(0, 1, 2)], 0), a).tolist() == [[3, 1], [2, 5], [2, 5]]


def test_states_are_read_and_updated() -> None:
    graph = Graph()
    state, weight = graph.state("count", (), "float32"), graph.weight("step", (), "float32")
    graph.outputs, graph.updates = [("old", state)], [("count", state + weight)]
    found = interp.run(graph, {}, {"count": np.float32(3), "step": np.float32(2)})
    assert found == {"old": 3, "state:count": 5}


def test_the_cost_bounds_the_memory_of_a_node() -> None:
    """The estimate grows with the shapes: twice the rows cost about twice as much."""
    graph = Graph()
    small, large = (graph.input(str(n), (n, 64), "float32") for n in (32, 64))
    w = graph.weight("w", (64, 64), "float32")
    for f in (lambda v: v.matmul(w), lambda v: v * 2.0, lambda v: v.sum((1,))):
        a, b = (interp.cost(f(v).node) for v in (small, large))
        assert a.bytes < b.bytes <= 2 * a.bytes and a.operations < b.operations <= 2 * a.operations
