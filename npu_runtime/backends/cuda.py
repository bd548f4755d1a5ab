"""NVIDIA GPUs: memory and streams through CuPy, cubins and graphs through the driver. A run is one graph launch."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support import dtypes, env
from npu_compiler.support.errors import ArtifactError, BackendError
from npu_compiler.targets.cuda.devices import arch_of, capability_of, row_for, too_old
from npu_compiler.targets.simt.lang import program as simt

from ..arrays import SLAB, SlabCheck, read_into
from ..cuda_driver import DriverError, driver, failure
from .base import Backend, DeviceBuffer, FileBlock, Launch, LoadedEntry

_GRAPHS = 16  # kept per entry point, one for each set of addresses
_READERS = 16  # threads that read a file, each with ``SLAB`` pinned bytes
_DLPACK_CUDA = 2  # kDLCUDA
_STEPWISE = 2  # NPU_DEBUG from which kernels run one by one, so that an error names the one that failed


class CUDABuffer(DeviceBuffer):
    """Memory of a GPU. Interchange: ``__cuda_array_interface__`` and DLPack, without a copy."""

    def __init__(self, backend: CUDABackend, memory: Any, shape: Sequence[int], alloc_shape: Sequence[int], dtype: Any):
        """``memory``: a CuPy MemoryPointer, or :class:`_Borrowed`."""
        self._backend, self._memory = backend, memory
        self.shape, self.alloc_shape, self.dtype = tuple(shape), tuple(alloc_shape), np.dtype(dtype)
        self._address = int(memory.ptr)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._backend.allocate_buffer, (self.to_numpy(), self.alloc_shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.alloc_shape) * self.dtype.itemsize

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
        """A CuPy array of the same memory, [alloc_shape]."""
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
        self._backend.synchronize()  # the consumer's stream does not know this one
        return self.as_cupy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._backend.device

    def __repr__(self) -> str:
        return f"CUDABuffer({self.dtype}{list(self.shape)})"


class _Borrowed:
    """Another library's array: its address, for as long as this lives."""

    def __init__(self, owner: Any, address: int):
        self.owner, self.ptr = owner, address


class _Code:
    """The kernels of a program on a device. Loading them compiles nothing, unless they are PTX for a newer chip."""

    def __init__(self, program: CompiledProgram, capability: tuple[int, int]):
        self.program = program
        self.entries, code = simt.unpack(program.binary)
        _check_driver(program)
        self.functions: dict[str, int] = {}
        shared: dict[str, int] = {}
        for launch in (x for launches in self.entries.values() for x in launches):
            shared[launch.function] = max(shared.get(launch.function, 0), launch.shared)
        modules: list[int] = []
        self._unload = weakref.finalize(self, _unload, modules)
        self._unload.atexit = False  # the driver may be gone before
        try:
            native = _runs(code["arch"], capability)
            for name, (cubin, ptx) in code["modules"].items():
                if not native and not ptx:
                    here = row_for(capability).spec
                    raise BackendError(
                        f"program {program.name!r} was compiled for {program.device or code['arch']}, this GPU is "
                        f"{arch_of(capability)}; compile it again: npusim compile MODEL --target {here} (on a machine "
                        "with such a GPU, --target cuda will do)"
                    )
                image = cubin if native else zlib.decompress(ptx)
                module, self.functions[name] = driver().load(image, name, shared.get(name, 0))
                modules.append(module)
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ArtifactError(f"binary: no CUDA code: {error!r}; compile the model again") from None
        except DriverError as error:
            raise BackendError(f"program {program.name!r}: {error}") from None


def _check_driver(program: CompiledProgram) -> None:
    """A driver runs what compilers of its own major version made, and older ones."""
    made_by = str(program.build.get("compiler", "")).removeprefix("nvrtc ")
    major, known = made_by.partition(".")[0], driver().version
    if major.isdigit() and int(major) > known[0]:
        raise BackendError(
            f"program {program.name!r} was compiled with NVRTC {made_by}, and the NVIDIA driver is too old for it: "
            f"it supports CUDA {known[0]}.{known[1]}. Update the driver, or compile the model with an NVRTC {known[0]}"
        )


