"""Scatters with many writes to one place: the order is that of the source, on the CPU's threads and on SIMT kernels, or
sums do not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.targets.simt.rewrites.scatter_sums import MIN_UPDATES
from npu_runtime import CPUBackend, Executor
from npu_runtime.backends.base import Backend

from ...support import cuda_gpu
from ...support.metal_backend import EmulatedMetal

BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": lambda: CPUBackend(2),
    "metal": lambda: EmulatedMetal("shuffled", seed=2),
    "cuda": cuda_gpu.backend,
}
TARGETS = ["cpu", "metal", pytest.param("cuda", marks=cuda_gpu.marks())]


SUMS = 4  # of the results of Scatters


class Scatters(nn.Module):
    """A place for each element, in columns, in rows and flat; a place for each row; sums, and what comes last."""

    def forward(
        self, base: torch.Tensor, places: torch.Tensor, source: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        flat = base.flatten()
        return (
            base.scatter_add(0, places, source),
            base.t().scatter_add(1, places.t(), source.t()),
            flat.scatter_add(0, places.flatten(), source.flatten()),
            base.index_add(0, rows, source),
            base.scatter(0, places, source),
            flat.scatter(0, places.flatten(), source.flatten()),
        )


def in_order(base: np.ndarray, places: np.ndarray, source: np.ndarray, add: bool) -> np.ndarray:
    """Along the first dim, in the order of the source."""
    out = base.copy()
    columns = np.indices(places.shape)[1:]
    for n, place in enumerate(places):
        at = (place, *(c[n] for c in columns))
        out[at] = out[at] + source[n] if add else source[n]
    return out


def wanted(base: np.ndarray, places: np.ndarray, source: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    flat = base.reshape(-1), places.reshape(-1), source.reshape(-1)
    every = np.broadcast_to(rows[:, None], source.shape)
    sums = in_order(base, places, source, True)
    return [
        sums, sums.T, in_order(*flat, True), in_order(base, every, source, True), in_order(base, places, source, False),
        in_order(*flat, False),
    ]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("turns", "width"), [(7, 5), (340, 19), (1000, 70)])
def test_writes_to_one_place_keep_their_order(turns: int, width: int, target: str) -> None:
    """Bit for bit, because float32 sums depend on their order, except for sums of many updates on a GPU. 1000 x 70
    places are too many to compare with each other."""
    rng = np.random.default_rng(turns)
    base, source = (rng.standard_normal((n, width)).astype(np.float32) for n in (13, turns))
    places, rows = rng.integers(0, 13, (turns, width)), rng.integers(0, 13, turns)
    inputs = [base, places, source, rows]
    program = npu_compiler.compile(capture(Scatters(), tuple(map(torch.from_numpy, inputs))), target)
    results = Executor(program, None, BACKENDS[target]()).run(inputs).values()
    exact = wanted(base.astype(np.float64), places, source.astype(np.float64), rows)
    for n, (found, in_float, sums) in enumerate(zip(results, wanted(*inputs), exact, strict=True)):
        if target != "cpu" and n < SUMS and (turns >= MIN_UPDATES or n == 2):
            assert np.square(found - sums).mean() <= 1.1**2 * np.square(in_float - sums).mean()
        else:
            np.testing.assert_array_equal(found, in_float)


class Sums(nn.Module):
    """Into 13 places of each of 19 columns, into 300 in one dim, and integers."""

    def forward(
        self, base: torch.Tensor, rows: torch.Tensor, source: torch.Tensor, integers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (
            base.index_add(0, rows, source),
            base.index_put((rows,), source, accumulate=True),
            base.new_zeros(300).scatter_add(0, (rows[:, None] + torch.arange(19)).flatten(), source.flatten()),
            base.scatter_reduce(0, rows[:, None].expand(-1, 19), source, "mean"),
            integers[:13].index_add(0, rows, integers),
            integers[:13].int().index_add(0, rows, integers.int()),
        )


@pytest.mark.parametrize("target", TARGETS[1:])
def test_sums_on_a_gpu_do_not_depend_on_the_order(target: str) -> None:
    """Also if updates of a place differ by many orders of magnitude, are infinite or NaN."""
    rng = np.random.default_rng(3)
    base, source = (rng.standard_normal((n, 19)).astype(np.float32) for n in (13, 500))
    rows, integers = rng.integers(0, 13, 500), rng.integers(-(2**62), 2**62, (500, 19))
    source[:, 1] *= 10.0 ** rng.integers(-30, 30, 500)
    source[:50, 2], source[50:100, 3], source[9, 4], source[7, 5] = np.inf, -np.inf, np.nan, 1e-42
    source[100:120, 2], base[3, 6], base[4, 7], source[:, 8] = -np.inf, np.inf, np.nan, 0
    inputs = [base, rows, source, integers]
    program = npu_compiler.compile(capture(Sums(), tuple(map(torch.from_numpy, inputs))), target)
    run = Executor(program, None, BACKENDS[target]())
    found = [np.array(y) for y in run.run(inputs).values()]
    order = rng.permutation(500)
    again = run.run([base, rows[order], source[order], integers[order]]).values()
    arguments = [torch.from_numpy(a.astype(np.float64) if a.dtype == np.float32 else a) for a in inputs]
    with np.errstate(invalid="ignore"):
        for y, z, exact in zip(found, again, Sums()(*arguments), strict=True):
            if y.dtype == np.float32:
                np.testing.assert_array_equal(y, z)
                np.testing.assert_allclose(y, exact.numpy(), 3e-7, 2e-6)
            else:
                np.testing.assert_array_equal(y, exact.numpy())
