"""Convolutions of few terms between channels-first images are loop nests; others keep their micro-kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npu_compiler.graph.graph import Graph, Value
from npu_compiler.passes import layout
from npu_compiler.passes.short_convolutions import short_convolutions
from npu_compiler.schedule.kernel import Loops
from npu_compiler.targets.codegen.nest import build_nest
from npu_compiler.targets.cpu.devices import MEASURED
from npu_compiler.targets.cpu.plan import make_plan, parts_of_lanes

from ...support.graph_tools import compiled, conv, kept, ops, relu


def graph_of(build: Callable[[Value], Value], shape: tuple[int, ...], dtype: str = "float32") -> Graph:
    g = Graph("short")
    g.outputs = [("y", build(g.input("x", shape, dtype)))]
    return g


def rewritten(graph: Graph, lanes: int = 16) -> Graph:
    return kept(graph, lambda g: (layout.sink_permutes(g), short_convolutions(g, lanes)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    "build, shape",
    [
        (lambda x: conv(x, "depthwise", 4, bias=True, groups=4), (2, 4, 7, 14)),
        (lambda x: relu(conv(x, "grouped", 12, groups=4)), (1, 8, 5, 6)),
        (lambda x: conv(x, "pointwise", 40, bias=True, size=1, pad=0), (2, 16, 5, 7)),
        (lambda x: conv(x, "grey", 8, size=5, pad=2), (3, 1, 9, 10)),
        (lambda x: conv(x, "one", 1, size=1, pad=0), (1, 16, 4, 20)),
    ],
)
def test_one_kernel_computes_it(build: Callable[[Value], Value], shape: tuple[int, ...], dtype: str) -> None:
    assert not ops(rewritten(graph_of(build, shape, dtype)))["conv2d"]
    _, kernels = compiled(graph_of(build, shape, dtype), dtype=dtype)
    assert [k.kind for k in kernels] == ["loops"]


@pytest.mark.parametrize(
    "build, shape",
    [
        (lambda x: conv(x, "many", 8, groups=1), (1, 4, 6, 16)),  # 36 terms
        (lambda x: conv(x, "alone", 4, size=5, pad=2, groups=4), (1, 4, 16, 16)),  # 25, each read once
        (lambda x: conv(x, "narrow", 4, groups=4), (1, 4, 9, 5)),  # most lanes of a vector would be empty
        (lambda x: conv(conv(x, "wide", 16), "second", 16, groups=16), (1, 16, 16, 16)),  # reads channels-last
    ],
)
def test_others_stay(build: Callable[[Value], Value], shape: tuple[int, ...]) -> None:
    before = ops(graph_of(build, shape))["conv2d"]
    assert ops(rewritten(graph_of(build, shape)))["conv2d"] == before


@pytest.mark.parametrize(
    "build, channels, stay",
    [
        (lambda x: conv(x, "depthwise", 4, bias=True, groups=4), 4, 0),
        (lambda x: relu(conv(x, "two of each", 8, size=5, pad=2, groups=4)), 4, 0),
        (lambda x: conv(x, "many", 4, size=6, groups=4), 4, 1),  # 36 terms
        (lambda x: conv(x, "grouped", 8, groups=4), 8, 1),
        (lambda x: conv(x, "grey", 8), 1, 1),
    ],
)
def test_threads_compute_depthwise_ones(build: Callable[[Value], Value], channels: int, stay: int) -> None:
    assert ops(rewritten(graph_of(build, (2, channels, 9, 7)), lanes=0))["conv2d"] == stay


def test_results_that_stay_channels_last_have_a_micro_kernel() -> None:
    def build(x: Value) -> Value:
        return conv(x, "c", 4, groups=4).permute(0, 2, 3, 1)

    assert ops(rewritten(graph_of(build, (1, 4, 5, 16))))["conv2d"] == 1


def test_a_long_loop_over_channels_has_masks_instead_of_narrow_vectors() -> None:
    _, (kernel,) = compiled(graph_of(lambda x: conv(x, "c", 32, groups=2), (1, 4, 6, 30)))
    assert isinstance(kernel, Loops)
    plan = make_plan(build_nest(kernel), MEASURED)
    assert plan.lane is not None and plan.inner is not None and plan.nest.size[plan.inner] == 16
    exprs = [e for s in plan.nest.steps for e in s.exprs()]
    assert parts_of_lanes(plan, exprs, plan.nest.ranges) == [(0, 30)]
