"""The command queue: command buffers are encoded, committed in order, and waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from npu_compiler.support.errors import BackendError

from . import errors
from .buffers import Memory
from .device import autorelease_pool, frameworks

_UNFINISHED = 32  # the most command buffers that are committed and not waited for; a queue has room for 64


class Pass(NamedTuple):
    """An encoder's work. ``descriptor``: a compute pass descriptor, or None."""

    label: str
    encode: Callable[[Any], None]
    descriptor: Any = None


@dataclass(frozen=True, eq=False)
class Work:
    """What a command buffer runs. ``what`` begins the message if it fails.

    ``held``: objects that live until it has run, because Metal keeps only what is bound directly. ``kernels``: the
    kernels of its passes in words. ``repeat`` runs them one by one, and raises the ``BackendError`` of the one that
    fails. ``reset`` restores what kernels expect of their memory after some of them have not finished.
    """

    what: str
    passes: tuple[Pass, ...] = ()
    held: Any = None
    kernels: str = ""
    repeat: Callable[[], object] | None = None
    reset: Callable[[], object] = lambda: None


_COPY = Work("a copy on the GPU")


class _Launch(NamedTuple):
    """A command buffer and its number among all that were launched. ``copied``: the memory of its copies, which may be
    that of a mapped file."""

    buffer: Any
    work: Work
    number: int
    copied: list[Memory]


class Commands:
    """The work of a backend, in the order in which it was launched. Several threads may use it.

    A run opens a command buffer, copies after it join that one in an encoder of their own, and the next run, a mark or
    a wait commits it: a boundary between command buffers costs about as much as several kernels. Every encoder waits
    for the one before it through a fence, because Metal does not see which memory an indirect command buffer uses.
    """

    def __init__(self, device: Any):
        self.queue = device.newCommandQueue()
        if self.queue is None:
            raise BackendError(f"{device.name()} gave no command queue")
        self.lock = threading.RLock()
        self._device, self._metal = device, frameworks()
        self._open: _Launch | None = None
        self._copies: Any = None  # the encoder of copies in the open command buffer
        self._committed: deque[_Launch] = deque()
        self._launched = 0
        # Of the last failure: the numbers of the command buffer that failed and of those that followed it; the message.
        self._failed: tuple[range, str] = (range(0), "")
        self._descriptor = self._metal.MTLCommandBufferDescriptor.alloc().init()
        self._descriptor.setErrorOptions_(self._metal.MTLCommandBufferErrorOptionEncoderExecutionStatus)
        self._fence, self._fence_used = device.newFence(), False

    @property
    def idle(self) -> bool:
        """Whether no work was launched since the last wait."""
        return self._open is None and not self._committed

    def launch(self, work: Work) -> Any:
        """Encode a new command buffer and return it. If its encoding raises, the work is dropped."""
        with self.lock, autorelease_pool():
            buffer, fence_used = self._begin(work), self._fence_used
            try:
                for label, encode, descriptor in work.passes:
                    if descriptor is None:
                        encoder = buffer.computeCommandEncoderWithDispatchType_(self._metal.MTLDispatchTypeConcurrent)
                    else:
                        encoder = buffer.computeCommandEncoderWithDescriptor_(descriptor)
                    try:
                        self._begin_encoder(encoder, label)
                        encode(encoder)
                    finally:
                        self._end_encoder(encoder)
            except BaseException:
                self._open, self._fence_used = None, fence_used
                raise
            return buffer

    def copy(self, to: Memory, at: int, source: Memory, start: int, nbytes: int) -> None:
        """Copy bytes on the GPU, after all work that was launched before. Offsets and ``nbytes`` are multiples of 4."""
        with self.lock, autorelease_pool():
            if self._open is None:
                self._begin(_COPY)
            assert self._open is not None
            if self._copies is None:
                self._copies = self._open.buffer.blitCommandEncoder()
                self._begin_encoder(self._copies, _COPY.what)
            self._open.copied.extend((to, source))
            self._copies.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
                source.buffer, start, to.buffer, at, nbytes
            )

    def commit(self) -> None:
        """Start the open command buffer."""
        with self.lock:
            if self._open is not None:
                if self._copies is not None:
                    self._end_encoder(self._copies)
                    self._copies = None
                self._open.buffer.commit()
                self._committed.append(self._open)
                self._open = None

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all work launched so far. Raises ``BackendError`` if it failed."""
        with self.lock:
            self.commit()
            last = self._committed[-1] if self._committed else None

        def wait() -> None:
            if last is not None:
                self._wait_through(last)

        return wait

    def wait(self) -> None:
        """Wait for all work. Raises ``BackendError`` with the first failure."""
        self.mark()()

    def _begin(self, work: Work) -> Any:
        self.commit()
        while len(self._committed) >= _UNFINISHED:
            self._wait_first()
        buffer = self.queue.commandBufferWithDescriptor_(self._descriptor)
        if buffer is None:
            raise BackendError(f"{work.what}: the GPU's command queue gave no command buffer")
        self._open = _Launch(buffer, work, self._launched, [])
        self._launched += 1
        return buffer

    def _begin_encoder(self, encoder: Any, label: str) -> None:
        encoder.setLabel_(label)
        if self._fence_used:
            encoder.waitForFence_(self._fence)

    def _end_encoder(self, encoder: Any) -> None:
        encoder.updateFence_(self._fence)
        encoder.endEncoding()
        self._fence_used = True

    def _wait_through(self, last: _Launch) -> None:
        last.buffer.waitUntilCompleted()  # without the lock: other threads may launch meanwhile
        with self.lock:
            while self._committed and self._committed[0].number <= last.number:
                self._wait_first()
            self._check(last)  # another thread may have waited for it

    def _wait_first(self) -> None:
        first = self._committed.popleft()
        first.buffer.waitUntilCompleted()
        self._check(first)

    def _check(self, launch: _Launch) -> None:
        """Raise ``BackendError`` if ``launch``, which has finished, failed or works on the results of one that did."""
        failed, message = self._failed
        if launch.number in failed:
            raise BackendError(message)
        if launch.buffer.status() != self._metal.MTLCommandBufferStatusCompleted:
            following = list(self._committed)
            for other in following:
                other.buffer.waitUntilCompleted()
            self._committed.clear()
            self._fence, self._fence_used = self._device.newFence(), False  # it may not have updated the old one
            for other in (launch, *following):
                other.work.reset()
            message = _message(launch.buffer.error(), launch.work)
            launch.work.reset()  # the repetition may have failed, too
            self._failed = range(launch.number, [launch, *following][-1].number + 1), message
            raise BackendError(message)


def _message(error: Any, work: Work) -> str:
    """Return what failed and why. Metal tells the encoder; the kernel is the one that fails again alone, or else the
    last one whose signpost the GPU has passed."""
    label, signpost = errors.faulted(error) or (work.what, "")
    if label == work.what and work.repeat is not None and errors.repeatable(error):
        try:
            work.repeat()
        except BackendError as found:
            return str(found)
        label += ", none of whose kernels failed again when they ran one by one"
    if signpost:
        label += f", at {signpost}"
    elif work.kernels and label.startswith(work.what):
        label += f" ({work.kernels})"
    return f"{label}: {errors.reason(error)}"
