"""What a device gives to the runtime: memory (:class:`DeviceBuffer`) and programs ready to run
(:class:`LoadedEntry`). Devices themselves are :class:`npu_runtime.backends.base.Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Launch = Callable[[np.ndarray | None], int]
FileBlock = Callable[[int, Sequence[int], np.dtype[Any]], "DeviceBuffer"]  # byte offset, shape, dtype -> a part of it


class HostLaunch(Protocol):
    """A launch on a device that computes in the host's memory."""

    table: Any
    """``table[id]`` is the address of a buffer; that of an input or output may be replaced between launches."""
    untimed: Callable[[], int]
    """The launch without times, called as directly as possible."""

    def __call__(self, times: np.ndarray | None, /) -> int: ...


class DeviceBuffer(ABC):
    """A dense tensor in a device's memory.

    ``shape`` is the tensor's; ``alloc_shape`` is what is allocated, at least as large in every dim (padding follows the
    data and is zero).
    """

    shape: tuple[int, ...]
    alloc_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes allocated."""

    @property
    @abstractmethod
    def native_handle(self) -> Any:
        """What the device's own interface calls this memory: an address on the CPU."""

    @abstractmethod
    def to_numpy(self, copy: bool = True) -> np.ndarray:
        """The contents, without padding. ``copy=False`` may return the memory itself where the host can see it."""

    @abstractmethod
    def shares_memory(self, other: DeviceBuffer) -> bool:
        """Whether the two overlap."""

    @property
    def writeable(self) -> bool:
        """Whether a program may store its results here."""
        return True


class LoadedEntry(ABC):
    """One entry point of a program on a device, with its memory planned and everything compiled."""

    @abstractmethod
    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        """A call that runs the kernels with these inputs and outputs, by buffer id.

        It takes None, or a float64 array of ``len(calls) + 1`` that receives the start and the end of each kernel in
        seconds. It returns 0, or 1 + k when kernel k met an index out of range in its data; a device that works on its
        own returns 0 at once, and :meth:`failed` tells later. Launches of one entry must not overlap: they share its
        arena.
        """

    def bind_host(self, buffers: Mapping[int, DeviceBuffer]) -> HostLaunch | None:
        """:meth:`bind` for a device that reads and writes the host's memory at any address; None for others."""
        return None

    def failed(self) -> int:
        """After ``Backend.synchronize()``: what the launches since the last call have to report, as a launch would."""
        return 0

    def io(self) -> dict[int, DeviceBuffer] | None:
        """Inputs and outputs of its own, by buffer id, for devices where binding memory is expensive. None: it is
        not."""
        return None

    @abstractmethod
    def arena_buffer(self, id: int) -> DeviceBuffer:
        """An arena buffer, as a view: valid until the next launch."""
