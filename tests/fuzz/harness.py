"""Runs fuzz cases and judges them.

A kind is a module of ``tests.fuzz.kinds`` with ``case(rng, folder)``, which makes one input from the random numbers of
``rng`` (files go into the empty ``folder``) and feeds it to the project. The case passes if the function returns or
raises a subclass of ``NPUError``. Everything else is a failure: another exception, more than ``SECONDS`` of time, more
than ``MEMORY`` of address space on top of what the process had before, and, in a worker process, a signal. A kind may
have ``prepare()``, which is called before the first case.

Case ``i`` of seed ``s`` depends on nothing but the kind, ``s`` and ``i``, so a failure can be repeated alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from npu_compiler.support.errors import NPUError

from . import kinds as kinds_package

SECONDS = 10.0
MEMORY = 2 << 30
_GRACE = 5.0  # seconds after which a worker that did not notice its own time limit is killed
_ROOT = Path(__file__).parents[2]
# A disk takes milliseconds to remove a folder, and every case has one. None: the folder for temporary files.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None

Case = Callable[[random.Random, Path], None]


def kinds() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(kinds_package.__path__))


def find_case(kind: str) -> Case:
    """The function ``case`` of a kind, or of any module by its full name, after the module's ``prepare``, if any."""
    module = import_module(kind if "." in kind else f"{kinds_package.__name__}.{kind}")
    getattr(module, "prepare", lambda: None)()
    case: Case = module.case
    return case


class _TimeLimit(BaseException):
    """Raised inside a case by the alarm; not an Exception, so that the code under test does not swallow it."""


@dataclass(frozen=True)
class Failure:
    """``what``: 'untyped', 'hang', 'memory' or 'signal'; ``where`` groups failures of one cause."""

    kind: str
    seed: int
    number: int
    what: str
    where: str
    detail: str = ""

    @property
    def replay(self) -> str:
        return f"python -m tests.fuzz {self.kind} --seed {self.seed} --case {self.number}"


@dataclass
class Report:
    kind: str
    accepted: int = 0
    refused: int = 0
    slowest: tuple[float, int] = (0.0, -1)  # seconds, case
    failures: list[Failure] = field(default_factory=list)
    complete: bool = True

    def add(self, other: Report) -> None:
        self.accepted += other.accepted
        self.refused += other.refused
        self.slowest = max(self.slowest, other.slowest)
        self.failures += other.failures

    def __str__(self) -> str:
        """Counts, then one line for each cause of failures, with the number of its first case."""
        counts = {what: sum(f.what == what for f in self.failures) for what in ("untyped", "hang", "memory", "signal")}
        lines = [
            f"{self.kind}: {self.accepted} accepted, {self.refused} refused, "
            + ", ".join(f"{n} {what}" for what, n in counts.items())
            + f"; slowest: case {self.slowest[1]}, {self.slowest[0]:.2f} s"
        ]
        groups: dict[tuple[str, str], list[Failure]] = {}
        for failure in self.failures:
            groups.setdefault((failure.what, failure.where), []).append(failure)
        for (what, where), found in sorted(groups.items(), key=lambda g: -len(g[1])):
            lines.append(f"  {len(found):5} {what}: {where}   {found[0].replay}")
        return "\n".join(lines)


# -- one process ----------------------------------------------------------------------------------------------------
def run_case(kind: str, seed: int, number: int) -> None:
    """One case, without limits and without judgement."""
    with tempfile.TemporaryDirectory(prefix="npu-fuzz-", dir=_MEMORY) as folder:
        find_case(kind)(random.Random(f"{kind} {seed} {number}"), Path(folder))


