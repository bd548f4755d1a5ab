"""The backend of NVIDIA GPUs. CuPy manages memory and streams; all other calls go to the driver."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support import env
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.cuda.devices import arch_of, too_old

from ...arrays import SLAB, SlabCheck, read_into
from ..base import Backend, DeviceBuffer, FileBlock
from .buffers import Borrowed, CUDABuffer, device_address, is_foreign
from .code import Code
from .driver import driver, failure
from .entry import CUDAEntry

_READERS = 16  # the most threads that read a file, each with ``SLAB`` bytes of pinned memory


class CUDABackend(Backend):
    """Runs ``cuda`` programs on GPU number ``device``. Needs CuPy and NVIDIA's driver, but no compiler; raises
    ``BackendError`` if one is missing, if there is no such GPU, or if the GPU is too old."""

    name, shares_host = "cuda", False

    @classmethod
    def machines(cls) -> list[str]:
        try:
            found = driver().devices()
        except BackendError:
            return []
        return [f"{d.name}, {arch_of(d.capability)}, {d.memory / 2**30:.0f} GiB" for d in found]

    @classmethod
    def missing(cls) -> list[str]:
        return missing_parts()

    @property
    def options(self) -> dict[str, Any]:
        return {"device": self.device}

    def __init__(self, device: int = 0):
        missing = missing_parts()
        if missing:
            raise BackendError(f"the cuda target cannot run here: {'; '.join(missing)}")
        import cupy

        self._driver = driver()
        found = self._driver.devices()
        if not 0 <= device < len(found):
            raise BackendError(f"there is no GPU number {device}, only {len(found)}")
        self.cupy, self.device = cupy, device
        self.gpu = found[device]
        self.capability, self.device_name = self.gpu.capability, self.gpu.name
        if (problem := too_old(self.capability)) is not None:
            raise BackendError(f"GPU {device} ({self.device_name}) {problem}")
        self.running = "a run on the GPU"  # the last launch, for errors that are reported later
        with self._errors(f"starting to use GPU {device} ({self.device_name})"):
            self.enter()
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self._codes: weakref.WeakValueDictionary[int, Code] = weakref.WeakValueDictionary()

    @property
    def machine(self) -> str:
        return self.device_name

    @property
    def bandwidth(self) -> float:
        return self.gpu.bandwidth

    def enter(self) -> None:
        """Make the GPU current in the calling thread; the driver's current GPU is per thread."""
        if getattr(_thread, "device", None) != self.device:
            self.cupy.cuda.Device(self.device).use()
            _thread.device = self.device

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Convert errors of CuPy to those of this package. ``what``: the action that failed, for the message."""
        try:
            yield
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise failure(what, error.status, str(error)) from None

    def allocate_empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> CUDABuffer:
        full = tuple(shape if alloc_shape is None else alloc_shape)
        if len(full) != len(shape) or any(n < m for n, m in zip(full, shape, strict=True)):
            raise BackendError(f"alloc_shape {list(full)} cannot hold shape {list(shape)}")
        nbytes = math.prod(full) * np.dtype(dtype).itemsize
        self.enter()
        try:
            with self._errors(f"allocating {nbytes} bytes"), self.stream:
                memory = self.cupy.cuda.alloc(max(nbytes, 16))
        except self.cupy.cuda.memory.OutOfMemoryError:
            free, total = self.cupy.cuda.runtime.memGetInfo()
            raise BackendError(
                f"the GPU has no memory for {nbytes} bytes (shape {list(shape)}, dtype {dtype}): {free} of {total} "
                "bytes are free"
            ) from None
        buffer = CUDABuffer(self, memory, shape, full, dtype)
        if full != tuple(shape):
            self._driver.clear(buffer.native_handle, nbytes, self.stream.ptr)
        return buffer

    def allocate_zeros(
        self, shape: Sequence[int], dtype: np.dtype[Any], alloc_shape: Sequence[int] | None = None
    ) -> CUDABuffer:
        buffer = self.allocate_empty(shape, dtype, alloc_shape)
        self._driver.clear(buffer.native_handle, buffer.size_bytes, self.stream.ptr)
        return buffer

    def host_array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        count = math.prod(shape)
        self.enter()
        with self._errors(f"pinning {count * dtype.itemsize} bytes of memory"):
            memory = self.cupy.cuda.alloc_pinned_memory(max(count * dtype.itemsize, 16))
        array = np.frombuffer(memory, dtype, count).reshape(tuple(shape))
        array.fill(0)
        return array

    def wrap(self, array: np.ndarray) -> CUDABuffer:
        buffer = self.allocate_empty(array.shape, array.dtype)
        self.copy(buffer, array)
        return buffer

    def adopt(self, value: Any) -> CUDABuffer | None:
        if isinstance(value, CUDABuffer):
            return value
        if is_foreign(value):
            value = self.cupy.from_dlpack(value)
        address = device_address(value, self.device)
        if address is None:
            return None
        self.enter()
        with self._errors("waiting for the input"):
            self.cupy.cuda.runtime.deviceSynchronize()  # the array may have been computed on another stream
        pointer, shape, dtype = address
        return CUDABuffer(self, Borrowed(value, pointer), shape, shape, dtype)

    def aligned(self, buffer: DeviceBuffer) -> bool:
        return int(buffer.native_handle) % 16 == 0

    def copy(self, target: DeviceBuffer, source: DeviceBuffer | np.ndarray) -> None:
        padded = isinstance(source, DeviceBuffer) and source.shape != source.alloc_shape
        if padded or target.shape != target.alloc_shape:
            self._copy_padded(target, source)
            return
        if isinstance(source, DeviceBuffer):
            self.move(target.native_handle, source.native_handle, target.size_bytes)
            return
        self.start_copy(target, np.asarray(source, order="C"))
        self.synchronize()

    def start_copy(self, target: DeviceBuffer, source: np.ndarray) -> None:
        if source.dtype != target.dtype or source.nbytes != target.size_bytes:
            raise BackendError(f"cannot copy {source.dtype}{list(source.shape)} into {target!r}")
        self.move(target.native_handle, source.ctypes.data, source.nbytes)

    def start_read(self, target: np.ndarray, source: DeviceBuffer) -> None:
        self.move(target.ctypes.data, source.native_handle, source.size_bytes)

    def _copy_padded(self, target: DeviceBuffer, source: DeviceBuffer | np.ndarray) -> None:
        values = source if isinstance(source, np.ndarray) else source.to_numpy()
        whole = np.zeros(target.alloc_shape, target.dtype)
        whole[tuple(slice(n) for n in target.shape)] = values.reshape(target.shape)
        self.start_copy(target, whole)
        self.synchronize()

    def mark(self) -> Callable[[], None]:
        event, what = self.cupy.cuda.Event(disable_timing=True), self.running
        event.record(self.stream)

        def wait() -> None:
            with self._errors(what):
                event.synchronize()

        return wait

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Start a copy between two addresses on this backend's stream; it is complete when :meth:`synchronize`
        returns."""
        self.enter()
        self._driver.copy(to, source, nbytes, self.stream.ptr)

    def read_file(self, descriptor: int, begin: int, nbytes: int, check: SlabCheck) -> FileBlock:
        """See :meth:`Backend.read_file`. Several threads read slabs into pinned memory, because reading from the disk
        cache is slower than copying to the GPU."""
        block = self.allocate_empty((nbytes,), np.dtype(np.uint8))
        self.synchronize()  # work on the previous owner of the memory may be in progress
        readers = min(_READERS, max(env.usable_cpus(), 2), -(-nbytes // SLAB))
        with ThreadPoolExecutor(max(readers, 1)) as pool:
            list(pool.map(lambda n: self._read_slabs(descriptor, begin, block, check, n, readers), range(readers)))

        def cut(at: int, shape: Sequence[int], dtype: np.dtype[Any]) -> CUDABuffer:
            return CUDABuffer(self, Borrowed(block, block.native_handle + at), shape, shape, dtype)

        return cut

    def _read_slabs(
        self, descriptor: int, begin: int, block: CUDABuffer, check: SlabCheck, first: int, step: int
    ) -> None:
        slab = self.host_array((SLAB,), np.dtype(np.uint8))
        stream = self.cupy.cuda.Stream(non_blocking=True)
        for number in range(first, -(-block.size_bytes // SLAB), step):
            at = number * SLAB
            size = min(SLAB, block.size_bytes - at)
            read_into(descriptor, begin + at, slab[:size])
            self._driver.copy(block.native_handle + at, slab.ctypes.data, size, stream.ptr)
            try:
                check(number, slab[:size])  # during the copy
            finally:
                self._driver.synchronize(stream.ptr, "copying weights to the GPU")

    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> CUDAEntry:
        self.enter()
        code = self._codes.get(id(program))  # it holds the program, so the id is not reused
        if code is None:
            code = self._codes[id(program)] = Code(program, self.capability)
        return CUDAEntry(self, code, entry, fixed)

    def synchronize(self) -> None:
        self.enter()
        self._driver.synchronize(self.stream.ptr, self.running)


_thread = threading.local()  # .device: the GPU that is current in a thread


def missing_parts() -> list[str]:
    """Return what this machine lacks to run programs on a GPU, each with its remedy."""
    missing, runtime, version = [], 0, (0, 0)
    try:
        version = driver().version
        devices = driver().devices()
        problems = [f"{d.name} {problem}" for d in devices if (problem := too_old(d.capability)) is not None]
        if len(problems) == len(devices):
            missing += problems or ["there is no NVIDIA GPU"]
    except BackendError as error:
        missing.append(str(error))
    try:
        import cupy

        runtime = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError as error:
        broken = "" if error.name == "cupy" else f" ({error})"
        missing.append(f"CuPy is needed{broken}: pip install 'npusim[cuda]', with a driver of CUDA 12 'npusim[cuda12]'")
    if not missing and version[0] < runtime:
        missing.append(
            f"CuPy is for CUDA {runtime}, and the NVIDIA driver is too old for it: it supports CUDA {version[0]}."
            f"{version[1]}; update the driver, or, if it supports CUDA 12, pip install 'npusim[cuda12]'"
        )
    return missing


BACKEND = CUDABackend
