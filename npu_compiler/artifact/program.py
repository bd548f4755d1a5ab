"""A compiled program as callers see it: its parts (``spec.py``), its file and its description."""

from __future__ import annotations

import os
from typing import Any

from . import describe, serialize
from .spec import (
    ABI_VERSION,
    LAYOUT_MARKER,
    SOURCE_NAME,
    SYMBOL,
    BufferSpec,
    EntryPoint,
    IOSpec,
    KernelCall,
    ProgramSpec,
    WeightSpec,
)

__all__ = [
    "ABI_VERSION", "LAYOUT_MARKER", "SOURCE_NAME", "SYMBOL", "BufferSpec", "CompiledProgram", "EntryPoint", "IOSpec",
    "KernelCall", "WeightSpec",
]  # fmt: skip


class CompiledProgram(ProgramSpec):
    """A compiled model: save it, load it, describe it, or run it with ``npu_runtime``."""

    def __repr__(self) -> str:
        entries = ", ".join(f"{e.name!r}: {len(e.calls)} kernels" for e in self.entries.values())
        return f"<CompiledProgram {self.name!r} for {self.device or self.target}, {self.dtype}; {entries}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.npubin``; a file already at ``path`` is replaced whole or not at all. Raises ``ArtifactError``."""
        serialize.save(self, path)

    def dumps(self) -> bytes:
        """Return the bytes of the file, which :meth:`loads` reads. Raises ``ArtifactError``."""
        return serialize.dumps(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompiledProgram:
        """Read and validate a ``.npubin``; raises ``ArtifactError`` with the field or file offset that is wrong.

        Loading executes nothing, but the file holds native code that a run executes: run only programs whose origin
        you trust, as with any library.
        """
        return serialize.load(path, cls)

    @classmethod
    def loads(cls, data: bytes) -> CompiledProgram:
        """Read and validate the bytes of a ``.npubin``; see :meth:`load`."""
        return serialize.loads(data, cls)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the bytes of the file: recipes are graphs that are too deep for pickle's recursion."""
        return type(self).loads, (self.dumps(),)

    @property
    def states(self) -> list[str]:
        """The state_dict keys of the buffers that the program writes."""
        return [b.name for b in self.buffers if b.kind == "state"]

    @property
    def totals(self) -> dict[str, int]:
        """Totals by name: kernels, FLOPs, bytes of arena, weights, state and binary."""
        return describe.totals(self)

    def describe(self) -> str:
        """Return the program as readable text: kernels, I/O, buffers, memory plan, weight map, totals."""
        return describe.describe(self)

    def to_json(self) -> dict[str, Any]:
        """Return the same facts as JSON-safe data."""
        return describe.to_json(self)
