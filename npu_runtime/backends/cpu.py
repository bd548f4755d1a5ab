"""The CPU backend: programs are shared objects, and device memory is host memory."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support import dtypes, env
from npu_compiler.support.errors import BackendError
from npu_compiler.support.numbers import whole_number
from npu_compiler.targets.cpu.host import host_cpu

from ..arrays import Block, aligned_empty, aligned_zeros, passing_empty
from ..native import NativeLibrary
from .base import Backend, DeviceBuffer, LoadedEntry


class CPUBuffer(DeviceBuffer):
    """Host memory. ``array`` is C-contiguous and has ``alloc_shape``; the tensor is its leading part of ``shape``."""

    def __init__(self, array: np.ndarray, shape: Sequence[int] | None = None):
        self._base = array
        self.shape = array.shape if shape is None else tuple(shape)
        self.alloc_shape = array.shape
        self.dtype = array.dtype
        self._address: int = array.ctypes.data
        padded = self.shape != self.alloc_shape
        self.array = array[tuple(slice(n) for n in self.shape)] if padded else array

    @property
    def native_handle(self) -> int:
        return self._address

    def to_numpy(self, copy: bool = True) -> np.ndarray:
        return self.array.copy() if copy else self.array

    def shares_memory(self, other: DeviceBuffer) -> bool:
        return np.may_share_memory(self.array, other.to_numpy(copy=False))

    @property
    def writeable(self) -> bool:
        return self.array.flags.writeable

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self._base, self.shape)


def _copied(array: np.ndarray, shape: Sequence[int]) -> CPUBuffer:
    memory = aligned_empty(array.shape, array.dtype)
    memory[...] = array
    return CPUBuffer(memory, shape)


class CPULaunch:
    """A native function bound to its buffers, which it keeps alive. See :class:`npu_runtime.device.HostLaunch`."""

    def __init__(self, function: Callable[..., int], table: Any, arena: np.ndarray, held: Any):
        self.table, self._held = table, (arena, held)
        self._function = partial(function, ctypes.addressof(table), arena.ctypes.data)
        self.untimed: Callable[[], int] = partial(self._function, None)  # no Python between caller and C

    def __call__(self, times: np.ndarray | None) -> int:
        return self.untimed() if times is None else self._function(times.ctypes.data)


class CPUEntry(LoadedEntry):
    """An entry point: a function of a native library, with its arena and the addresses of fixed buffers."""

    def __init__(
        self, library: NativeLibrary, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]
    ):
        self._library = library
        self._function = library.function(entry.symbol)
        self._specs = {b.id: b for b in program.buffers}
        self._arena = aligned_empty((entry.arena_bytes,), np.dtype(np.uint8))
        self._arena.fill(0)  # map every page now instead of in the first run
        self._fixed = dict(fixed)
        self._table = (ctypes.c_void_p * (max(self._specs, default=0) + 1))()
        for id, buffer in fixed.items():
            self._table[id] = buffer.native_handle

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> CPULaunch:
        table = type(self._table).from_buffer_copy(self._table)
        for id, buffer in buffers.items():
            table[id] = buffer.native_handle
        return CPULaunch(self._function, table, self._arena, (self, tuple(buffers.values())))

    bind_host = bind

    def arena_buffer(self, id: int) -> CPUBuffer:
        spec = self._specs[id]
        dtype = dtypes.numpy_dtype(spec.dtype)
        if 0 in spec.shape:
            return CPUBuffer(np.empty(spec.shape, dtype))
        return CPUBuffer(np.ndarray(spec.shape, dtype, self._arena, spec.offset))


class CPUBackend(Backend):
    """Runs ``cpu`` programs on ``threads`` threads; default ``NPU_NUM_THREADS``, else one for each usable core."""

    name = "cpu"

    def __init__(self, threads: int | None = None):
        self._asked = None if threads is None else whole_number("threads", threads, 1, env.MAX_THREADS)
        self.threads = self._asked or env.num_threads()
        self._block: Block | None = None
        self._libraries: weakref.WeakValueDictionary[int, NativeLibrary] = weakref.WeakValueDictionary()

    @classmethod
    def machines(cls) -> list[str]:
        cpu = host_cpu()
        return [f"{cpu.name or cpu.arch}, {env.usable_cpus()} CPUs"]

    @property
    def machine(self) -> str:
        cpu = host_cpu()
        return f"{cpu.name or cpu.arch}, {self.threads} thread(s)"

    @property
    def options(self) -> dict[str, Any]:
        return {} if self._asked is None else {"threads": self._asked}

    def allocate_empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> CPUBuffer:
        full = _allocated(shape, alloc_shape)
        array = self._block.take(full, np.dtype(dtype)) if self._block is not None else None
        if array is None:
            array = aligned_empty(full, np.dtype(dtype))
        if tuple(full) != tuple(shape):
            array.fill(0)
        return CPUBuffer(array, shape)

    def allocate_result(self, shape: Sequence[int], dtype: np.dtype[Any]) -> CPUBuffer:
        return CPUBuffer(passing_empty(shape, np.dtype(dtype)), shape)

    def allocate_zeros(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> CPUBuffer:
        return CPUBuffer(aligned_zeros(_allocated(shape, alloc_shape), np.dtype(dtype)), shape)

    @contextlib.contextmanager
    def block(self, nbytes: int) -> Iterator[None]:
        self._block = Block(nbytes)
        try:
            yield
        finally:
            self._block = None

    def wrap(self, array: np.ndarray) -> CPUBuffer:
        return CPUBuffer(array)

    def copy(self, target: DeviceBuffer, source: DeviceBuffer | np.ndarray) -> None:
        array = source if isinstance(source, np.ndarray) else source.to_numpy(copy=False)
        np.copyto(target.to_numpy(copy=False), array.reshape(target.shape), casting="no")

    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> CPUEntry:
        library = self._libraries.get(id(program))  # the library holds the program, so the id is not reused
        if library is None:
            library = self._libraries[id(program)] = NativeLibrary(program, self.threads)
        return CPUEntry(library, program, entry, fixed)


def _allocated(shape: Sequence[int], alloc_shape: Sequence[int] | None) -> Sequence[int]:
    full = shape if alloc_shape is None else alloc_shape
    if len(full) != len(shape) or any(n < m for n, m in zip(full, shape, strict=True)):
        raise BackendError(f"alloc_shape {list(full)} cannot hold shape {list(shape)}")
    return full


BACKEND = CPUBackend
