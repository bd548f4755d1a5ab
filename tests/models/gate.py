"""The error gate for whole models: against float64 no worse than PyTorch eager in the same dtype."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_compiler.ir import IRGraph
from npu_compiler.partitioner import NPU
from npu_runtime import Backend, CPUBackend, Executor

Args = tuple[Any, ...]  # of one call: tensors, also nested

ULPS = 0.25  # of the result's rms are always allowed: rounding the result once costs 0.29


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def row_largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(-1).mean())


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


# Two correct results round independently. That averages out over many elements; the largest error of all is a single
# draw, often from the one input for which the model is ill-conditioned.
MEASURES = (("rms", rms, 1.1), ("mean of the rows' largest", row_largest, 1.1), ("largest", largest, 1.5))


@dataclass(frozen=True)
class Expected:
    """What PyTorch gives for a set of inputs: float64 arrays [inputs, ...], one per output."""

    dtype: str
    exact: list[np.ndarray]
    eager: list[np.ndarray]

    def ratios(self, results: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Our error over eager's for each output and measure; errors below the floor count as 0."""
        found = []
        for exact, eager, ours in zip(self.exact, self.eager, results, strict=True):
            floor = ULPS * torch.finfo(getattr(torch, self.dtype)).eps * rms(exact)
            pairs = {name: (f(ours - exact), f(eager - exact)) for name, f, _ in MEASURES}
            found.append({name: max(a - floor, 0) / max(b, 1e-300) for name, (a, b) in pairs.items()})
        return found

    def check(self, results: Sequence[np.ndarray], tail: float = 1.0) -> None:
        """The gate, for every output; ``tail`` is more room for the largest error, where errors have heavy tails."""
        for i, (exact, ours) in enumerate(zip(self.exact, results, strict=True)):
            assert np.isfinite(exact).all() and exact.any(), f"output {i}: the reference means nothing"
            assert ours.shape == exact.shape and np.isfinite(ours).all(), f"output {i}: a wrong shape, or not finite"
        for i, ratios in enumerate(self.ratios(results)):
            room = {n: factor * tail if n == "largest" else factor for n, _, factor in MEASURES}
            too_large = {n: ratios[n] for n in room if not ratios[n] <= room[n]}
            assert not too_large, f"output {i}: errors over eager's: {ratios}"

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
