"""Processes and threads take turns at work whose result they share."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from . import progress

try:
    import fcntl
except ImportError:  # Windows has no flock: nothing waits, and work may be done twice
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

WAIT_S = 600.0  # more than the slowest program takes to compile
_POLL_S = 0.05


@contextlib.contextmanager
def turn(path: Path, work: str, wait: float | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` in a ``with`` statement; ``work`` says what for, as in 'compiling ResNet50'.

    While another process or thread holds it, this one waits, as a step of progress that says so. After ``wait`` seconds
    (default ``WAIT_S``) it logs a warning and goes on without the lock: the work may be done twice, but nothing hangs.
    The system releases the lock of a process that dies, and the file is removed in the end. Without the lock it also
    goes on at once where files cannot be locked or ``path`` cannot be created. It does not nest for one ``path``.
    """
    held = _acquire(path, work, WAIT_S if wait is None else wait)
    try:
        yield
    finally:
        if held is not None:
            _release(path, held)


def _acquire(path: Path, work: str, wait: float) -> int | None:
    """Return a descriptor of ``path`` that holds its lock; None: go on without it."""
    with contextlib.ExitStack() as waiting:
        deadline = None
        while True:
            try:
                held = _try(path)
            except OSError:  # the directory cannot be written, or its file system has no locks
                return None
            if held is not None:
                return held
            if deadline is None:
                deadline = time.monotonic() + wait
                waiting.enter_context(progress.step(f"waiting for another process or thread: {work}"))
            if time.monotonic() >= deadline:
                _log.warning("another process or thread is still busy with this after %.0f s: %s; not waiting longer "
                             "(its lock is %s)", wait, work, path)  # fmt: skip
                return None
            time.sleep(_POLL_S)


def _try(path: Path) -> int | None:
    """Lock ``path`` and return its descriptor; None if another holds it. Raises ``OSError``."""
    if fcntl is None:
        raise OSError("files cannot be locked")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file since it was opened: then another may hold a new file of this name.
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _release(path: Path, held: int) -> None:
    assert fcntl is not None
    with contextlib.suppress(OSError):
        os.unlink(path)
    # Children that were forked meanwhile have the descriptor too, so closing it would not release the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)
