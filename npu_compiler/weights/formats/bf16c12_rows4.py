"""bfloat16 weights in 12 bits a number without loss, four rows of a matrix together: the form in which SIMT targets
stream the matrix of a product with one row.

Of the two bytes of a bfloat16 (``bf16c12.py``) the high one is a sign and seven bits of the exponent. Those of a
row are seven neighbours, nearly always: counted from a base of the row they take three bits; zero is the eighth code.
Kernels count from a base of their own, the same for all rows, and multiply a row's sum by the power of four between the
two. Other elements, the *escapes*, are stored as zero and listed apart, in a fixed number of places.

A quad of rows [4, K] is ``QuadLayout(K).nbytes`` bytes; a *piece* is eight columns:

======================== =======================================================================================
codes   16 bytes a piece a word for each row, of eight nibbles: nibble n has the code of column n in its low bits; the
                         sign of column j is bit 8 j + 7, that of column 4 + j bit 8 j + 3
low     16 bytes a piece low bytes of the first two rows; after all pieces, those of the other two
scales  8 bytes          of each row, in bfloat16
escapes 4 bytes each     row << 30 | column << 16 | bits; zeros where there is none
======================== =======================================================================================
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from ...support import dtypes, env
from ...support.errors import IncompressibleError

ROWS = 4
PIECE = 8  # columns
_ALIGN = 128  # bytes: quads begin where memory is read as a whole
_SHARE = 128  # one element in so many may be an escape
_CODES = 7  # besides zero
_TOP = 0x3F  # the high byte of the last code, as kernels count
_HIGHEST = 0x7E  # that a code stands for: the next has infinities, and needs a scale beyond the largest number
_BLOCK = 1 << 20  # elements coded at a time


@dataclass(frozen=True)
class QuadLayout:
    """Where things lie in a quad of rows of ``k`` columns, in bytes."""

    k: int

    @property
    def pieces(self) -> int:
        return self.k // PIECE

    @property
    def scales(self) -> int:
        return 3 * 16 * self.pieces

    @property
    def escapes(self) -> int:
        return self.scales + 2 * ROWS

    @property
    def nbytes(self) -> int:
        return -(-(self.escapes + ROWS * self.k // _SHARE * 4) // _ALIGN) * _ALIGN

    @property
    def places(self) -> int:
        """Escapes that there is room for."""
        return (self.nbytes - self.escapes) // 4


def has_quads(k: int) -> bool:
    """Whether rows of ``k`` columns have this form: pieces are read in whole lines, columns fit an escape."""
    return 0 < k < 1 << 14 and k % 64 == 0


def quad_shape(n: int, k: int) -> tuple[int, int]:
    """Of the bytes that hold a matrix [n, k]."""
    return -(-n // ROWS), QuadLayout(k).nbytes


def pack_quads(w: np.ndarray) -> np.ndarray:
    """A bfloat16 matrix [N, K] as uint8 of :func:`quad_shape`; rows that lack to a whole quad are zeros.

    Raises ``IncompressibleError`` if a quad has more escapes than there are places for.
    """
    n, k = w.shape
    layout = QuadLayout(k)
    quads = -(-n // ROWS)
    bits = np.ascontiguousarray(w).view(np.uint16)
    if n % ROWS:
        bits = np.concatenate([bits, np.zeros((-n % ROWS, k), np.uint16)])
    bits = bits.reshape(quads, ROWS, k)
    out = np.zeros((quads, layout.nbytes), np.uint8)
    step = max(1, _BLOCK // (ROWS * k))
    with ThreadPoolExecutor(min(8, env.usable_cpus())) as pool:
        blocks = range(0, quads, step)
        for _ in pool.map(lambda at: _pack_block(bits[at : at + step], out[at : at + step], layout), blocks):
            pass  # raises what a block raised
    return out


@cache
def _columns(nbytes: int) -> int:
    """The columns of quads of ``nbytes`` bytes; 0 if no number of columns gives that size."""
    return next((k for k in range(64, 1 << 14, 64) if QuadLayout(k).nbytes == nbytes), 0)


def check_quads(packed: np.ndarray) -> None:
    """Raises ``ValueError`` unless all escapes of quads uint8 [..., QuadLayout.nbytes] are inside of their rows:
    kernels read the activation at the column that an escape names."""
    k = _columns(packed.shape[-1])
    if not k:
        raise ValueError(f"no matrix has quads of {packed.shape[-1]} bytes")
    quads = packed.reshape(-1, packed.shape[-1])
    step = max(1, _BLOCK // packed.shape[-1])
    for at in range(0, len(quads), step):
        escapes = quads[at : at + step, QuadLayout(k).escapes :].view("<u4")
        column = int((escapes & np.uint32(0x3FFF << 16)).max(initial=0)) >> 16
        if column >= k:
            raise ValueError(f"an escape is in column {column} of {k}")


def _pack_block(bits: np.ndarray, out: np.ndarray, layout: QuadLayout) -> None:
    quads, _, k = bits.shape
    pair = bits.view(np.uint8).reshape(quads, ROWS, k, 2)  # little endian: low byte first
    low, high = pair[..., 0].copy(), np.ascontiguousarray(pair[..., 1])
    sign = high >> 7
    high &= 0x7F
    base = _bases(high)
    code = high - base[..., None].astype(np.uint8)
    escaped = np.flatnonzero(((code - np.uint8(1)) >= _CODES) & (high | low != 0))
    code[high | low == 0] = 0
    if escaped.size:
        quad, place = np.divmod(escaped, ROWS * k)
        count = np.bincount(quad, minlength=quads)
        if count.max() > layout.places:
            raise IncompressibleError(
                f"{int(count.max())} of {ROWS * k} neighbouring weights have an unusual exponent; four rows in twelve "
                f"bits have room for {layout.places}"
            )
        number = np.arange(escaped.size) - (np.cumsum(count) - count)[quad]
        row, column = np.divmod(place, k)
        entry = row.astype(np.uint32) << 30 | column.astype(np.uint32) << 16 | bits.ravel()[escaped]
        out[:, layout.escapes :].view("<u4")[quad, number] = entry
        for plane in (low, code, sign):
            plane.ravel()[escaped] = 0
    exponent = 127 + 2 * (base + _CODES - _TOP)
    out[:, layout.scales : layout.escapes].view("<u2")[...] = exponent << 7
    codes, lows = out[:, : 16 * layout.pieces], out[:, 16 * layout.pieces : layout.scales]
    codes.reshape(quads, layout.pieces, ROWS, 4)[...] = _nibbles(code, sign).transpose(0, 2, 1, 3)
    halves = low.reshape(quads, 2, 2, layout.pieces, PIECE).transpose(0, 1, 3, 2, 4)
    lows.reshape(halves.shape)[...] = halves


def _bases(high: np.ndarray) -> np.ndarray:
    """[Q, 4, K] exponents without their last bit -> [Q, 4]: the base from which codes 1 to 7 stand for the most."""
    quads = len(high)
    rows = np.arange(quads * ROWS, dtype=np.int32).reshape(quads, ROWS, 1) << 7
    counts = np.bincount((high + rows).ravel(), minlength=quads * ROWS << 7).reshape(-1, 128)
    upto = np.cumsum(counts, axis=1)[:, : _HIGHEST + 1]
    return (upto[:, _CODES:] - upto[:, :-_CODES]).argmax(axis=1).reshape(quads, ROWS)


def _nibbles(code: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """[Q, 4, K] -> four bytes for every piece, [Q, 4, K / 8, 4]."""
    c, s = (x.reshape(*x.shape[:2], -1, PIECE) for x in (code, sign))
    return c[..., 0::2] | c[..., 1::2] << 4 | s[..., 4:] << 3 | s[..., :4] << 7


def unpack_quads(packed: np.ndarray, n: int, k: int) -> np.ndarray:
    """The matrix [n, k] that :func:`pack_quads` was given."""
    layout = QuadLayout(k)
    quads = len(packed)
    codes = packed[:, : 16 * layout.pieces].reshape(quads, layout.pieces, ROWS, 4).transpose(0, 2, 1, 3)
    low = packed[:, 16 * layout.pieces : layout.scales].reshape(quads, 2, layout.pieces, 2, PIECE)
    low = low.transpose(0, 1, 3, 2, 4).reshape(quads, ROWS, k)
    code = np.stack([codes & 7, codes >> 4 & 7], -1).reshape(quads, ROWS, k)
    sign = np.concatenate([codes >> 7, codes >> 3 & 1], -1).reshape(quads, ROWS, k)
    exponent = np.ascontiguousarray(packed[:, layout.scales : layout.escapes]).view("<u2") >> 7
    base = (exponent.astype(np.int64) - 127) // 2 - _CODES + _TOP
    high = np.where(code == 0, 0, base[..., None] + code) | sign.astype(np.int64) << 7
    bits = (high << 8 | low).astype(np.uint16).reshape(quads, -1)
    escapes = np.ascontiguousarray(packed[:, layout.escapes :]).view("<u4")
    quad, place = np.nonzero(escapes)
    entry = escapes[quad, place]
    bits[quad, (entry >> 30) * k + (entry >> 16 & 0x3FFF)] = entry & 0xFFFF
    return bits.reshape(quads * ROWS, k)[:n].view(dtypes.numpy_dtype("bfloat16"))
