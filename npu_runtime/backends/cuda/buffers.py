"""Buffers in the memory of a GPU, and arrays of other libraries in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npu_compiler.support import dtypes

from ..base import DeviceBuffer

if TYPE_CHECKING:
    from .backend import CUDABackend

_DLPACK_CUDA = 2  # kDLCUDA


class CUDABuffer(DeviceBuffer):
    """A buffer in the memory of a GPU. Other libraries access it without a copy by ``__cuda_array_interface__`` or
    DLPack."""

    def __init__(self, backend: CUDABackend, memory: Any, shape: Sequence[int], alloc_shape: Sequence[int], dtype: Any):
        """``memory``: a CuPy ``MemoryPointer`` or :class:`Borrowed`, which the buffer keeps alive."""
        self._backend, self._memory = backend, memory
        self.shape, self.alloc_shape, self.dtype = tuple(shape), tuple(alloc_shape), np.dtype(dtype)
        self._address = int(memory.ptr)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._backend.allocate_buffer, (self.to_numpy(), self.alloc_shape)

    @property
    def native_handle(self) -> int:
        return self._address

    def to_numpy(self, copy: bool = True) -> np.ndarray:
        whole = np.empty(self.alloc_shape, self.dtype)
        if whole.nbytes:
            self._backend.move(whole.ctypes.data, self._address, whole.nbytes)
            self._backend.synchronize()
        return whole[tuple(slice(n) for n in self.shape)] if self.shape != self.alloc_shape else whole

    def shares_memory(self, other: DeviceBuffer) -> bool:
        start, end = self._address, self._address + self.size_bytes
        return start < other.native_handle + other.size_bytes and other.native_handle < end

    def as_cupy(self) -> Any:
        """Return a CuPy array of ``alloc_shape`` in the same memory."""
        cp = self._backend.cupy
        memory = self._memory
        if not isinstance(memory, cp.cuda.MemoryPointer):
            held = cp.cuda.UnownedMemory(self._address, self.size_bytes, memory)
            memory = cp.cuda.MemoryPointer(held, 0)
        return cp.ndarray(self.alloc_shape, self.dtype, memory)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype == ml_dtypes.bfloat16:
            raise AttributeError("the CUDA array interface has no bfloat16; use DLPack")
        return {
            "shape": self.alloc_shape, "typestr": self.dtype.str, "data": (self._address, False), "version": 3,
            "strides": None, "stream": self._backend.stream.ptr,
        }  # fmt: skip

    def __dlpack__(self, **options: Any) -> Any:
        self._backend.synchronize()  # the consumer uses another stream
        return self.as_cupy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._backend.device


class Borrowed:
    """Memory at ``address`` that belongs to ``owner``, which is kept alive."""

    def __init__(self, owner: Any, address: int):
        self.owner, self.ptr = owner, address


def is_foreign(value: Any) -> bool:
    """Whether ``value`` is an array in a GPU's memory that only DLPack describes."""
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "__cuda_array_interface__"):
        return False
    where = getattr(value, "__dlpack_device__", None)
    return where is not None and int(where()[0]) == _DLPACK_CUDA


def device_address(value: Any, device: int) -> tuple[int, tuple[int, ...], np.dtype[Any]] | None:
    """Return (address, shape, dtype) of a dense array in the memory of GPU ``device``, or None if it is not one.

    The array is PyTorch's, or has the CUDA array interface, which does not name the GPU.
    """
    if type(value).__module__.partition(".")[0] == "torch":
        if not getattr(value, "is_cuda", False) or value.get_device() != device or not value.is_contiguous():
            return None
        return value.data_ptr(), tuple(value.shape), dtypes.numpy_dtype(dtypes.parse(value.dtype))
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    dtype, shape, strides = np.dtype(interface["typestr"]), tuple(interface["shape"]), interface.get("strides")
    dense, step = [], dtype.itemsize
    for n in reversed(shape):
        dense.append(step)
        step *= n
    if strides is not None and tuple(strides) != tuple(reversed(dense)):
        return None
    return interface["data"][0], shape, dtype
