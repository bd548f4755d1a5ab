"""A ``Backend`` that runs CPU programs for aarch64 under qemu-user, on a machine of another architecture.

It needs the ``ziglang`` package and Debian's ``qemu-user`` and ``libc6-arm64-cross``. Each run of an entry point is one
process: its buffers go there and back in a file.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support import dtypes
from npu_compiler.support.errors import BackendError, ToolchainError
from npu_compiler.targets.cpu import compilers
from npu_runtime.arrays import aligned_empty
from npu_runtime.backends.base import DeviceBuffer, Launch, LoadedEntry
from npu_runtime.backends.cpu import CPUBackend, CPUBuffer

SYSROOT = Path("/usr/aarch64-linux-gnu")
DRIVER = Path(__file__).with_name("aarch64_driver.cpp")
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
ALIGNMENT = 4096
TIMEOUT_S = 120


def obstacle() -> str:
    """Why no aarch64 program can run here; empty if one can."""
    if QEMU is None:
        return "there is no qemu-aarch64 (Debian: apt install qemu-user)"
    if not (SYSROOT / "lib/libc.so.6").exists():
        return "there is no C library for aarch64 (Debian: apt install libc6-arm64-cross)"
    try:
        compilers.find_compiler("aarch64")
    except ToolchainError as error:
        return str(error)
    return ""


def _check(command: list[str], folder: Path) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if run.returncode:
        raise BackendError(f"{command[0]} failed with status {run.returncode}: {run.stderr.strip()[-2000:]}")


@lru_cache(maxsize=1)
def _driver() -> Path:
    """The compiled driver, in a folder that is removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="npu-aarch64-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiler = compilers.find_compiler("aarch64")
    flags = compilers.compile_flags("generic", compiler, "aarch64")
    _check([*compiler.argv, *flags, "-c", str(DRIVER), "-o", "driver.o"], folder)
    target = flags[flags.index("-target") :][:2]
    libraries = [str(SYSROOT / "lib" / name) for name in ("libc.so.6", "libm.so.6")]
    _check([*compiler.argv, *target, "-nostdlib", "driver.o", "-Wl,--no-as-needed", *libraries, "-o", "driver"], folder)
    return folder / "driver"


class EmulatedEntry(LoadedEntry):
    """An entry point; a launch copies the buffers into a file, runs the program on it and copies them back."""

    def __init__(
        self, backend: EmulatedAarch64, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]
    ):
        self._backend, self._program, self._entry, self._fixed = backend, program, entry, dict(fixed)
        self._specs = {b.id: b for b in program.buffers}
        self._arena = aligned_empty((max(entry.arena_bytes, 1),), np.dtype(np.uint8))
        self._arena.fill(0xFF)

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        memory = {**self._fixed, **buffers}

        def run(times: np.ndarray | None) -> int:
            assert times is None, "emulated programs are not profiled"
            return self._run({id: b for id, b in memory.items() if b.size_bytes})

        return run

    def arena_buffer(self, id: int) -> CPUBuffer:
        spec = self._specs[id]
        return CPUBuffer(np.ndarray(spec.shape, dtypes.numpy_dtype(spec.dtype), self._arena, spec.offset))

    def _run(self, buffers: Mapping[int, DeviceBuffer]) -> int:
        """Run the program on ``buffers`` by id, and return the status of the entry point."""
        memory = {id: _bytes(b) for id, b in buffers.items()} | {-1: self._arena}
        at = -(-8 * (3 + 2 * len(memory)) // ALIGNMENT) * ALIGNMENT
        places: dict[int, slice] = {}
        for id, array in memory.items():
            places[id] = slice(at, at + array.size)
            at += -(-array.size // ALIGNMENT) * ALIGNMENT
        head = [0, len(places), max(memory), *(word for id, place in places.items() for word in (id, place.start))]
        with tempfile.TemporaryDirectory(prefix="npu-aarch64-") as name:
            folder = Path(name)
            (folder / "program.so").write_bytes(self._program.binary)
            image = np.memmap(folder / "buffers", np.uint8, "w+", shape=(at,))
            image[: 8 * len(head)] = np.array(head, "<i8").view(np.uint8)
            for id, place in places.items():
                image[place] = memory[id]
            image.flush()
            self._backend.emulate(folder, self._entry.symbol)
            for id, place in places.items():
                if id < 0 or buffers[id].to_numpy(copy=False).flags.writeable:
                    memory[id][...] = image[place]
            return int(image[:8].view("<i8")[0])


def _bytes(buffer: DeviceBuffer) -> np.ndarray:
    """The memory of a buffer, padding included."""
    memory = (ctypes.c_uint8 * buffer.size_bytes).from_address(buffer.native_handle)
    return np.frombuffer(memory, np.uint8)


class EmulatedAarch64(CPUBackend):
    """Runs programs for aarch64 on ``threads`` threads of an emulated ``cpu``, named as qemu does."""

    def __init__(self, cpu: str = "max", threads: int = 2):
        super().__init__(threads)
        self.cpu = cpu

    def load_entry(
        self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]
    ) -> EmulatedEntry:
        return EmulatedEntry(self, program, entry, fixed)

    def emulate(self, folder: Path, symbol: str) -> None:
        """Run an entry point of ``program.so`` on ``buffers``, both in ``folder``."""
        command = [str(QEMU), "-cpu", self.cpu, "-L", str(SYSROOT), str(_driver())]
        _check([*command, "./program.so", symbol, str(self.threads), "buffers"], folder)
