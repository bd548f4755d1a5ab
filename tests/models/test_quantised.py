"""Quantised PyTorch models compile completely, multiply integers, and have PyTorch's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import state_dict_numpy
from npu_compiler.graph import expr, interp
from npu_compiler.graph.graph import Graph
from npu_compiler.ops.lower import lower_ir
from npu_compiler.phases import State, run_fold, run_layout, run_normalise
from npu_compiler.pipeline import compile_graph, run_graph, run_phases
from npu_compiler.schedule.anchors import Conv2d
from npu_compiler.target_config import target_config
from npu_compiler.targets.cpu.host import host_cpu
from npu_runtime import Executor

from ..support import cuda_gpu
from ..support.graph_tools import run_kernels
from ..support.quantised import Activation, Conv, Layer, Q, QuantisedNet, Weight


def built(model: nn.Module, *args: torch.Tensor, target: str = "cpu") -> Executor:
    ir = npu_compiler.capture(model, args)
    assert not npu_compiler.check(ir, target)
    return Executor(npu_compiler.compile(ir, target), state_dict_numpy(model))


def result(run: Executor, *args: torch.Tensor) -> np.ndarray:
    return next(iter(run.run([a.numpy() for a in args]).values()))


def folded(model: nn.Module, *args: torch.Tensor) -> Graph:
    """The graph of a model before fusion."""
    ir = npu_compiler.capture(model, args)
    state = State(ir, target_config("cpu"), None, (), lower_ir(ir))
    for phase in (run_normalise, run_layout, run_fold):
        phase(state)
    return state.graph


def test_network_multiplies_integers() -> None:
    torch.manual_seed(0)
    model, x = QuantisedNet(signed=True).eval(), torch.randn(2, 3, 16, 16)
    products = [n for n in folded(model, x).nodes if n.op in ("conv2d", "matmul")]
    assert [n.inputs[0].dtype for n in products].count("uint8") == 4, "all but the depthwise convolution"
    with torch.no_grad():
        want = model(x)
    # A value next to the middle of two integers may be rounded to either, which moves the results a little.
    np.testing.assert_allclose(result(built(model, x), x), want.numpy(), rtol=0, atol=0.01)


class Layers(nn.Module):
    """Layers with uint8 and with int8 activations."""

    def __init__(self) -> None:
        super().__init__()
        self.unsigned, self.signed = Layer(torch.uint8), Layer(torch.int8, groups=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.unsigned(x), self.signed(x)


def test_requantised_results_are_pytorchs() -> None:
    torch.manual_seed(1)
    model, x = Layers().eval(), torch.randn(2, 6, 11, 13)
    with torch.no_grad():
        want = [y.numpy().astype(int) for y in model(x)]
    got = [y.astype(int) for y in built(model, x).run([x.numpy()]).values()]
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 1
        assert (a == b).mean() > 0.999


SHAPES = ((1, 70, 33), (5, 7, 40), (40, 3001, 8), (2, 40, 10))


# Filters of few channels, whose rows are rows of bytes: the last unit reads the next pixel.
FILTERS = {"wide": (7, 7, 2, 3), "one": (1, 1, 2, 0), "tall": (3, 1, 1, 1)}


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2", "cpu:portable", pytest.param("cuda", marks=cuda_gpu.marks())])
def test_integer_products_are_exact(target: str) -> None:
    """On every instruction set, and as the scheduled kernels' meaning in numpy."""
    device: Any = target_config(target).device
    backend = cuda_gpu.backend() if target == "cuda" else None
    if backend is None and not device.runs_on(host_cpu()):
        pytest.skip(f"this CPU does not run {target}")
    rng, g = np.random.default_rng(0), Graph("products")
    inputs, want = {}, {}
    for i, (m, k, n) in enumerate(SHAPES):
        a = rng.integers(0, 256, (m, k)).astype(np.uint8)
        b = rng.integers(-128, 128, (k, n)).astype(np.int8)
        a[0], b[:, 0] = 255, -128  # the largest products
        inputs[f"a{i}"], want[f"y{i}"] = a, a.astype(np.int32) @ b.astype(np.int32)
        right = g.const(b)
        if i % 2:  # packed in each run
            inputs[f"b{i}"], right = b, g.input(f"b{i}", b.shape, "int8")
        g.outputs.append((f"y{i}", g.input(f"a{i}", (m, k), "uint8").matmul(right)))
    inputs["x"] = rng.integers(0, 256, (2, 9, 10, 3)).astype(np.uint8)
    x = g.input("x", inputs["x"].shape, "uint8")
    for name, (r, s, stride, padding) in FILTERS.items():
        w = g.const(rng.integers(-128, 128, (40, r, s, 3)).astype(np.int8))
        g.outputs.append((name, g.conv2d(x, w, (stride, stride), (padding,) * 4, (1, 1), 1)))
    computed = interp.run(g, inputs)
    kernels = run_kernels(run_graph(g, target), inputs, {})
    got = Executor(compile_graph(g, target), {}, backend).run(inputs)
    assert all((computed[name] == values).all() for name, values in want.items())
    for name, values in computed.items():
        assert (got[name] == values).all() and (kernels[name] == values).all()


