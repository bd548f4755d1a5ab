"""Convolutions that share a kernel with the pool or the 1x1 convolution behind them, on Hopper."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.artifact.describe import describe
from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph
from npu_compiler.ops.pooling import fixed_window, pool
from npu_compiler.pipeline import compile_graph, run_graph
from npu_compiler.schedule.anchors import B2bConv2d, DualConv2d, PooledConv2d
from npu_compiler.schedule.kernel import Kernel
from npu_compiler.support.dtypes import extremes
from npu_compiler.targets.cuda import b2b_conv, dual_conv, pooled_conv
from npu_compiler.targets.cuda.dialect import HOPPER
from npu_compiler.targets.simt.emit import Functions

from ...support import cuda_gpu
from ...support.graph_tools import run_kernels
from ...unit.schedule.test_horizontal_fusion import data
from .test_dual_conv import added, convolved


def few_results_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let convolutions of few results be fused."""
    monkeypatch.setattr(dual_conv, "MIN_RESULTS", 1)
    monkeypatch.setattr(b2b_conv, "MIN_TILES", 0)
    monkeypatch.setattr(pooled_conv, "MIN_OCCUPANCY", 0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few results are enough."""
    few_results_suffice(monkeypatch)


def pooled(
    size: int = 16, window: int = 3, stride: int = 2, pad: int = 1, dtype: str = "float16", out: int = 64,
    kind: str = "max", shared: bool = False,
) -> Graph:  # fmt: skip
    """A convolution and a pool of its results; with ``shared`` they are also an output."""
    g = Graph("pooled")
    y = convolved(g.input("x", (2, size, 16, 64), dtype), "w", out, 3, dtype=dtype)
    windows = [fixed_window(n, window, stride, pad, 1, False, False) for n in (size, 16)]
    g.outputs = [("out", pool(kind, y, windows, extremes(dtype)[0] if kind == "max" else 0.0))]
    if shared:
        g.outputs.append(("y", y))
    return g


def chain(
    dtype: str = "float16", last: int = 64, adds: str = "input", inner: int = 64, taps: int = 1, out: int = 256
) -> Graph:
    """The end of a bottleneck block, whose results are an output, and the start of the next one. ``adds``: what the
    first convolution adds, an 'input', another 'convolution' or 'nothing'."""
    g = Graph("chain")
    x = g.input("x", (2, 9, 9, inner), dtype)
    y = convolved(x, "first", out, dtype=dtype)
    if adds == "input":
        y = added(y, g.input("residual", (2, 9, 9, out), dtype), dtype)
    elif adds == "convolution":
        y = added(y, convolved(g.input("z", (2, 9, 9, 64), dtype), "short", out, dtype=dtype), dtype)
    g.outputs = [("y", y), ("out", convolved(y, "second", last, taps, dtype=dtype))]
    return g


def check(make: Callable[[], Graph], kind: type) -> tuple[Kernel, str]:
    """Check that a graph becomes one kernel, a ``kind``, which computes the same. Return it and the source of its
    function."""
    state = run_graph(make(), "cuda")
    assert state.schedule is not None
    (kernel,) = state.schedule.kernels
    assert isinstance(kernel, kind)
    graph = make()
    inputs, weights = data(graph)
    want, got = interp.run(graph, inputs, weights), run_kernels(state, inputs, weights)
    bfloat16 = any(v.dtype == "bfloat16" for _, v in graph.outputs)
    for name, value in want.items():
        exact = value.astype(np.float32)
        error = np.abs(got[name].astype(np.float32).reshape(exact.shape) - exact).max()
        assert error <= (0.2 if bfloat16 else 0.02) * np.abs(exact).max()
    launch = (functions := Functions(HOPPER)).launch(kernel)
    return kernel, functions.text[launch.function]


def kinds(make: Callable[[], Graph]) -> set[str]:
    """The kinds of kernels that a graph becomes."""
    schedule = run_graph(make(), "cuda").schedule
    assert schedule is not None
    return {k.kind for k in schedule.kernels}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_pool_joins_the_convolution_before_it(dtype: str) -> None:
    """One launch, and what is pooled is never in memory."""
    kernel, text = check(lambda: pooled(dtype=dtype), PooledConv2d)
    assert isinstance(kernel, PooledConv2d) and kernel.conv.outputs[0].buffer.kind == "scratch"
    assert kernel.pool.inputs == kernel.conv.outputs and kernel.inputs == kernel.conv.inputs
    assert "MaxPool<" in text and "IMAGES = 2" in text


@cuda_gpu.compiles()
def test_an_image_is_pooled_line_by_line() -> None:
    """The lines of an image are columns of wgmma if it has an instruction for so many pixels."""
    for width, expected in ((224, True), (320, False)):
        model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 8, 1))
        ir = npu_compiler.capture(model.half().eval(), (torch.zeros(16, 3, 32, width, dtype=torch.float16),))
        kernels = npu_compiler.compile(ir, "cuda:sm_90").sources["kernels.cu"]
        assert ('#include "pooled_rows.h"' in kernels) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2, "pad": 0}, {"stride": 1}, {"pad": 0}, {"kind": "sum"}, {"size": 24, "stride": 4}, {"size": 12},
        {"out": 32}, {"out": 128}, {"dtype": "float32"}, {"shared": True},
    ],
    ids=lambda options: " ".join(f"{k} {v}" for k, v in options.items()),
)  # fmt: skip
def test_other_pools_stay_apart(options: dict) -> None:
    assert "pooled_conv2d" not in kinds(lambda: pooled(**options))


def test_few_images_are_pooled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_conv, "MIN_OCCUPANCY", 0.7)
    assert kinds(pooled) == {"conv2d", "loops"}


@pytest.mark.parametrize(
    "options",
    [
        {}, {"last": 128}, {"adds": "nothing"}, {"adds": "convolution"}, {"dtype": "bfloat16", "out": 128},
    ],
    ids=lambda options: " ".join(f"{k} {v}" for k, v in options.items()) or "residual",
)  # fmt: skip
def test_two_convolutions_in_a_row_share_a_kernel(options: dict) -> None:
    kernel, text = check(lambda: chain(**options), B2bConv2d)
    assert isinstance(kernel, B2bConv2d) and kernel.second.inputs[0] == kernel.first.outputs[0]
    dual = options.get("adds") == "convolution"
    assert isinstance(kernel.first, DualConv2d) == dual == ("keep(Operands<" in text)
    assert ("RESIDUAL = true" in text) == ("adds" not in options)
    assert re.search(r"filters = .*shared_memory \+ 0\)", text), "where swizzled rows have to begin"


@pytest.mark.parametrize(
    "options",
    [
        {"taps": 3}, {"inner": 128}, {"out": 512}, {"adds": "convolution", "last": 128}, {"last": 256},
        {"dtype": "float32"},
    ],
    ids=lambda options: " ".join(f"{k} {v}" for k, v in options.items()),
)  # fmt: skip
def test_other_convolutions_in_a_row_stay_apart(options: dict) -> None:
    assert "b2b_conv2d" not in kinds(lambda: chain(**options))


def test_few_tiles_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b2b_conv, "MIN_TILES", 4)
    assert kinds(chain) == {"conv2d"}


@cuda_gpu.compiles()
def test_they_are_described() -> None:
    for make, kind, text in ((pooled, "pooled_conv2d", "in0: "), (chain, "b2b_conv2d", "out0: ")):
        program = compile_graph(make(), "cuda")
        (call,) = program.entries["main"].calls
        assert call.kind == kind and call.text.startswith(text) and kind in describe(program)