def _unload(modules: list[int]) -> None:
    for module in modules:
        driver().unload(module)


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a cubin for ``arch`` runs: of the same major version, no newer; 'a' means exactly that chip."""
    major, minor = capability_of(arch)
    return (major, minor) == capability if arch[-1] == "a" else major == capability[0] and minor <= capability[1]


class CUDAEntry(LoadedEntry):
    """An entry point with its arena, and a graph for each set of inputs and outputs it was bound to."""

    def __init__(self, backend: CUDABackend, code: _Code, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]):
        self._backend, self._code, self._entry = backend, code, entry
        if entry.symbol not in code.entries or len(code.entries[entry.symbol]) != len(entry.calls):
            raise ArtifactError(f"binary: it has no launches for entry point {entry.name!r}; compile the model again")
        self._launches = code.entries[entry.symbol]
        self._fixed = dict(fixed)
        self._specs = {b.id: b for b in code.program.buffers}
        self._what = f"running {entry.name!r} of program {code.program.name!r}"
        try:
            self._arena = backend.allocate_zeros((max(entry.arena_bytes, 1),), np.dtype(np.uint8))
        except BackendError as error:
            raise BackendError(f"the arena of {entry.name!r} of program {code.program.name!r}: {error}") from None
        self._bad = backend.host_array((max(len(self._launches), 1),), np.dtype(np.int32))
        self._maps: dict[int, tuple[tuple[int, ...], list[Any]]] = {}
        self._graphs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        io = (*entry.inputs, *entry.outputs)
        self._io = {s.buffer: s for s in io if self._specs[s.buffer].kind in ("input", "output")}

    def io(self) -> dict[int, DeviceBuffer]:
        return {id: self._backend.allocate_zeros(s.shape, dtypes.numpy_dtype(s.dtype)) for id, s in self._io.items()}

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        for id, buffer in buffers.items():
            if buffer.native_handle % 16:
                raise BackendError(f"{self._specs[id].name!r}: its memory is not at a multiple of 16 bytes")
        key = tuple(buffers[id].native_handle for id in sorted(buffers))
        address = {id: b.native_handle for id, b in {**self._fixed, **buffers}.items()}
        address[simt.ARENA] = self._arena.native_handle
        held = self._graph(key, address), tuple(buffers.values())
        graph, backend, what, run = held[0].handle, self._backend, self._what, driver().run_graph
        stream, stepwise = backend.stream.ptr, env.debug() >= _STEPWISE

        def launch(times: np.ndarray | None, _keep_alive: Any = held) -> int:
            backend.enter()
            backend.running = what
            if times is not None:
                self._timed(address, times)
            elif stepwise:
                self._one_by_one(address)
            else:
                run(graph, stream, what)
            return 0

        return launch

    def _graph(self, key: tuple[int, ...], address: Mapping[int, int]) -> _Graph:
        found = self._graphs.get(key)
        if found is None:
            self._backend.enter()

            def launch_all() -> None:
                for number in range(len(self._launches)):
                    self._launch(number, address, overlap=True)

            what = f"the graph of {self._entry.name!r} of program {self._code.program.name!r}"
            found = self._graphs[key] = _Graph(driver().record(self._backend.stream.ptr, what, launch_all))
            while len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return found

    def _launch(self, number: int, address: Mapping[int, int], overlap: bool) -> None:
        x = self._launches[number]
        if not x.groups:
            return
        values = [address[id] + at for id, at in x.arguments]
        if x.checks:
            values.append(self._bad.ctypes.data + 4 * number)  # host memory: one address space
        function, stream = self._code.functions[x.function], self._backend.stream.ptr
        name = self._name(number)
        maps = self._tile_maps(number, address) if x.maps else ()
        driver().launch(name, function, x.groups, x.threads, x.shared, stream, values, overlap, maps)

    def _tile_maps(self, number: int, address: Mapping[int, int]) -> list[Any]:
        """Of a launch; kept for the next one at the same addresses: making them takes longer than small kernels."""
        maps = self._launches[number].maps
        places = tuple(address[id] + at for id, at, _ in maps)
        kept = self._maps.get(number)
        if kept is None or kept[0] != places:
            made = [driver().tile_map(self._name(number), p, m[2]) for p, m in zip(places, maps, strict=True)]
            kept = self._maps[number] = (places, made)
        return kept[1]

    def _name(self, number: int) -> str:
        """A kernel in the words of the program's description, and of its code."""
        call = self._entry.calls[number]
        return f"{call.name} ({self._launches[number].function}) of program {self._code.program.name!r}"

    def _one_by_one(self, address: Mapping[int, int]) -> None:
        for number in range(len(self._launches)):
            self._launch(number, address, overlap=False)
            driver().synchronize(self._backend.stream.ptr, f"kernel {self._name(number)}")

    def _timed(self, address: Mapping[int, int], times: np.ndarray) -> None:
        """Kernel by kernel, with an event between two; times[0] is 0."""
        cuda, stream = self._backend.cupy.cuda, self._backend.stream
        events = [cuda.Event() for _ in range(len(self._launches) + 1)]
        events[0].record(stream)
        for number in range(len(self._launches)):
            self._launch(number, address, overlap=False)
            events[number + 1].record(stream)
        self._backend.synchronize()
        times[:] = [cuda.get_elapsed_time(events[0], e) * 1e-3 for e in events]

    def failed(self) -> int:
        if not self._bad.any():
            return 0
        first = int(np.flatnonzero(self._bad)[0])
        self._bad.fill(0)
        return 1 + first

    def arena_buffer(self, id: int) -> CUDABuffer:
        spec = self._specs[id]
        dtype = dtypes.numpy_dtype(spec.dtype)
        place = _Borrowed(self._arena, self._arena.native_handle + spec.offset)
        return CUDABuffer(self._backend, place, spec.shape, spec.shape, dtype)


