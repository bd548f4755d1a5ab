"""Turns: contenders run in short turns in one process, and ratios are those of turns of one round.

The speed of a shared machine changes within seconds, so two medians of a whole run compare different times. Between
turns the process rests until the threads of the contender before have stopped spinning.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readme import real_time

REST = 0.1  # seconds; threads of OpenMP and TBB spin for a shorter time
SLOW = 1.0  # seconds; a contender whose call takes longer has one call in each of the first three rounds


@dataclass(frozen=True)
class Turn:
    """The times in seconds of a contender's calls in one turn. ``clean``: other processes used almost no CPU."""

    seconds: list[float]
    clean: bool


def take_turns(runs: dict[str, Callable[[], Any]], rounds: int, calls: int, threads: int) -> dict[str, list[Turn]]:
    """Measure ``calls`` calls of each contender in each round, in alternating order; slow ones less often."""
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    slow = {name for name, run in runs.items() if _is_slow(run)}
    for number in range(rounds):
        for name, run in list(runs.items())[:: 1 if number % 2 == 0 else -1]:
            if name not in slow:
                turns[name].append(_turn(run, calls, threads, warm_ups=1))
            elif number < 3:
                turns[name].append(_turn(run, 1, threads, warm_ups=0))
    return turns


def _is_slow(run: Callable[[], Any]) -> bool:
    """Warm a contender up, and return whether its calls are slow."""
    run()
    start = time.perf_counter()
    run()
    if time.perf_counter() - start > SLOW:
        return True
    run()
    return False


def _turn(run: Callable[[], Any], calls: int, threads: int, warm_ups: int) -> Turn:
    time.sleep(REST)
    real_time(True)
    for _ in range(warm_ups):
        run()
    busy, mine, start = _busy(), time.process_time(), time.perf_counter()
    taken: list[float] = []
    for _ in range(calls):
        at = time.perf_counter()
        run()
        taken.append(time.perf_counter() - at)
    wall = time.perf_counter() - start
    foreign = _busy() - busy - (time.process_time() - mine)
    real_time(False)
    return Turn(taken, foreign < 0.04 * wall * threads + 0.02)


def _busy() -> float:
    """Return the CPU seconds that all processes used so far, on the CPUs of this process."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    fields = (list(map(int, line[1:9])) for line in lines if line[0] in ours)
    return sum(f[0] + f[1] + f[2] + f[5] + f[6] + f[7] for f in fields) / os.sysconf("SC_CLK_TCK")


def usable(*turns: list[Turn]) -> list[tuple[list[float], ...]]:
    """Return the rounds in which the turns of all contenders are clean, or all rounds if fewer than three are. Rounds
    in which one of them took no part are left out."""
    rounds = list(zip(*turns, strict=False))
    clean = [r for r in rounds if all(t.clean for t in r)]
    return [tuple(t.seconds for t in r) for r in (clean if len(clean) >= 3 else rounds)]


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Return one contender's median and minimum in milliseconds, ready for JSON."""
    seconds = [t for (taken,) in usable(turns) for t in taken]
    return {
        "median_ms": statistics.median(seconds) * 1e3,
        "min_ms": min(seconds) * 1e3,
        "samples": len(seconds),
        "undisturbed": sum(t.clean for t in turns) >= 3,
    }


def ratio(ours: list[Turn], peers: Sequence[list[Turn]]) -> float:
    """Return the ratio to the fastest peer: the median over the rounds of the ratio of a round's medians."""
    return max(
        statistics.median(statistics.median(a) / statistics.median(b) for a, b in usable(ours, p)) for p in peers
    )
