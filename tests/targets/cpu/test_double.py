"""float64 products and convolutions: one program on the kernels for doubles, beside numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from npu_compiler.graph import interp
from npu_compiler.graph.expr import where
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.pipeline import compile_graph, run_graph
from npu_compiler.schedule.anchors import Conv2d, DepthwiseConv2d, Gemm
from npu_compiler.target_config import target_config
from npu_runtime import CPUBackend, Executor, load_weights

Arrays = Mapping[str, np.ndarray]


class Doubles:
    """A graph of products and convolutions with random inputs and weights; ``results`` has the values of each part."""

    def __init__(self) -> None:
        self.graph, self.rng = Graph(), np.random.default_rng(5)
        self.inputs: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}

    def input(self, name: str, *shape: int, weight: bool = False) -> Value:
        (self.weights if weight else self.inputs)[name] = self.rng.standard_normal(shape)
        return (self.graph.weight if weight else self.graph.input)(name, shape, "float64")

    def weight(self, name: str, *shape: int) -> Value:
        return self.input(name, *shape, weight=True)

    def give(self, name: str, value: Value) -> None:
        self.graph.outputs.append((name, value))


def _program() -> Doubles:
    d = Doubles()
    w, bias = d.weight("w", 65, 37), d.weight("bias", 37)
    for rows in (1, 3, 4, 5, 30):  # in streams, then on tiles
        d.give(f"linear{rows}", d.input(f"x{rows}", rows, 65).matmul(w) + bias)
    x = d.input("gated", 6, 65)
    gate, up = x.matmul(d.weight("gate", 65, 64)), x.matmul(d.weight("up", 65, 64))
    d.give("gated", gate * up)
    d.give("computed", d.input("a", 3, 20, 9).matmul(d.input("b", 3, 9, 33)))
    image = d.input("image", 2, 9, 7, 6)
    conv = d.graph.conv2d(image, d.weight("filters", 10, 3, 3, 6), (2, 1), (1, 1, 1, 1), (1, 1), 1)
    d.give("conv", conv * 0.5)
    d.give("narrow", conv.cast("float32"))
    d.give("groups", d.graph.conv2d(image, d.weight("two", 8, 2, 3, 3), (1, 1), (0, 2, 0, 1), (1, 2), 2))
    d.give("depthwise", d.graph.conv2d(image, d.weight("each", 6, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1), 6))
    d.give("filters", d.graph.conv2d(image, d.input("given", 5, 2, 2, 6), (1, 1), (0, 0, 0, 0), (1, 1), 1))
    return d


@pytest.fixture(scope="module")
def doubles() -> tuple[Doubles, Executor]:
    d = _program()
    program = compile_graph(_program().graph)
    return d, Executor(program, load_weights(program, d.weights), CPUBackend())


def test_kernels_for_doubles_are_used() -> None:
    kernels = run_graph(_program().graph, target_config("cpu")).schedule.kernels
    assert {type(k) for k in kernels} >= {Gemm, Conv2d, DepthwiseConv2d}


def test_finite(doubles: tuple[Doubles, Executor]) -> None:
    d, executor = doubles
    got = executor.run(d.inputs)
    want = interp.run(d.graph, d.inputs, d.weights)
    for name, reference in want.items():
        assert got[name].dtype == reference.dtype
        unit = 16 * np.finfo(reference.dtype).eps
        np.testing.assert_allclose(got[name], reference, rtol=unit, atol=unit * np.abs(reference).max(), err_msg=name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5e-324, -0.0, 1e308])
def test_one_special_element(doubles: tuple[Doubles, Executor], value: float) -> None:
    """It changes the results that depend on it as in numpy, and no other bit."""
    d, executor = doubles
    before = executor.run(d.inputs)
    inputs = {name: x.copy() for name, x in d.inputs.items()}
    for x in inputs.values():
        x.reshape(-1)[x.size // 2] = value
    got = executor.run(inputs)
    with np.errstate(all="ignore"):
        was, want = (interp.run(d.graph, x, d.weights) for x in (d.inputs, inputs))
    for name, reference in want.items():
        special = ~np.isfinite(reference)
        np.testing.assert_array_equal(got[name][special], reference[special], err_msg=name)
        scale = 16 * np.finfo(reference.dtype).eps * np.abs(np.where(special, 0, reference)).max()
        np.testing.assert_allclose(got[name][~special], reference[~special], rtol=0, atol=scale, err_msg=name)
        alike = was[name] == reference  # -0.0 and 0.0 alike
        np.testing.assert_array_equal(got[name][alike], before[name][alike], err_msg=name)


def test_a_left_operand_that_the_kernel_computes_from_a_mask() -> None:
    g, rng = Graph(), np.random.default_rng(7)
    mask, scale = g.input("mask", (1, 16), "bool"), g.input("scale", (1, 1), "float64")
    rows = g.pointwise(lambda m, s: where(m, s, -0.5), mask, scale.expand(1, 16), promote=False)
    g.outputs.append(("out", rows.matmul(g.weight("w", (16, 5), "float64"))))
    state = run_graph(g, "cpu")
    assert state.schedule is not None
    (kernel,) = state.schedule.kernels
    assert isinstance(kernel, Gemm) and kernel.prologue is not None
    assert (kernel.inputs[0].dtype, kernel.left.dtype) == ("bool", "float64")
    w, m, s = rng.standard_normal((16, 5)), rng.random((1, 16)) > 0.4, rng.standard_normal((1, 1))
    program = compile_graph(g, "cpu")
    (found,) = Executor(program, load_weights(program, {"w": w})).run([m, s]).values()
    np.testing.assert_allclose(found, np.where(m, s, -0.5) @ w, rtol=1e-14)