class Pooled(nn.Module):
    """Max pooling between two quantisations with the same scale, and a maximum in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q = Activation(0.02, -3 if dtype == torch.int8 else 5, dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = nn.functional.max_pool2d(self.q(x), 3, 2, 1)
        return Q.quantize_per_tensor(y, *self.q.arguments), self.q(x).amax((2, 3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_maxima_are_those_of_the_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    model, x = Pooled(dtype).eval(), torch.randn(2, 3, 9, 8)
    graph = folded(model, x)
    maxima = [n.out.dtype for n in graph.nodes if n.op == "reduce" and n.attrs["kind"] == "max"]
    assert len(maxima) == 2 and set(maxima) <= {"uint8", "int8"}
    assert sum("round" in expr.render(n.attrs["expr"]) for n in graph.nodes if n.op == "pointwise") == 1
    for got, want in zip(interp.run(graph, {"x": x.numpy()}).values(), model(x), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


class Averaged(nn.Module):
    """A quantised layer whose result is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.conv, self.out = Activation(0.02), Conv(8, 16), Activation(0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.conv(self.input(x)))).mean((2, 3))


def test_dequantisation_joins_the_readers_of_an_8_bit_result() -> None:
    state = run_phases(npu_compiler.capture(Averaged().eval(), (torch.zeros(1, 8, 6, 6),)), "cpu", until="schedule")
    assert state.schedule is not None
    kernels = [k.outputs[0].dtype for k in state.schedule.kernels if isinstance(k, Conv2d)]
    assert kernels == ["uint8"]


class DynamicLinear(nn.Module):
    """A linear layer as torchao's int8 tensors compute it, with a scale for each row of its input, and one as PT2E's
    dynamic quantisation does, with the range of the whole input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weight((48, 32)), Weight((20, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.clamp(x.abs().amax(1, keepdim=True) / 127.5, min=2.0**-23)
        q = torch.clamp(torch.round(x * (1.0 / scale)), -128, 127).to(torch.int8)
        w = self.first.q.t()
        sums = torch._int_mm((q.to(torch.int32) + 128).to(torch.uint8), w) - 128 * w.sum(0, dtype=torch.int32)
        y = torch.relu(sums.to(torch.float32) * scale * self.first.scale)
        s, z = Q.choose_qparams(y, 0, 255, 2.0**-12, torch.uint8)
        y = Q.quantize_per_tensor.tensor(y, s, z, 0, 255, torch.uint8)
        y = Q.dequantize_per_tensor.tensor(y, s, z, 0, 255, torch.uint8)
        return nn.functional.linear(y, self.second())


def test_dynamically_quantised_layers_multiply_integers() -> None:
    torch.manual_seed(3)
    model, x = DynamicLinear().eval(), torch.randn(19, 32)
    products = [n for n in folded(model, x).nodes if n.op == "matmul"]
    assert [n.inputs[0].dtype for n in products] == ["uint8", "uint8"]
    with torch.no_grad():
        want = model(x).numpy()
    np.testing.assert_allclose(result(built(model, x), x), want, rtol=0, atol=0.01)


class Tokens(nn.Module):
    def forward(self, x: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized_decomposed.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)


def test_the_product_is_rounded_before_the_zero_point_is_added() -> None:
    """Of these elements, a fused multiplication and addition would give another result."""
    scale, zero = np.float32(0.0173), 37
    inverse = np.float32(1) / scale
    middle = ((np.arange(-128, 127) + 0.5 - zero) / float(inverse)).astype(np.float32)
    x = (middle.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)).view(np.float32).ravel()
    fused = (x.astype(np.float64) * float(inverse) + zero).astype(np.float32)
    chosen = x[np.round(fused) != np.round(x * inverse + np.float32(zero))]
    assert len(chosen) > 3
    given = torch.from_numpy(chosen[None]), torch.tensor([[scale]]), torch.tensor([[zero]], dtype=torch.int32)
    np.testing.assert_array_equal(result(built(Tokens(), *given), *given), Tokens()(*given).numpy())
