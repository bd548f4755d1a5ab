"""Sizes around the edges of tiles, splits and teams, on the SIMT kernels as Metal runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_compiler import target_config
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.targets.simt.kernels import depthwise, gemm, loops, transposed
from npu_runtime import Executor

from ...models.gate import Args, cast, compile_and_run, compile_whole, expect, run
from ...support.metal_backend import EmulatedMetal
from ...support.sweeps import FULL, IN_FULL


class Call(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


def product(m: int, n: int, k: int, batch: int = 0) -> tuple[nn.Module, Args]:
    """A product with bias, activation and residual behind it."""
    lead = (batch,) if batch else ()
    shapes = ((*lead, m, k), (*lead, k, n), (n,), (*lead, m, n))
    return Call(lambda x, w, b, r: F.gelu(x @ w + b) + r), tuple(torch.randn(s) for s in shapes)


def linear(m: int, n: int, k: int) -> tuple[nn.Module, Args]:
    return nn.Sequential(nn.LayerNorm(k), nn.Linear(k, n), nn.SiLU()), (torch.randn(m, k),)


def conv(size: int, channels: int, out: int, **options: Any) -> tuple[nn.Module, Args]:
    return nn.Sequential(nn.Conv2d(channels, out, **options), nn.ReLU()), (torch.randn(2, channels, size, size),)


def attention(queries: int, keys: int, heads: int, shared: int, width: int, causal: bool) -> tuple[nn.Module, Args]:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared != heads)

    shapes = ((2, heads, queries, width), (2, shared, keys, width), (2, shared, keys, width))
    return Call(f), tuple(torch.randn(s) for s in shapes)


Cases = dict[str, Callable[[], tuple[nn.Module, Args]]]

CASES: Cases = {
    "product-65x130x72": lambda: product(65, 130, 72),
    "product-5x33x200": lambda: product(5, 33, 200),
    "product-64x64x32": lambda: product(64, 64, 32),
    "product-batch": lambda: product(17, 40, 24, batch=3),
    "row-1x65x256": lambda: linear(1, 65, 256),
    "row-1x48x2056": lambda: linear(1, 48, 2056),
    "rows-4x70x96": lambda: linear(4, 70, 96),
    "conv-3x3": lambda: conv(11, 16, 40, kernel_size=3, padding=1),
    "conv-odd-channels": lambda: conv(9, 5, 13, kernel_size=3, stride=2, dilation=2, padding=3),
    "conv-1x1": lambda: conv(9, 24, 72, kernel_size=1),
    "conv-groups": lambda: conv(8, 16, 32, kernel_size=(3, 2), groups=2),
    "conv-groups-of-4": lambda: conv(11, 24, 24, kernel_size=3, padding=1, groups=6),
    "conv-groups-of-3": lambda: conv(9, 12, 24, kernel_size=(3, 5), stride=2, dilation=(1, 2), padding=4, groups=4),
    "conv-depthwise": lambda: conv(10, 24, 24, kernel_size=5, padding=2, groups=24),
    "attention-decode": lambda: attention(1, 301, 6, 2, 64, False),
    "attention-prefill": lambda: attention(37, 37, 4, 4, 32, True),
    "attention-wide": lambda: attention(3, 70, 2, 1, 100, False),
    "softmax-3000": lambda: (Call(lambda x: torch.softmax(x, -1)), (torch.randn(3, 3000),)),
    "softmax-columns": lambda: (Call(lambda x: torch.softmax(x, 0)), (torch.randn(300, 70),)),
    "sums-of-20000": lambda: (Call(lambda x: (x * x + x).sum(-1)), (torch.randn(16, 20000),)),
    "sum-of-all": lambda: (Call(lambda x: ((x * x).sum().sqrt() * x.amax()).view(1)), (torch.randn(61, 3, 257),)),
    "sums-of-few-columns": lambda: (Call(lambda x, y: x.mean((0, 2)) + y), (torch.randn(64, 3, 257), torch.randn(3))),
    "largest-of-all": lambda: (Call(lambda x: (x.amin() - x.amax(0)).view(1)), (torch.randn(30011),)),
    "group-norm": lambda: (nn.GroupNorm(3, 12), (torch.randn(2, 12, 17, 5),)),
}


# float16 takes the paths of bfloat16.
dtypes = pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=IN_FULL), "bfloat16"])


def shared(cases: Cases, dtype: str) -> Cases:
    """The cases that ``dtype`` has by default, half of them; float32 and bfloat16 take turns."""
    return cases if FULL else dict(list(cases.items())[dtype == "bfloat16" :: 2])


def checked(name: str, make: Callable[[], tuple[nn.Module, Args]], dtype: str) -> CompiledProgram:
    """The program of a case, after a run in shuffled order of threads, with float64 as the judge;
    ``NPU_CONFORMANCE=full`` also runs it in ascending order."""
    torch.manual_seed(1)
    model, inputs = make()
    low = getattr(torch, dtype)
    wanted, model, args = expect(model, [inputs], dtype), model.eval().to(low), cast(inputs, low)
    program = compile_whole(capture(model, args), target="metal")
    for order in ("ascending", "shuffled") if FULL else ("shuffled",):
        try:
            wanted.check(run(program, state_dict_numpy(model), [args], EmulatedMetal(order, seed=11)))
        except Exception as error:
            raise AssertionError(f"{name} {dtype} {order}: {error}") from error
    return program


@dtypes
def test_shape(dtype: str) -> None:
    for name, make in shared(CASES, dtype).items():
        checked(name, make, dtype)


FLOAT_PRODUCTS: Cases = {
    "product": lambda: product(131, 71, 37),
    "product-vectors": lambda: product(40, 136, 48),
    "product-transposed": lambda: (Call(lambda x, w: x.mT @ w.mT), (torch.randn(35, 66), torch.randn(34, 35))),
    "conv": lambda: conv(9, 12, 36, kernel_size=3, padding=1),
    "conv-groups": lambda: conv(6, 64, 72, kernel_size=(3, 2), groups=2),
}


# The second stands for the largest of the table, which needs more shared memory than Apple's GPUs have.
SIMPLE_TILES = [gemm.SimpleTile(*sizes, 1.0) for sizes in ((64, 64, 4, 4), (64, 64, 8, 8), (128, 32, 4, 4))]


@pytest.mark.parametrize("tile", SIMPLE_TILES, ids=lambda t: f"{t.m}x{t.n}-{t.rows}x{t.columns}")
def test_tiles_of_float_arithmetic(tile: gemm.SimpleTile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "choose_simple_tile", lambda p, dialect: tile)
    for name, make in FLOAT_PRODUCTS.items():
        source = "".join(checked(name, make, "float32").sources.values())
        assert f"TILE_M = {tile.m}, TILE_N = {tile.n}" in source, name


def test_a_product_without_rows() -> None:
    model, args = Call(lambda x, w: (x @ w, x.sum(0) @ w)), (torch.zeros(0, 8), torch.randn(8, 3))
    program = compile_whole(capture(model, args), target="metal")
    executor = Executor(program, {}, EmulatedMetal())
    none, zeros = executor.run([a.numpy() for a in args]).values()
    assert none.shape == (0, 3) and not zeros.any()


def rotary(rows: int, width: int) -> tuple[nn.Module, Args]:
    """Each half of a row needs the other."""
    half = width // 2

    def f(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s

    return Call(f), (torch.randn(2, rows, width), torch.randn(rows, width), torch.randn(rows, width))


VECTORS: Cases = {
    "rotary": lambda: rotary(5, 32),
    "rotary-odd-half": lambda: rotary(5, 12),
    "max-pool": lambda: (nn.Sequential(nn.Conv2d(4, 16, 1), nn.MaxPool2d(3, 2, 1)), (torch.randn(1, 4, 9, 9),)),
    "mean-pool": lambda: (nn.Sequential(nn.Conv2d(4, 16, 1), nn.AvgPool2d(3, 2, 1)), (torch.randn(1, 4, 9, 9),)),
    "column-sums": lambda: (Call(lambda x: x.sum(1)), (torch.randn(3, 7, 24),)),
    "norm-of-a-few-rows": lambda: (nn.LayerNorm(1536), (torch.randn(5, 1536),)),
    "image": lambda: (nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU()), (torch.randn(2, 3, 13, 15),)),
    "image-3x3": lambda: (nn.Conv2d(1, 8, 3, 2), (torch.randn(1, 1, 12, 12),)),
    "images": lambda: (nn.Conv2d(3, 16, 7, 2, 3), (torch.randn(8, 3, 13, 15),)),
    "depthwise": lambda: conv(10, 24, 24, kernel_size=5, padding=2, groups=24),
    "depthwise-stride": lambda: conv(13, 12, 12, kernel_size=3, stride=2, dilation=2, padding=1, groups=12),
    "grid": lambda: (Call(F.grid_sample), (torch.randn(2, 4, 5, 6), torch.rand(2, 7, 9, 2) * 3 - 1.5)),
    "repeated": lambda: (nn.Upsample(scale_factor=(2, 1, 3)), (torch.randn(1, 3, 3, 4, 5),)),
    "enlarged": lambda: (nn.Upsample((7, 12)), (torch.randn(1, 3, 5, 5),)),
    "differences": lambda: (Call(lambda x: (x.diff(), x[0].diff())), (torch.randn(4, 300),)),
    "pixels": lambda: (Call(lambda x: F.pad(x, (1, 2, 3, 0)).permute(0, 2, 3, 1) * 2), (torch.randn(4, 4, 9, 21),)),
}


@dtypes
def test_threads_that_take_vectors(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where rows and vectors are many, and images as rows of pixels."""
    monkeypatch.setattr(depthwise, "RESIDENT", 0)
    monkeypatch.setattr(loops, "VECTOR_ROWS", 1)
    monkeypatch.setattr(loops, "MIN_UNROLLED_VECTORS", 1)
    rows = replace(target_config.target_config("metal"), image_row=32)
    monkeypatch.setitem(target_config._registered, "metal", rows)
    for name, make in shared(VECTORS, dtype).items():
        torch.manual_seed(1)
        model, inputs = make()
        try:
            expect(model, [inputs], dtype).check(compile_and_run(model, [inputs], dtype, EmulatedMetal("shuffled", 5)))
        except Exception as error:
            raise AssertionError(f"{name} {dtype}: {error}") from error


TRANSPOSED: Cases = {
    "one": lambda: (Call(lambda x: x.transpose(1, 2) * 2), (torch.randn(3, 70, 33),)),
    "two and a row": lambda: (
        Call(lambda x, y, z: x.mT + y.mT * z), (torch.randn(65, 40), torch.randn(65, 40), torch.randn(40, 65)),
    ),
    "bool": lambda: (Call(lambda x: torch.where((x > 0).mT, 1.0, x.mT)), (torch.randn(70, 66),)),
    "images": lambda: (nn.Conv2d(16, 24, 3, padding=1), (torch.randn(2, 16, 9, 7),)),
    "depthwise": lambda: (nn.Conv2d(20, 20, 6, groups=20), (torch.randn(2, 20, 14, 12),)),  # 36 terms
}  # fmt: skip


@dtypes
def test_squares_of_transposed_points(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where points are many."""
    monkeypatch.setattr(transposed, "MIN_POINTS", 1)
    monkeypatch.setattr(transposed, "MIN_RESULTS", 1)
    for name, make in shared(TRANSPOSED, dtype).items():
        source = "".join(checked(name, make, dtype).sources.values())
        assert "square0" in source, name
        assert ("_transposed_" in source) == (name in ("images", "depthwise")), name
