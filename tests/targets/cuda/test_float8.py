"""Products of 8-bit floats on Hopper: rows of activations by matrices in fp8_e4m3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.weights.format import block_format
from npu_runtime import Executor, load_weights

from ...support import cuda_gpu


class Layers(nn.Module):
    """A product with bias and residual, or a gated one."""

    def __init__(self, k: int, n: int, dtype: torch.dtype, gated: bool):
        super().__init__()
        self.gated = gated
        self.a, self.b = nn.Linear(k, n, not gated, dtype=dtype), nn.Linear(k, n, False, dtype=dtype)

    def forward(self, x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.a(x)) * self.b(x) if self.gated else rest + self.a(x)

    def exact(self, x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """The result of the quantised operands in float64."""
        top = x.float().abs().amax(-1, keepdim=True)
        q = (x.float() * torch.div(448, top)).to(torch.float8_e4m3fn).double() * (top / 448).double()
        a, b = (q @ _decoded(layer.weight).T for layer in (self.a, self.b))
        return nn.functional.silu(a) * b if self.gated else rest.double() + a + self.a.bias.double()


def _decoded(weight: torch.Tensor) -> torch.Tensor:
    format, w = block_format("fp8_e4m3"), weight.detach().float().numpy()
    return torch.from_numpy(format.decode(format.encode(w), w.shape[1])).double()


def _compiled(m: int, n: int, k: int, dtype: torch.dtype, gated: bool) -> tuple[Layers, tuple[Any, ...], Any]:
    torch.manual_seed(m)
    model = Layers(k, n, dtype, gated).eval()
    args = torch.randn(1, m, k).to(dtype), torch.randn(1, m, n).to(dtype)
    program = npu_compiler.compile(capture(model, args), "cuda:sm_90", weights="fp8_e4m3", activations="fp8")
    return model, args, program


@cuda_gpu.compiles()
@pytest.mark.parametrize(("m", "n", "k", "promoted"), [(70, 36, 256, 0), (2048, 1536, 4096, 4)])
def test_the_kernel_reads_blocks_as_they_are(m: int, n: int, k: int, promoted: int) -> None:
    """One copy of the weights; scales of rows are applied by the kernel; long sums are promoted to float32."""
    _, _, program = _compiled(m, n, k, torch.bfloat16, not promoted)
    assert [c.kind for c in program.entries["main"].calls] == ["loops", "gemm"]
    assert [b.format for b in program.buffers if b.kind == "weight" and b.format] == ["fp8_e4m3.rows"]
    kernels = program.sources["kernels.cu"]
    for text in ("FOURS = true", f"PROMOTED = {promoted},", "FourScales<", "_scale{"):
        assert text in kernels


needs_a_gpu, or_is_skipped = cuda_gpu.marks()
SHAPES = [
    (17, 16, 32), (40, 320, 160), (100, 36, 1056), (128, 2048, 1536), (128, 1536, 8960), (333, 200, 608),
    (2047, 1000, 4096),
]  # fmt: skip


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_on_the_gpu(m: int, n: int, k: int, gated: bool, dtype: torch.dtype) -> None:
    """The error is that of a rounding to the dtype, and of sums with 14 bits of up to 2048 terms."""
    model, args, program = _compiled(m, n, k, dtype, gated)
    backend = cuda_gpu.backend()
    executor = Executor(program, load_weights(program, state_dict_numpy(model), backend), backend)
    (got,) = executor.run(list(args)).values()
    exact = model.exact(*args)
    error = (torch.from_numpy(np.asarray(got, np.float64)).reshape(exact.shape) - exact).square().mean().sqrt()
    rounding = (exact.to(dtype).double() - exact).square().mean().sqrt()
    assert error <= 1.1 * rounding + 1e-3 * exact.square().mean().sqrt()
