"""Branches of threads: what both sides compute stands in front of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from npu_compiler.graph import interp
from npu_compiler.graph.expr import Expr, call, const, index, load, where
from npu_compiler.graph.graph import Graph
from npu_compiler.pipeline import compile_graph
from npu_runtime import Executor

from ...support.metal_backend import EmulatedMetal

N = 64


def graph_of(value: Callable[[Expr], Expr], dtype: str = "float32") -> Graph:
    g = Graph("branches")
    g.outputs = [("y", g.pointwise(value, g.input("x", (N,), dtype)))]
    return g


def source_of(graph: Graph, x: np.ndarray) -> str:
    """Return the kernel, which must compute the same as the graph."""
    (want,) = interp.run(graph, {"x": x}).values()
    program = compile_graph(graph, "metal")
    got = Executor(program, {}, EmulatedMetal()).run([x])["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    return program.sources["map_0.metal"]


X = np.random.default_rng(0).uniform(0.5, 3, N).astype(np.float32)


@pytest.mark.parametrize(
    "value, exponentials, branches",
    [
        (lambda x: where(x > 1, call("exp", x) + 1, call("exp", x) * 2), 1, 0),
        (lambda x: where(x > 1, call("log", call("exp", x) + 1), 2 - call("exp", x)), 1, 1),
        (lambda x: where(x > 1, call("exp", x), call("log", x)), 1, 1),
        (lambda x: where(x > 1, where(x > 2, call("exp", x), x), where(x > 0.7, call("exp", x), x)), 2, 3),
        (lambda x: where(x > 1, where(call("exp", x) > 9, x, -x), call("exp", x)), 1, 0),
    ],
    ids=["only shared", "also others", "different", "on conditions", "in a condition"],
)
def test_shared_parts_are_computed_once(value: Callable[[Expr], Expr], exponentials: int, branches: int) -> None:
    text = source_of(graph_of(value), X)
    assert text.count("m_exp(") == exponentials and text.count("else {") == branches


@pytest.mark.parametrize("ops, branches", [(8, 0), (24, 1)])
def test_long_arms_have_branches(ops: int, branches: int) -> None:
    """Lanes of which none takes an arm skip it."""

    def powers(x: Expr) -> Expr:
        y = x
        for i in range(ops):
            y = y * 0.5 + x if i % 2 else y + i
        return y

    text = source_of(graph_of(lambda x: where(x > 1, powers(x), x)), X)
    assert text.count("else {") == branches


def test_a_guarded_load_stays_in_its_branch() -> None:
    """Its address is valid only there, although both branches use the same element."""
    g = Graph("guarded")
    x = g.input("x", (N,), "float32")
    back = load(0, "float32", (index(0) - 1,))
    e = call("exp", back)
    inside = where(index(0) > 3, e + 1, e * 2)
    g.outputs = [("y", g.elementwise((N,), [x], where(index(0) >= 1, inside, const(0, "float32"))))]
    text = source_of(g, X)
    assert text.index("if (") < text.index("a0[")


def test_shared_parts_of_parts_are_looked_for_once() -> None:
    """A chain in which each link is used twice has 2^60 paths."""

    def chain(x: Expr) -> Expr:
        y = call("exp", x * 0.01)
        for _ in range(60):
            y = (y + y) * 0.5
        return y

    text = source_of(graph_of(lambda x: where(x > 1, chain(x) + 1, chain(x) * 2)), X)
    assert text.count("m_exp(") == 1
