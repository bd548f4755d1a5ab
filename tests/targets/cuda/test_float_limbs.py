"""float32 products with wgmma, as sums of bfloat16 products: as exact as float arithmetic, infinities too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture

from ...models.gate import Args, compile_and_run, expect
from ...support import cuda_gpu


class Scores(nn.Module):
    """Products of queries and keys, whose heads are matrices of a batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return them."""
        return x @ y.transpose(-1, -2)


class Gated(nn.Module):
    """A row norm and a gated MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256, eps=1e-6)
        self.gate, self.up, self.down = nn.Linear(256, 640), nn.Linear(256, 640), nn.Linear(640, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Case(NamedTuple):
    """A module and the shapes of its inputs."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]


CASES = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 40)), ((300, 256),)),
    "long sums": Case(lambda: nn.Linear(4096, 96), ((33, 4096),)),
    "large": Case(lambda: nn.Linear(1024, 2048, bias=False), ((2048, 1024),)),
    "odd sizes": Case(lambda: nn.Linear(500, 308), ((201, 500),)),
    "gated": Case(lambda: nn.Sequential(Gated(), Gated()), ((2, 150, 256),)),
    "activations": Case(Scores, ((2, 3, 200, 64), (2, 3, 90, 64))),
    "3x3": Case(lambda: nn.Conv2d(64, 96, 3, 2, 1), ((5, 64, 28, 28),)),
    "dilated": Case(lambda: nn.Sequential(nn.Conv2d(32, 64, 3, 1, 2, 2), nn.ReLU()), ((2, 32, 40, 40),)),
    "48 channels": Case(lambda: nn.Conv2d(48, 40, (2, 3), 1, 1), ((3, 48, 20, 21),)),
    "strided 1x1": Case(lambda: nn.Conv2d(64, 48, 1, 2), ((5, 64, 28, 28),)),
}


def made(name: str) -> tuple[nn.Module, Args]:
    torch.manual_seed(2)
    model = CASES[name].make().eval()
    generator = torch.Generator().manual_seed(1)
    return model, tuple(torch.randn(s, generator=generator) for s in CASES[name].shapes)


@cuda_gpu.compiles()
@pytest.mark.parametrize("name", CASES)
def test_they_use_wgmma(name: str) -> None:
    kernels = npu_compiler.compile(capture(*made(name)), "cuda:sm_90").sources["kernels.cu"]
    assert set(re.findall(r"\b(\w+_gemm)<\w+_sizes>\(", kernels)) == {"tma_gemm"}
    assert "LIMBS = true" in kernels and "LIMBS = false" not in kernels


@cuda_gpu.compiles()
def test_results_of_two_bytes_do_not_take_stages() -> None:
    """TMA would store them from stages of the ring, which the warps that split operands would have to leave out."""

    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).bfloat16()

    program = npu_compiler.compile(capture(Halved(256, 512), (torch.randn(512, 256),)), "cuda:sm_90")
    kernels = program.sources["kernels.cu"]
    assert "LIMBS = true" in kernels and re.search(r"RESULT_STAGES = 0\b", kernels)


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("name", CASES)
def test_they_pass_the_gate(name: str) -> None:
    model, args = made(name)
    backend = cuda_gpu.backend()
    expect(model, [args], "float32").check(compile_and_run(model, [args], "float32", backend))


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("terms", [64, 256, 4096])
def test_sums_are_not_biased(terms: int) -> None:
    """The matrix unit truncates; over positive terms its errors would add up."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.rand(512, terms, generator=generator), torch.rand(512, terms, generator=generator)
    (found,) = compile_and_run(Scores(), [(x, y)], "float32", cuda_gpu.backend())
    exact = x.double() @ y.double().T
    error = (torch.from_numpy(found).reshape(exact.shape).double() - exact) / exact
    assert abs(error.mean()) < 3e-8


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("name", ["activations", "large", "long sums", "3x3", "48 channels", "strided 1x1"])
def test_infinities_are_those_of_float_arithmetic(name: str) -> None:
    """Some elements of the inputs are infinite, NaN or the largest floats; other results keep their precision."""
    model, args = made(name)
    special = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, -1, 0x7FFFFFFF, 0x7F7FFFFF], dtype=torch.int32)
    for i, x in enumerate(args):
        places = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(i))[:6]
        x.view(-1)[places] = special.view(torch.float32)
    (found,) = compile_and_run(model, [args], "float32", cuda_gpu.backend())
    with torch.no_grad():
        want, exact = model(*args), model.double()(*(x.double() for x in args))
    ours, finite = torch.from_numpy(found).float().reshape(want.shape), want.isfinite()
    assert 0 < finite.sum() < finite.numel()
    assert torch.equal(torch.where(finite, 0, ours).nan_to_num(7), torch.where(finite, 0, want).nan_to_num(7))
    usual = finite & (exact.abs() < 1e30)
    error, eager = ((t.double() - exact)[usual].square().mean().sqrt() for t in (ours, want))
    assert error <= 1.1 * eager
