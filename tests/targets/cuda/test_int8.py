"""Products and convolutions of 8-bit integers on NVIDIA GPUs.

All scales are powers of two, so requantisation is exact in float32 and results must be equal to PyTorch's in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import state_dict_numpy
from npu_runtime import Executor

from ...support import cuda_gpu
from ...support.quantised import RANGE, Conv, Q, Weight
from ...support.sweeps import IN_FULL

SCALE = 2.0**-7


class Quantised(nn.Module):
    """Layers on 8-bit activations of ``dtype`` with one scale: [N, C, H, W] or [N, C] -> the same, of integers.

    ``relu``: after every layer. ``residual``: the index of the layer to whose result the input of layer 1 is added.
    """

    def __init__(self, *layers: nn.Module, dtype: torch.dtype = torch.uint8, zero: int = 0, residual: int = -1):
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual
        self.arguments = (SCALE, zero, *RANGE[dtype], dtype)
        generator = torch.Generator().manual_seed(3)
        for w in (m for m in self.modules() if isinstance(m, Weight)):
            largest = -6.0 - w.q[0].numel() ** 0.5 // 10
            w.scale.copy_(2.0 ** (largest - torch.randint(0, 3, w.scale.shape, generator=generator)))
        for p in self.parameters():
            p.data = torch.round(p.data * 64) / 64

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        first = None
        for n, layer in enumerate(self.layers):
            y = layer(Q.dequantize_per_tensor(q, *self.arguments))
            if n == self.residual and first is not None:
                y = y + Q.dequantize_per_tensor(first, *self.arguments)
            q = Q.quantize_per_tensor(torch.relu(y), *self.arguments)
            first = q if first is None else first
        return q

    @torch.no_grad()
    def exact(self, q: torch.Tensor) -> torch.Tensor:
        """The same in float64."""
        scale, zero, low, high, dtype = self.arguments
        first, x = None, q.double()
        for n, layer in enumerate(self.layers):
            y = _apply(layer, (x - zero) * scale)
            if n == self.residual and first is not None:
                y = y + (first - zero) * scale
            x = (torch.round(torch.relu(y) / scale) + zero).clamp(low, high)
            first = x if first is None else first
        return x.to(dtype)


def _apply(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer in float64."""
    if isinstance(layer, Shortcut):
        scale, zero, low, high, _ = layer.arguments
        beside = (torch.round(_apply(layer.short, x) / scale) + zero).clamp(low, high)
        return _apply(layer.conv, x) + (beside - zero) * scale
    if not isinstance(layer, Conv | Linear):
        return layer(x)
    scale, bias = layer.weight.scale.double(), layer.bias.double()
    w = layer.weight.q.double() * scale.reshape(-1, *(1,) * (layer.weight.q.ndim - 1))
    if isinstance(layer, Linear):
        return nn.functional.linear(x, w, bias)
    return nn.functional.conv2d(x, w, bias, layer.stride, w.shape[-1] // 2, 1, layer.groups)


class Shortcut(nn.Module):
    """A convolution, and another one whose quantised result is added."""

    def __init__(self, conv: Conv, short: Conv):
        super().__init__()
        self.conv, self.short, self.arguments = conv, short, (SCALE, 100, *RANGE[torch.uint8], torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = Q.quantize_per_tensor(self.short(x), *self.arguments)
        return self.conv(x) + Q.dequantize_per_tensor(beside, *self.arguments)


class Linear(nn.Module):
    """A product of dequantised operands with a bias."""

    def __init__(self, k: int, n: int):
        super().__init__()
        self.weight, self.bias = Weight((n, k)), nn.Parameter(torch.linspace(-0.5, 0.5, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight(), self.bias)


Case = tuple[Quantised, Sequence[int]]
CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: (Quantised(Linear(256, 128), Linear(128, 200)), (300, 256)),
    "linear-few-rows": lambda: (Quantised(Linear(256, 1000), Linear(1000, 48)), (3, 256)),
    "linear-odd": lambda: (Quantised(Linear(33, 37), Linear(37, 20)), (70, 33)),
    "linear-long-sums": lambda: (Quantised(Linear(4096, 96), Linear(96, 64)), (128, 4096)),
    "linear-signed": lambda: (Quantised(Linear(192, 384), Linear(384, 72), dtype=torch.int8, zero=-5), (1000, 192)),
    "3x3": lambda: (Quantised(Conv(64, 64), Conv(64, 128), Conv(128, 64, 1)), (5, 64, 19, 23)),
    "3x3-stride": lambda: (Quantised(Conv(128, 128, 3, 2), Conv(128, 72, 1)), (9, 128, 28, 28)),
    "3x3-zero-point": lambda: (Quantised(Conv(64, 64), Conv(64, 64), zero=31), (3, 64, 14, 14)),
    "3x3-signed": lambda: (Quantised(Conv(64, 128), Conv(128, 64), dtype=torch.int8, zero=-128), (3, 64, 14, 14)),
    "1x1": lambda: (Quantised(Conv(64, 256, 1), Conv(256, 64, 1), Conv(64, 256, 1), residual=2), (11, 64, 28, 28)),
    "1x1-stride": lambda: (Quantised(Conv(256, 512, 1, 2), Conv(512, 128, 1)), (16, 256, 29, 29)),
    "wide": lambda: (
        Quantised(Conv(1024, 2048, 1), Conv(2048, 512, 1), Conv(512, 2048, 1), residual=2), (8, 1024, 7, 7)
    ),
    "long-sums": lambda: (Quantised(Conv(512, 512), Conv(512, 192, 1)), (2, 512, 7, 7)),
    "lines": lambda: (Quantised(Conv(64, 64), Conv(64, 48), Conv(48, 64, 1)), (64, 64, 23, 16)),
    "lines-stride": lambda: (Quantised(Conv(64, 64, 3, (2, 1)), Conv(64, 64, 5), Conv(64, 64, 1)), (50, 64, 56, 40)),
    "shortcut": lambda: (
        Quantised(Shortcut(Conv(64, 256, 1), Conv(64, 256, 1)), Conv(256, 72, 1)), (50, 64, 29, 28)
    ),
    "bottlenecks-shortcut": lambda: (
        Quantised(Shortcut(Conv(64, 256, 1), Conv(64, 256, 1)), Conv(256, 64, 1), Conv(64, 24)), (90, 64, 29, 28)
    ),
    "bottlenecks": lambda: (
        Quantised(Conv(64, 256, 1), Conv(256, 64, 1), Conv(64, 256, 1), Conv(256, 64, 1), Conv(64, 24), residual=2),
        (90, 64, 29, 28),
    ),
    "bottlenecks-128": lambda: (
        Quantised(Conv(64, 256, 1), Conv(256, 64, 1), Conv(64, 256, 1), Conv(256, 128, 1), Conv(128, 24), residual=2),
        (90, 64, 29, 28),
    ),
    "shortcut-wide": lambda: (
        Quantised(Shortcut(Conv(256, 512, 1, 2), Conv(256, 512, 1, 2)), Conv(512, 64, 1)), (60, 256, 35, 35)
    ),
    "few-channels": lambda: (Quantised(Conv(3, 64, 7, 2), Conv(64, 64, 1)), (2, 3, 64, 64)),
    "padded-image": lambda: (Quantised(Conv(3, 64, 7, 2), Conv(64, 64, 1), zero=117), (2, 3, 64, 64)),
    "many-images": lambda: (Quantised(Conv(3, 64, 7, 2), Conv(64, 64, 1), zero=117), (60, 3, 65, 65)),
    "few-filters": lambda: (Quantised(Conv(4, 48, 5, 2), Conv(48, 64, 1)), (99, 4, 36, 36)),
    "image-stride-4": lambda: (Quantised(Conv(3, 64, 7, 4), Conv(64, 64, 1)), (60, 3, 65, 65)),
    "odd-channels": lambda: (Quantised(Conv(5, 13), Conv(13, 40)), (2, 5, 11, 9)),
    "40-channels": lambda: (Quantised(Conv(40, 40), Conv(40, 96, 1)), (2, 40, 17, 17)),
    "groups": lambda: (Quantised(Conv(64, 128, 3, 1, 4), Conv(128, 64, 3, 1, 2)), (2, 64, 15, 15)),
    "pooled-image": lambda: (
        Quantised(Conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), Conv(64, 64, 1), zero=117), (190, 3, 64, 96)
    ),
    "pool": lambda: (Quantised(nn.MaxPool2d(3, 2, 1), Conv(64, 64, 1)), (4, 64, 57, 57)),
}  # fmt: skip


def _input(shape: Sequence[int], model: Quantised) -> torch.Tensor:
    _, _, low, high, dtype = model.arguments
    generator = torch.Generator().manual_seed(1)
    return torch.randint(low, high + 1, tuple(shape), generator=generator).to(dtype)


def _compiled(name: str, target: str) -> tuple[Quantised, torch.Tensor, npu_compiler.CompiledProgram]:
    model, shape = CASES[name]()
    q = _input(shape, model)
    return model, q, npu_compiler.compile(npu_compiler.capture(model.eval(), (q,)), target)


SAMPLE = ("3x3", "padded-image", "many-images", "shortcut")


@cuda_gpu.compiles()
@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=IN_FULL) for n in CASES])
@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_80"])
def test_layers_compile(name: str, target: str) -> None:
    _, _, program = _compiled(name, target)
    kernels = program.sources["kernels.cu"]
    multiplies = 'tma_gemm.h"' if target == "cuda:sm_90" and name != "linear-few-rows" else "FragI Frag"
    assert (multiplies in kernels) == ("odd" not in name and name != "groups")
    if name == "padded-image":
        calls = program.entries["main"].calls
        assert [c.kind for c in calls] == ["loops", "conv2d", "conv2d"], "padding joins the copy"
    if name == "shortcut":
        assert ("KEEPS = true" in kernels) == (target == "cuda:sm_90")
        assert ("= round_clamped_float(" in kernels) == (target == "cuda:sm_90"), "what is kept is not packed"
    if name == "many-images":
        assert "= (round_clamped_bits(" not in kernels, "the zero point is added before results saturate"
        assert ("y[i4] = (round_clamped(" in kernels) == (target == "cuda:sm_90")
    if name == "3x3":
        assert ("RESULT_STAGES = 1" in kernels) == (target == "cuda:sm_90"), "TMA stores bytes"


