"""Weights in the layouts of a program, on disk, so that the next start does not have to pack them again.

======== =====================================================================
offset   content (little endian)
======== =====================================================================
0        magic
8        8-byte length of the header
16       CRC-32 of the header
20       header: a msgpack map
         ``key``      digest of the file's key in the cache
         ``buffers``  list of [name, dtype, shape, offset in the body, format]
         ``sums``     CRC-32 of each ``SLAB`` bytes of the body
...      the body, from a multiple of 64 bytes on: buffers at multiples of 64
======== =====================================================================

These files are a local cache. Disks and other programs can damage them, and kernels trust some of their bytes.
Therefore checksums cover every byte, and the threads that read the file check every index and offset that a kernel
uses. A failed check raises ``ArtifactError``; the weights are then packed again.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import msgpack
import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import dtypes
from npu_compiler.support.errors import ArtifactError
from npu_compiler.support.records import Field
from npu_compiler.weights.format import find_layout

from .arrays import ALIGNMENT, SLAB
from .backends.base import Backend, FileBlock
from .weight_loader import WeightStore, check_packed

_MAGIC = b"NPUWGHT2"
_PREFIX = len(_MAGIC) + 8 + 4
_SUM = np.dtype("<u4")


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    format: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.DTYPES[self.dtype].size


def write_packed(file: BinaryIO, key: str, store: WeightStore, program: CompiledProgram) -> None:
    """Write all buffers of ``store``, the weights of ``program``. The store has no initial state."""
    formats = {b.name: b.format for b in program.buffers if b.format}
    entries, size = [], 0
    for name, b in store.items():
        size += -size % ALIGNMENT
        entries.append(_Entry(name, dtypes.name_of(b.dtype), tuple(b.shape), size, formats.get(name, "")))
        size += entries[-1].nbytes
    blank = _header(key, entries, bytes(-(-size // SLAB) * _SUM.itemsize))
    file.write(blank)
    body = _Body(file)
    for e in entries:
        body.write(bytes(e.offset - body.size))
        array = np.asarray(store[e.name].to_numpy(copy=False), order="C")
        body.write(array.reshape(-1).view(np.uint8).data)
    file.seek(0)
    file.write(_header(key, entries, np.array(body.sums, _SUM).tobytes()))


def _header(key: str, entries: list[_Entry], sums: bytes) -> bytes:
    """Return the file up to the body."""
    table = [[e.name, e.dtype, e.shape, e.offset, e.format] for e in entries]
    header = msgpack.packb({"key": _digest(key), "buffers": table, "sums": sums})
    prefix = _MAGIC + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(4, "little")
    return (prefix + header).ljust(_body_offset(len(header)), b"\0")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _body_offset(header: int) -> int:
    return -(-(_PREFIX + header) // ALIGNMENT) * ALIGNMENT


class _Body:
    """Writes the body and computes its checksums."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.size = 0
        self.sums: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            if self.size % SLAB == 0:
                self.sums.append(0)
            part, view = view[: SLAB - self.size % SLAB], view[SLAB - self.size % SLAB :]
            self._file.write(part)
            self.sums[-1] = zlib.crc32(part, self.sums[-1])
            self.size += len(part)


class PackedFile:
    """The contents of a file, in one block of device memory."""

    def __init__(self, entries: list[_Entry], cut: FileBlock):
        self._entries, self._cut = entries, cut

    def store(self, program: CompiledProgram) -> WeightStore:
        """Return the weights of ``program``. Raises ``ArtifactError`` if the file has other buffers."""
        wanted = {b.name: (b.dtype, tuple(b.shape), b.format) for b in program.buffers if b.constant}
        if {e.name: (e.dtype, e.shape, e.format) for e in self._entries} != wanted:
            raise ArtifactError(f"these are not the weights of program {program.name!r}")
        buffers = {e.name: self._cut(e.offset, e.shape, dtypes.numpy_dtype(e.dtype)) for e in self._entries}
        return WeightStore(buffers, {})


