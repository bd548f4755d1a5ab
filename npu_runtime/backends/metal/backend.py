"""The backend of Apple GPUs. The CPU and the GPU share memory, so nothing is copied that is in the right place."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support import env
from npu_compiler.support.errors import BackendError

from ...arrays import ALIGNMENT, SlabCheck, read_slabs
from ..base import Backend, DeviceBuffer, FileBlock
from .buffers import Memory, MetalBuffer, allocate, map_pages, memory_of
from .commands import Commands
from .device import default_device, file_url, frameworks
from .entry import MetalEntry
from .library import Code
from .residency import Residency
from .timestamps import Timestamps


class MetalBackend(Backend):
    """Runs ``metal`` programs on this Mac's GPU. Needs pyobjc-framework-Metal; raises ``BackendError`` if it is
    missing, if there is no GPU, or if the GPU is too old.

    It has run on Linux only, where tests put an emulator in place of Apple's frameworks.
    """

    name, shares_host = "metal", False

    @classmethod
    def machines(cls) -> list[str]:
        try:
            return [str(default_device().name())]
        except BackendError:
            return []

    @classmethod
    def missing(cls) -> list[str]:
        return missing_parts()

    def __init__(self) -> None:
        self.mtl = default_device()
        self.commands = Commands(self.mtl)
        self.residency = Residency(self.mtl, self.commands.queue)
        self._block: tuple[Memory, int] | None = None
        self._capture: Any = None
        self._codes: weakref.WeakValueDictionary[int, Code] = weakref.WeakValueDictionary()

    @property
    def machine(self) -> str:
        return str(self.mtl.name())

    @cached_property
    def timestamps(self) -> Timestamps | None:
        """The GPU's clock at the ends of encoders; None if it cannot be read there."""
        return Timestamps.create(self.mtl)

    def allocate_empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> MetalBuffer:
        full = tuple(shape if alloc_shape is None else alloc_shape)
        if len(full) != len(shape) or any(n < m for n, m in zip(full, shape, strict=True)):
            raise BackendError(f"alloc_shape {list(full)} cannot hold shape {list(shape)}")
        dtype = np.dtype(dtype)
        nbytes = math.prod(full) * dtype.itemsize
        if self._block is not None:
            memory, used = self._block
            if used + nbytes <= memory.nbytes:
                self._block = memory, -(-(used + nbytes) // ALIGNMENT) * ALIGNMENT
                return MetalBuffer(self, memory, shape, dtype, full, used)
        memory = allocate(self.mtl, nbytes, f"an array of shape {list(full)} and dtype {dtype}")
        return MetalBuffer(self, memory, shape, dtype, full)

    def allocate_zeros(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> MetalBuffer:
        return self.allocate_empty(shape, dtype, alloc_shape)  # Metal clears new memory

    @contextlib.contextmanager
    def block(self, nbytes: int) -> Iterator[None]:
        self._block = allocate(self.mtl, nbytes, "the weights"), 0
        try:
            yield
        finally:
            self._block = None

    def host_array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        return allocate(self.mtl, size, f"an array of shape {list(shape)} and dtype {dtype}").array(0, shape, dtype)

    def wrap(self, array: np.ndarray) -> MetalBuffer:
        memory = memory_of(array)
        if memory is None and array.ctypes.data % 16 == 0:
            memory = map_pages(self.mtl, array)
        if memory is not None:
            at = array.ctypes.data - memory.address
            return MetalBuffer(self, memory, array.shape, array.dtype, None, at, array.flags.writeable)
        buffer = self.allocate_empty(array.shape, array.dtype)
        buffer.whole[...] = array  # no run uses new memory yet
        return buffer

    def aligned(self, buffer: DeviceBuffer) -> bool:
        at = _metal(buffer).offset
        return at % 16 == 0 and (_metal(buffer).memory.address + at) % 16 == 0

    def copy(self, target: DeviceBuffer, source: DeviceBuffer | np.ndarray) -> None:
        if isinstance(source, MetalBuffer) and not self.commands.idle and self._copy_on_gpu(target, source):
            return
        self.synchronize()
        array = source.view if isinstance(source, MetalBuffer) else np.asarray(source)
        np.copyto(_metal(target).view, array.reshape(target.shape), casting="no")

    def start_copy(self, target: DeviceBuffer, source: np.ndarray) -> None:
        if source.dtype != target.dtype or source.nbytes != target.size_bytes:
            raise BackendError(f"cannot copy {source.dtype}{list(source.shape)} into {target!r}")
        if self.commands.idle or memory_of(source) is None or not self._copy_on_gpu(target, self.wrap(source)):
            self.copy(target, source)

    def start_read(self, target: np.ndarray, source: DeviceBuffer) -> None:
        if self.commands.idle or memory_of(target) is None or not self._copy_on_gpu(self.wrap(target), source):
            np.copyto(target, source.to_numpy(copy=False))

    def _copy_on_gpu(self, target: DeviceBuffer, source: DeviceBuffer) -> bool:
        """Start a copy that comes after all launched work; return False if the GPU cannot do it."""
        to, begin = _metal(target), _metal(source)
        padded = to.shape != to.alloc_shape or begin.shape != begin.alloc_shape
        if padded or to.dtype != begin.dtype or (to.offset | begin.offset | to.size_bytes) % 4:
            return False
        if to.size_bytes:
            self.commands.copy(to.memory, to.offset, begin.memory, begin.offset, to.size_bytes)
        return True

    def mark(self) -> Callable[[], None]:
        return self.commands.mark()

    def synchronize(self) -> None:
        if not self.commands.idle:
            self.commands.wait()
        if self._capture is not None:
            self._capture.stopCapture()
            self._capture = None

    def read_file(self, descriptor: int, begin: int, nbytes: int, check: SlabCheck) -> FileBlock:
        memory = allocate(self.mtl, nbytes, "the weights")
        read_slabs(descriptor, begin, memory.array(0, (nbytes,), np.dtype(np.uint8)), check)

        def cut(at: int, shape: Sequence[int], dtype: np.dtype[Any]) -> MetalBuffer:
            return MetalBuffer(self, memory, shape, dtype, offset=at)

        return cut

    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> MetalEntry:
        code = self._codes.get(id(program))  # it holds the program, so the id is not reused
        if code is None:
            code = self._codes[id(program)] = Code(program, self.mtl)
        return MetalEntry(self, code, entry, fixed)

    def start_capture(self) -> None:
        """Record what follows until :meth:`synchronize` into ``NPU_METAL_CAPTURE``, once for each file."""
        path = env.metal_capture()
        if path is None or path in _captured:
            return
        _captured.add(path)
        metal = frameworks()
        descriptor = metal.MTLCaptureDescriptor.alloc().init()
        descriptor.setCaptureObject_(self.commands.queue)
        descriptor.setDestination_(metal.MTLCaptureDestinationGPUTraceDocument)
        descriptor.setOutputURL_(file_url(path))
        manager = metal.MTLCaptureManager.sharedCaptureManager()
        started, error = manager.startCaptureWithDescriptor_error_(descriptor, None)
        if not started:
            raise BackendError(
                f"NPU_METAL_CAPTURE={path}: {error.localizedDescription()}; the file must not exist, and macOS "
                "captures only processes that were started with METAL_CAPTURE_ENABLED=1"
            )
        self._capture = manager


_captured: set[Any] = set()  # the files that this process has captured


def _metal(buffer: DeviceBuffer) -> MetalBuffer:
    if not isinstance(buffer, MetalBuffer):
        raise BackendError(f"{buffer!r} is not in Metal memory; allocate it with this backend")
    return buffer


def missing_parts() -> list[str]:
    """Return what this machine lacks to run programs on an Apple GPU, each with its remedy."""
    try:
        default_device()
    except BackendError as error:
        return [str(error)]
    return []


BACKEND = MetalBackend
