"""Kernels that reduce rows and then compute their points: what is computed and loaded once for a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph
from npu_compiler.ops import lower_call
from npu_compiler.pipeline import compile_graph, run_graph
from npu_compiler.schedule.kernel import Loops
from npu_compiler.support.dtypes import FLOAT8
from npu_compiler.targets.cuda.dialect import HOPPER
from npu_compiler.targets.simt.emit import emit
from npu_runtime import Executor

from ...support.metal_backend import EmulatedMetal


def quantised_rows(rows: int, columns: int, most: float) -> Graph:
    """Rows as 8-bit floats, whose largest number becomes ``most``, and the largest number of each row."""
    g = Graph("quantised_rows")
    x = g.input("x", (rows, columns), "bfloat16").cast("float32")
    top = g.pointwise(lambda a: expr.call("abs", a), x).amax([1])
    q = g.pointwise(lambda a, t: (a * (expr.const(most, "float32") / t)).cast(FLOAT8), x, top, promote=False)
    g.outputs = [("q", q), ("top", top)]
    return g


def test_rows_are_loaded_and_scales_computed_once() -> None:
    """The scale stands between the loops, and the vectors of the first stay in registers for the second."""
    schedule = run_graph(quantised_rows(64, 512, 448.0), "cuda:sm_90").schedule
    assert schedule is not None
    (kernel,) = schedule.kernels
    assert isinstance(kernel, Loops)
    text = emit(kernel, HOPPER).text
    assert text.count("(a0 +") == 1 and text.count("448.0f") == 1
    first, second = (at for at in range(len(text)) if text.startswith("for (uint step", at))
    assert first < text.index("448.0f") < second
    assert "e4m3_vector<8>" in text[second:]


@pytest.mark.parametrize("most", [448.0, 500.0])
def test_numbers_in_vectors_are_converted_like_single_ones(most: float) -> None:
    """Those that would round to more than 448 become NaN."""
    x = np.random.default_rng(0).standard_normal((6, 512)).astype(ml_dtypes.bfloat16)
    x[1, 5], x[2] = np.nan, 0.5
    program = compile_graph(quantised_rows(6, 512, most), "metal")
    found = Executor(program, {}, EmulatedMetal()).run([x])
    wide = x.astype(np.float32)
    top = np.abs(wide).max(1, keepdims=True)
    want = (wide * (np.float32(most) / top)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found["q"].astype(np.float32), want.astype(np.float32))
    assert np.isnan(found["q"].astype(np.float32)).any(1).tolist() == [most > 464, True, *[most > 464] * 4]


def test_a_copy_gathers_neighbours_that_are_near() -> None:
    g = Graph("every_second")
    g.outputs = [("y", g.input("x", (64, 3, 128, 2), "bfloat16").permute(0, 3, 1, 2))]
    schedule = run_graph(g, "cuda:sm_90").schedule
    assert schedule is not None
    (kernel,) = schedule.kernels
    assert "Vec<bf16, 4>" in emit(kernel, HOPPER).text


@pytest.mark.parametrize(("heads", "threads"), [(64, 32), (1, 256)])
def test_few_keys_have_few_threads(heads: int, threads: int) -> None:
    """A thread adds up several keys before the threads' sums are added up, if there are tiles for all units."""
    g = Graph("few_keys")
    q, k, v = (g.input(n, (16, heads, s, 32), "float32") for n, s in (("q", 8), ("k", 24), ("v", 24)))
    g.outputs = [("y", g.attention(q, k, v, None, 0.125, False))]
    schedule = run_graph(g, "cuda:sm_90").schedule
    assert schedule is not None
    assert emit(schedule.kernels[-1], HOPPER).threads == threads


def averages(shape: tuple[int, ...], window: int) -> Graph:
    """Averages of cubes with an edge of ``window``, or of rows if it is 0."""
    g = Graph("averages")
    x = g.input("x", shape, "float32")
    padded = {"kernel_size": [window] * 3, "stride": [1] * 3, "padding": [1] * 3}
    y = lower_call(g, "aten.avg_pool3d.default", [x], padded)[0] if window else x.mean([-1])
    assert y is not None
    g.outputs = [("y", y)]
    return g


@pytest.mark.parametrize(("shape", "window", "shared"), [
    ((32, 32, 18, 18, 18), 3, False), ((2, 2, 18, 18, 18), 3, True), ((1 << 16, 27), 0, True), ((1 << 16, 3), 0, False),
])  # fmt: skip
def test_a_thread_reduces_a_window_of_short_runs(shape: tuple[int, ...], window: int, shared: bool) -> None:
    """If there are few windows, or a row is one run of elements, the lanes of a subgroup share it."""
    schedule = run_graph(averages(shape, window), "cuda:sm_90").schedule
    assert schedule is not None
    assert ("subgroup_reduce" in emit(schedule.kernels[0], HOPPER).text) == shared


def test_averages_of_windows_that_threads_reduce() -> None:
    x = np.random.default_rng(0).standard_normal((2, 4, 16, 16, 16)).astype(np.float32)
    program = compile_graph(averages(x.shape, 3), "metal")
    found = Executor(program, {}, EmulatedMetal()).run([x])["y"]
    want = torch.nn.functional.avg_pool3d(torch.from_numpy(x).double(), 3, 1, 1).numpy()
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)