def read_packed(file: BinaryIO, key: str, backend: Backend) -> PackedFile:
    """Read a file that :func:`write_packed` wrote under ``key``, and close it.

    The file is read instead of mapped, because mapped files have small pages, which slow down streaming weights.
    Raises ``ArtifactError`` for a damaged file, ``OSError`` if it cannot be read, ``BackendError`` if memory is short.
    """
    with file:
        size = os.fstat(file.fileno()).st_size
        entries, sums, begin = _read_header(file, size, key)

        follows = _Followed([e for e in entries if e.format and e.nbytes])

        def check(number: int, slab: np.ndarray) -> None:
            if zlib.crc32(slab.data) != sums[number]:
                raise ArtifactError(f"offset {begin + number * SLAB}: the checksum does not fit the contents")
            follows.check(number * SLAB, slab)

        cut = backend.read_file(file.fileno(), begin, size - begin, check)
        for at, nbytes in follows.between_slabs():
            follows.check(at, np.frombuffer(os.pread(file.fileno(), nbytes, begin + at), np.uint8))
        return PackedFile(entries, cut)


class _Followed:
    """Checks buffers in weight formats: kernels use some of their bytes as indices and offsets."""

    def __init__(self, entries: list[_Entry]):
        self._entries = sorted(entries, key=lambda e: e.offset)
        self._offsets = [e.offset for e in self._entries]

    def check(self, at: int, data: np.ndarray) -> None:
        """Check all rows that lie completely in ``data``, the bytes from ``at`` on of the body. Raises
        ``ArtifactError``."""
        first = max(bisect_right(self._offsets, at) - 1, 0)
        for e in self._entries[first : bisect_left(self._offsets, at + data.size)]:
            row = e.shape[-1]
            begin = max(-((e.offset - at) // row), 0)
            end = min((at + data.size - e.offset) // row, e.nbytes // row)
            if begin < end:
                start = e.offset + begin * row - at
                rows = data[start : start + (end - begin) * row].reshape(-1, row)
                check_packed(e.format, e.name, rows)

    def between_slabs(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the body, bytes) of the rows that cross a slab border."""
        for e in self._entries:
            row = e.shape[-1]
            borders = range(-(-e.offset // SLAB) * SLAB, e.offset + e.nbytes, SLAB)
            for n in sorted({(b - e.offset) // row for b in borders if (b - e.offset) % row}):
                yield e.offset + n * row, row


def _read_header(file: BinaryIO, size: int, key: str) -> tuple[list[_Entry], np.ndarray, int]:
    """Return the buffers, the checksums of the body's slabs and the offset of the body."""
    prefix = file.read(_PREFIX)
    if prefix[: len(_MAGIC)] != _MAGIC or len(prefix) < _PREFIX:
        raise ArtifactError("offset 0: not a file of packed weights of this version")
    length, expected = int.from_bytes(prefix[8:16], "little"), int.from_bytes(prefix[16:], "little")
    if length > size - _PREFIX:
        raise ArtifactError(f"offset 8: a header of {length} bytes in a file of {size}")
    header = file.read(length)
    if zlib.crc32(header) != expected:
        raise ArtifactError("offset 16: the checksum does not fit the header")
    try:
        plain = msgpack.unpackb(header)
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ArtifactError(f"offset {_PREFIX}: the header is not msgpack: {error}") from None
    r = Field(plain, "header").record(["key", "buffers", "sums"])
    if r["key"].text() != _digest(key):
        raise ArtifactError("header.key: these are the weights of another program or checkpoint")
    begin = _body_offset(length)
    body = size - begin
    entries = [_entry(f, body) for f in r["buffers"].items()]
    if len({e.name for e in entries}) != len(entries):
        raise ArtifactError("header.buffers: two buffers have one name")
    ordered = sorted(entries, key=lambda e: e.offset)
    if any(a.offset + a.nbytes > b.offset for a, b in pairwise(ordered)):
        raise ArtifactError("header.buffers: two buffers overlap")
    sums = r["sums"].blob()
    if body < 0 or len(sums) != -(-body // SLAB) * _SUM.itemsize:
        raise ArtifactError(f"header.sums: {len(sums)} bytes for a body of {body}; the file is truncated")
    return entries, np.frombuffer(sums, _SUM), begin


def _entry(f: Field, body: int) -> _Entry:
    name, dtype, shape, offset, format = f.row(5)
    e = _Entry(name.text(), dtype.dtype(), shape.integers(0), offset.integer(0, body), format.text())
    if e.offset % ALIGNMENT or e.offset + e.nbytes > body:
        offset.fail(f"a multiple of {ALIGNMENT} with {e.nbytes} of {body} bytes behind it")
    if e.format:
        try:
            find_layout(e.format)
        except ValueError as error:
            raise ArtifactError(f"{format.path}: {error}") from None
        if e.dtype != "uint8" or not e.shape:
            format.fail("no weight format, for a buffer of elements")
    return e
