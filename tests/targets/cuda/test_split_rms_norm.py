"""Row norms that are divided among the products around them, where Hopper's functions can do their share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from npu_compiler.artifact.describe import describe
from npu_compiler.graph import expr, interp
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.pipeline import compile_graph, run_graph
from npu_compiler.schedule.anchors import Gemm
from npu_compiler.schedule.kernel import Kernel
from npu_compiler.targets.cuda.dialect import HOPPER
from npu_compiler.targets.simt.emit import Functions

from ...support import cuda_gpu
from ...support.graph_tools import run_kernels
from ...unit.schedule.test_horizontal_fusion import call, data, norm

Make = Callable[[], Graph]


def product(x: Value, name: str, columns: int) -> Value:
    return x.matmul(x.graph.weight(name, (x.shape[-1], columns), x.dtype)).cast(x.dtype)


def layer(rows: int = 40, hidden: int = 192, inner: int = 320, dtype: str = "bfloat16", gate: bool = False) -> Graph:
    """x + product, which is an output, its norm, and one more product, gated or not."""
    g = Graph("layer")
    x, y = g.input("x", (rows, hidden), dtype), g.input("y", (rows, inner), dtype)
    stream = (x + product(y, "down", hidden)).cast(dtype)
    normed = norm(g, stream)
    out = product(normed, "up", inner)
    if gate:
        first = product(normed, "gate", inner)
        out = ((first * call("sigmoid", first)).cast(dtype) * out).cast(dtype)
    g.outputs = [("stream", stream), ("out", out)]
    return g


def kernels(graph: Graph, target: str = "cuda") -> list[Kernel]:
    schedule = run_graph(graph, target).schedule
    assert schedule is not None
    return schedule.kernels


SHAPES: dict[str, Make] = {
    "tiles": layer, "few rows": lambda: layer(17), "gated": lambda: layer(gate=True),
    "shared sums": lambda: layer(64, 256, 4096), "many": lambda: layer(1024, 512, 1024, gate=True),
    "columns beside tiles": lambda: layer(33, 200, 72),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_no_kernel_is_left_of_the_norm(name: str) -> None:
    state = run_graph(SHAPES[name](), "cuda")
    assert state.schedule is not None
    first, second = state.schedule.kernels
    assert isinstance(first, Gemm) and isinstance(second, Gemm)
    assert len(first.outputs) == 3 and len(first.extra_stages) == 2
    assert (second.inputs[0].buffer, second.inputs[-1]) == (first.outputs[1].buffer, first.outputs[2])
    graph = SHAPES[name]()
    inputs, weights = data(graph)
    want, got = interp.run(graph, inputs, weights), run_kernels(state, inputs, weights)
    for key in ("stream", "out"):
        scale = np.abs(want[key].astype(np.float32)).max()
        assert np.abs(got[key].astype(np.float32) - want[key].astype(np.float32)).max() <= 0.03 * scale, key
    launch = (functions := Functions(HOPPER)).launch(first)
    tiles, rows = first.outputs[2].shape
    width = launch.maps[1][2].box[1]  # of the tiles of weights
    assert tiles == -(-first.n // width) and rows == first.m
    assert "SUM_ROWS = 0" not in functions.text[launch.function] and "NoRowScale" in functions.text[launch.function]
    assert "NoRowScale" not in functions.text[functions.launch(second).function]


@cuda_gpu.compiles()
def test_it_is_described() -> None:
    program = compile_graph(layer(), "cuda")
    first, second = program.entries["main"].calls
    assert "r0 = sum " in first.text and "out1 = bfloat16" in first.text
    assert second.text.startswith("acc of a row times rsqrt") and "acc of a row" in describe(program)


def of_an_input() -> Graph:
    g = Graph("input")
    g.outputs = [("out", product(norm(g, g.input("x", (40, 192), "bfloat16")), "up", 320))]
    return g


def read_twice() -> Graph:
    """The norm is a result, too."""
    g = Graph("read_twice")
    normed = norm(g, product(g.input("x", (40, 192), "bfloat16"), "down", 192))
    g.outputs = [("out", product(normed, "up", 320)), ("normed", normed)]
    return g


def other_factor() -> Graph:
    """The norm's weight depends on the row."""
    g = Graph("other_factor")
    x = product(g.input("x", (40, 192), "bfloat16"), "down", 192)
    wide = x.cast("float32")
    factor = call("rsqrt", (wide * wide).mean((1,)) + 1e-5)
    normed = (wide * factor * g.weight("rows", (40, 1), "float32")).cast("bfloat16")
    g.outputs = [("out", product(normed, "up", 320))]
    return g


def with_mean() -> Graph:
    """A layer norm, which is not a product of factors."""
    g = Graph("with_mean")
    x = product(g.input("x", (40, 192), "bfloat16"), "down", 192)
    wide = x.cast("float32") - x.cast("float32").mean((1,))
    normed = (wide * call("rsqrt", (wide * wide).mean((1,)) + 1e-5)).cast("bfloat16")
    g.outputs = [("out", product(normed, "up", 320))]
    return g


@pytest.mark.parametrize(
    "make", [lambda: layer(dtype="float16"), lambda: layer(16), of_an_input, read_twice, other_factor, with_mean],
    ids=["float16", "few rows", "an input", "read twice", "a factor of rows", "layer norm"],
)  # fmt: skip
def test_others_stay_kernels_of_their_own(make: Make) -> None:
    made = kernels(make())
    products = [k for k in made if isinstance(k, Gemm)]
    assert len(products) < len(made) or any(k.prologue is not None for k in products)
    assert not any(k.extra_stages or k.row_scale is not None for k in products)


def test_of_norms_in_a_row_every_other_is_divided() -> None:
    """A product that scales its rows for one norm does nothing for the next."""

    def make() -> Graph:
        g = Graph("chain")
        x = g.input("x", (40, 192), "bfloat16")
        for name in ("a", "b", "c"):
            x = norm(g, product(x, name, 192))
        g.outputs = [("out", product(x, "d", 320))]
        return g

    state = run_graph(make(), "cuda")
    assert state.schedule is not None
    made = state.schedule.kernels
    assert [k.kind for k in made] == ["gemm", "gemm", "loops", "gemm", "gemm"]
    assert [isinstance(k, Gemm) and bool(k.extra_stages) for k in made] == [True, False, False, True, False]
    inputs, weights = data(graph := make())
    want = interp.run(graph, inputs, weights)["out"].astype(np.float32)
    got = run_kernels(state, inputs, weights)["out"].astype(np.float32)
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()


@pytest.mark.parametrize("target", ["cpu", "metal"])
def test_other_targets_keep_the_norm(target: str) -> None:
    assert [k.kind for k in kernels(layer(64, 256, 320), target)][1:2] == ["loops"]


def test_chips_without_the_function_keep_the_norm() -> None:
    assert [k.kind for k in kernels(layer(), "cuda:sm_80")] == ["gemm", "loops", "gemm"]


def test_the_scale_comes_before_the_bias() -> None:
    g = Graph("bias")
    x = product(g.input("x", (40, 192), "bfloat16"), "down", 192)
    out = product(norm(g, x), "up", 320) + g.weight("bias", (320,), "bfloat16")
    g.outputs = [("out", out.cast("bfloat16"))]
    second = kernels(g)[-1]
    assert second.row_scale is not None
    assert expr.render(second.row_scale) == "rsqrt(((r0 / 192.0) + 1e-05))" and "in2[" in expr.render(second.epilogue)
