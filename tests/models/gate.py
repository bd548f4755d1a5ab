"""The error gate: how far a result may be from the exact one. Every test of a whole model uses this rule alone.

The yardstick is PyTorch eager in the same dtype, on the same CPU. Its errors against float64 and ours are two draws of
rounding noise: a result that is as good as eager's is not the same result, and on another CPU (other vector lengths,
other orders of a sum) both are drawn anew. What a gate may rely on are therefore statistics of the noise, not single
draws. The rule, for errors e of ours and f of eager's, each [..., row length]:

1. **Scale.** rms(e) <= 1.1 x rms(f), plus the uncertainty of that ratio: four standard errors,
   4 x sqrt((kurtosis(f) - 1) / 2N) for N independent errors. A row counts as 64 at most, because errors of a row have
   common causes. 64 rows of Gaussian errors add 6 %; the kurtosis says how many errors really count, so it adds more
   where a few ill-conditioned ones make up the sum.
2. **Extremes.** No row and no element may stick out: with s = 1.1 x the rms of eager's worst row (rows differ in
   condition, and eager's draw shows by how much), the largest rms of any of G groups of n errors is at most
   s x (1 + (sqrt(2 ln G) + 4) / sqrt(min(n, 64))). sqrt(2 ln G) is where the largest of G Gaussian draws lies; 4 more
   standard deviations make a false alarm negligible. A group is a row, or an element (n = 1). Where eager itself has
   heavier tails than that, 4.4 x its largest error is the bound for elements.

Errors below a quarter of the unit in the last place of the result's rms pass in any case. ``test_gate.py`` shows both
sides: noise of many kinds, drawn 1,000 times, raises no alarm; one wrong element, one wrong row, a lost bit of
precision and a factor of 1.3 do. Single operators have no need of statistics: ``conformance/cases.py`` bounds each of
their elements by units in the last place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_compiler.partitioning.plan import NPU
from npu_runtime import Backend, CPUBackend, Executor

Args = tuple[Any, ...]  # of one call: tensors, also nested

ULPS = 0.25  # of the result's rms are always allowed: rounding the result once costs 0.29


SCALE = 1.1  # of errors, over eager's
SIGMAS = 4  # standard deviations for which chance may account
TAIL = 4  # of the largest error over eager's largest, where that is the larger bound
ROW = 64  # errors in a row that count as independent, at most


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def row_rms(x: np.ndarray) -> np.ndarray:
    """The rms of each row, that is of each vector along the last dim."""
    return np.sqrt(np.mean(np.square(np.atleast_1d(x)), axis=-1)).reshape(-1)


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def kurtosis(x: np.ndarray) -> float:
    """E[x^4] / E[x^2]^2: 3 for Gaussian errors, up to x.size if a single one makes up the sum."""
    squares = np.square(x / (largest(x) or 1.0))
    mean = float(squares.mean())
    return float(np.square(squares).mean()) / mean**2 if mean else 1.0


def scale_room(eager: np.ndarray) -> float:
    """What rms(e) / rms(f) may be. A vector is a row of its own for each element."""
    row = eager.shape[-1] if eager.ndim > 1 else 1
    count = eager.size // row * min(row, ROW)
    return SCALE * (1 + SIGMAS * math.sqrt((kurtosis(eager) - 1) / (2 * count)))


def peak_room(groups: int, size: int) -> float:
    """What the rms of the worst of ``groups`` groups of ``size`` errors may be over the scale of eager's worst row."""
    return SCALE * (1 + (math.sqrt(2 * math.log(groups)) + SIGMAS) / math.sqrt(min(size, ROW)))


@dataclass(frozen=True)
class Measure:
    """One statistic of our errors, its bound, and what it is for eager's."""

    ours: float
    allowed: float
    eager: float


