"""The rows4 layout of bf16c12: four rows of a matrix together, for targets that read weights row by row.

The high byte of a bfloat16 is a sign and seven bits of the exponent. The exponents of a row are nearly always among
seven neighbouring values: relative to a base of the row they take three bits, and zero is the eighth code. Kernels use
one base for all rows, and multiply the sum of a row by a power of four, the ratio of the two bases.

Four rows [4, K] are ``FourRows(K).nbytes`` bytes; a *piece* is eight columns. The codes and low bytes of all fours come
first, so that they lie at multiples of cache lines, and then the scales and outliers of all fours:

======================== =======================================================================================
codes   16 bytes a piece a word for each row, of eight nibbles: nibble n has the code of column n in its low bits; the
                         sign of column j is bit 8 j + 7, that of column 4 + j bit 8 j + 3
low     16 bytes a piece low bytes of the first two rows; after all pieces, those of the other two
scales  8 bytes          of each row, in bfloat16
outliers 4 bytes each    row << 30 | column << 16 | bits, in the order of columns; zeros where there is none
======================== =======================================================================================
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from ....support import dtypes, env
from ....support.errors import IncompressibleError
from ...block_rows import PIECE, ROWS
from ...format import Layout, Order, Shape

SCALES = 2 * ROWS  # bytes of the scales of four rows
_SECTOR = 32  # bytes: scales and outliers of four rows start at multiples of a memory transaction
_SHARE = 128  # one of this many elements may be an outlier
_LEAST = 16  # outliers that four short rows may have
_CODES = 7  # besides zero
_TOP = 0x3F  # the high byte of the last code, relative to the kernels' base
_HIGHEST = 0x7E  # largest high byte with a code: the next one has infinities, and its scale would overflow
_BLOCK = 1 << 20  # elements packed at a time


@dataclass(frozen=True)
class FourRows:
    """The sizes of the parts of four rows of ``k`` columns, in bytes."""

    k: int

    @property
    def pieces(self) -> int:
        """Number of pieces of eight columns."""
        return self.k // PIECE

    @property
    def planes(self) -> int:
        """Bytes of the codes and the low bytes."""
        return 3 * 16 * self.pieces

    @property
    def extras(self) -> int:
        """Bytes of the scales and the outliers."""
        return -(-(SCALES + 4 * max(ROWS * self.k // _SHARE, _LEAST)) // _SECTOR) * _SECTOR

    @property
    def nbytes(self) -> int:
        """Bytes of four rows."""
        return self.planes + self.extras

    @property
    def max_outliers(self) -> int:
        """Number of outliers that four rows can hold."""
        return (self.extras - SCALES) // 4

    def split(self, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes and low bytes, and the scales and outliers, of packed fours: views [fours, bytes]."""
        flat, fours = packed.reshape(-1), packed.size // self.nbytes
        return flat[: fours * self.planes].reshape(fours, -1), flat[fours * self.planes :].reshape(fours, -1)


