"""The backend: memory, and a loop over the launches."""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Mapping

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.targets.simt.lang.program import ARENA, unpack
from npu_compiler.targets.simt.rewrites.fuse_decode_attention import GRID_BARRIERS
from npu_runtime.arrays import aligned_empty
from npu_runtime.backends.base import DeviceBuffer, Launch, LoadedEntry, status_of
from npu_runtime.backends.cpu import CPUBackend, CPUBuffer


class HostEntry(LoadedEntry):
    def __init__(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]):
        launches, code = unpack(program.binary)
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(code["object"])
            file.flush()
            self.library = ctypes.CDLL(file.name)
        self._launches, self._fixed = launches[entry.symbol], dict(fixed)
        self._arena = aligned_empty((max(entry.arena_bytes, 1),), np.dtype(np.uint8))
        self._specs = {b.id: b for b in program.buffers}
        self._arena.fill(0xFF)  # to detect reads before writes; states of grid barriers start at zero
        for b in program.buffers:
            if b.kind == "arena" and b.name == GRID_BARRIERS:
                self._arena[b.offset : b.offset + 4 * math.prod(b.shape)] = 0

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        address = {id: b.native_handle for id, b in {**self._fixed, **buffers}.items()}
        address[ARENA] = self._arena.ctypes.data

        def launch(times: np.ndarray | None) -> int:
            if times is not None:
                times[:] = 0
            flags = np.zeros((len(self._launches), 2), np.int32)
            for number, call in enumerate(self._launches):
                values = [address[id] + at for id, at in call.arguments] + [flags[number].ctypes.data] * call.checks
                table = (ctypes.c_void_p * (len(values) + 1))(*values)
                if call.workgroups:
                    getattr(self.library, f"run_{call.function}")(table, call.workgroups, call.threads)
            return status_of(flags)

        return launch

    def arena_buffer(self, id: int) -> CPUBuffer:
        spec = self._specs[id]
        return CPUBuffer(np.ndarray(spec.shape, numpy_dtype(spec.dtype), self._arena, spec.offset))


class HostBackend(CPUBackend):
    """Host memory is the device's: all but the launches is the CPU backend's."""

    name = "host"

    def aligned(self, buffer: DeviceBuffer) -> bool:
        return buffer.native_handle % 16 == 0

    def load_entry(self, program: CompiledProgram, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]) -> HostEntry:
        return HostEntry(program, entry, fixed)


BACKEND = HostBackend
