"""The lock of a program's memory, which neither a fork nor a signal handler can turn into a deadlock."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from npu_compiler.support.errors import BackendError


class RunLock:
    """Held while a run uses a program's arena and state: runs from several threads take turns.

    A plain lock deadlocks in two cases. First, a signal handler or a destructor runs the model while it interrupts a
    run of the same thread; this lock then raises ``BackendError``. Second, a child of ``fork()`` inherits the lock of a
    thread that it does not have; the child gets a new lock.

    Code for which a Python context manager is too slow uses ``mutex`` and ``busy`` directly, and must do what
    :meth:`held` does.
    """

    __slots__ = ("__weakref__", "busy", "mutex")

    def __init__(self) -> None:
        self.mutex = threading.RLock()  # re-entrant only so that `busy` can be read
        self.busy = False
        _locks.add(self)

    def __reduce__(self) -> tuple[type[RunLock], tuple[()]]:
        return RunLock, ()  # a copy is not held

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock in a ``with`` statement. Raises ``BackendError`` if this thread already holds it."""
        with self.mutex:
            if self.busy:
                raise reentered()
            try:
                self.busy = True
                yield
            finally:
                self.busy = False

    def renew(self) -> None:
        """Replace the lock, in a forked child, if it is held by a thread that the child does not have."""
        if self.mutex.acquire(blocking=False):
            self.mutex.release()
        else:
            self.mutex, self.busy = threading.RLock(), False


def reentered() -> BackendError:
    """Return the error for a run inside another run."""
    return BackendError(
        "the model is already running in this thread, which was interrupted by a signal handler or a destructor that "
        "runs it too; let the handler set a flag and run the model after it has returned"
    )


_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
