"""Scatters with many writes to one place: the order is that of the source, on the CPU's threads and on SIMT kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture
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
    """Bit for bit: float32 sums depend on their order. 1000 x 70 places are too many to compare with each other."""
    rng = np.random.default_rng(turns)
    base, source = (rng.standard_normal((n, width)).astype(np.float32) for n in (13, turns))
    places, rows = rng.integers(0, 13, (turns, width)), rng.integers(0, 13, turns)
    inputs = [base, places, source, rows]
    program = npu_compiler.compile(capture(Scatters(), tuple(map(torch.from_numpy, inputs))), target)
    results = Executor(program, None, BACKENDS[target]()).run(inputs).values()
    for found, exact in zip(results, wanted(*inputs), strict=True):
        np.testing.assert_array_equal(found, exact)
