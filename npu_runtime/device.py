"""The objects that a backend creates: memory on its device (:class:`DeviceBuffer`) and entry points that are ready to
run (:class:`LoadedEntry`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Launch = Callable[[np.ndarray | None], int]
# (byte offset, shape, dtype) -> a buffer in the block
FileBlock = Callable[[int, Sequence[int], np.dtype[Any]], "DeviceBuffer"]


class HostLaunch(Protocol):
    """A launch on a device that computes in the host's memory."""

    table: Any
    """``table[id]`` is the address of a buffer; that of an input or output may be replaced between launches."""
    untimed: Callable[[], int]
    """The launch without times, as a direct native call."""

    def __call__(self, times: np.ndarray | None, /) -> int: ...


class DeviceBuffer(ABC):
    """A dense tensor in a device's memory.

    ``shape`` is the tensor's shape. ``alloc_shape``, the shape of the allocation, is at least as large in every dim;
    the padding after the data is zero.
    """

    shape: tuple[int, ...]
    alloc_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        """Allocated bytes, padding included."""
        return math.prod(self.alloc_shape) * self.dtype.itemsize

    @property
    @abstractmethod
    def native_handle(self) -> Any:
        """The memory in terms of the device's own interface; on the CPU, its address."""

    @abstractmethod
    def to_numpy(self, copy: bool = True) -> np.ndarray:
        """Return the contents without padding. ``copy=False`` may return the memory itself if the host can access
        it."""

    @abstractmethod
    def shares_memory(self, other: DeviceBuffer) -> bool:
        """Return whether the two buffers overlap."""

    @property
    def writeable(self) -> bool:
        """Whether a program may store its results here."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)})"


def status_of(flags: np.ndarray) -> int:
    """Return the status (:meth:`LoadedEntry.bind`) that ``flags`` int32 [kernels, 2] report, and clear them. A kernel
    sets the first flag for an index out of range, the second for a division by zero."""
    if not flags.any():
        return 0
    number = int(np.flatnonzero(flags.any(1))[0])
    status = 1 + number + (0 if flags[number, 0] else len(flags))
    flags.fill(0)
    return status


class LoadedEntry(ABC):
    """One entry point of a program on a device, with its memory planned and everything compiled."""

    @abstractmethod
    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        """Return a function that runs the kernels with these inputs and outputs, by buffer id.

        Its argument is None, or float64 [len(calls) + 1] that receives the start of the run and the end of each kernel
        in seconds. It returns 0; 1 + k if kernel k met an index out of range in its data; or 1 + len(calls) + k if it
        divided an integer by zero (:func:`status_of`). On a device that is asynchronous to the host it returns 0 at
        once, and :meth:`failed` reports later. Launches of one entry must not overlap, because they share its arena.
        """

    def bind_host(self, buffers: Mapping[int, DeviceBuffer]) -> HostLaunch | None:
        """Return a launch with these buffers if the device can access the host's memory at any address, else None."""
        return None

    def failed(self) -> int:
        """Return the status of the launches since the last call; call it after ``Backend.synchronize()``."""
        return 0

    def io(self) -> dict[int, DeviceBuffer] | None:
        """Return the entry's own inputs and outputs by buffer id if the device has them because binding memory is
        expensive, else None."""
        return None

    @abstractmethod
    def arena_buffer(self, id: int) -> DeviceBuffer:
        """Return a view of an arena buffer, valid until the next launch."""
