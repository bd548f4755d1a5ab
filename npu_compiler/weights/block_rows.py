"""The layout of rows of block formats: four rows of a matrix together, for targets that read weights row by row.

A *piece* is eight columns of four rows; columns 2 i and 2 i + 1 of a row are its pair i. Four rows consist of

======== ===============================================================================================================
planes   piece after piece: the low bits of the codes (4 of them, or 2); then, plane by plane, the remaining bits
scales   of each sub-block, field by field: the bytes of row 0, 1, 2 and 3
heads    of each block, in the same way
======== ===============================================================================================================

A plane of b <= 4 bits has 32-bit words, each for 4 / b rows: pair i of row r begins at bit 4 b (r % (4 / b)) + b i, and
its second column is 16 bits higher, so that a shift and a mask select both. Codes of 8 bits are bytes, row by row, so
that TMA can load them as a matrix. There are as many bytes as in the blocks, but for the 6-bit scales of
GGUF, which take a byte each, and for padding to whole memory transactions.
The readers are ``blocks.h`` and the files named after the formats, in ``targets/simt/kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..support import env
from .format import Layout, Order, Read, Real, Shape

ROWS = 4
PIECE = 8  # columns
QUAD = 32  # columns of four neighbouring pieces, of which rows consist
_PAIRS = PIECE // 2
_SECTOR = 32  # bytes of a memory transaction
_CHUNK = 2**21  # codes that are packed at a time: temporary arrays have several bytes a code


class Parts(NamedTuple):
    """Blocks in parts: codes uint8 [..., sub-blocks, sub_block], head uint8 [..., bytes], and the scales of the
    sub-blocks uint8 [..., sub-blocks, bytes]."""

    codes: np.ndarray
    head: np.ndarray
    scales: np.ndarray


class Coded(Protocol):
    """A block format whose blocks consist of codes and scales: what the layout needs of it.

    ``bits``: of a code. ``block``: codes of a block, 0 for a whole row; ``sub_block``: those that share a scale.
    ``head_fields`` and ``scale_fields``: the bytes of the fields of a head and of a sub-block's scales.
    """

    name: str

    @property
    def bits(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def sub_block(self) -> int: ...
    @property
    def head_fields(self) -> tuple[int, ...]: ...
    @property
    def scale_fields(self) -> tuple[int, ...]: ...
    @property
    def is_arithmetic(self) -> bool:
        """Whether an element is :meth:`element`, not the entry of a table."""

    def columns(self, c: int) -> int:
        """Return the elements of a row of ``c`` bytes."""

    def parts_of(self, rows: np.ndarray) -> Parts:
        """Return the parts [..., blocks, ...] of rows uint8 [..., bytes of a row]."""

    def rows_of(self, parts: Parts) -> np.ndarray:
        """Return the rows of their parts: the inverse of :meth:`parts_of`."""

    def element(self, code: Any, head: Read, scale: Read, real: Real) -> Any:
        """Return an element's value from its code and the bytes of its head and scales, see ``Layout.element``."""


