"""Memory that kernels read and write: buffers, and strided windows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..support import dtypes


@dataclass(frozen=True)
class Buffer:
    """A block of memory. ``kind``: 'input', 'output', 'weight', 'const', 'state' (pointers the runtime supplies, by
    ``id``), 'arena' (at byte ``offset`` of the one arena) or 'scratch' (results of a nested kernel, which stay in
    registers or thread-local memory). ``name`` is the I/O name, state key or a label. ``persistent``: the buffer
    shares its place in the arena with no other, keeps its contents from run to run, and is zero before the first.
    ``format``: of a weight in a weight format, the name of its layout (:mod:`npu_compiler.weights.format`); its bytes
    are then not elements, and a kernel reads them with the format's reader."""

    id: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    offset: int = 0
    persistent: bool = False
    format: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.DTYPES[self.dtype].size

    @property
    def is_input(self) -> bool:
        """Whether it is filled before the first kernel runs, and no kernel writes it."""
        return self.kind in ("input", "weight", "const")


@dataclass(frozen=True)
class Operand:
    """A strided window of a buffer; ``strides`` and ``offset`` count elements. Distinct operands of one kernel may
    share a buffer only if neither is written, or if they are read and written at the same index of the domain."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def dtype(self) -> str:
        return self.buffer.dtype

    @property
    def format(self) -> str:
        """The layout of a weight in a weight format, or ''."""
        return self.buffer.format

    @property
    def contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major element strides; dims of size 1 get stride 0, so that equal layouts compare equal."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(0 if n == 1 else step)
        step *= n
    return tuple(reversed(strides))


def bytes_touched(o: Operand) -> int:
    """Bytes of the distinct elements a window covers."""
    elements = math.prod(n for n, s in zip(o.shape, o.strides, strict=True) if s != 0)
    return min(elements * dtypes.DTYPES[o.dtype].size, o.buffer.nbytes)
