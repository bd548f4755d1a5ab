"""float32 products on the matrix unit, as sums of two TF32 numbers: as exact as float arithmetic, infinities too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture

from ...models.gate import Args, compile_and_run, expect
from ...support import cuda_gpu


class Product(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


def matrices(*shapes: tuple[int, ...]) -> Args:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(s, generator=generator) for s in shapes)


def layers(*made: nn.Module) -> nn.Module:
    return nn.Sequential(*made).eval()


CASES: dict[str, tuple[nn.Module, Args]] = {
    "linear": (layers(nn.Linear(499, 300), nn.GELU()), matrices((200, 499))),
    "odd terms": (layers(nn.Linear(77, 130)), matrices((70, 77))),
    "long sums": (Product(), matrices((70, 5000), (5000, 33))),
    "batches": (Product(), matrices((3, 70, 64), (3, 64, 90))),
    "transposed": (Product(), (matrices((90, 62))[0], matrices((40, 62))[0].mT)),
    "convolution": (layers(nn.Conv2d(18, 40, 3, 2, 1), nn.ReLU()), matrices((2, 18, 19, 17))),
    "groups": (layers(nn.Conv2d(128, 128, 3, 1, 1, groups=2)), matrices((2, 128, 9, 9))),
}


@cuda_gpu.compiles()
@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_86"])
@pytest.mark.parametrize("case", CASES)
def test_it_uses_the_matrix_unit(case: str, target: str) -> None:
    model, args = CASES[case]
    assert "split_gemm<" in npu_compiler.compile(capture(model, args), target=target).sources["kernels.cu"]


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("case", CASES)
def test_it_passes_the_gate(case: str) -> None:
    model, args = CASES[case]
    backend = cuda_gpu.backend()
    expect(model, [args], "float32").check(compile_and_run(model, [args], "float32", backend))


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
def test_infinities_are_those_of_float_arithmetic() -> None:
    """Some operands are infinite or NaN; other results keep their precision."""
    x, y = matrices((200, 160), (160, 130))
    x[3, 5], x[4, 6], x[9, 1], y[2, 8], y[1, 20] = torch.inf, torch.nan, torch.inf, -torch.inf, 0.0
    x[60, 7], y[9, 70] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaNs of all ones
    (found,) = compile_and_run(Product(), [(x, y)], "float32", cuda_gpu.backend())
    want, exact = x @ y, x.double() @ y.double()
    ours, finite = torch.from_numpy(found).reshape(want.shape), exact.isfinite()
    assert torch.equal(torch.where(finite, 0, ours.double()).nan_to_num(7), torch.where(finite, 0, exact).nan_to_num(7))
    error, eager = ((t.double() - exact)[finite].square().mean().sqrt() for t in (ours, want))
    assert error <= 1.1 * eager
