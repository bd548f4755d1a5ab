"""Weights as a program wants them, on disk: read at the next start instead of being made again.

======== =====================================================================
offset   content (little endian)
======== =====================================================================
0        magic
8        8-byte length of the header
16       header: msgpack list of [name, dtype, shape, offset of its data]
...      the buffers, each at a multiple of 64 bytes
======== =====================================================================

These files are a cache of this machine's own making, found by a key that covers what is in them.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import BinaryIO

import msgpack
import numpy as np

from npu_compiler import dtypes
from npu_compiler.compiled_program import CompiledProgram

from .arrays import ALIGNMENT
from .backend import Backend
from .weight_loader import WeightStore

_MAGIC = b"NPUWGHT1"
_PREFIX = len(_MAGIC) + 8

Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, offset


def write_packed(file: BinaryIO, store: WeightStore) -> None:
    """Write all buffers of ``store`` (which has no initial state)."""
    table = _table([(name, dtypes.name_of(b.dtype), b.shape) for name, b in store.items()])
    header = msgpack.packb(table)
    file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
    for name, _, _, offset in table:
        file.write(bytes(offset - file.tell()))
        array = np.asarray(store[name].to_numpy(copy=False), order="C")
        file.write(array.reshape(-1).view(np.uint8).data)


def _table(buffers: list[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """Offsets for buffers in order, behind a header that holds them: its size is computed with the largest offsets."""
    longest = len(msgpack.packb([(*b, 2**63) for b in buffers]))
    table, at = [], _PREFIX + longest
    for name, dtype, shape in buffers:
        at += -at % ALIGNMENT
        table.append((name, dtype, tuple(shape), at))
        at += math.prod(shape) * dtypes.DTYPES[dtype].size
    return table


class PackedFile:
    """The contents of a file in one block of the memory that ``backend`` computes in.

    They are read, not mapped: pages of a file are small, and streaming weights through small pages is slower. Raises
    ``OSError``, ``ValueError`` or ``BackendError`` if that is not possible.
    """

    def __init__(self, path: Path, backend: Backend):
        with open(path, "rb") as file:
            self._table = _read_table(file)
            size = os.fstat(file.fileno()).st_size
            self._begin = min((offset for *_, offset in self._table), default=size)
            self._size = size - self._begin
            self._cut = backend.read_file(file.fileno(), self._begin, self._size)

    def store(self, program: CompiledProgram) -> WeightStore | None:
        """The weights of ``program``; None if these are not exactly the buffers that it wants."""
        wanted = {b.name: (b.dtype, tuple(b.shape)) for b in program.buffers if b.kind in ("weight", "const")}
        if {name: (dtype, tuple(shape)) for name, dtype, shape, _ in self._table} != wanted:
            return None
        buffers = {}
        for name, dtype, shape, offset in self._table:
            start = offset - self._begin
            stop = start + math.prod(shape) * dtypes.DTYPES[dtype].size
            if start % ALIGNMENT or not 0 <= start <= stop <= self._size:
                return None
            buffers[name] = self._cut(start, shape, dtypes.numpy_dtype(dtype))
        return WeightStore(buffers, {})


def _read_table(file: BinaryIO) -> list[Entry]:
    prefix = file.read(_PREFIX)
    if prefix[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a file of packed weights")
    header = file.read(int.from_bytes(prefix[len(_MAGIC) :], "little"))
    try:
        return [(str(name), str(dtype), tuple(shape), int(at)) for name, dtype, shape, at in msgpack.unpackb(header)]
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"its header is damaged: {error}") from None
