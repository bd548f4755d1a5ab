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
from ..device import DeviceBuffer, FileBlock, HostLaunch, Launch, LoadedEntry
from ..executor import Executor
from ..registry import available_backends, get_backend, register_backend
from ..state import State

__all__ = [
    "Backend", "DeviceBuffer", "FileBlock", "HostLaunch", "Launch", "LoadedEntry", "available_backends", "get_backend",
    "register_backend",
]  # fmt: skip


class Backend(ABC):
    """A device that runs the programs of one target; ``name`` is that target's. ``device`` is its number among the
    devices of its kind. ``shares_host``: whether it computes in the host's own memory."""

    name: str
    device: int = 0
    shares_host: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What :func:`get_backend` was given to make this backend."""
        return {}

    @classmethod
    def machines(cls) -> list[str]:
        """What this machine has for the backend to run on, in words. Empty: there is nothing, or nobody can tell."""
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
        """What running here lacks, each with what to do about it. Empty: nothing is known to be missing."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.name, self.options)

    def __deepcopy__(self, memo: Any) -> Backend:
        return self

    @abstractmethod
    def allocate_empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> DeviceBuffer:
        """Memory with undefined contents (padding is zero). Raises ``BackendError`` if there is not enough."""

    @abstractmethod
    def wrap(self, array: np.ndarray) -> DeviceBuffer:
        """``array`` (C-contiguous) as device memory: the same memory where the device can use it, else a copy."""

    def adopt(self, value: Any) -> DeviceBuffer | None:
        """Another library's array in this device's memory, without a copy; None if it is not that."""
        return value if isinstance(value, DeviceBuffer) else None

    @abstractmethod
    def copy(self, target: DeviceBuffer, source: DeviceBuffer | np.ndarray) -> None:
        """Overwrite ``target``'s elements with ``source``'s: same dtype and number of elements, in row-major order."""

    def start_copy(self, target: DeviceBuffer, source: np.ndarray) -> None:
        """:meth:`copy` of a C-contiguous array that stays as it is until :meth:`synchronize`: it need not wait."""
        self.copy(target, source)

    def start_read(self, target: np.ndarray, source: DeviceBuffer) -> None:
        """Read ``source`` into a C-contiguous array of its shape and dtype, which has it after :meth:`synchronize`."""
        np.copyto(target, source.to_numpy(copy=False))

    def mark(self) -> Callable[[], None]:
        """A wait for everything launched so far, and for no more. Nothing to wait for where launches do."""
        return lambda: None

    def host_array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Zeros in host memory of the kind that moves to and from the device fastest."""
        return aligned_zeros(shape, dtype)

    def read_file(self, descriptor: int, begin: int, nbytes: int, check: SlabCheck) -> FileBlock:
        """A part of an open file in one block of device memory, of which the result hands out buffers. ``check`` sees
        every ``SLAB`` bytes of it in host memory, in several threads. Raises ``OSError``, ``BackendError`` and what
        ``check`` raises."""
        block = read_file(descriptor, begin, nbytes, check)

        def cut(at: int, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceBuffer:
            return self.wrap(block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape)))

        return cut

    @abstractmethod
    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> LoadedEntry:
        """Make an entry point ready to run. ``fixed`` are the buffers that stay the same from run to run.

        Raises ``BackendError`` if the program cannot run on this device.
        """

    def block(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Buffers allocated inside come from one block of ``nbytes`` as long as it lasts. Optional: does nothing
        here."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait until everything launched has finished. Nothing to do where launches do."""
        return None

    def allocate_zeros(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> DeviceBuffer:
        buffer = self.allocate_empty(shape, dtype, alloc_shape)
        self.copy(buffer, zeros(buffer.shape, buffer.dtype))
        return buffer

    def allocate_result(self, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceBuffer:
        """:meth:`allocate_empty` for a run's output, which its caller will not keep for long."""
        return self.allocate_empty(shape, dtype)

    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: Sequence[int] | None = None, spec: IOSpec | TensorSpec | None = None
    ) -> DeviceBuffer:
        """A copy of ``data`` in device memory. ``spec``: the input it is for, such as ``executor.inputs[0]``; its shape
        is checked and its dtype widened as :meth:`Executor.run` does, with the same ``InputError``."""
        if spec is not None:
            data = host_input(spec, data).astype(dtypes.numpy_dtype(spec.dtype), copy=False)
        buffer = self.allocate_empty(data.shape, data.dtype, alloc_shape)
        self.copy(buffer, data)
        return buffer

    def create_executor(
        self, program: CompiledProgram, weights: Any = None, entry: str | None = None, state: State | None = None
    ) -> Executor:
        """See :class:`npu_runtime.executor.Executor`."""
        return Executor(program, weights, self, entry, state)

    def execute(self, program: CompiledProgram, inputs: Any, weights: Any = None) -> dict[str, DeviceBuffer]:
        """Load, run once, forget. To run more than once, keep an executor."""
        return self.create_executor(program, weights).run_device(inputs)


def _again(name: str, options: Mapping[str, Any]) -> Backend:
    return get_backend(name, **options)
