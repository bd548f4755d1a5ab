"""Memory that kernels read and write: buffers, and strided windows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..support import buffer_kinds, dtypes

MAX_COMPARED = 1 << 22  # elements of two windows


@dataclass(frozen=True)
class Buffer:
    """A block of memory.

    Attributes:
        id: number of the buffer in its schedule or program.
        kind: 'input', 'output', 'weight', 'const', 'state' (the runtime supplies a pointer), 'arena' (at byte
            ``offset`` of the arena) or 'scratch' (the result of a nested kernel, in registers or thread-local memory).
        name: the I/O name, the state key or a label.
        offset: bytes from the start of the arena.
        persistent: no other buffer shares its place in the arena; it keeps its contents from run to run, and is zero
            before the first run.
        format: the name of the layout (:mod:`npu_compiler.weights.format`) of a weight in a weight format, else ''. Its
            bytes are then not elements, and a kernel reads them with the format's reader.
    """

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
        """Size in bytes."""
        return math.prod(self.shape) * dtypes.DTYPES[self.dtype].size

    @property
    def constant(self) -> bool:
        """Whether the buffer is filled when weights are loaded."""
        return self.kind in buffer_kinds.CONSTANT

    @property
    def is_input(self) -> bool:
        """Whether the buffer is filled before the first kernel runs, and no kernel writes it."""
        return self.kind in buffer_kinds.READ_ONLY


@dataclass(frozen=True)
class Operand:
    """A strided window of a buffer; ``strides`` and ``offset`` count elements. Distinct operands of one kernel may
    share a buffer only if none is written, or if they are read and written at the same index of the domain."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def dtype(self) -> str:
        """The dtype of the buffer's elements."""
        return self.buffer.dtype

    @property
    def format(self) -> str:
        """The layout of a weight in a weight format, or ''."""
        return self.buffer.format

    @property
    def contiguous(self) -> bool:
        """Whether the elements are dense and in row-major order."""
        return self.strides == contiguous_strides(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major element strides; dims of size 1 get stride 0, so that equal layouts compare equal."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(0 if n == 1 else step)
        step *= n
    return tuple(reversed(strides))


def overlap(a: Operand, b: Operand) -> bool:
    """Return whether two windows have an element in common. Windows of more than ``MAX_COMPARED`` elements whose ranges
    cross are taken to have one."""
    if a.buffer.id != b.buffer.id or 0 in a.shape or 0 in b.shape:
        return False
    (first, last), (begin, end) = _span(a), _span(b)
    if last < begin or end < first:
        return False
    return max(map(math.prod, (a.shape, b.shape))) > MAX_COMPARED or bool(np.isin(_places(a), _places(b)).any())


def _span(o: Operand) -> tuple[int, int]:
    """Return the first and the last element of a window that is not empty."""
    return o.offset, o.offset + sum((n - 1) * s for n, s in zip(o.shape, o.strides, strict=True))


def _places(o: Operand) -> np.ndarray:
    places = np.array(o.offset)
    for n, stride in zip(o.shape, o.strides, strict=True):
        places = places[..., None] + np.arange(n) * stride
    return places


def bytes_touched(o: Operand) -> int:
    """Return the bytes of the distinct elements that a window covers."""
    elements = math.prod(n for n, s in zip(o.shape, o.strides, strict=True) if s != 0)
    return min(elements * dtypes.DTYPES[o.dtype].size, o.buffer.nbytes)