class BlockRows(Layout):
    """The layout of rows of a block format; see the module."""

    order = Order.ROWS
    panel = ROWS
    alignment = _SECTOR
    max_rows = 1

    def __init__(self, format: Coded):
        self.format, self.name = format, f"{format.name}.rows"
        low = 8 if format.bits == 8 else 4 if format.bits >= 4 else 2
        self.planes = tuple(b for b in (low, format.bits - low) if b)  # bits of the codes in each plane
        self._scale, self._head = ROWS * sum(format.scale_fields), ROWS * sum(format.head_fields)

    def sizes(self, k: int) -> tuple[int, int, int]:
        """Return the bytes of the planes, the scales and the heads of four rows of ``k`` columns."""
        f = self.format
        return k * ROWS * f.bits // 8, k // (f.sub_block or k) * self._scale, k // (f.block or k) * self._head

    def nbytes(self, k: int) -> int:
        """Return the bytes of four rows of ``k`` columns."""
        return -(-sum(self.sizes(k)) // _SECTOR) * _SECTOR

    def packed_shape(self, n: int, c: int) -> Shape | None:
        k = self.format.columns(c)
        return (-(-n // ROWS), self.nbytes(k)) if k % QUAD == 0 else None

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, c = stored.shape
        shape, k = self.packed_shape(n, c), self.format.columns(c)
        assert shape is not None
        out = np.zeros(shape, np.uint8)
        step = max(1, _CHUNK // (ROWS * k))

        def pack_some(begin: int) -> None:
            rows = stored[begin * ROWS : (begin + step) * ROWS]
            if len(rows) % ROWS:
                rows = np.concatenate([rows, np.zeros((-len(rows) % ROWS, c), np.uint8)])
            made = self._packed(self.format.parts_of(rows.reshape(-1, ROWS, c)), k)
            out[begin : begin + step, : made.shape[1]] = made

        with ThreadPoolExecutor(min(8, env.usable_cpus())) as pool:
            for _ in pool.map(pack_some, range(0, shape[0], step)):
                pass  # raises what a part raised
        return out

    def _packed(self, parts: Parts, k: int) -> np.ndarray:
        """Return the bytes [fours, bytes] of parts [fours, 4, blocks, ...]."""
        fours = len(parts.codes)
        codes, made = parts.codes.reshape(fours, ROWS, k), []
        for bits, shift in zip(self.planes, self._shifts(), strict=True):
            made.append(_plane(codes >> np.uint8(shift), bits))
        scales = parts.scales.reshape(fours, ROWS, -1, parts.scales.shape[-1])
        made += [_by_field(scales, self.format.scale_fields), _by_field(parts.head, self.format.head_fields)]
        return np.concatenate([part.reshape(fours, -1) for part in made], 1)

    def _shifts(self) -> list[int]:
        return [sum(self.planes[:n]) for n in range(len(self.planes))]

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        f, fours, k = self.format, len(packed), self.format.columns(c)
        blocks, at = k // (f.block or k), 0
        codes = np.zeros((fours, ROWS, k), np.uint8)
        for bits, shift in zip(self.planes, self._shifts(), strict=True):
            size = k * ROWS * bits // 8
            codes |= _codes(packed[:, at : at + size], bits) << np.uint8(shift)
            at += size
        _, scale_bytes, head_bytes = self.sizes(k)
        sub_blocks = k // (f.sub_block or k)
        scales = _by_row(packed[:, at : at + scale_bytes], sub_blocks, f.scale_fields)
        head = _by_row(packed[:, at + scale_bytes : at + scale_bytes + head_bytes], blocks, f.head_fields)
        lead = (fours, ROWS, blocks, sub_blocks // blocks)
        parts = Parts(codes.reshape(*lead, k // sub_blocks), head, scales.reshape(*lead, -1))
        return f.rows_of(parts).reshape(fours * ROWS, c)[:n]

    def looks_up(self, n: int, k: int) -> bool:
        return n % ROWS == 0 and self.format.is_arithmetic

    def element(self, read: Read, real: Real, row: Any, column: Any, nbytes: int) -> Any:
        f = self.format
        k = self._columns(nbytes)
        r, piece, pair, odd = row & ROWS - 1, column >> 3, column >> 1 & _PAIRS - 1, column & 1
        code: Any = 0
        at = 0
        for bits, shift in zip(self.planes, self._shifts(), strict=True):
            if bits == 8:
                part = read(r * k + column)
            else:
                field = r * (4 * bits) + pair * bits  # among the low halves of the piece's words
                word = (field >> 4) * 4 + odd * 2
                bit = field & 15
                part = read(piece * (4 * bits) + at + word + (bit >> 3)) >> (bit & 7) & (1 << bits) - 1
            code = (part << shift) + code
            at += k * ROWS * bits // 8
        scales, heads = at, at + self.sizes(k)[1]

        def byte_of(fields: Sequence[int], begin: Any) -> Read:
            """Return the reader of byte i of the fields of a row."""
            places = [(ROWS * sum(fields[:n]) + i, size) for n, size in enumerate(fields) for i in range(size)]
            return lambda i: read(begin + places[i][0] + r * places[i][1])

        scale = scales + ((column >> f.sub_block.bit_length() - 1) * self._scale if f.sub_block else 0)
        head = heads + ((column >> f.block.bit_length() - 1) * self._head if f.block else 0)
        return f.element(code, byte_of(f.head_fields, head), byte_of(f.scale_fields, scale), real)

    def _columns(self, nbytes: int) -> int:
        """Return the columns of four rows of ``nbytes``: padding is less than four rows of a block."""
        step = self.format.block or QUAD
        k = nbytes * 8 // (ROWS * self.format.bits) // step * step
        while k > step and self.nbytes(k) > nbytes:
            k -= step
        return k


def _plane(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return the plane [fours, bytes] of the low ``bits`` of codes [fours, 4, K]."""
    fours, _, k = codes.shape
    if bits == 8:
        return codes.reshape(fours, -1)
    low = (codes & np.uint8((1 << bits) - 1)).reshape(fours, ROWS, k // PIECE, _PAIRS, 2)
    if bits == 4:  # a byte has two pairs' columns; its place: row, column of the pair, half of the pairs
        halves = low.reshape(fours, ROWS, -1, 2, 2, 2)
        return _joined([halves[:, :, :, :, n] for n in range(2)], bits).transpose(0, 2, 1, 4, 3).reshape(fours, -1)
    pairs = _joined([low[:, :, :, n] for n in range(_PAIRS)], bits)  # [fours, 4, pieces, 2]
    if bits == 2:
        return pairs.reshape(fours, 2, 2, -1, 2).transpose(0, 3, 1, 4, 2).reshape(fours, -1)
    rows = _joined([pairs[:, n::2] for n in range(2)], _PAIRS)
    return rows.transpose(0, 2, 3, 1).reshape(fours, -1)


def _joined(fields: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """Return bytes of fields of ``bits`` each, the first in the lowest ones."""
    out = fields[0].copy()
    for n, x in enumerate(fields[1:], 1):
        out |= x << np.uint8(n * bits)
    return out


def _codes(plane: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes uint8 [fours, 4, K] of a plane [fours, bytes]."""
    fours = len(plane)
    if bits == 8:
        return plane.reshape(fours, ROWS, -1)
    words = np.ascontiguousarray(plane).view("<u4").reshape(fours, -1, bits).transpose(0, 2, 1)
    rows, pairs, odd = np.ogrid[: ROWS // bits, :_PAIRS, :2]
    shifts = (4 * bits * rows + bits * pairs + 16 * odd).astype(np.uint32)[:, None]
    codes = words[:, :, None, :, None, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(fours, ROWS, -1)


def _by_field(rows: np.ndarray, fields: Sequence[int]) -> np.ndarray:
    """Return [fours, 4, blocks, bytes] as [fours, bytes]: block by block, field by field, row by row."""
    blocks, parts, at = rows.transpose(0, 2, 1, 3), [np.empty((len(rows), rows.shape[2], 0), np.uint8)], 0
    for size in fields:
        parts.append(blocks[..., at : at + size].reshape(*blocks.shape[:2], -1))
        at += size
    return np.concatenate(parts, -1).reshape(len(rows), -1)


def _by_row(packed: np.ndarray, count: int, fields: Sequence[int]) -> np.ndarray:
    """Return the rows [fours, 4, count, bytes] of the result of :func:`_by_field`."""
    blocks, at = packed.reshape(len(packed), count, -1), 0
    parts = [np.empty((len(packed), count, ROWS, 0), np.uint8)]
    for size in fields:
        parts.append(blocks[..., at : at + ROWS * size].reshape(len(packed), count, ROWS, size))
        at += ROWS * size
    return np.concatenate(parts, -1).transpose(0, 2, 1, 3)
