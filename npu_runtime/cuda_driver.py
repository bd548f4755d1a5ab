"""The few calls of NVIDIA's driver library that CuPy does not offer: modules, launches with attributes, graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache

from npu_compiler.errors import BackendError

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STATIC_SHARED = 48 << 10
_ADVICE = {
    2: "the GPU is out of memory",
    209: "it holds no code for this GPU",
    218: "its PTX does not compile for this GPU",
    222: "its PTX is of a newer CUDA version than this driver knows; update the driver",
}


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    ]


class DriverError(BackendError):
    """``code`` is the driver's; the message says what was attempted."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class Driver:
    """libcuda; every failed call raises :class:`DriverError`."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise BackendError("there is no NVIDIA driver on this machine (libcuda.so.1 does not load)") from None
        self.call("a start of the driver", "cuInit", c_uint(0))

    def call(self, what: str, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            reason = _ADVICE.get(code) or (text.value or b"unknown error").decode()
            raise DriverError(code, f"{what} failed: {reason} (CUDA error {code})")

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports: (13, 0)."""
        number = c_int()
        self.call("reading the driver's version", "cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        """(module, function ``name``) of a cubin or of PTX; ``shared``: bytes of group memory its launches ask for."""
        module, function = c_void_p(), c_void_p()
        self.call(f"loading kernel {name}", "cuModuleLoadData", byref(module), c_char_p(image))
        self.call(f"finding kernel {name}", "cuModuleGetFunction", byref(function), module, name.encode())
        if shared > _STATIC_SHARED:
            what = f"kernel {name}: asking for {shared} bytes of group memory"
            self.call(what, "cuFuncSetAttribute", function, _MAX_SHARED, shared)
        return module.value or 0, function.value or 0

    def unload(self, module: int) -> None:
        self._library.cuModuleUnload(c_void_p(module))

    def launch(
        self, name: str, function: int, groups: int, threads: int, shared: int, stream: int,
        arguments: Sequence[int], overlap: bool,
    ) -> None:  # fmt: skip
        """``arguments`` are addresses. ``overlap``: the kernel may start before the one ahead of it has ended."""
        values = (c_void_p * max(len(arguments), 1))(*arguments)
        first, size = ctypes.addressof(values), ctypes.sizeof(c_void_p)
        pointers = (c_void_p * len(values))(*(first + i * size for i in range(len(values))))
        attribute = _Attribute(_SERIALIZATION, 0, 1)
        config = _Config(groups, 1, 1, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(overlap))
        self.call(f"launching kernel {name}", "cuLaunchKernelEx", byref(config), c_void_p(function), pointers, None)

    def begin_capture(self, stream: int) -> None:
        self.call("recording a graph", "cuStreamBeginCapture_v2", c_void_p(stream), _RELAXED)

    def end_capture(self, stream: int) -> int:
        """An executable graph of what was launched on ``stream`` since :meth:`begin_capture`."""
        graph, executable = c_void_p(), c_void_p()
        self.call("recording a graph", "cuStreamEndCapture", c_void_p(stream), byref(graph))
        try:
            self.call(
                "building a graph", "cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0)
            )
        finally:
            self._library.cuGraphDestroy(graph)
        self.call("uploading a graph", "cuGraphUpload", executable, c_void_p(stream))
        return executable.value or 0

    def run_graph(self, executable: int, stream: int) -> None:
        code = self._library.cuGraphLaunch(c_void_p(executable), c_void_p(stream))
        if code:
            self.call("launching a graph", "cuGraphLaunch", c_void_p(executable), c_void_p(stream))

    def destroy_graph(self, executable: int) -> None:
        self._library.cuGraphExecDestroy(c_void_p(executable))

    def synchronize(self, stream: int, what: str) -> None:
        self.call(what, "cuStreamSynchronize", c_void_p(stream))


@cache
def driver() -> Driver:
    """The driver of this machine. Raises ``BackendError`` in one line if there is none, or no GPU."""
    return Driver()
