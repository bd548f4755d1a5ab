"""Calls of NVIDIA's driver library that CuPy does not offer, or whose errors it does not describe: modules, launches
with attributes, graphs, copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from npu_compiler.support.errors import BackendError
from npu_compiler.targets.simt.lang.program import TileMap

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TWO_BYTES = 6  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16; only the size matters for copies
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_*
_L2_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STATIC_SHARED = 48 << 10
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MEMORY_KHZ, _BUS_BITS = 36, 37  # CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, _GLOBAL_MEMORY_BUS_WIDTH
_MIN_VERSION = (12, 3)  # of CUDA: the first whose graphs support programmatic dependent launch
_ADVICE = {
    2: "the GPU is out of memory",
    100: "there is no NVIDIA GPU",
    200: "its code is damaged, or made by a compiler newer than this driver; compile the model again, or update the "
    "driver",
    209: "it holds no code for this GPU",
    218: "its PTX does not compile for this GPU",
    222: "its PTX is of a newer CUDA version than this driver knows; update the driver",
    700: "a kernel read or wrote outside of its memory",
    702: "a kernel took too long",
    715: "a kernel met an instruction that this GPU does not have",
    716: "a kernel read or wrote at an address that is not aligned",
    719: "a kernel failed",
    803: "the driver and its library are of different versions; restart the machine",
    999: "the driver does not work, or something keeps this process from using it",
}
# After these errors every later call of the process fails in the same way.
_LOST = frozenset((214, 700, 702, 710, 714, 715, 716, 717, 718, 719))


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    ]


@dataclass(frozen=True)
class InstalledGPU:
    """A GPU of this machine: its number, name, compute capability, bytes of memory, and the bytes per second that the
    clock and the width of its memory bus make (0: the driver does not tell)."""

    number: int
    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float = 0.0


_MapMemory: TypeAlias = "ctypes.Array[ctypes.c_char]"
_MAP_BYTES, _MAP_ALIGN = 128, 64


def _aligned(memory: _MapMemory) -> int:
    """The address of the TMA descriptor in ``memory``."""
    return -(-ctypes.addressof(memory) // _MAP_ALIGN) * _MAP_ALIGN


class DriverError(BackendError):
    """An error of the driver. ``code``: the driver's error code. The message names the action that failed."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


def failure(what: str, code: int, text: str) -> DriverError:
    """Return the error for CUDA error ``code``. ``what``: the action that failed. ``text``: CUDA's description."""
    lost = "; this process cannot use the GPU any more: start it again, or go on with the cpu target"
    reason = _ADVICE.get(code, text) + (lost if code in _LOST else "")
    return DriverError(code, f"{what} failed: {reason} (CUDA error {code})")