class _Graph:
    def __init__(self, handle: int):
        self.handle = handle
        self._destroy = weakref.finalize(self, driver().destroy_graph, handle)
        self._destroy.atexit = False


class CUDABackend(Backend):
    """Runs ``cuda`` programs on GPU number ``device``. Needs CuPy and NVIDIA's driver; no compiler."""

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
        self.capability, self.device_name = found[device].capability, found[device].name
        if (problem := too_old(self.capability)) is not None:
            raise BackendError(f"GPU {device} ({self.device_name}) {problem}")
        self.running = "a run on the GPU"  # what an error that comes late is about
        with self._errors(f"starting to use GPU {device} ({self.device_name})"):
            self.enter()
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self._codes: weakref.WeakValueDictionary[int, _Code] = weakref.WeakValueDictionary()

    def enter(self) -> None:
        """Make the GPU this thread's: the driver has one for each."""
        if getattr(_thread, "device", None) != self.device:
            self.cupy.cuda.Device(self.device).use()
            _thread.device = self.device

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """CuPy's errors as this package's."""
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
        if _is_foreign(value):
            value = self.cupy.from_dlpack(value)
        address = _device_address(value, self.device)
        if address is None:
            return None
        self.enter()
        with self._errors("waiting for the input"):
            self.cupy.cuda.runtime.deviceSynchronize()  # whoever made it may have used another stream
        pointer, shape, dtype = address
        return CUDABuffer(self, _Borrowed(value, pointer), shape, shape, dtype)

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
        """Between addresses, in the order of this backend's work; done when :meth:`synchronize` returns."""
        self.enter()
        self._driver.copy(to, source, nbytes, self.stream.ptr)

    def read_file(self, descriptor: int, begin: int, nbytes: int, check: SlabCheck) -> FileBlock:
        """Several threads read slabs into pinned memory: the disk's cache, not the bus to the GPU, is the limit."""
        block = self.allocate_empty((nbytes,), np.dtype(np.uint8))
        self.synchronize()  # the memory may have been another buffer's until now
        readers = min(_READERS, max(env.usable_cpus(), 2), -(-nbytes // SLAB))
        with ThreadPoolExecutor(max(readers, 1)) as pool:
            list(pool.map(lambda n: self._read_slabs(descriptor, begin, block, check, n, readers), range(readers)))

        def cut(at: int, shape: Sequence[int], dtype: np.dtype[Any]) -> CUDABuffer:
            return CUDABuffer(self, _Borrowed(block, block.native_handle + at), shape, shape, dtype)

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
                check(number, slab[:size])  # while it is copied
            finally:
                self._driver.synchronize(stream.ptr, "copying weights to the GPU")

    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> CUDAEntry:
        self.enter()
        code = self._codes.get(id(program))  # it holds the program, so the id is not another's
        if code is None:
            code = self._codes[id(program)] = _Code(program, self.capability)
        return CUDAEntry(self, code, entry, fixed)

    def synchronize(self) -> None:
        self.enter()
        self._driver.synchronize(self.stream.ptr, self.running)


_thread = threading.local()  # .device: the GPU that a thread uses


def missing_parts() -> list[str]:
    """What running on a GPU lacks here, each with what to do about it."""
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
        missing.append(f"CuPy is needed{broken}: pip install 'npusim[cuda]' (or cupy-cuda13x)")
    if not missing and version[0] < runtime:
        missing.append(
            f"CuPy is for CUDA {runtime}, and the NVIDIA driver is too old for it: it supports CUDA {version[0]}."
            f"{version[1]}; update the driver, or pip install cupy-cuda{version[0]}x"
        )
    return missing


def _is_foreign(value: Any) -> bool:
    """Whether only DLPack tells about it, and says that it is in a GPU's memory."""
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "__cuda_array_interface__"):
        return False
    where = getattr(value, "__dlpack_device__", None)
    return where is not None and int(where()[0]) == _DLPACK_CUDA


def _device_address(value: Any, device: int) -> tuple[int, tuple[int, ...], np.dtype[Any]] | None:
    """(address, shape, dtype) of a dense array in a GPU's memory, of PyTorch or of anyone with the CUDA array
    interface, which does not tell the GPU."""
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


BACKEND = CUDABackend
