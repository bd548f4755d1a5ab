"""Convolutions that join the one that adds their results: where Hopper has a function for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from npu_compiler.artifact.describe import describe
from npu_compiler.graph import expr, interp
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.pipeline import compile_graph, run_graph
from npu_compiler.schedule.anchors import DualConv2d
from npu_compiler.schedule.kernel import Kernel
from npu_compiler.targets.cuda import dual_conv as kernel_file
from npu_compiler.targets.cuda.dialect import DIALECT, HOPPER
from npu_compiler.targets.simt.emit import Functions
from npu_compiler.targets.simt.rewrites.dual_conv import dual_conv

from ...support import cuda_gpu
from ...support.graph_tools import run_kernels
from ...unit.schedule.test_horizontal_fusion import data

Blocks = Callable[[], Graph]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few results are enough."""
    monkeypatch.setattr(kernel_file, "MIN_RESULTS", 1)
    return


def convolved(x: Value, name: str, out: int, taps: int = 1, stride: int = 1, dtype: str = "float16") -> Value:
    """A convolution with a bias, rounded."""
    g, pad = x.graph, taps // 2
    w = g.weight(name, (out, taps, taps, x.shape[3]), x.dtype)
    y = g.conv2d(x, w, (stride, stride), (pad,) * 4, (1, 1), 1)
    return (y + g.weight(f"{name}.bias", (out,), "float32")).cast(dtype)


def added(a: Value, b: Value, dtype: str = "float16") -> Value:
    """relu(a + b), rounded once."""

    def f(x: expr.Expr, y: expr.Expr) -> expr.Expr:
        return expr.maximum(x.cast("float32") + y.cast("float32"), 0.0).cast(dtype)

    return a.graph.pointwise(f, a, b)


def block(
    dtype: str = "float16",
    taps: int = 1,
    stride: int = 1,
    inner: int = 64,
    out: int = 128,
    shared: bool = False,
    residual: str = "float16",
) -> Graph:
    """relu(conv(y) + conv(x)); with ``shared`` what is added is also an output."""
    g, small = Graph("block"), -(-9 // stride)
    x, y = g.input("x", (3, 9, 9, 64), dtype), g.input("y", (3, small, small, inner), dtype)
    long = convolved(y, "long", out, taps, dtype=dtype)
    short = convolved(x, "short", out, stride=stride, dtype=residual if dtype == "float16" else dtype)
    g.outputs = [("out", added(long, short, dtype))]
    if shared:
        g.outputs.append(("short", short))
    return g


def kernels(graph: Graph) -> list[Kernel]:
    schedule = run_graph(graph, "cuda").schedule
    assert schedule is not None
    return schedule.kernels


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"taps": 3, "inner": 128}, {"dtype": "bfloat16"}, {"stride": 2, "taps": 3}],
    ids=["1x1", "stride", "3x3", "bfloat16", "both"],
)  # fmt: skip
def test_a_shortcut_joins_the_convolution_that_adds_it(options: dict) -> None:
    """One launch, no memory between, and the results of the graph."""
    state = run_graph(block(**options), "cuda")
    assert state.schedule is not None
    (kernel,) = state.schedule.kernels
    assert isinstance(kernel, DualConv2d)
    part = kernel.residual
    assert part.outputs[0].buffer.kind == "scratch"
    assert state.schedule.arena_bytes == 0 and kernel.inputs[-len(part.inputs) :] == part.inputs
    graph = block(**options)
    inputs, weights = data(graph)
    want = interp.run(graph, inputs, weights)["out"].astype(np.float32)
    got = run_kernels(state, inputs, weights)["out"].astype(np.float32)
    assert np.abs(got - want).max() <= (0.02 if options.get("dtype") != "bfloat16" else 0.2) * np.abs(want).max()
    launch = (functions := Functions(HOPPER)).launch(kernel)
    text = functions.text[launch.function]
    assert [m[0] for m in launch.maps].count(-1) == 0 and len(launch.maps) == 5
    assert "tma_gemm<" in text and "keep(Operands<" in text and "RESULT_STAGES = 0" not in text


@cuda_gpu.compiles()
def test_it_is_described() -> None:
    program = compile_graph(block(), "cuda")
    (call_,) = program.entries["main"].calls
    assert call_.kind == "dual_conv2d" and call_.text.startswith("acc1: ") and len(call_.inputs) == 6
    assert call_.flops == 2 * 3 * 81 * 128 * (64 + 64) and "dual_conv2d" in describe(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: block(shared=True), lambda: block(residual="float32"), lambda: block("float32"),
        lambda: block(inner=20), lambda: block(out=96), lambda: twice(), lambda: with_other_residual(),
    ],
    ids=["read by others", "another type", "float32", "channels", "columns", "added twice", "another residual"],
)  # fmt: skip
def test_others_stay_apart(make: Blocks) -> None:
    assert not any(isinstance(k, DualConv2d) for k in kernels(make()))


def twice() -> Graph:
    """Two convolutions add the same results."""
    g = Graph("block")
    x, y = g.input("x", (3, 9, 9, 64), "float16"), g.input("y", (3, 9, 9, 64), "float16")
    one, two, short = (convolved(v, name, 128) for v, name in ((y, "one"), (y, "two"), (x, "short")))
    g.outputs = [("one", added(one, short)), ("two", added(two, short))]
    return g


def with_other_residual() -> Graph:
    """The convolution that would join adds something itself."""
    g = Graph("block")
    x, y, z = (g.input(name, (3, 9, 9, c), "float16") for name, c in (("x", 64), ("y", 64), ("z", 128)))
    long = convolved(y, "long", 128)
    g.outputs = [("out", added(long, added(convolved(x, "short", 128), z)))]
    return g


def test_few_results_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_file, "MIN_RESULTS", 3 * 81 * 128 + 1)
    assert [k.kind for k in kernels(block())] == ["conv2d", "conv2d"]


def test_chips_without_the_function_keep_them_apart() -> None:
    schedule = run_graph(block(), "metal").schedule
    assert schedule is not None
    made = schedule.kernels
    dual_conv(schedule, DIALECT)
    assert schedule.kernels == made
    dual_conv(schedule, HOPPER)
    assert [type(k) for k in schedule.kernels] == [DualConv2d]
