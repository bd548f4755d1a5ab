"""A ``Backend`` that runs Metal programs in the emulator. For tests: it is slow, and it stops at every mistake."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint, KernelCall
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.simt.lang.program import ARENA, unpack
from npu_compiler.targets.simt.lang.program import Launch as KernelLaunch
from npu_compiler.targets.simt.rewrites.fuse_decode_attention import GRID_BARRIERS
from npu_runtime.arrays import aligned_empty
from npu_runtime.backends.base import DeviceBuffer, Launch, LoadedEntry, status_of
from npu_runtime.backends.cpu import CPUBackend, CPUBuffer

from ..metal_emulator import EmulatorError, Library, Window


@lru_cache(maxsize=4)
def library(text: str, checks: bool, version: int) -> Library:
    """The kernels of a program, in a ``version`` of the language. A test often runs one program on several backends,
    each with its order of threads."""
    return Library({"program.metal": text}, checks, version)


def _version(language: str) -> int:
    """Return the version 310 of 'metal3.1'."""
    major, minor = language.removeprefix("metal").split(".")
    return 100 * int(major) + 10 * int(minor)


class EmulatedEntry(LoadedEntry):
    """Launches run one after the other, each with the windows of memory that its operands' buffers are."""

    def __init__(
        self, backend: EmulatedMetal, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]
    ):
        entries, code = unpack(program.binary)
        self._backend, self._entry, self._fixed = backend, entry, dict(fixed)
        self._launches: list[KernelLaunch] = entries[entry.symbol]
        self._library = library(code["text"], backend.checks, _version(code["language"]))
        self._specs = {b.id: b for b in program.buffers}
        self._arena = aligned_empty((max(entry.arena_bytes, 1),), np.dtype(np.uint8))
        self._arena.fill(0xFF)
        for b in program.buffers:
            if b.kind == "arena" and b.name == GRID_BARRIERS:
                self._arena[b.offset : b.offset + 4 * math.prod(b.shape)] = 0

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        memory = {**self._fixed, **buffers}

        def run(times: np.ndarray | None) -> int:
            flags = np.zeros((len(self._launches), 2), np.int32)
            for number, (launch, call) in enumerate(zip(self._launches, self._entry.calls, strict=True)):
                if times is not None:
                    times[number] = time.monotonic()
                if launch.workgroups:
                    self._run(launch, call, memory, flags[number])
            if times is not None:
                times[len(self._launches)] = time.monotonic()
            return status_of(flags)

        return run

    def _run(
        self, launch: KernelLaunch, call: KernelCall, memory: Mapping[int, DeviceBuffer], flags: np.ndarray
    ) -> None:
        """One kernel; ``flags``: its two of :func:`status_of`."""
        windows = [self._window(id, at, call, memory) for id, at in launch.arguments]
        arguments: dict[int, Window | np.ndarray] = dict(enumerate(windows))
        if launch.checks:
            arguments[len(windows)] = flags
        backend = self._backend
        try:
            self._library[launch.function](
                arguments, (launch.workgroups,), (launch.threads,), order=backend.order, seed=backend.seed
            )
        except EmulatorError as error:
            raise BackendError(f"kernel {call.name} (from {', '.join(call.sources)}): {error}") from None

    def _window(self, id: int, at: int, call: KernelCall, memory: Mapping[int, DeviceBuffer]) -> Window:
        if id != ARENA:
            buffer = memory[id]
            return Window(buffer.native_handle + at, buffer.size_bytes - at, at)
        for other in (*call.inputs, *call.outputs):
            spec = self._specs[other]
            size = int(np.prod(spec.shape)) * numpy_dtype(spec.dtype).itemsize
            if spec.kind == "arena" and spec.offset <= at < spec.offset + size:
                return Window(self._arena.ctypes.data + at, spec.offset + size - at, at - spec.offset)
        raise BackendError(f"kernel {call.name}: byte {at} of the arena belongs to none of its buffers")

    def arena_buffer(self, id: int) -> CPUBuffer:
        spec = self._specs[id]
        return CPUBuffer(np.ndarray(spec.shape, numpy_dtype(spec.dtype), self._arena, spec.offset))


class EmulatedMetal(CPUBackend):
    """``order`` and ``seed``: of threads and groups, as :class:`Library` takes them; ``checks``: watch every access."""

    name = "metal"

    def __init__(self, order: str = "ascending", seed: int = 0, checks: bool = True):
        super().__init__()
        self.order, self.seed, self.checks = order, seed, checks

    def aligned(self, buffer: DeviceBuffer) -> bool:
        return buffer.native_handle % 16 == 0

    def load_entry(
        self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]
    ) -> EmulatedEntry:
        return EmulatedEntry(self, program, entry, fixed)
