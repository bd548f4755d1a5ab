"""Memory that the CPU and the GPU share, and tensors in it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.support.errors import BackendError

from ..base import DeviceBuffer
from .device import frameworks

if TYPE_CHECKING:
    from .backend import MetalBackend


class Memory:
    """An ``MTLBuffer`` in shared storage, of ``nbytes`` at ``address``. Arrays of its bytes keep it alive."""

    def __init__(self, buffer: Any, nbytes: int, held: Any = None):
        """``held``: an object that owns the memory, if Metal does not."""
        self.buffer, self.nbytes, self._held = buffer, nbytes, held
        self.address: int = np.frombuffer(buffer.contents().as_buffer(nbytes), np.uint8).ctypes.data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def array(self, at: int, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Return a tensor in this memory, from byte ``at`` on."""
        size = math.prod(shape) * dtype.itemsize
        return np.asarray(self)[at : at + size].view(dtype).reshape(tuple(shape))


def allocate(device: Any, nbytes: int, purpose: str) -> Memory:
    """Return new memory, whose contents are zero. Raises ``BackendError`` if there is not enough; ``purpose`` begins
    the message."""
    nbytes = max(nbytes, 16)
    limit = int(device.maxBufferLength())
    if nbytes > limit:
        raise BackendError(f"{purpose}: {nbytes} bytes, but a Metal buffer has at most {limit}")
    buffer = device.newBufferWithLength_options_(nbytes, frameworks().MTLResourceStorageModeShared)
    if buffer is None:
        advised = int(device.recommendedMaxWorkingSetSize())
        raise BackendError(f"{purpose}: the GPU has no memory for {nbytes} bytes; it should use {advised} at most")
    return Memory(buffer, nbytes)


def memory_of(array: np.ndarray) -> Memory | None:
    """Return the Metal memory that an array lies in, or None."""
    owner = _owner(array)
    return owner if isinstance(owner, Memory) else None


def map_pages(device: Any, array: np.ndarray) -> Memory | None:
    """Return the pages of an array in mapped memory, such as weights in a file, as Metal memory without a copy; None if
    the array is elsewhere."""
    owner = _owner(array)
    owner = owner.obj if isinstance(owner, memoryview) else owner
    if not isinstance(owner, mmap.mmap) or not array.nbytes:
        return None
    page = mmap.PAGESIZE
    start = array.ctypes.data // page * page
    nbytes = -(-(array.ctypes.data + array.nbytes - start) // page) * page
    whole = np.frombuffer(owner, np.uint8)
    begin = start - whole.ctypes.data
    if begin < 0 or begin + nbytes > whole.nbytes:  # the file ends within the last page
        return None
    shared = frameworks().MTLResourceStorageModeShared
    pages = whole[begin : begin + nbytes]
    buffer = device.newBufferWithBytesNoCopy_length_options_deallocator_(pages, nbytes, shared, None)
    if buffer is None:
        return None
    memory = Memory(buffer, nbytes, held=(pages, array))
    return memory if memory.address == pages.ctypes.data else None  # else a copy that the bridge made and has freed


def _owner(array: np.ndarray) -> Any:
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner


class MetalBuffer(DeviceBuffer):
    """A tensor from byte ``offset`` of ``memory`` on."""

    def __init__(
        self,
        backend: MetalBackend,
        memory: Memory,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        alloc_shape: Sequence[int] | None = None,
        offset: int = 0,
        writeable: bool = True,
    ):
        self._backend, self.memory, self.offset, self._writeable = backend, memory, offset, writeable
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.alloc_shape = self.shape if alloc_shape is None else tuple(alloc_shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._backend.allocate_buffer, (self.to_numpy(), self.alloc_shape)

    @property
    def native_handle(self) -> Any:
        """The ``MTLBuffer``; the tensor begins at byte ``offset`` of it."""
        return self.memory.buffer

    @property
    def writeable(self) -> bool:
        return self._writeable

    @property
    def whole(self) -> np.ndarray:
        """The memory itself, padding included, without waiting for runs that write it."""
        return self.memory.array(self.offset, self.alloc_shape, self.dtype)

    @property
    def view(self) -> np.ndarray:
        """:attr:`whole` without padding."""
        whole = self.whole
        return whole[tuple(slice(n) for n in self.shape)] if self.shape != self.alloc_shape else whole

    def to_numpy(self, copy: bool = True) -> np.ndarray:
        self._backend.synchronize()
        return self.view.copy() if copy else self.view

    def shares_memory(self, other: DeviceBuffer) -> bool:
        if not isinstance(other, MetalBuffer):
            return False
        start, begin = self.memory.address + self.offset, other.memory.address + other.offset
        return start < begin + other.size_bytes and begin < start + self.size_bytes
