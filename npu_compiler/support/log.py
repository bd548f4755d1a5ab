"""Levels of the loggers ``npu_compiler``, ``npu_runtime`` and ``npusim``, and how ``NPU_DEBUG`` and ``-v`` show them.

Libraries write to loggers, and the program decides how records are shown. ``NPU_DEBUG`` shows those of the compiler on
standard error even if the program does not configure logging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import env

PHASES, KERNELS, GRAPHS, SOURCES = logging.INFO, logging.DEBUG, 8, 6
_VERBOSITY = (logging.WARNING, PHASES, KERNELS, GRAPHS, SOURCES)
_LOGGERS = tuple(map(logging.getLogger, ("npu_compiler", "npu_runtime", "npusim")))


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(f"npusim: {kind}{record.getMessage()}", file=sys.stderr)


_handler = _StandardError()


def level(verbosity: int) -> int:
    """Return the lowest level that is shown at a verbosity from 0 (warnings) to 4 (sources)."""
    return _VERBOSITY[min(verbosity, len(_VERBOSITY) - 1)]


@contextmanager
def shown(least: int) -> Iterator[None]:
    """Show records of at least this level on standard error while the block runs."""
    before = [logger.level for logger in _LOGGERS]
    for logger in _LOGGERS:
        logger.setLevel(least)
        logger.addHandler(_handler)
    try:
        yield
    finally:
        for logger, old in zip(_LOGGERS, before, strict=True):
            logger.setLevel(old)
            logger.removeHandler(_handler)


@contextmanager
def debugging() -> Iterator[None]:
    """Show the records that ``NPU_DEBUG`` selects while the block runs, unless records are shown already."""
    if not env.debug() or _handler in _LOGGERS[0].handlers:
        yield
        return
    with shown(level(env.debug())):
        yield