def run_cases(kind: str, seed: int, numbers: range, started: Callable[[int], None] = lambda number: None) -> Report:
    """Judge some cases in this process; ``started`` is told the number of each before it runs."""
    case, report = find_case(kind), Report(kind)
    with (
        tempfile.TemporaryDirectory(prefix="npu-fuzz-", dir=_MEMORY) as parent,
        _memory_limit(),
        _alarm(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        folder = Path(parent) / "case"
        for number in numbers:
            folder.mkdir()
            started(number)
            start = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                try:
                    case(random.Random(f"{kind} {seed} {number}"), folder)
                    report.accepted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except NPUError as error:
                assert str(error)
                report.refused += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a Rust panic is not an Exception
                what = {_TimeLimit: "hang", MemoryError: "memory"}.get(type(error), "untyped")
                detail = "".join(traceback.format_exception(error, limit=-30))
                report.failures.append(Failure(kind, seed, number, what, _where(error), detail))
            report.slowest = max(report.slowest, (time.monotonic() - start, number))
            shutil.rmtree(folder)
    return report


def _where(error: BaseException) -> str:
    """The exception's type, the innermost line of the project that it passed, and what it says."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(_ROOT) and not path.is_relative_to(_ROOT / ".venv") and path != Path(__file__):
            place = f"{path.relative_to(_ROOT)}:{frame.lineno}"
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__} at {place}" + (f" ({said[:60]})" if said and "case" not in place else "")


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    """Bound the address space; without effect where the system does not (macOS)."""
    status = Path("/proc/self/statm")
    if not status.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(status.read_text().split()[0]) * resource.getpagesize()
    limit = used + MEMORY
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise _TimeLimit(f"more than {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- worker processes -----------------------------------------------------------------------------------------------
class _Worker:
    """A process that runs a range of cases. It says which case it is at, so that its death has a culprit."""

    def __init__(self, kind: str, seed: int, numbers: range):
        context = multiprocessing.get_context("spawn")
        self.numbers = numbers
        self.current = context.Value("q", numbers.start, lock=False)
        self.since = time.monotonic()
        self.seen = numbers.start
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(kind, seed, numbers, self.current, sender), daemon=True)
        self.process.start()
        sender.close()

    def stuck(self) -> bool:
        now, at = time.monotonic(), self.current.value
        if at != self.seen:
            self.seen, self.since = at, now
        start = 60.0 if at == self.numbers.start else 0.0  # imports
        return now - self.since > SECONDS + _GRACE + start

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.receiver.close()


def _work(kind: str, seed: int, numbers: range, current: Any, sender: Connection) -> None:
    def started(number: int) -> None:
        current.value = number

    sender.send(run_cases(kind, seed, numbers, started))


def run_in_workers(
    kind: str, seed: int, cases: int, jobs: int, progress: Callable[[Report], None] | None = None
) -> Report:
    """Judge ``cases`` cases in ``jobs`` processes at a time, each of which runs a part of them."""
    size = max(1, min(1000, -(-cases // jobs)))
    todo = [range(at, min(at + size, cases)) for at in range(0, cases, size)][::-1]
    report = Report(kind)
    running: list[_Worker] = []
    try:
        while todo or running:
            while todo and len(running) < jobs:
                running.append(_Worker(kind, seed, todo.pop()))
            wait([w.receiver for w in running], timeout=1.0)
            for worker in list(running):
                if worker.receiver.poll() or worker.stuck():
                    running.remove(worker)
                    part = _collect(worker, kind, seed)
                    report.add(part)
                    if not part.complete:  # what the worker learnt before died with it
                        at = part.failures[-1].number
                        rest = (range(at + 1, worker.numbers.stop), range(worker.numbers.start, at))
                        todo += [numbers for numbers in rest if numbers]
                    if progress is not None:
                        progress(report)
    finally:
        for worker in running:
            worker.stop()
    return report


def _collect(worker: _Worker, kind: str, seed: int) -> Report:
    """What a worker found; an incomplete report of one failure if the worker died or had to be killed."""
    number = worker.current.value
    if not worker.receiver.poll():
        worker.stop()
        failure = Failure(kind, seed, number, "hang", "native code, which no alarm interrupts")
        return Report(kind, failures=[failure], complete=False)
    try:
        report: Report = worker.receiver.recv()
        return report
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Report(kind, failures=[Failure(kind, seed, number, "signal", name)], complete=False)
    finally:
        worker.stop()


def show_progress(report: Report) -> None:
    done = report.accepted + report.refused + len(report.failures)
    print(f"\r{report.kind}: {done} cases, {len(report.failures)} failures ", end="", file=sys.stderr, flush=True)