class Product(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, y)


@cuda_gpu.compiles()
@pytest.mark.parametrize("left", [torch.int8, torch.uint8])
def test_products_of_two_activations_are_multiplied_by_matrix_units(left: torch.dtype) -> None:
    x, y = torch.ones(64, 128, dtype=left), torch.ones(128, 64, dtype=torch.int8)
    for right in (y, y.t().contiguous().t()):
        program = npu_compiler.compile(npu_compiler.capture(Product(), (x, right)), "cuda:sm_90")
        kinds = [c.kind for c in program.entries["main"].calls]
        assert kinds[-1] == "gemm", "the zero point is subtracted in the epilogue"
        assert 'tma_gemm.h"' in program.sources["kernels.cu"]


@IN_FULL
@pytest.mark.parametrize("name", CASES)
def test_layers_on_the_cpu(name: str) -> None:
    model, q, program = _compiled(name, "cpu")
    got = next(iter(Executor(program, state_dict_numpy(model)).run([q.numpy()]).values()))
    np.testing.assert_array_equal(got, model.exact(q).numpy())


needs_a_gpu, or_is_skipped = cuda_gpu.marks()


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize("name", CASES)
def test_layers_on_the_gpu(name: str) -> None:
    model, q, program = _compiled(name, "cuda")
    got = next(iter(Executor(program, state_dict_numpy(model), cuda_gpu.backend()).run([q.numpy()]).values()))
    np.testing.assert_array_equal(got, model.exact(q).numpy())
