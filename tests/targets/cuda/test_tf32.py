"""``float32_precision="tf32"``: the matrix unit multiplies rounded float32 operands if the user allows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.support.errors import ConfigError
from npu_runtime import Executor, load_weights

from ...support import cuda_gpu


class Product(nn.Module):
    """A product of the input and its transpose, or of the input and itself."""

    def __init__(self, transposed: bool):
        super().__init__()
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ (x.transpose(-1, -2) if self.transposed else x)


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
    """A module, the shape of its input, and the template of its products."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    template: str


CASES = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 40)), (300, 256), "tma_gemm"),
    "long sums": Case(lambda: nn.Linear(4096, 96), (33, 4096), "tma_gemm"),
    "large": Case(lambda: nn.Linear(1024, 4096, bias=False), (4096, 1024), "tma_gemm"),
    "gated": Case(lambda: nn.Sequential(Gated(), Gated()), (2, 150, 256), "tma_gemm"),
    "3x3": Case(lambda: nn.Conv2d(64, 96, 3, 2, 1), (5, 64, 28, 28), "tma_gemm"),
    "strided 1x1": Case(lambda: nn.Conv2d(64, 48, 1, 2), (5, 64, 28, 28), "tma_gemm"),
    "16 channels": Case(lambda: nn.Conv2d(16, 64, 3, 1, 1), (16, 16, 28, 28), "tma_gemm"),
    "40 channels": Case(lambda: nn.Conv2d(40, 64, 3, 1, 1), (5, 40, 12, 12), "split_gemm"),
    "grouped": Case(lambda: nn.Conv2d(64, 96, 3, 1, 1, groups=4), (33, 64, 12, 12), "split_gemm"),
    "three channels": Case(lambda: nn.Conv2d(3, 64, 7, 2, 3), (5, 3, 64, 64), "split_gemm"),
    "odd sums": Case(lambda: nn.Linear(101, 64), (70, 101), "split_gemm"),
    "activations": Case(lambda: Product(True), (6, 200, 64), "split_gemm"),
    "columns": Case(lambda: Product(False), (320, 320), "split_gemm"),
}


def module(name: str) -> nn.Module:
    torch.manual_seed(2)
    return CASES[name].make().eval()


def inputs(name: str) -> torch.Tensor:
    return torch.randn(CASES[name].shape, generator=torch.Generator().manual_seed(1))


@cache
def compiled(name: str, target: str = "cuda:sm_90", precision: str = "tf32") -> CompiledProgram:
    return npu_compiler.compile(capture(module(name), (inputs(name),)), target, float32_precision=precision)


def products(program: CompiledProgram) -> set[str]:
    """Return the templates of a program's products."""
    return set(re.findall(r"\b(\w+_gemm|tma_conv)<\w+_sizes>\(", program.sources["kernels.cu"]))


@cuda_gpu.compiles()
@pytest.mark.parametrize("name", CASES)
def test_all_products_use_the_matrix_unit(name: str) -> None:
    assert products(compiled(name)) == {CASES[name].template}
    kernels = compiled(name).sources["kernels.cu"]
    assert ("SMALL = false" in kernels) == (CASES[name].template == "split_gemm")


@cuda_gpu.compiles()
def test_exact_products_do_not_round() -> None:
    exact = compiled("3x3", precision="highest")
    assert products(exact) == {"tma_gemm"}
    assert "ROUNDED = false" in exact.sources["kernels.cu"] and "LIMBS = true" in exact.sources["kernels.cu"]


@cuda_gpu.compiles()
def test_products_of_few_rows_do_not_round() -> None:
    few = npu_compiler.compile(
        capture(nn.Linear(256, 64), (torch.randn(16, 256),)), "cuda:sm_90", float32_precision="tf32"
    )
    assert products(few) == {"simple_gemm"}


@cuda_gpu.compiles()
@pytest.mark.parametrize("weights", ["q8_0", "int8_g128"])
def test_weights_in_a_format_are_decoded(weights: str) -> None:
    """Their elements are not rounded in memory, so that the kernel rounds both operands."""
    model = capture(nn.Linear(1024, 1024), (torch.randn(64, 1024),))
    program = npu_compiler.compile(model, "cuda:sm_90", float32_precision="tf32", weights=weights)
    assert products(program) == {"split_gemm"}
    assert "SMALL = false" in program.sources["kernels.cu"]


@cuda_gpu.compiles()
@pytest.mark.parametrize("name", ["3x3", "columns"])
def test_gpus_before_hopper_use_one_template(name: str) -> None:
    older = compiled(name, "cuda:sm_80")
    assert products(older) == {"split_gemm"}
    assert "SMALL = false" in older.sources["kernels.cu"]


@pytest.mark.parametrize("target", ["cpu", "metal"])
def test_other_targets_refuse_it(target: str) -> None:
    with pytest.raises(ConfigError, match=f"the {target} target has no float32_precision='tf32'; it has 'highest'"):
        compiled("linear", target)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded to 11 bits, in float64."""
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.round(fraction * 2**11) / 2**11, exponent)


def round_operands(model: nn.Module) -> nn.Module:
    """Let a module round the operands of its products; return it."""
    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Conv2d | Product):
            m.register_forward_pre_hook(lambda _, args: tuple(map(rounded, args)))
            for weight in (w for w in m.parameters() if w.dim() > 1):
                weight.copy_(rounded(weight))
    return model


@cuda_gpu.compiles()
def test_it_is_written_and_read() -> None:
    program = compiled("linear")
    assert CompiledProgram.loads(program.dumps()).binary == program.binary


@pytest.fixture
def eager_tf32() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_eager(name: str, eager_tf32: None) -> None:
    model, x, program, gpu = module(name), inputs(name), compiled(name), cuda_gpu.backend()
    run = Executor(program, load_weights(program, state_dict_numpy(model), gpu), gpu)
    (found,) = run.run([x.numpy()]).values()
    with torch.no_grad():
        eager = model.cuda()(x.cuda()).cpu().numpy()
        wanted = model.double()(x.cuda().double()).cpu().numpy()
        expected = round_operands(model)(x.cuda().double()).cpu().numpy()
    error, usual, least = (np.sqrt(np.square(y - wanted).mean()) for y in (found, eager, expected))
    assert 0.5 * least < error <= 1.1 * max(usual, least)  # PyTorch does not round in some products
