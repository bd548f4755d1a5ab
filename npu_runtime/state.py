"""The mutable buffers of a program: key-value caches, running statistics, counters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import dtypes
from npu_compiler.support.errors import InputError
from npu_compiler.support.host_arrays import to_array

from .arrays import zeros
from .device import DeviceBuffer
from .locks import RunLock

if TYPE_CHECKING:
    from .backends.base import Backend


class State(Mapping[str, DeviceBuffer]):
    """The mutable buffers of a program by state key; executors may share them. Their initial contents are those of the
    state_dict, or zeros."""

    def __init__(self, program: CompiledProgram, backend: Backend, initial: Mapping[str, np.ndarray]):
        self.lock = RunLock()
        self._backend, self._initial = backend, dict(initial)
        self._buffers = {
            b.name: backend.allocate_zeros(b.shape, dtypes.numpy_dtype(b.dtype))
            for b in program.buffers
            if b.kind == "state"
        }
        for key, value in self._initial.items():
            if key in self._buffers:
                backend.copy(self._buffers[key], value)

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy of the contents, taken between two runs."""
        with self.lock.held():
            return {**self.__dict__, "_buffers": copy.deepcopy(self._buffers)}

    def __getitem__(self, key: str) -> DeviceBuffer:
        return self._buffers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def reset(self) -> None:
        """Return to the values before the first run."""
        with self.lock.held():
            for key, buffer in self._buffers.items():
                initial = self._initial.get(key)
                self._backend.copy(buffer, zeros(buffer.shape, buffer.dtype) if initial is None else initial)

    def write(self, key: str, value: Any) -> None:
        """Set one state to ``value``, which has its shape and dtype. Raises ``InputError``."""
        if key not in self._buffers:
            raise InputError(f"there is no state {key!r}; known: {', '.join(self._buffers) or 'none'}")
        buffer, array = self._buffers[key], to_array(value)
        if (array.shape, array.dtype) != (buffer.shape, buffer.dtype):
            raise InputError(
                f"state {key!r}: got {array.dtype}{list(array.shape)}, expected {buffer.dtype}{list(buffer.shape)}"
            )
        with self.lock.held():
            self._backend.copy(buffer, array)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of all states."""
        with self.lock.held():
            return {key: buffer.to_numpy() for key, buffer in self._buffers.items()}