class Rows4(Layout):
    """The layout 'bf16c12.rows4': uint8 [N / 4, bytes of four rows]."""

    name = "bf16c12.rows4"
    order = Order.ROWS
    panel = ROWS
    alignment = _SECTOR
    max_rows = 1

    def packed_shape(self, n: int, c: int) -> Shape | None:
        """Return the packed shape, or None: pieces must fill whole lines, and an outlier's column has 14 bits."""
        return (-(-n // ROWS), FourRows(c).nbytes) if 0 < c < 1 << 14 and c % 64 == 0 else None

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, k = stored.shape
        layout, fours = FourRows(k), -(-n // ROWS)
        bits = np.ascontiguousarray(stored).view(np.uint16)
        if n % ROWS:
            bits = np.concatenate([bits, np.zeros((-n % ROWS, k), np.uint16)])
        bits = bits.reshape(fours, ROWS, k)
        out = np.zeros((fours, layout.nbytes), np.uint8)
        step = max(1, _BLOCK // (ROWS * k))
        with ThreadPoolExecutor(min(8, env.usable_cpus())) as pool:
            planes, extras = layout.split(out)
            blocks = (slice(at, at + step) for at in range(0, fours, step))
            for _ in pool.map(lambda some: _pack_block(bits[some], planes[some], extras[some], layout), blocks):
                pass  # raises what a block raised
        return out

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        layout, fours = FourRows(c), len(packed)
        planes, extras = layout.split(np.ascontiguousarray(packed))
        codes = planes[:, : 16 * layout.pieces].reshape(fours, layout.pieces, ROWS, 4).transpose(0, 2, 1, 3)
        low = planes[:, 16 * layout.pieces :].reshape(fours, 2, layout.pieces, 2, PIECE)
        low = low.transpose(0, 1, 3, 2, 4).reshape(fours, ROWS, c)
        code = np.stack([codes & 7, codes >> 4 & 7], -1).reshape(fours, ROWS, c)
        sign = np.concatenate([codes >> 7, codes >> 3 & 1], -1).reshape(fours, ROWS, c)
        exponent = np.ascontiguousarray(extras[:, :SCALES]).view("<u2") >> 7
        base = (exponent.astype(np.int64) - 127) // 2 - _CODES + _TOP
        high = np.where(code == 0, 0, base[..., None] + code) | sign.astype(np.int64) << 7
        bits = (high << 8 | low).astype(np.uint16).reshape(fours, -1)
        outliers = np.ascontiguousarray(extras[:, SCALES:]).view("<u4")
        four, place = np.nonzero(outliers)
        entry = outliers[four, place]
        bits[four, (entry >> 30) * c + (entry >> 16 & 0x3FFF)] = entry & 0xFFFF
        return bits.reshape(fours * ROWS, c)[:n].view(dtypes.numpy_dtype("bfloat16"))

    def check(self, packed: np.ndarray) -> None:
        """Check that outliers lie inside their rows: kernels read the activation at an outlier's column."""
        k = _columns(packed.shape[-1])
        if not k:
            raise ValueError(f"no matrix has four rows of {packed.shape[-1]} bytes")
        outliers = FourRows(k).split(packed)[1][:, SCALES:].view("<u4")
        step = max(1, _BLOCK // packed.shape[-1])
        for at in range(0, len(outliers), step):
            column = int((outliers[at : at + step] & np.uint32(0x3FFF << 16)).max(initial=0)) >> 16
            if column >= k:
                raise ValueError(f"an outlier is in column {column} of {k}")


@cache
def _columns(nbytes: int) -> int:
    """Return the columns of four rows of ``nbytes`` bytes; 0 if no number of columns has that size."""
    return next((k for k in range(64, 1 << 14, 64) if FourRows(k).nbytes == nbytes), 0)


def _pack_block(bits: np.ndarray, planes: np.ndarray, extras: np.ndarray, layout: FourRows) -> None:
    fours, _, k = bits.shape
    pair = bits.view(np.uint8).reshape(fours, ROWS, k, 2)  # little endian: low byte first
    low, high = pair[..., 0].copy(), np.ascontiguousarray(pair[..., 1])
    sign = high >> 7
    high &= 0x7F
    base = _bases(high)
    code = high - base[..., None].astype(np.uint8)
    outliers = np.flatnonzero(((code - np.uint8(1)) >= _CODES) & (high | low != 0))
    code[high | low == 0] = 0
    if outliers.size:
        four, place = np.divmod(outliers, ROWS * k)
        count = np.bincount(four, minlength=fours)
        if count.max() > layout.max_outliers:
            raise IncompressibleError(
                f"{int(count.max())} of {ROWS * k} neighbouring weights have an unusual exponent; four rows of "
                f"bf16c12 have room for {layout.max_outliers}"
            )
        number = np.arange(outliers.size) - (np.cumsum(count) - count)[four]
        place = place[np.lexsort((place % k, four))]
        row, column = np.divmod(place, k)
        entry = row.astype(np.uint32) << 30 | column.astype(np.uint32) << 16 | bits.reshape(fours, -1)[four, place]
        extras[:, SCALES:].view("<u4")[four, number] = entry
        for plane in (low, code, sign):
            plane.ravel()[outliers] = 0
    exponent = 127 + 2 * (base + _CODES - _TOP)
    extras[:, :SCALES].view("<u2")[...] = exponent << 7
    codes, lows = planes[:, : 16 * layout.pieces], planes[:, 16 * layout.pieces :]
    codes.reshape(fours, layout.pieces, ROWS, 4)[...] = _nibbles(code, sign).transpose(0, 2, 1, 3)
    halves = low.reshape(fours, 2, 2, layout.pieces, PIECE).transpose(0, 1, 3, 2, 4)
    lows.reshape(halves.shape)[...] = halves


def _bases(high: np.ndarray) -> np.ndarray:
    """Return for exponents without their last bit [F, 4, K] the bases [F, 4] with which codes 1 to 7 represent the most
    elements."""
    fours = len(high)
    rows = np.arange(fours * ROWS, dtype=np.int32).reshape(fours, ROWS, 1) << 7
    counts = np.bincount((high + rows).ravel(), minlength=fours * ROWS << 7).reshape(-1, 128)
    upto = np.cumsum(counts, axis=1)[:, : _HIGHEST + 1]
    return (upto[:, _CODES:] - upto[:, :-_CODES]).argmax(axis=1).reshape(fours, ROWS)


def _nibbles(code: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Return codes and signs [F, 4, K] as four bytes per piece, [F, 4, K / 8, 4]."""
    c, s = (x.reshape(*x.shape[:2], -1, PIECE) for x in (code, sign))
    return c[..., 0::2] | c[..., 1::2] << 4 | s[..., 4:] << 3 | s[..., :4] << 7
