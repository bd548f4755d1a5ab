"""Wall times of calls, measured in turns so that disturbances of the machine affect all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.support import dtypes

if TYPE_CHECKING:
    from npu_runtime.executor import Executor

PERCENTILES = (10, 50, 90, 99)
_WARMUP = 3


@dataclass(frozen=True)
class Latencies:
    """Wall times of single calls, in seconds: float64[runs]."""

    seconds: np.ndarray

    def percentile(self, p: float) -> float:
        """Return the seconds that ``p`` percent of the calls did not exceed."""
        return float(np.percentile(self.seconds, p))

    @property
    def median(self) -> float:
        """Seconds."""
        return self.percentile(50)

    def to_dict(self, batch: int) -> dict[str, float]:
        """Return percentiles in milliseconds, the number of runs, and samples per second at the median."""
        times = {f"p{p}_ms": self.percentile(p) * 1e3 for p in PERCENTILES}
        return {**times, "runs": len(self.seconds), "per_second": batch / self.median}

    def row(self, name: str, batch: int) -> tuple[object, ...]:
        """Return a row of the table whose header is ``HEADER``."""
        times = (f"{self.percentile(p) * 1e3:.3f}" for p in PERCENTILES)
        return (name, *times, f"{batch / self.median:.1f}", len(self.seconds))


HEADER = ("", *(f"p{p} ms" for p in PERCENTILES), "per second", "runs")


def interleaved(calls: Mapping[str, Callable[[], Any]], seconds: float, least: int = 10) -> dict[str, Latencies]:
    """Call the functions in turns, for ``seconds`` in total but at least ``least`` times each, after a warm-up.
    Disturbances of the machine affect all of them alike."""
    for call in calls.values():
        for _ in range(_WARMUP):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: Latencies(np.array(t)) for name, t in times.items()}


def bound_call(executor: Executor, arrays: list[np.ndarray]) -> Callable[[], None]:
    """Return a call that runs an entry point on ``arrays``, with inputs and outputs in device memory, and waits for
    it."""
    backend = executor.backend
    outputs = [backend.allocate_zeros(s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.outputs]
    run = executor.bind([backend.allocate_buffer(a) for a in arrays], outputs)

    def call() -> None:
        run()
        run.finish()

    return call


def torch_call(module: Any, arrays: list[np.ndarray], threads: int) -> Callable[[], Any]:
    """Return a call of a PyTorch module on ``arrays`` with this number of threads, in inference mode."""
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(a) for a in arrays]

    def call() -> Any:
        with torch.inference_mode():
            return module(*tensors)

    return call
