"""``float32_precision="tf32"``: the matrix unit multiplies rounded float32 operands if the user allows it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.support.errors import ConfigError
from npu_runtime import Executor, load_weights

from ...support import cuda_gpu


def network() -> nn.Module:
    """Convolutions with strides and groups, and products. All channels are multiples of 16, because PyTorch computes
    some others without TF32."""
    torch.manual_seed(2)
    layers: list[nn.Module] = [nn.Conv2d(16, 64, 3, 1, 1), nn.SiLU(), nn.Conv2d(64, 96, 3, 2, 1, groups=4), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv2d(96, 64, 1), nn.Flatten(), nn.Linear(64 * 36, 80)).eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(33, 16, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def ir(images: torch.Tensor) -> IRGraph:
    return capture(network(), (images,))


@pytest.fixture(scope="module")
def program(ir: IRGraph) -> CompiledProgram:
    return npu_compiler.compile(ir, "cuda:sm_90", float32_precision="tf32")


@cuda_gpu.compiles()
def test_all_products_use_the_matrix_unit(ir: IRGraph, program: CompiledProgram) -> None:
    exact = npu_compiler.compile(ir, "cuda:sm_90").sources["kernels.cu"]
    kernels = program.sources["kernels.cu"]
    assert kernels.count("split_gemm<gemm") + kernels.count("split_gemm<conv") == kernels.count("SMALL = false") == 4
    assert "SMALL = false" not in exact


@pytest.mark.parametrize("target", ["cpu", "metal"])
def test_other_targets_refuse_it(ir: IRGraph, target: str) -> None:
    with pytest.raises(ConfigError, match=f"the {target} target has no float32_precision='tf32'; it has 'highest'"):
        npu_compiler.compile(ir, target, float32_precision="tf32")


@pytest.fixture
def eager_tf32() -> Iterator[None]:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = True
    yield
    products.allow_tf32, convolutions.allow_tf32 = before


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
def test_errors_are_those_of_eager(program: CompiledProgram, images: torch.Tensor, eager_tf32: None) -> None:
    model, gpu = network(), cuda_gpu.backend()
    run = Executor(program, load_weights(program, state_dict_numpy(model), gpu), gpu)
    (found,) = run.run([images.numpy()]).values()
    with torch.no_grad():
        eager = model.cuda()(images.cuda()).cpu().numpy()
        wanted = model.double()(images.cuda().double()).cpu().numpy()
    error, usual = (np.sqrt(np.square(y - wanted).mean()) for y in (found, eager))
    assert 1e-5 < error <= 1.1 * usual
