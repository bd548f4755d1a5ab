"""Progress bars on a terminal for the steps that the libraries declare (:mod:`npu_compiler.support.progress`).

A step appears when it has run for a second; what runs inside it appears below it. Everything is erased when the last
step ends. Without rich, the innermost step is a plain line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from npu_compiler.support.progress import Step, listening
from npu_compiler.support.text import printable

__all__ = ["ProgressBars", "progress_bars"]

_PATIENCE = 1.0  # seconds before a step appears
_INTERVAL = 0.1  # seconds between two pictures


@contextmanager
def progress_bars(stream: TextIO | None = None) -> Iterator[None]:
    """Show on ``stream`` (default: standard error) the steps of the block that take longer than a second::

        with npusim.progress_bars():
            model = npusim.build(module, (example,))

    Nothing is shown if the stream is not a terminal.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield
        return
    with listening(ProgressBars(stream)):
        yield


class ProgressBars:
    """A listener that draws the running steps, in a thread of its own."""

    def __init__(self, stream: TextIO, patience: float = _PATIENCE):
        self._stream, self._patience = stream, patience
        self._running: dict[Step, float] = {}  # when each began
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._drawing: threading.Thread | None = None

    def __call__(self, step: Step) -> None:
        ended = None
        with self._lock:
            if step.finished:
                self._running.pop(step, None)
                if not self._running and self._drawing is not None:
                    ended, self._drawing = self._drawing, None
                    self._ended.set()
            else:
                self._running.setdefault(step, time.monotonic())
                if self._drawing is None:
                    self._ended = threading.Event()
                    self._drawing = threading.Thread(target=self._draw, args=(self._ended,), daemon=True)
                    self._drawing.start()
        if ended is not None:
            ended.join()  # the next line of output must not meet a bar

    def _draw(self, ended: threading.Event) -> None:
        display: _Display | None = None
        while not ended.wait(_INTERVAL):
            now = time.monotonic()
            with self._lock:
                seconds = {s: now - began for s, began in self._running.items() if now - began >= self._patience}
            if seconds and display is None:
                display = _display(self._stream)
            if display is not None:
                display.show(seconds)
        if display is not None:
            display.clear()


class _Display(Protocol):
    def show(self, seconds: Mapping[Step, float]) -> None:
        """Draw these steps, outermost first, with the seconds that they have run."""

    def clear(self) -> None:
        """Erase what was drawn."""


def _display(stream: TextIO) -> _Display:
    try:
        return _Bars(stream)
    except ImportError:
        return _Line(stream)


def _amount(step: Step) -> str:
    """'3/12', '1.5 of 3.0 MB' or ''."""
    if step.unit == "B":
        total = f" of {step.total / 1e6:.1f}" if step.total else ""
        return f"{step.done / 1e6:.1f}{total} MB"
    return f"{step.done}/{step.total}" if step.total else ""


class _Bars:
    """A bar for each step. Raises ``ImportError`` without rich."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TextColumn("{task.fields[seconds]:.0f} s"),
        )
        self._tasks: dict[Step, TaskID] = {}
        self._progress: Any = Progress(*columns, console=Console(file=stream), transient=True, auto_refresh=False)
        self._progress.start()

    def show(self, seconds: Mapping[Step, float]) -> None:
        for step in [s for s in self._tasks if s not in seconds]:
            self._progress.remove_task(self._tasks.pop(step))
        for step, elapsed in seconds.items():
            fields = {"total": step.total, "completed": step.done, "amount": _amount(step), "seconds": elapsed}
            if step in self._tasks:
                self._progress.update(self._tasks[step], description=printable(step.text), **fields)
            else:
                self._tasks[step] = self._progress.add_task(printable(step.text), **fields)
        self._progress.refresh()

    def clear(self) -> None:
        self._progress.stop()


class _Line:
    """One line for the innermost step."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def show(self, seconds: Mapping[Step, float]) -> None:
        for step, elapsed in list(seconds.items())[-1:]:
            text = " ".join(filter(None, (printable(step.text), _amount(step))))
            self._stream.write(f"\r\x1b[K{text} … {elapsed:.0f} s")
            self._stream.flush()

    def clear(self) -> None:
        self._stream.write("\r\x1b[K")
        self._stream.flush()
