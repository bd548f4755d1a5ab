"""Execution times of a program, kernel by kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support.errors import ConfigError
from npu_compiler.support.text import si, table


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


class Profiler:
    """The result of a measurement.

    ``times`` is float64 [runs, kernels + 1]: the start of each run and the end of each kernel, in seconds.
    """

    def __init__(self, name: str, entry: EntryPoint, times: np.ndarray):
        self.name, self.entry, self.times = name, entry, times
        spans = np.diff(times, axis=1)
        medians = np.median(spans, axis=0) if len(spans) else np.zeros(len(entry.calls))
        total = float(medians.sum()) or 1.0
        self.rows = [
            KernelProfile(i, c.name, c.kind, c.sources, s, s / total, c.flops, c.bytes_read + c.bytes_written)
            for i, (c, s) in enumerate(zip(entry.calls, medians.tolist(), strict=True))
        ]

    @property
    def runs(self) -> int:
        return len(self.times)

    @property
    def total_seconds(self) -> float:
        """Median time of a whole run."""
        return float(np.median(self.times[:, -1] - self.times[:, 0])) if self.runs else 0.0

    def table(self, limit: int | None = None) -> str:
        """Return the kernels as text, the slowest first; at most ``limit`` of them."""
        rows = sorted(self.rows, key=lambda r: -r.seconds)
        shown = rows if limit is None else rows[:limit]
        cells = [
            (r.index, r.name, r.kind, f"{r.seconds * 1e6:.1f}", f"{r.share:.1%}", f"{r.gflops:.1f}", f"{r.gbytes:.1f}",
             ", ".join(r.sources)[:60])
            for r in shown
        ]  # fmt: skip
        flops, moved = sum(r.flops for r in rows), sum(r.bytes for r in rows)
        seconds = self.total_seconds or 1.0
        head = f"{self.name}/{self.entry.name}: {self.total_seconds * 1e3:.3f} ms (median of {self.runs} runs), "
        head += f"{len(rows)} kernels, {si(flops / seconds, 'FLOP/s')}, {si(moved / seconds, 'B/s')}"
        header = ("#", "kernel", "kind", "µs", "share", "GFLOP/s", "GB/s", "stands for")
        left = [f"  … {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
        return "\n".join([head, *table(header, cells), *left]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the totals and one object per kernel, ready for JSON."""
        return {
            "program": self.name,
            "entry": self.entry.name,
            "runs": self.runs,
            "seconds": self.total_seconds,
            "kernels": [{**asdict(r), "gflops": r.gflops, "gbytes": r.gbytes} for r in self.rows],
        }

    def chrome_trace(self) -> dict[str, Any]:
        """Return the last run as complete events (``ph`` X, microseconds) for chrome://tracing and Perfetto."""
        events = []
        if self.runs:
            last = (self.times[-1] - self.times[-1][0]) * 1e6
            for r in self.rows:
                events.append({
                    "name": r.name, "cat": r.kind, "ph": "X", "pid": os.getpid(), "tid": 0,
                    "ts": float(last[r.index]), "dur": float(last[r.index + 1] - last[r.index]),
                    "args": {"sources": list(r.sources), "flops": r.flops, "bytes": r.bytes},
                })  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`chrome_trace` as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace()))


def measure(
    program: CompiledProgram, entry: EntryPoint, run: Callable[[np.ndarray | None], None], runs: int, warmup: int
) -> Profiler:
    """Call ``run`` ``warmup`` times with None, then ``runs`` times with an array that receives its kernel times."""
    if runs < 1 or warmup < 0:
        raise ConfigError(f"a profile needs runs >= 1 and warmup >= 0, not {runs} and {warmup}")
    for _ in range(warmup):
        run(None)
    times = np.zeros((runs, len(entry.calls) + 1))
    rows: Sequence[np.ndarray] = list(times)
    for row in rows:
        run(row)
    return Profiler(program.name, entry, times)
