"""Attention on NVIDIA's matrix unit: of many queries and of few, heads and masks of all kinds, in float32 too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture

from ...models.gate import Args, compile_and_run, expect
from ...support import cuda_gpu

SIZES = [(32, 48), (48, 32), (128, 64), (64, 128), (40, 72), (160, 24)]
FEW = [(1, 70), (3, 900), (8, 2100), (17, 900), (40, 3000)]  # queries and keys
EQUAL = [8, 40, 64, 72, 96, 128, 160, 256]  # SD 1.5 has heads of 40, 80 and 160, DiT of 72, Gemma of 256


class Attention(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


class Masked(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask > 0, enable_gqa=True)


class AnyMask(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def operands(queries: int, keys: int, d: int, dv: int) -> Args:
    torch.manual_seed(d + dv)
    shapes = ((2, 4, queries, d), (2, 2, keys, d), (2, 2, keys, dv))
    return tuple(torch.randn(s) for s in shapes)


@cuda_gpu.compiles()
@pytest.mark.parametrize(("d", "dv"), SIZES)
def test_it_takes_one_kernel(d: int, dv: int) -> None:
    args = tuple(x.bfloat16() for x in operands(40, 70, d, dv))
    program = npu_compiler.compile(capture(Attention(False), args), target="cuda")
    assert len(program.entries["main"].calls) == 1
    assert "flash<" in program.sources["kernels.cu"]


@cuda_gpu.compiles()
@pytest.mark.parametrize("d", [40, 160])
def test_older_gpus_pad_heads(d: int) -> None:
    args = tuple(x.half() for x in operands(130, 130, d, d))
    kernels = npu_compiler.compile(capture(Attention(True), args), target="cuda:sm_86").sources["kernels.cu"]
    assert f"KEY_SIZE = {d}" in kernels and "flash<" in kernels


@cuda_gpu.compiles()
@pytest.mark.parametrize("d", EQUAL)
def test_results_leave_as_tiles(d: int) -> None:
    """Those of a head are one store of a warpgroup."""
    args = tuple(x.bfloat16() for x in operands(130, 130, d, d))
    kernels = npu_compiler.compile(capture(Attention(True), args), target="cuda:sm_90").sources["kernels.cu"]
    assert "flash_wgmma<" in kernels and "TMA_STORE = true" in kernels


@cuda_gpu.compiles()
@pytest.mark.parametrize(
    ("d", "rows", "kernel"), [(64, 1, "flash_wgmma<"), (64, 70, "flash<"), (256, 70, "flash_wgmma<")]
)
def test_masks_take_the_faster_kernel(d: int, rows: int, kernel: str) -> None:
    args = (*(x.half() for x in operands(70, 150, d, d)), torch.randn(2, 1, rows, 150))
    kernels = npu_compiler.compile(capture(Masked(), args), target="cuda:sm_90").sources["kernels.cu"]
    assert kernel in kernels and "MASKED = true" in kernels


@cuda_gpu.compiles()
@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_86"])
def test_few_queries_share_tiles(target: str) -> None:
    """Workgroups share the keys, and the rows of heads that share keys are in one tile."""
    args = tuple(x.bfloat16() for x in operands(3, 900, 64, 64))
    program = npu_compiler.compile(capture(Attention(False), args), target=target)
    assert [c.kind for c in program.entries["main"].calls] == ["attention", "combine_attention"]
    kernels = program.sources["kernels.cu"]
    assert "flash<" in kernels and "GROUP = 2" in kernels and "SHARES = 4" in kernels


@cuda_gpu.compiles()
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (20, 128), (128, 8)])
def test_float32_is_split(d: int, dv: int) -> None:
    program = npu_compiler.compile(capture(Attention(True), operands(40, 40, d, dv)), target="cuda:sm_86")
    assert "flash_tf32<" in program.sources["kernels.cu"]


def check(model: nn.Module, run: Args, dtype: str) -> None:
    expect(model, [run], dtype).check(compile_and_run(model, [run], dtype, cuda_gpu.backend()))


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize(("queries", "keys"), FEW)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (40, 72), (160, 24)])
def test_few_queries_pass_the_gate(queries: int, keys: int, d: int, dv: int) -> None:
    for causal in (False, True):
        check(Attention(causal), operands(queries, keys, d, dv), "bfloat16")


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(3, 900), (3, 903), (17, 904), (70, 150)])
def test_masks_of_each_head(queries: int, keys: int, boolean: bool) -> None:
    """Some rows of the mask admit no key, in one part of the keys or in all."""
    q, k, v = operands(queries, keys, 64, 64)
    mask = torch.rand(2, 4, queries, keys) > 0.5
    mask[0, 1, 0], mask[1, 2, :, : keys // 2] = False, False
    given = mask if boolean else torch.where(mask, torch.randn(mask.shape), -torch.inf)
    for dtype in ("float16", "float32"):
        check(AnyMask(), (q, k, v, given), dtype)


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (20, 128), (128, 8), (100, 40)])
def test_float32_passes_the_gate(d: int, dv: int, causal: bool) -> None:
    for lengths in ((130, 130), (40, 1900)):
        check(Attention(causal), operands(*lengths, d, dv), "float32")


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [*SIZES, *((d, d) for d in EQUAL)])
def test_it_passes_the_gate(d: int, dv: int, causal: bool) -> None:
    runs = [operands(*lengths, d, dv) for lengths in ((130, 130), (40, 200))[: 1 if causal else 2]]
    for run in runs:
        wanted = expect(Attention(causal), [run], "bfloat16")
        wanted.check(compile_and_run(Attention(causal), [run], "bfloat16", cuda_gpu.backend()))


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("d", [40, 72, 128, 256])
def test_masked_heads_pass_the_gate(d: int, rows: int) -> None:
    run = (*operands(70, 150, d, d), torch.randn(2, 1, rows, 150))
    expect(Masked(), [run], "float16").check(compile_and_run(Masked(), [run], "float16", cuda_gpu.backend()))
