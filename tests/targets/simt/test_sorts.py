"""Long rows sorted (the order of equals, of NaN and of infinities) and summed up, on the SIMT kernels and the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_runtime import CPUBackend, Executor
from npu_runtime.backends.base import Backend

from ...support import cuda_gpu
from ...support.metal_backend import EmulatedMetal

# shape, dim, k: a simd works on a row, from registers or from memory; a group does; rows are strided; sections are
# merged, of which the first may be short, and the last; parts of a subgroup, a subgroup or several sort a row
Case = tuple[tuple[int, ...], int, int]
CASES: list[Case] = [
    ((3, 70), -1, 2),
    ((200, 37), 0, 5),
    ((2, 1000, 3), 1, 31),
    ((1, 5003), -1, 4),
    ((4999, 2), 0, 3),
    ((5001, 2), 0, 40),
    ((2, 300), 1, 100),
    ((9, 5), 1, 5),
    ((2, 40), 1, 40),
    ((3, 600), 1, 600),
    ((1, 9001), -1, 300),
    ((2, 2500, 3), 1, 2500),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "uint8": torch.uint8}
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": CPUBackend,
    "metal": lambda: EmulatedMetal("shuffled", seed=2),
    "cuda": cuda_gpu.backend,
}
TARGETS = ["cpu", "metal", pytest.param("cuda", marks=cuda_gpu.marks())]


class TopK(nn.Module):
    """The largest, then the smallest of each input."""

    def __init__(self, cases: list[Case]):
        super().__init__()
        self.cases = cases

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for x, (_, dim, k) in zip(inputs, self.cases, strict=True):
            for largest in (True, False):
                results += torch.topk(x, k, dim, largest)
        return results


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Few different ones, so that many are equal."""
    x = torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(3))
    if not dtype.is_floating_point:
        return x.to(dtype)
    y = (x - 30).float()
    special = torch.rand(shape, generator=torch.Generator().manual_seed(4))
    for limit, value in ((0.02, torch.nan), (0.015, torch.inf), (0.01, -torch.inf), (0.005, -0.0)):
        y[special < limit] = value
    return y.to(dtype)


def check(cases: list[Case], inputs: list[torch.Tensor], target: str) -> None:
    """The order is that of a stable sort: of equals, the one that comes first."""
    program = npu_compiler.compile(capture(TopK(cases), tuple(inputs)), target)
    run = Executor(program, None, BACKENDS[target]())
    results = iter(run.run([tensor_to_numpy(x) for x in inputs]).values())
    for x, (_, dim, k) in zip(inputs, cases, strict=True):
        for largest in (True, False):
            order = torch.sort(x, dim=dim, descending=largest, stable=True)
            found, places = next(results), next(results)
            np.testing.assert_array_equal(places, order.indices.narrow(dim, 0, k).numpy())
            np.testing.assert_array_equal(found.astype(np.float64), order.values.narrow(dim, 0, k).double().numpy())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_few(dtype: str, target: str) -> None:
    check(CASES, [values(shape, DTYPES[dtype]) for shape, _, _ in CASES], target)


@pytest.mark.parametrize("target", [TARGETS[-1]])
def test_a_vocabulary(target: str) -> None:
    cases: list[Case] = [((1, 151_936), 1, 256), ((128, 1187), 0, 4), ((1_000_003,), 0, 1_000_003)]
    check(cases, [values(shape, torch.float32) for shape, _, _ in cases], target)


class Running(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.cumsum(1), x[..., 0].cumprod(1), x.cummax(1)[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_running_reductions_of_long_rows(dtype: str, target: str) -> None:
    x = torch.randint(0, 60, (2, 2600, 3), generator=torch.Generator().manual_seed(3)).to(DTYPES[dtype])
    x = x / 64 + 0.55 if dtype == "float32" else x
    program = npu_compiler.compile(capture(Running(), (x,)), target)
    sums, products, largest = Executor(program, None, BACKENDS[target]()).run([x.numpy()]).values()
    if dtype != "float32":
        np.testing.assert_array_equal(sums, x.cumsum(1).numpy())
        np.testing.assert_array_equal(products, x[..., 0].cumprod(1).numpy())
    else:  # PyTorch adds up in float64, which Metal does not have
        first, exact = x[..., 0], x.double()
        sums_of = (sums, x.cumsum(1), exact.cumsum(1))
        products_of = (products, first.cumprod(1), exact[..., 0].cumprod(1))
        for found, eager, wanted in (sums_of, products_of):
            error, usual = (np.abs(y / wanted.numpy() - 1).max() for y in (found, eager.numpy()))
            assert error <= 1.1 * usual + (1e-6 if target == "metal" else 0) * math.sqrt(x.shape[1])
    np.testing.assert_array_equal(largest, x.cummax(1)[0].numpy())


# shape, dim: rows in sections, whose last is shorter, by workgroups and by threads; a workgroup, a subgroup, or a
# thread has a row; rows that are not contiguous or not aligned
SCANNED = [((2, 30_001), 1), ((1, 17_000, 3), 1), ((2, 1500, 40), 1), ((700, 40), 1), ((40, 12), 0), ((3, 2050), 1)]


class Scans(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [y for x, (_, dim) in zip(inputs, SCANNED, strict=True) for y in (x.cumsum(dim), *x.cummax(dim))]


class Extremes(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [y for x in inputs for y in (*x.cummax(1), *x.cummin(1))]


@pytest.mark.parametrize("target", TARGETS)
def test_running_extremes_and_their_positions(target: str) -> None:
    """Of rows with equal elements and with NaN, whose last occurrence counts; on a GPU a pair is scanned at once."""
    rng = torch.Generator().manual_seed(7)
    inputs = tuple(torch.randint(-3, 4, s, generator=rng).float() for s in [(2, 99, 33), (3, 2050), (1, 17_000, 3)])
    inputs = tuple(torch.where(torch.rand(x.shape, generator=rng) < 1 / x.shape[1], torch.nan, x) for x in inputs)
    for x in inputs[:2]:
        x[0] = -torch.inf
    program = npu_compiler.compile(capture(Extremes(), inputs), target)
    if target != "cpu":
        assert {call.kind for call in program.entries["main"].calls} <= {"scan", "scan_totals"}
    results = Executor(program, None, BACKENDS[target]()).run([x.numpy() for x in inputs]).values()
    for found, exact in zip(results, Extremes()(*inputs), strict=True):
        np.testing.assert_array_equal(found, exact.numpy())


@pytest.mark.parametrize("target", TARGETS)
def test_scans_are_exact_in_integers(target: str) -> None:
    """Of 0 to 49, so that float32 sums are exact too, and half types round the same sums."""
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float32, torch.int64, torch.float16)
    rng = torch.Generator().manual_seed(5)
    inputs = tuple(torch.randint(0, 50, s, generator=rng).to(t) for (s, _), t in zip(SCANNED, dtypes, strict=True))
    program = npu_compiler.compile(capture(Scans(), inputs), target)
    results = Executor(program, None, BACKENDS[target]()).run([tensor_to_numpy(x) for x in inputs]).values()
    for found, exact in zip(results, Scans()(*inputs), strict=True):
        np.testing.assert_array_equal(found.astype(np.float64), exact.double().numpy())
