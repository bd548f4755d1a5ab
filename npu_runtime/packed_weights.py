"""Weights as a program wants them, on disk: mapped into memory at the next start instead of being made again.

======== =====================================================================
offset   content (little endian)
======== =====================================================================
0        magic
8        8-byte length of the header
16       header: msgpack list of [name, dtype, shape, offset of its data]
...      the buffers, each at a multiple of 64 bytes
======== =====================================================================

These files are a cache of this machine's own making, found by a key that covers what is in them; nothing else reads them.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

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
        array = np.ascontiguousarray(store[name].to_numpy(copy=False))
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


def map_packed(path: Path, program: CompiledProgram, backend: Backend) -> WeightStore | None:
    """The weights in ``path``, sharing its pages; None if the file does not hold exactly ``program``'s buffers."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Reading the pages in now, in order, is cheaper than one fault for each later.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ)
        table = _read_table(mapped)
    except (OSError, ValueError, TypeError):
        return None
    wanted = {b.name: (b.dtype, tuple(b.shape)) for b in program.buffers if b.kind in ("weight", "const")}
    if {name: (dtype, tuple(shape)) for name, dtype, shape, _ in table} != wanted:
        return None
    buffers = {}
    for name, dtype, shape, offset in table:
        count = math.prod(shape)
        if offset % ALIGNMENT or offset + count * dtypes.DTYPES[dtype].size > size:
            return None
        array: np.ndarray[Any, Any] = np.frombuffer(mapped, dtypes.numpy_dtype(dtype), count, offset) if count else (
            np.empty(0, dtypes.numpy_dtype(dtype))
        )
        buffers[name] = backend.wrap(array.reshape(shape))
    return WeightStore(buffers, {})


def _read_table(mapped: mmap.mmap) -> list[Entry]:
    if mapped[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a file of packed weights")
    length = int.from_bytes(mapped[len(_MAGIC) : _PREFIX], "little")
    table: list[Entry] = msgpack.unpackb(mapped[_PREFIX : _PREFIX + length])
    return table
