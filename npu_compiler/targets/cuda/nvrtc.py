"""NVRTC, from its wheel or a CUDA toolkit: compiles CUDA C++ to cubin and PTX, without a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...support.errors import ToolchainError

WHEEL = "nvidia-cuda-nvrtc"
FLAGS = ("--std=c++17", "--device-int128", "--extra-device-vectorization")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. ``ptx`` is empty if the code runs only on the architecture that it was compiled for."""

    cubin: bytes
    ptx: bytes


class Nvrtc:
    """A loaded NVRTC library. ``path``: its file. ``version``: such as (13, 0). Raises ``OSError`` if it does not
    load."""

    def __init__(self, path: str):
        self.path = path
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so*"):  # NVRTC finds them only if they are loaded
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = major.value, minor.value

    def _check(self, status: int, what: str) -> None:
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise ToolchainError(f"{what}: {self._library.nvrtcGetErrorString(status).decode()} (NVRTC {self.path})")

    def compile(self, source: str, name: str, arch: str) -> Compiled:
        """Compile ``source`` for ``arch`` ('sm_90'); ``name`` is used in messages. Raises ``ToolchainError`` with the
        compiler's messages."""
        lib, program = self._library, ctypes.c_void_p()
        text = source.encode()
        self._check(lib.nvrtcCreateProgram(ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None), name)
        try:
            flags = [f"--gpu-architecture={arch}".encode(), *(f.encode() for f in FLAGS)]
            status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            if status:
                raise ToolchainError(f"kernel {name} does not compile for {arch}:\n{self._log(program)}")
            ptx = b"" if arch[-1].isalpha() else self._bytes(program, "PTX")
            return Compiled(self._bytes(program, "CUBIN"), ptx)
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw

    def _log(self, program: ctypes.c_void_p) -> str:
        return self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")


def _candidates() -> Iterator[str]:
    for folder in sys.path:
        yield from map(str, sorted(Path(folder or ".", "nvidia").glob("*/lib/libnvrtc.so.*"), reverse=True))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        if root:
            yield from map(str, sorted(Path(root, "lib64").glob("libnvrtc.so.*"), reverse=True))
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found
    yield from map(str, sorted(Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*"), reverse=True))


@cache
def find_nvrtc() -> Nvrtc:
    """Return the newest NVRTC of this installation. Raises ``ToolchainError`` if there is none."""
    for path in _candidates():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError):
            continue
    raise ToolchainError(
        f"compiling for CUDA needs NVRTC, NVIDIA's compiler library: pip install {WHEEL} (no GPU is needed)"
    )