class Driver:
    """The driver library, libcuda. Every failed call raises :class:`DriverError`.

    Addresses and handles (modules, functions, streams, graphs) are ints. ``what`` is the action that an error message
    names. Raises ``BackendError`` if there is no driver or it is too old.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise BackendError("there is no NVIDIA driver on this machine (libcuda.so.1 does not load)") from None
        self.call("starting the NVIDIA driver", "cuInit", c_uint(0))
        if self.version < _MIN_VERSION:
            raise BackendError(
                f"the NVIDIA driver is too old: it supports CUDA {_dotted(self.version)}, and CUDA "
                f"{_dotted(_MIN_VERSION)} is needed; update it"
            )
        # Every run makes this call. With declared types, ctypes takes a third of the time.
        self._launch_graph = self._library.cuGraphLaunch
        self._launch_graph.argtypes = (c_void_p, c_void_p)

    def call(self, what: str, name: str, *arguments: object) -> None:
        """Call driver function ``name``."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise self._failure(what, code)

    def _failure(self, what: str, code: int) -> DriverError:
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        return failure(what, code, (text.value or b"unknown error").decode())

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, such as (13, 0)."""
        number = c_int()
        self.call("reading the driver's version", "cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def devices(self) -> list[InstalledGPU]:
        """Return the GPUs that this process may use."""
        count = c_int()
        self.call("counting the GPUs", "cuDeviceGetCount", byref(count))
        return [self._device(number) for number in range(count.value)]

    def _device(self, number: int) -> InstalledGPU:
        what, handle, size = f"asking about GPU {number}", c_int(), ctypes.c_size_t()
        name, major, minor = ctypes.create_string_buffer(256), c_int(), c_int()
        self.call(what, "cuDeviceGet", byref(handle), number)
        self.call(what, "cuDeviceGetName", name, len(name), handle)
        self.call(what, "cuDeviceGetAttribute", byref(major), _COMPUTE_MAJOR, handle)
        self.call(what, "cuDeviceGetAttribute", byref(minor), _COMPUTE_MINOR, handle)
        self.call(what, "cuDeviceTotalMem_v2", byref(size), handle)
        khz, bits = c_int(), c_int()
        for value, attribute in ((khz, _MEMORY_KHZ), (bits, _BUS_BITS)):
            self._library.cuDeviceGetAttribute(byref(value), attribute, handle)  # 0 if the driver does not know it
        bandwidth = 2e3 * khz.value * bits.value / 8  # two transfers per cycle
        capability = major.value, minor.value
        return InstalledGPU(number, name.value.decode(errors="replace"), capability, size.value, bandwidth)

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        """Load a cubin or PTX ``image`` and return (module, function ``name``). ``shared``: the most bytes of shared
        memory that its launches request."""
        module, function = c_void_p(), c_void_p()
        self.call(f"loading kernel {name}", "cuModuleLoadData", byref(module), c_char_p(image))
        self.call(f"finding kernel {name}", "cuModuleGetFunction", byref(function), module, name.encode())
        if shared > _STATIC_SHARED:
            what = f"kernel {name}: asking for {shared} bytes of shared memory"
            self.call(what, "cuFuncSetAttribute", function, _MAX_SHARED, shared)
        return module.value or 0, function.value or 0

    def unload(self, module: int) -> None:
        """Unload a module."""
        self._library.cuModuleUnload(c_void_p(module))

    def launch(
        self, name: str, function: int, workgroups: int, threads: int, shared: int, stream: int,
        arguments: Sequence[int], overlap: bool, maps: Sequence[_MapMemory] = (),
    ) -> None:  # fmt: skip
        """Launch ``workgroups`` thread blocks of ``threads`` threads with ``shared`` bytes of dynamic shared memory.

        ``arguments``: addresses. ``maps``: results of :meth:`tile_map`, which follow the addresses. ``overlap``: the
        kernel may start before its predecessor ends (programmatic dependent launch).
        """
        values = (c_void_p * max(len(arguments), 1))(*arguments)
        first, size = ctypes.addressof(values), ctypes.sizeof(c_void_p)
        places = [*(first + i * size for i in range(len(arguments))), *(_aligned(m) for m in maps)]
        pointers = (c_void_p * max(len(places), 1))(*places)
        attribute = _Attribute(_SERIALIZATION, 0, 1)
        config = _Config(workgroups, 1, 1, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(overlap))
        self.call(f"launching kernel {name}", "cuLaunchKernelEx", byref(config), c_void_p(function), pointers, None)

    def tile_map(self, name: str, address: int, tiles: TileMap) -> _MapMemory:
        """Return the TMA descriptor with which kernel ``name`` accesses the tensor at ``address``."""
        memory, rank = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGN))(), len(tiles.sizes)
        what = f"kernel {name}: describing tiles {list(tiles.box)} of {list(tiles.sizes)}"
        to, start = c_void_p(_aligned(memory)), c_void_p(address)
        sizes = (ctypes.c_uint64 * rank)(*tiles.sizes)
        strides = (ctypes.c_uint64 * (rank - 1))(*tiles.strides)
        swizzle = _SWIZZLES[tiles.swizzle]
        if tiles.corners:
            low, high = (c_int * 2)(*tiles.corners[:2]), (c_int * 2)(*tiles.corners[2:])
            steps = (c_uint * 4)(1, *tiles.steps, 1)
            self.call(
                what, "cuTensorMapEncodeIm2col", to, _TWO_BYTES, c_uint(rank), start, sizes, strides, low, high,
                c_uint(tiles.box[0]), c_uint(tiles.box[1]), steps, 0, swizzle, _L2_256, 0,
            )  # fmt: skip
        else:
            box, steps = (c_uint * rank)(*tiles.box), (c_uint * rank)(*(1,) * rank)
            self.call(
                what, "cuTensorMapEncodeTiled", to, _TWO_BYTES, c_uint(rank), start, sizes, strides, box, steps, 0,
                swizzle, _L2_256, 0,
            )  # fmt: skip
        return memory

    def record(self, stream: int, what: str, launch_all: Callable[[], None]) -> int:
        """Return an executable graph of the kernels that ``launch_all`` launches on ``stream``. They do not run yet."""
        graph, executable = c_void_p(), c_void_p()
        self.call(f"recording {what}", "cuStreamBeginCapture_v2", c_void_p(stream), _RELAXED)
        try:
            launch_all()
        except BaseException:  # also an interrupt: a stream that stays in capture mode runs nothing any more
            self._library.cuStreamEndCapture(c_void_p(stream), byref(graph))  # may fail, too, but ends the capture
            self._library.cuGraphDestroy(graph)
            raise
        self.call(f"recording {what}", "cuStreamEndCapture", c_void_p(stream), byref(graph))
        try:
            flags = ctypes.c_ulonglong(0)
            self.call(f"building {what}", "cuGraphInstantiateWithFlags", byref(executable), graph, flags)
        finally:
            self._library.cuGraphDestroy(graph)
        try:
            self.call(f"uploading {what}", "cuGraphUpload", executable, c_void_p(stream))
        except BackendError:
            self._library.cuGraphExecDestroy(executable)
            raise
        return executable.value or 0

    def run_graph(self, executable: int, stream: int, what: str) -> None:
        """Launch a graph. It returns before the kernels have run."""
        code = self._launch_graph(executable, stream)
        if code:
            raise self._failure(what, code)

    def record_event(self, event: int, stream: int) -> None:
        """Record ``event`` as a node of the graph that is being captured on ``stream``. Each run of the graph sets the
        event's time."""
        external = c_uint(_EXTERNAL)
        self.call("recording an event", "cuEventRecordWithFlags", c_void_p(event), c_void_p(stream), external)

    def destroy_graph(self, executable: int) -> None:
        """Destroy an executable graph."""
        self._library.cuGraphExecDestroy(c_void_p(executable))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses, of the host or of a GPU. If the host memory is pinned, it may return before
        the copy is complete."""
        if nbytes:
            arguments = c_void_p(to), c_void_p(source), ctypes.c_size_t(nbytes), c_void_p(stream)
            self.call(f"copying {nbytes} bytes", "cuMemcpyAsync", *arguments)

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        """Set ``nbytes`` at an address of a GPU to zero, in the order of ``stream``."""
        if nbytes:
            arguments = c_void_p(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), c_void_p(stream)
            self.call(f"clearing {nbytes} bytes", "cuMemsetD8Async", *arguments)

    def synchronize(self, stream: int, what: str) -> None:
        """Wait until all work on ``stream`` is complete. Errors of earlier launches are raised here."""
        self.call(what, "cuStreamSynchronize", c_void_p(stream))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@cache
def driver() -> Driver:
    """Return the driver of this machine. Raises ``BackendError`` in one line if there is none, or no GPU."""
    return Driver()
