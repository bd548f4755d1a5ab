"""The contract between the runtime and a device: memory (:class:`DeviceBuffer`), programs (:class:`LoadedEntry`)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint, IOSpec
from npu_compiler.aten.ir import TensorSpec
from npu_compiler.support import dtypes
from npu_compiler.support.errors import BackendError

from ..arrays import SlabCheck, aligned_zeros, read_file, zeros

if TYPE_CHECKING:
    from ..executor import Executor, State

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
            from ..executor import host_input

            data = host_input(spec, data).astype(dtypes.numpy_dtype(spec.dtype), copy=False)
        buffer = self.allocate_empty(data.shape, data.dtype, alloc_shape)
        self.copy(buffer, data)
        return buffer

    def create_executor(
        self, program: CompiledProgram, weights: Any = None, entry: str | None = None, state: State | None = None
    ) -> Executor:
        """See :class:`npu_runtime.executor.Executor`."""
        from ..executor import Executor

        return Executor(program, weights, self, entry, state)

    def execute(self, program: CompiledProgram, inputs: Any, weights: Any = None) -> dict[str, DeviceBuffer]:
        """Load, run once, forget. To run more than once, keep an executor."""
        return self.create_executor(program, weights).run_device(inputs)


def available_backends() -> list[str]:
    """Names of the backends this installation has."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "base"))


_registered: dict[str, Callable[..., Backend]] = {}


def register_backend(name: str, backend: Callable[..., Backend]) -> None:
    """Make a backend known that is not part of this package; it runs the programs of the target ``name``."""
    _registered[name] = backend


def _again(name: str, options: Mapping[str, Any]) -> Backend:
    return get_backend(name, **options)


def get_backend(name: str, **options: Any) -> Backend:
    """A new backend by target name, e.g. ``get_backend('cpu', threads=2)``; ``BackendError`` if there is none."""
    if name in _registered:
        return _registered[name](**options)
    if name not in available_backends():
        known = available_backends()
        raise BackendError(
            f"this build has no {name!r} target; it has: {', '.join(known)}. Compile the model for one of these"
        )
    make: Callable[..., Backend] = importlib.import_module(f".{name}", __package__).BACKEND
    foreign = sorted(options.keys() - inspect.signature(make).parameters.keys())
    if foreign:
        raise BackendError(f"the {name} target has no option {foreign[0]!r}")
    return make(**options)
