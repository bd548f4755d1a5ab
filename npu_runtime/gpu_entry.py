"""What entry points on GPUs have in common: the launches of the program's code, and buffers for inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support import dtypes
from npu_compiler.support.errors import ArtifactError
from npu_compiler.targets.simt.lang import program as simt

from .device import DeviceBuffer, LoadedEntry

if TYPE_CHECKING:
    from .backends.base import Backend

__all__ = ["STEPWISE", "GPUEntry"]

STEPWISE = 2  # the NPU_DEBUG level from which kernels run one by one, so that an error names the failed one

B = TypeVar("B", bound="Backend")


class GPUEntry(LoadedEntry, Generic[B]):
    """An entry point of ``program``, whose launches are those of its symbol in ``entries``.

    ``fixed``: the buffers of weights and constants by id. Raises ``ArtifactError`` if the launches are not those of the
    entry point.
    """

    def __init__(
        self,
        backend: B,
        program: CompiledProgram,
        entries: Mapping[str, Sequence[simt.Launch]],
        entry: EntryPoint,
        fixed: Mapping[int, DeviceBuffer],
    ):
        if entry.symbol not in entries or len(entries[entry.symbol]) != len(entry.calls):
            raise ArtifactError(f"binary: it has no launches for entry point {entry.name!r}; compile the model again")
        self._backend, self._entry, self._launches, self._fixed = backend, entry, entries[entry.symbol], dict(fixed)
        self._specs = {b.id: b for b in program.buffers}
        self._what = f"running {entry.name!r} of program {program.name!r}"
        self._arena_name = f"the arena of {entry.name!r} of program {program.name!r}"
        io = (*entry.inputs, *entry.outputs)
        self._io = {s.buffer: s for s in io if self._specs[s.buffer].kind in ("input", "output")}

    def io(self) -> dict[int, DeviceBuffer]:
        return {id: self._backend.allocate_zeros(s.shape, dtypes.numpy_dtype(s.dtype)) for id, s in self._io.items()}
