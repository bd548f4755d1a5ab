"""Products of some rows on Hopper, whose kernel decodes weights in block formats and in bf16c12."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.pipeline import compile_entries
from npu_compiler.targets.cuda.decoded_gemm import MAX_BLOCK_ROWS, MAX_ROWS
from npu_compiler.weights.format import block_format
from npu_compiler.weights.formats.bf16c12.rows4 import FourRows
from npu_runtime import Executor, load_weights

from ...support import cuda_gpu

FORMATS = "int4_g128", "int4_g32_zp", "q4_0", "q4_k", "q5_1", "q6_k", "q8_0", "iq4_nl"


class Layers(nn.Module):
    """A product with bias and residual, or a gated one."""

    def __init__(self, k: int, n: int, dtype: torch.dtype, gated: bool):
        super().__init__()
        self.gated = gated
        self.a, self.b = nn.Linear(k, n, not gated, dtype=dtype), nn.Linear(k, n, False, dtype=dtype)

    def forward(self, x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.a(x)) * self.b(x) if self.gated else rest + self.a(x)


def _compiled(m: int, n: int, k: int, dtype: torch.dtype, gated: bool, format: str) -> tuple[Layers, Any, Any]:
    torch.manual_seed(m)
    model = Layers(k, n, dtype, gated).eval()
    args = torch.randn(1, m, k).to(dtype), torch.randn(1, m, n).to(dtype)
    return model, args, npu_compiler.compile(capture(model, args), "cuda:sm_90", weights=format)


def _kinds(program: Any) -> list[str]:
    return [c.kind for c in program.entries["main"].calls]


@cuda_gpu.compiles()
@pytest.mark.parametrize(
    ("format", "dtype"), [("q4_k", torch.bfloat16), ("int4_g128", torch.float16), ("q6_k", torch.bfloat16)]
)
def test_the_product_decodes_the_only_copy_of_the_weights(format: str, dtype: torch.dtype) -> None:
    _, _, program = _compiled(70, 48, 1024, dtype, True, format)
    assert _kinds(program) == ["gemm"]
    assert [b.format for b in program.buffers if b.kind == "weight" and b.format] == [f"{format}.rows"]
    assert f"BlockCodes<{format}, 24, 128," in program.sources["kernels.cu"]


def _shared(m: int, n: int, k: int, gated: bool) -> tuple[Layers, Any, Any]:
    """A program whose weights in bf16c12 serve one row and ``m`` rows. Four rows have almost as many large weights as
    fit, beside each other, and others a few."""
    torch.manual_seed(m)
    model, made = Layers(k, n, torch.bfloat16, gated).eval(), []
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.weight.normal_(0, 0.02)
            large = torch.rand(n, k) < 1e-3
            large[:4] = False
            large[:4, : FourRows(k).max_outliers // 5] = True
            layer.weight[large] = 30.0 * (2 * torch.rand(int(large.sum())) - 1).to(torch.bfloat16)
    for rows in (m, 1):
        made.append((torch.randn(1, rows, k).bfloat16(), torch.randn(1, rows, n).bfloat16()))
    entries = {name: capture(model, args) for name, args in zip(("main", "step"), made, strict=True)}
    return model, made[0], compile_entries(entries, "cuda:sm_90", weights="bf16c12")


@cuda_gpu.compiles()
def test_weights_in_12_bits_are_decoded_by_the_product_of_some_rows() -> None:
    _, _, program = _shared(70, 48, 1024, True)
    assert _kinds(program) == ["gemm"]
    assert [b.format for b in program.buffers if b.kind == "weight" and b.format] == ["bf16c12.rows4"]
    assert "Rows4Codes<24, 160, 38, " in program.sources["kernels.cu"]


@cuda_gpu.compiles()
def test_weights_of_many_rows_are_decoded_once() -> None:
    assert _kinds(_compiled(MAX_BLOCK_ROWS + 1, 48, 256, torch.bfloat16, False, "int4_g32")[2]) == ["unpack", "gemm"]
    for rows, kinds in ((MAX_ROWS, ["gemm"]), (MAX_ROWS + 1, ["unpack", "gemm"])):
        assert _kinds(_shared(rows, 48, 256, True)[2]) == kinds


def test_other_devices_decode_to_memory() -> None:
    model = Layers(64, 32, torch.bfloat16, True).eval()
    args = torch.randn(1, 70, 64).bfloat16(), torch.randn(1, 70, 32).bfloat16()
    program = npu_compiler.compile(capture(model, args), "metal", weights="int4_g32")
    assert _kinds(program) == ["unpack", "gemm"]


needs_a_gpu, or_is_skipped = cuda_gpu.marks()
SHAPES = [(17, 16, 96), (70, 320, 160), (100, 36, 1056), (128, 2048, 1536), (128, 1536, 8960), (200, 200, 608)]


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_the_gpu(m: int, n: int, k: int, gated: bool, format: str, dtype: torch.dtype) -> None:
    """The error is not larger than PyTorch's with the decoded weights."""
    blocks = block_format(format)
    if k % blocks.block:
        k = -(-k // blocks.block) * blocks.block
    model, args, program = _compiled(m, n, k, dtype, gated, format)
    run = _runner(model, program)
    for layer in (model.a, model.b):
        w = layer.weight.detach().float().numpy()
        layer.weight.data = torch.from_numpy(blocks.decode(blocks.encode(w), k)).to(dtype)
    _check(run(args), model, args)


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize(("m", "n", "k"), [(m, n, k // 64 * 64) for m, n, k in SHAPES])
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_weights_in_12_bits_on_the_gpu(m: int, n: int, k: int, gated: bool) -> None:
    model, args, program = _shared(m, n, k, gated)
    _check(_runner(model, program)(args), model, args)


def _runner(model: Layers, program: Any) -> Any:
    backend = cuda_gpu.backend()
    executor = Executor(program, load_weights(program, state_dict_numpy(model), backend), backend, "main")
    return lambda args: next(iter(executor.run(list(args)).values()))


def _check(got: Any, model: Layers, args: Any) -> None:
    eager = model.cuda()(*(a.cuda() for a in args)).double().cpu()
    exact = model.cpu().double()(*(a.double() for a in args))

    def rms(x: torch.Tensor) -> float:
        return float((x.reshape(exact.shape) - exact).detach().square().mean().sqrt())

    assert rms(torch.from_numpy(np.asarray(got, np.float64))) <= 1.1 * rms(eager)
