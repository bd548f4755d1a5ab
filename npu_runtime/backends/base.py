"""The contract between the runtime and a device."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint, IOSpec
from npu_compiler.aten.ir import TensorSpec
from npu_compiler.support import dtypes

from ..arguments import host_input
from ..arrays import SlabCheck, aligned_zeros, read_file, zeros
from ..device import DeviceBuffer, FileBlock, HostLaunch, Launch, LoadedEntry, status_of
from ..executor import Executor
from ..registry import available_backends, get_backend, register_backend
from ..state import State

__all__ = [
    "Backend", "DeviceBuffer", "FileBlock", "HostLaunch", "Launch", "LoadedEntry", "available_backends", "get_backend",
    "register_backend", "status_of",
]  # fmt: skip


class Backend(ABC):
    """A device that runs the programs of one target.

    ``name``: the target's name. ``device``: the number of the device among those of its kind. ``shares_host``: whether
    it computes in the host's memory. Methods of a backend have the docstrings of this class.
    """

    name: str
    device: int = 0
    shares_host: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments with which :func:`get_backend` makes an equal backend."""
        return {}

    @classmethod
    def machines(cls) -> list[str]:
        """Return descriptions of this machine's devices that the backend can use. Empty: none, or they are unknown."""
        return []

    @property
    def machine(self) -> str:
        """The device that this backend runs on, in words."""
        return self.name

    @property
    def bandwidth(self) -> float:
        """Bytes per second of its memory as its driver tells; 0: it does not."""
        return 0.0

    @classmethod
    def missing(cls) -> list[str]:
        """Return what this machine lacks to run programs, each with its remedy. Empty: nothing is known to be
        missing."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, self.options)

    def __deepcopy__(self, memo: Any) -> Backend:
        return self

    @abstractmethod
    def allocate_empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> DeviceBuffer:
        """Return a buffer with undefined contents. ``alloc_shape``: the shape of the allocation, at least ``shape`` in
        every dim (default: ``shape``); its padding is zero. Raises ``BackendError`` if there is not enough memory."""

    @abstractmethod
    def wrap(self, array: np.ndarray) -> DeviceBuffer:
        """Return ``array`` (C-contiguous) as a buffer: the same memory if the device can use it, else a copy. Raises
        ``BackendError`` if there is not enough memory."""

    def adopt(self, value: Any) -> DeviceBuffer | None:
        """Return a buffer for an array of another library in this device's memory, without a copy; None if ``value`` is
        not such an array."""
        return value if isinstance(value, DeviceBuffer) else None

    def aligned(self, buffer: DeviceBuffer) -> bool:
        """Return whether kernels can access ``buffer`` where it is: on most devices they load vectors, whose addresses
        must be multiples of 16 bytes. The executor copies inputs that are not aligned. By default all are."""
        return True

    @abstractmethod
    def copy(self, target: DeviceBuffer, source: DeviceBuffer | np.ndarray) -> None:
        """Overwrite ``target`` with ``source``, which has the same dtype and number of elements, in row-major order.
        Padding is not copied."""

    def start_copy(self, target: DeviceBuffer, source: np.ndarray) -> None:
        """Start :meth:`copy` of a C-contiguous array, which must not change until :meth:`synchronize` returns."""
        self.copy(target, source)

    def start_read(self, target: np.ndarray, source: DeviceBuffer) -> None:
        """Start to read ``source`` into ``target``, a C-contiguous array of its shape and dtype, which is complete
        after :meth:`synchronize`."""
        np.copyto(target, source.to_numpy(copy=False))

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all work launched so far, and no more. It returns at once on a device whose
        launches are synchronous."""
        return lambda: None

    def host_array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Return zeros in the kind of host memory that is copied to and from the device fastest."""
        return aligned_zeros(shape, dtype)

    def read_file(self, descriptor: int, begin: int, nbytes: int, check: SlabCheck) -> FileBlock:
        """Read ``nbytes`` from offset ``begin`` of an open file into one block of device memory.

        Returns a function (byte offset, shape, dtype) -> buffer in the block. ``check`` is called with the number and
        the bytes of every slab of ``SLAB`` bytes, from several threads. Raises ``OSError``, ``BackendError`` and the
        errors of ``check``.
        """
        block = read_file(descriptor, begin, nbytes, check)

        def cut(at: int, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceBuffer:
            return self.wrap(block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape)))

        return cut

    @abstractmethod
    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> LoadedEntry:
        """Make an entry point ready to run. ``fixed``: the buffers that are the same in every run, by buffer id.

        Raises ``BackendError`` if the program cannot run on this device, ``ArtifactError`` if its code is damaged.
        """

    def block(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which buffers are allocated in one block of ``nbytes``, as long as they fit. By default
        it does nothing."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait until all launched work has finished. By default launches are synchronous, and it does nothing. Raises
        ``BackendError`` if a launch failed."""
        return None

    def allocate_zeros(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> DeviceBuffer:
        """:meth:`allocate_empty`, with all elements zero."""
        buffer = self.allocate_empty(shape, dtype, alloc_shape)
        self.copy(buffer, zeros(buffer.shape, buffer.dtype))
        return buffer

    def allocate_result(self, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceBuffer:
        """:meth:`allocate_empty` for an output of a run, which is usually short-lived."""
        return self.allocate_empty(shape, dtype)

    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: Sequence[int] | None = None, spec: IOSpec | TensorSpec | None = None
    ) -> DeviceBuffer:
        """Return a copy of ``data`` in device memory. ``spec``: the input that it is for, such as
        ``executor.inputs[0]``; shape and dtype are then checked and widened as by :meth:`Executor.run`, with the same
        ``InputError``. Raises ``BackendError`` if there is not enough memory."""
        if spec is not None:
            data = host_input(spec, data).astype(dtypes.numpy_dtype(spec.dtype), copy=False)
        buffer = self.allocate_empty(data.shape, data.dtype, alloc_shape)
        self.copy(buffer, data)
        return buffer

    def create_executor(
        self, program: CompiledProgram, weights: Any = None, entry: str | None = None, state: State | None = None
    ) -> Executor:
        """Return an executor of ``program`` on this device; :class:`npu_runtime.executor.Executor` documents the
        parameters and errors."""
        return Executor(program, weights, self, entry, state)

    def execute(self, program: CompiledProgram, inputs: Any, weights: Any = None) -> dict[str, DeviceBuffer]:
        """Load ``program``, run it once and return its outputs by name. To run it more than once, make an executor,
        whose errors this raises, too."""
        return self.create_executor(program, weights).run_device(inputs)


def _unpickled(name: str, options: Mapping[str, Any]) -> Backend:
    return get_backend(name, **options)
