"""Progress of steps that may take longer than a second, for programs that show it.

Code that does such work wraps it in :func:`step`, which prints nothing and needs no terminal library. A program that
shows the steps listens to them, as the command line does (``npusim/bars.py``)::

    with listening(lambda step: print(step.text, step.done, step.total)):
        npu_compiler.compile(ir)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Listener", "Step", "listening", "relaying", "step"]


@dataclass(eq=False)
class Step:
    """Work in progress.

    Attributes:
        text: what is being done: 'compiling ResNet50'.
        total: amount of work; None: unknown.
        unit: of ``total`` and ``done``: 'B' for bytes, else a count.
        done: how much of ``total`` is done.
        finished: the work ended, with or without success.
    """

    text: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    finished: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def advance(self, count: int = 1) -> None:
        """Add ``count`` to ``done``. Any thread may call it."""
        with self._lock:
            self.done += count
        _tell(self)

    def update(self, text: str | None = None, done: int | None = None) -> None:
        """Replace ``text`` or ``done``."""
        with self._lock:
            self.text = self.text if text is None else text
            self.done = self.done if done is None else done
        _tell(self)


Listener = Callable[[Step], None]
"""Called when a step begins, changes and ends, by the thread that does the work."""

_listeners: list[Listener] = []


def _tell(changed: Step) -> None:
    for listener in tuple(_listeners):
        listener(changed)


@contextmanager
def step(text: str, total: int | None = None, unit: str = "") -> Iterator[Step]:
    """Declare the block as a step; see :class:`Step` for the arguments. Steps may be nested."""
    current = Step(text, total, unit)
    _tell(current)
    try:
        yield current
    finally:
        current.finished = True
        _tell(current)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` for the steps of all threads while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def relaying() -> Iterator[Callable[[int, str, int | None, str, int, bool], None]]:
    """Declare the steps of another process: the function tells listeners here what changed there.

    Its arguments are a number of the step and the attributes of :class:`Step`. All steps are finished in the end.
    """
    steps: dict[int, Step] = {}

    def relay(number: int, text: str, total: int | None, unit: str, done: int, finished: bool) -> None:
        current = steps.setdefault(number, Step(text, total, unit))
        current.text, current.done, current.finished = text, done, finished
        _tell(current)

    try:
        yield relay
    finally:
        for current in steps.values():
            if not current.finished:
                current.finished = True
                _tell(current)
