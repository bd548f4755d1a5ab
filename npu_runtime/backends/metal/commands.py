"""The command queue: command buffers are encoded, committed in order, and waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from npu_compiler.support.errors import BackendError

from .buffers import Memory
from .device import autorelease_pool, frameworks

_UNFINISHED = 32  # the most command buffers that are committed and not waited for; a queue has room for 64


class Commands:
    """The work of a backend, in the order in which it was launched. Several threads may use it.

    A run opens a command buffer, copies after it join that one, and the next run, a mark or a wait commits it: a
    boundary between command buffers costs about as much as several kernels.
    """

    def __init__(self, device: Any):
        self.queue = device.newCommandQueue()
        if self.queue is None:
            raise BackendError(f"{device.name()} gave no command queue")
        self.lock = threading.RLock()
        self._open: tuple[Any, str] | None = None
        self._committed: deque[tuple[Any, str]] = deque()
        self._metal = frameworks()

    @property
    def idle(self) -> bool:
        """Whether no work was launched since the last wait."""
        return self._open is None and not self._committed

    def begin(self, what: str) -> Any:
        """Return a new open command buffer. ``what`` begins the message if it fails. Hold ``lock`` while encoding."""
        self.commit()
        while len(self._committed) >= _UNFINISHED:
            self._wait_first()
        buffer = self.queue.commandBuffer()
        if buffer is None:
            raise BackendError(f"{what}: the GPU's command queue gave no command buffer")
        self._open = buffer, what
        return buffer

    def encode(self, what: str, encode: Callable[[Any], None]) -> Any:
        """Call ``encode`` with a new concurrent compute encoder in a command buffer of its own, and return the command
        buffer. If ``encode`` raises, the work is dropped."""
        with self.lock, autorelease_pool():
            buffer = self.begin(what)
            encoder = buffer.computeCommandEncoderWithDispatchType_(self._metal.MTLDispatchTypeConcurrent)
            try:
                encode(encoder)
            except BaseException:
                self._open = None
                raise
            finally:
                encoder.endEncoding()
            return buffer

    def copy(self, to: Memory, at: int, source: Memory, start: int, nbytes: int) -> None:
        """Copy bytes on the GPU, after all work that was launched before. Offsets and ``nbytes`` are multiples of 4."""
        with self.lock, autorelease_pool():
            buffer = self._open[0] if self._open is not None else self.begin("a copy on the GPU")
            encoder = buffer.blitCommandEncoder()
            encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
                source.buffer, start, to.buffer, at, nbytes
            )
            encoder.endEncoding()

    def commit(self) -> None:
        """Start the open command buffer."""
        with self.lock:
            if self._open is not None:
                self._open[0].commit()
                self._committed.append(self._open)
                self._open = None

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all work launched so far. Raises ``BackendError`` if it failed."""
        with self.lock:
            self.commit()
            last = self._committed[-1] if self._committed else None

        def wait() -> None:
            if last is not None:
                self._wait_through(*last)

        return wait

    def wait(self) -> None:
        """Wait for all work. Raises ``BackendError`` with the first failure."""
        self.mark()()

    def _wait_through(self, last: Any, what: str) -> None:
        last.waitUntilCompleted()  # without the lock: other threads may launch meanwhile
        with self.lock:
            while any(buffer is last for buffer, _ in self._committed):
                self._wait_first()
        self._check(last, what)  # another thread may have waited for it

    def _wait_first(self) -> None:
        buffer, what = self._committed.popleft()
        buffer.waitUntilCompleted()
        self._check(buffer, what)

    def _check(self, buffer: Any, what: str) -> None:
        if buffer.status() != self._metal.MTLCommandBufferStatusCompleted:
            self._committed.clear()  # what follows a failed command buffer fails for the same reason
            raise BackendError(f"{what}: {_reason(buffer.error(), self._metal)}")


def _reason(error: Any, metal: Any) -> str:
    """Return what went wrong in a command buffer, and the remedy."""
    if error is None:
        return "the GPU stopped without an error"
    remedies = {
        metal.MTLCommandBufferErrorOutOfMemory: "close other programs, or compile a smaller batch or context",
        metal.MTLCommandBufferErrorTimeout: "a kernel took too long; compile a smaller batch",
        metal.MTLCommandBufferErrorPageFault: "a kernel accessed memory out of bounds; NPU_DEBUG=2 names it",
        metal.MTLCommandBufferErrorDeviceRemoved: "the GPU was lost; start the program again",
        metal.MTLCommandBufferErrorAccessRevoked: "the GPU was lost; start the program again",
    }
    remedy = remedies.get(error.code(), "NPU_DEBUG=2 runs kernels one by one and names the one that fails")
    return f"{error.localizedDescription()} ({remedy})"
