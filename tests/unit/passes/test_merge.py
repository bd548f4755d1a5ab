"""Merged projections, selected concatenations, scatters that compute what they write, and launch steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from npu_compiler.graph import expr, interp
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.passes.combine_parallel_matmul import combine_parallel_matmul
from npu_compiler.passes.concat_to_select import concat_to_select
from npu_compiler.pipeline import State, _run
from npu_compiler.schedule.memory_planner import assign_barrier_groups
from npu_compiler.target_config import target_config


def arrays(graph: Graph, op: str, key: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {}
    for node in graph.nodes:
        if node.op == op:
            shape = node.out.shape
            value = rng.integers(0, 4, shape) if node.out.dtype == "int64" else rng.standard_normal(shape)
            out[node.attrs[key]] = value.astype(node.out.dtype)
    return out


def unchanged(graph: Graph, rewrite: Callable[[Graph], None]) -> None:
    """The rewrite keeps every output."""
    inputs, weights = arrays(graph, "input", "name"), arrays(graph, "weight", "key")
    before = interp.run(graph, inputs, weights)
    rewrite(graph)
    after = interp.run(graph, inputs, weights)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-5)


def scheduled(graph: Graph) -> State:
    return _run(State(None, target_config("cpu"), None, frozenset(), graph), 1, "memory")


def projections(bias: bool = True, gated: bool = False) -> Graph:
    g = Graph("projections")
    x = g.input("x", (2, 5, 8), "float32")
    outs: list[Value] = []
    for name, width in (("q", 12), ("k", 4), ("v", 4)):
        y = x.matmul(g.weight(name, (8, width), "float32"))
        if bias:
            y = y + g.weight(f"{name}.bias", (width,), "float32")
        outs.append(y)
    q, k, v = outs
    if gated:
        k = g.pointwise(lambda a, b: a * b, k, v)
        g.outputs = [("q", q.reshape(10, 12)), ("k", k)]
        return g

    def heads(t: Value) -> Value:
        return t.reshape(2, 5, -1, 4).permute(0, 2, 1, 3)

    g.outputs = [
        ("y", g.attention(heads(q), heads(k), heads(v), None, 0.5, False).permute(0, 2, 1, 3).reshape(2, 5, 12))
    ]
    return g


@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_one_input_become_one_product(bias: bool) -> None:
    graph = projections(bias)
    unchanged(graph, combine_parallel_matmul)
    products = [n for n in graph.nodes if n.op == "matmul"]
    assert [n.out.shape for n in products] == [(2, 5, 20)]
    kinds = [k.kind for k in scheduled(projections(bias)).schedule.kernels]
    assert kinds == ["gemm", "attention"]


def test_a_gated_pair_keeps_its_products() -> None:
    graph = projections(gated=True)
    unchanged(graph, combine_parallel_matmul)
    assert sum(n.op == "matmul" for n in graph.nodes) == 3


def rotated(returned: bool = False) -> Graph:
    g = Graph("rotate half")
    x = g.input("x", (2, 3, 8), "float32")
    turned = g.concat([-x.slice(-1, 4, 8), x.slice(-1, 0, 4)], -1)
    g.outputs = [("y", x * 0.5 + turned * g.input("s", (3, 8), "float32"))] + ([("turned", turned)] if returned else [])
    return g


def test_rotate_half_needs_one_kernel() -> None:
    graph = rotated()
    unchanged(graph, concat_to_select)
    assert not any(n.op == "concat" for n in graph.nodes)
    assert len(scheduled(rotated()).schedule.kernels) == 1


def test_a_concatenation_that_is_returned_stays() -> None:
    graph = rotated(returned=True)
    unchanged(graph, concat_to_select)
    assert sum(n.op == "concat" for n in graph.nodes) == 1


def test_a_scatter_computes_what_it_writes() -> None:
    g = Graph("cache")
    cache, x, at = g.input("cache", (6, 4), "float32"), g.input("x", (2, 4), "float32"), g.input("at", (2,), "int64")
    written = g.scatter(cache, x * 3.0, [at], (expr.load(0, "int64", [expr.index(0)]), expr.index(1)))
    g.outputs = [("y", written)]
    kernels = scheduled(g).schedule.kernels
    assert [k.name.split("_")[1] for k in kernels] == ["copy", "scatter"]
    assert "3.0" in kernels[1].text()


def test_kernels_share_a_phase_only_without_hazards() -> None:
    g = Graph("steps")
    x = g.input("x", (64, 64), "float32")
    w = [g.weight(str(i), (64, 64), "float32") for i in range(3)]
    a = x.matmul(w[0])
    b = g.pointwise(expr.fn("exp"), x).sum([0])
    c = a.matmul(w[1])
    g.outputs = [("c", c), ("b", b)]
    kernels = assign_barrier_groups(scheduled(g).schedule.kernels)
    for phase in {k.barrier_group for k in kernels}:
        members = [k for k in kernels if k.barrier_group == phase]
        for i, k in enumerate(members):
            written = {o.buffer.id for o in k.outputs}
            for other in members[i + 1 :]:
                touched = {o.buffer.id for o in (*other.inputs, *other.outputs)}
                assert not written & touched and not {o.buffer.id for o in k.inputs} & {
                    o.buffer.id for o in other.outputs
                }
    assert len({k.barrier_group for k in kernels}) < len(kernels)
