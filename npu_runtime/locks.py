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

    A plain lock deadlocks in two cases. A signal handler or a destructor that runs the model interrupts a run of the
    same thread, which cannot go on: this raises ``BackendError``. A child of ``fork()`` inherits the lock of a thread
    that it does not have: the child gets a new one.

    ``mutex`` and ``busy`` are for code where a context manager in Python would cost too much; it must do what
    :meth:`held` does.
    """

    __slots__ = ("__weakref__", "busy", "mutex")

    def __init__(self) -> None:
        self.mutex = threading.RLock()  # re-entrant, so that `busy` can be looked at, never to share the memory
        self.busy = False
        _locks.add(self)

    def __reduce__(self) -> tuple[type[RunLock], tuple[()]]:
        return RunLock, ()  # a copy is not held by anybody

    @contextmanager
    def held(self) -> Iterator[None]:
        """The lock, for a ``with`` statement. Raises ``BackendError`` if this thread holds it already."""
        with self.mutex:
            if self.busy:
                raise reentered()
            try:
                self.busy = True
                yield
            finally:
                self.busy = False

    def renew(self) -> None:
        """In a forked child: replace the lock if a thread holds it that the child does not have."""
        if self.mutex.acquire(blocking=False):
            self.mutex.release()
        else:
            self.mutex, self.busy = threading.RLock(), False


def reentered() -> BackendError:
    """The error of a run inside of another one."""
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
