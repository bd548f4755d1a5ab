"""Execution times of an entry point, kernel by kernel. ``npusim.profile`` makes reports of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support.errors import ConfigError
from npu_compiler.support.text import html_table, html_text, si, table

_HEADER = ("#", "kernel", "kind", "µs", "share", "GFLOP/s", "GB/s", "stands for")


class Run(Protocol):
    """A run that is bound to its inputs and outputs, such as ``BoundRun``."""

    def __call__(self, times: np.ndarray | None = None) -> None: ...

    def finish(self) -> None:
        """Wait for the end of the run."""


@dataclass(frozen=True)
class KernelProfile:
    """One kernel. ``seconds`` is the median over the runs; ``share`` is its part of the sum of all medians, 0 to 1."""

    index: int
    name: str
    kind: str
    sources: tuple[str, ...]
    seconds: float
    share: float
    flops: int
    bytes: int

    @property
    def gflops(self) -> float:
        """GFLOP/s."""
        return self.flops / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def gbytes(self) -> float:
        """GB/s, counting every operand once."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class EntryProfile:
    """The times of an entry point.

    ``times`` is float64 [runs, kernels + 1]: the start of each run and the end of each kernel, in seconds. ``whole`` is
    float64 [runs]: seconds of whole runs in which no kernel is timed, as the host sees them.
    """

    def __init__(self, program: CompiledProgram, entry: EntryPoint, times: np.ndarray, whole: np.ndarray):
        self.program, self.entry, self.times, self.whole = program, entry, times, whole

    @property
    def runs(self) -> int:
        """The number of measured runs."""
        return len(self.times)

    @property
    def spans(self) -> np.ndarray:
        """Seconds of each kernel in each run: float64 [runs, kernels]."""
        return np.diff(self.times, axis=1)

    @property
    def seconds(self) -> float:
        """Median time of a run in which kernels are timed."""
        return float(np.median(self.times[:, -1] - self.times[:, 0])) if self.runs else 0.0

    @property
    def rows(self) -> list[KernelProfile]:
        """The kernels in launch order."""
        medians = np.median(self.spans, axis=0) if self.runs else np.zeros(len(self.entry.calls))
        total = float(medians.sum()) or 1.0
        return [
            KernelProfile(i, c.name, c.kind, c.sources, s, s / total, c.flops, c.bytes_read + c.bytes_written)
            for i, (c, s) in enumerate(zip(self.entry.calls, medians.tolist(), strict=True))
        ]

    def summary(self) -> str:
        """Return the totals in one line."""
        calls, seconds = self.entry.calls, self.seconds or 1.0
        flops, moved = sum(c.flops for c in calls), sum(c.bytes_read + c.bytes_written for c in calls)
        head = f"{self.program.name}/{self.entry.name}: {self.seconds * 1e3:.3f} ms (median of {self.runs} runs), "
        return f"{head}{len(calls)} kernels, {si(flops / seconds, 'FLOP/s')}, {si(moved / seconds, 'B/s')}"

    def table(self, limit: int | None = None) -> str:
        """Return the kernels as text, the slowest first; at most ``limit`` of them."""
        cells = self._cells()
        shown = cells if limit is None else cells[:limit]
        left = [f"  … {len(cells) - len(shown)} more"] if len(shown) < len(cells) else []
        return "\n".join([self.summary(), *table(_HEADER, shown), *left]) + "\n"

    def _cells(self) -> list[tuple[object, ...]]:
        return [
            (r.index, r.name, r.kind, f"{r.seconds * 1e6:.1f}", f"{r.share:.1%}", f"{r.gflops:.1f}", f"{r.gbytes:.1f}",
             ", ".join(r.sources)[:60])
            for r in sorted(self.rows, key=lambda r: -r.seconds)
        ]  # fmt: skip

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_text(self.summary()) + html_table(_HEADER, self._cells())


def measure(program: CompiledProgram, entry: EntryPoint, run: Run, runs: int, warmup: int) -> EntryProfile:
    """Call ``run`` ``warmup`` times, then ``runs`` times as a whole, then ``runs`` times kernel by kernel."""
    check_counts(runs, warmup)
    for _ in range(warmup):
        run()
        run.finish()

    def complete() -> None:
        run()
        run.finish()

    whole = np.array([elapsed(complete) for _ in range(runs)])
    times = np.zeros((runs, len(entry.calls) + 1))
    for row in times:
        run(row)
        run.finish()
    return EntryProfile(program, entry, times, whole)


def check_counts(runs: int, warmup: int) -> None:
    """Raise ``ConfigError`` unless there is at least one run and no negative number of warm-up runs."""
    if runs < 1 or warmup < 0:
        raise ConfigError(f"a profile needs runs >= 1 and warmup >= 0, not {runs} and {warmup}")


def elapsed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