def measure(ours: np.ndarray, eager: np.ndarray) -> dict[str, Measure]:
    """The statistics of the rule for errors ``ours`` and ``eager`` of the same shape."""
    mine, theirs = row_rms(ours), row_rms(eager)
    worst = float(theirs.max())
    peak = max(worst * peak_room(ours.size, 1), SCALE * TAIL * largest(eager))
    rows = min(worst * peak_room(mine.size, ours.size // mine.size), peak)
    return {
        "rms": Measure(rms(ours), rms(eager) * scale_room(eager), rms(eager)),
        "worst row": Measure(float(mine.max()), rows, worst),
        "largest": Measure(largest(ours), peak, largest(eager)),
    }


@dataclass(frozen=True)
class Expected:
    """What PyTorch gives for a set of inputs: float64 arrays [inputs, ...], one per output."""

    dtype: str
    exact: list[np.ndarray]
    eager: list[np.ndarray]

    def errors(self, results: Sequence[np.ndarray]) -> list[dict[str, Measure]]:
        """The statistics of each output's errors."""
        return [
            measure(ours - exact, eager - exact)
            for exact, eager, ours in zip(self.exact, self.eager, results, strict=True)
        ]

    def check(self, results: Sequence[np.ndarray]) -> None:
        """The gate, for every output."""
        for i, (exact, ours) in enumerate(zip(self.exact, results, strict=True)):
            assert np.isfinite(exact).all() and exact.any(), f"output {i}: the reference means nothing"
            assert ours.shape == exact.shape and np.isfinite(ours).all(), f"output {i}: a wrong shape, or not finite"
        for i, (exact, found) in enumerate(zip(self.exact, self.errors(results), strict=True)):
            floor = ULPS * torch.finfo(getattr(torch, self.dtype)).eps * rms(exact)
            too_large = [name for name, m in found.items() if not m.ours <= m.allowed + floor]
            assert not too_large, f"output {i}: {', '.join(too_large)} of the errors exceed what eager's allow: {found}"

    def check_ranking(self, results: Sequence[np.ndarray], output: int = 0, margin: float | None = None) -> None:
        """Argmax and top-5 set of each row, where the margin exceeds what errors of eager's size could turn around."""
        exact, ours = (x[output].reshape(-1, x[output].shape[-1]) for x in (self.exact, results))
        margin = 6 * rms(self.eager[output] - self.exact[output]) if margin is None else margin
        for wanted, found in zip(exact, ours, strict=True):
            order, mine = np.argsort(-wanted), np.argsort(-found)
            for k in (1, 5):
                if wanted[order[k - 1]] - wanted[order[k]] > margin:
                    assert set(mine[:k]) == set(order[:k]), f"top-{k}: {mine[:k]}, float64 has {order[:k]}"


def cast(args: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in ``dtype``; everything else as it is."""
    return pytree.tree_map(lambda a: a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a, args)


def _outputs(model: nn.Module, args: Args) -> list[np.ndarray]:
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(*args))
    return [t.double().numpy() for t in leaves if isinstance(t, torch.Tensor)]


def join(runs: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The runs' outputs, joined along the batch, in float64."""
    return [np.concatenate([p.astype(np.float64) for p in parts]) for parts in zip(*runs, strict=True)]


def expect(model: nn.Module, runs: Sequence[Args], dtype: str, rounded: bool = True) -> Expected:
    """Eager's results in ``dtype`` and those in float64, both from parameters and inputs as ``dtype`` holds them; with
    ``rounded`` False, float64 has them as they are given."""
    low = getattr(torch, dtype)
    eager = copy.deepcopy(model).eval().to(low)
    wide = copy.deepcopy(eager if rounded else model).eval().double()
    exact = [_outputs(wide, cast(cast(args, low) if rounded else args, torch.float64)) for args in runs]
    return Expected(dtype, join(exact), join([_outputs(eager, cast(args, low)) for args in runs]))


def run(
    program: CompiledProgram, weights: Mapping[str, np.ndarray], runs: Sequence[Args], backend: Backend | None = None
) -> list[np.ndarray]:
    """Our outputs for the tensors of each run's arguments, joined; on the CPU if no ``backend`` is given."""
    executor = Executor(program, weights, backend or CPUBackend())
    arrays = [[tensor_to_numpy(a) for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)] for args in runs]
    return join([list(executor.run(a).values()) for a in arrays])


def check_sums(model: nn.Module, x: torch.Tensor, target: str = "cpu") -> CompiledProgram:
    """Check float32 results of one input by the rule of scale alone, without the uncertainty of the ratio. Return the
    program. ``model`` becomes float64."""
    program = compile_whole(capture(model, (x,)), target=target)
    (result,) = run(program, state_dict_numpy(model), [(x,)])
    with torch.no_grad():
        eager, exact = model(x).numpy(), model.double()(x.double()).numpy()
    assert rms(result.astype(np.float64) - exact) <= SCALE * rms(eager.astype(np.float64) - exact)
    return program


def compile_whole(ir: IRGraph, dtype: str | None = None, target: str = "cpu") -> CompiledProgram:
    """One program for the whole model, which the partitioner agrees with."""
    plan = npu_compiler.partition(ir, target=target)
    assert [p.device for p in plan.partitions] == [NPU], str(plan)
    assert not plan.transfers and not plan.reasons
    return npu_compiler.compile(ir, target, dtype)


def compile_and_run(
    model: nn.Module, runs: Sequence[Args], dtype: str, backend: Backend | None = None
) -> list[np.ndarray]:
    """``model`` in ``dtype``, compiled for ``backend``'s target and the shapes of the first run."""
    low = getattr(torch, dtype)
    ours = copy.deepcopy(model).eval().to(low)
    inputs = [cast(args, low) for args in runs]
    program = compile_whole(capture(ours, inputs[0]), target=backend.name if backend else "cpu")
    assert program.dtype == dtype
    return run(program, state_dict_numpy(ours), inputs, backend)
