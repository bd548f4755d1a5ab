"""Execution times of a partitioned model: transfers, every op on the host, every kernel on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.partitioning.plan import Partition, PartitionPlan, TransferOp

from ..profiler import check_counts, elapsed

if TYPE_CHECKING:
    from .dag_executor import DAGExecutor


@dataclass
class StepTimes:
    """The times of one step of a plan, in seconds.

    ``begin`` and ``end`` are float64 [runs], counted from the start of each run. ``marks`` is float64 [runs, n + 1],
    counted from the start of the step: its beginning and the end of each of its n kernels or ops; a transfer has none.
    """

    step: Partition | TransferOp
    runs: int
    parts: int
    begin: np.ndarray = field(init=False)
    end: np.ndarray = field(init=False)
    marks: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.begin, self.end = np.zeros(self.runs), np.zeros(self.runs)
        self.marks = np.zeros((self.runs, self.parts + 1))


@dataclass
class PlanProfile:
    """The times of a partitioned model. ``whole`` is float64 [runs]: seconds of runs in which no step is timed."""

    plan: PartitionPlan
    steps: list[StepTimes]
    whole: np.ndarray

    @property
    def runs(self) -> int:
        """The number of measured runs."""
        return len(self.whole)

    @property
    def seconds(self) -> float:
        """Median time of a run in which every step is timed."""
        return float(np.median(self.steps[-1].end)) if self.steps else 0.0


def profile_plan(executor: DAGExecutor, inputs: Sequence[Any], runs: int, warmup: int) -> PlanProfile:
    """Run the plan ``warmup`` times, then ``runs`` times as a whole, then ``runs`` times step by step."""
    check_counts(runs, warmup)
    for _ in range(warmup):
        executor.execute(inputs)
    whole = np.array([elapsed(lambda: executor.execute(inputs)) for _ in range(runs)])
    steps = [StepTimes(step, runs, _parts(executor, step)) for step in executor.plan.steps]
    for number in range(runs):
        executor.run_steps(inputs, Clock(executor, steps, number))
    return PlanProfile(executor.plan, steps, whole)


def _parts(executor: DAGExecutor, step: Partition | TransferOp) -> int:
    if isinstance(step, TransferOp):
        return 0
    return len(executor.executors[step.id].entry.calls) if step.id in executor.executors else len(step.ir.nodes)


class Clock:
    """Times the steps of run number ``number``. The device is idle when a step begins and when it ends."""

    def __init__(self, executor: DAGExecutor, steps: Sequence[StepTimes], number: int):
        self._executor, self._steps, self._number = executor, steps, number
        self._start = time.perf_counter()

    def begin(self, at: int) -> np.ndarray:
        """Begin step ``at``. Return the array for the times of its kernels or ops, in seconds of any clock."""
        self._executor.backend.synchronize()
        step = self._steps[at]
        step.begin[self._number] = time.perf_counter() - self._start
        return step.marks[self._number]

    def end(self, at: int) -> None:
        """End step ``at``."""
        self._executor.backend.synchronize()
        step = self._steps[at]
        step.end[self._number] = time.perf_counter() - self._start
        step.marks[self._number] -= step.marks[self._number][0]
