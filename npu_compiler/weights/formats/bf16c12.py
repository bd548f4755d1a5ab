"""bfloat16 weights in twelve bits, without loss: fewer bytes to stream for products that wait for memory.

The low byte of a bfloat16 (an exponent bit and the mantissa) is noise. Its high byte (sign and seven exponent bits) is
not: the weights of a matrix have few different ones. Those that are frequent get a 4-bit code; :func:`tabulate` makes
the tables. The others are *escapes*: zero in place of the element, and the element listed apart, in a list of fixed
length, so that sizes do not depend on values.

A panel of 32 output columns, as the ``cpu`` target streams it ("coded"):

================ =======================================================================================
bytes            content
================ =======================================================================================
16               the high byte of each code; code 0 is 0x00
4 (+ 44 unused)  number of escapes
48 K             for each four k: 64 bytes of codes (low nibbles: k and k + 1, high nibbles: k + 2 and k + 3), 64 low
                 bytes of k and k + 1, 64 of k + 2 and k + 3
8 :func:`slots`  escapes by k: uint32 32 k + column, float32 value
================ =======================================================================================

The 64 bytes of two k are in the order in which interleaving bytes within 16-byte lanes gives pairs of k, columns in
order: for each lane its columns of the lower and then of the upper 16, each with both k.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...support import env
from ...support.errors import IncompressibleError

PANEL = 32
CODES = 16
HEAD_BYTES = 64
K_MULTIPLE = 8  # of the reduced dim
_ESCAPE = np.dtype([("at", "<u4"), ("value", "<f4")])
_SAMPLE = 8192  # elements of a panel that choose its table
_ROOM = 128  # elements for each escape there is room for: half a bit


def tabulate(symbols: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The table of up to ``size`` symbols and the code of every symbol.

    ``symbols``: uint8, any shape. Gives uint8 [size], where code 0 is the symbol 0 and the others are the most frequent
    ones, and uint8 [256]: the code of each symbol, 0 also for those without one.
    """
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    counts[0] = 0
    often = np.argsort(-counts, kind="stable")[: size - 1]
    often = often[counts[often] > 0]
    table, code = np.zeros(size, np.uint8), np.zeros(256, np.uint8)
    table[1 : 1 + often.size] = often
    code[often] = np.arange(1, 1 + often.size)
    return table, code


def slots(k: int) -> int:
    """Escapes that a panel of ``k`` rows has room for."""
    return -(-PANEL * k // _ROOM // 8) * 8


def panel_bytes(k: int) -> int:
    return HEAD_BYTES + PANEL * k * 3 // 2 + slots(k) * _ESCAPE.itemsize


def pack_coded(w: np.ndarray) -> np.ndarray:
    """bfloat16 [N, K], K a multiple of 8, as uint8 [ceil(N / 32), panel_bytes(K)].

    Raises ``IncompressibleError`` if a panel has more escapes than :func:`slots`.
    """
    n, k = w.shape
    out = np.zeros((-(-n // PANEL), panel_bytes(k)), np.uint8)
    bits = w.view(np.uint16)
    with ThreadPoolExecutor(min(8, env.usable_cpus())) as pool:
        counts = pool.map(lambda p: _pack_panel(bits[p * PANEL : (p + 1) * PANEL], out[p]), range(len(out)))
        most = max(counts, default=0)
    if most > slots(k):
        raise IncompressibleError(
            f"{most} of {PANEL * k} neighbouring weights have an unusual exponent; a panel in twelve bits has room for "
            f"{slots(k)}"
        )
    return out


def check_coded(packed: np.ndarray) -> None:
    """Raises ``ValueError`` unless all escapes of panels uint8 [..., :func:`panel_bytes`] are inside of their panel:
    kernels read as many as a panel says, and add them where they say."""
    size = packed.shape[-1]
    k = (size - HEAD_BYTES) * _ROOM // (PANEL * (_ROOM * 3 // 2 + _ESCAPE.itemsize)) // K_MULTIPLE * K_MULTIPLE
    if k < K_MULTIPLE or panel_bytes(k) != size:
        raise ValueError(f"no matrix has panels of {size} bytes")
    panels = packed.reshape(-1, size)
    counts = panels[:, CODES : CODES + 4].copy().view("<u4")
    places = panels[:, HEAD_BYTES + PANEL * k * 3 // 2 :].view(_ESCAPE)["at"]
    if counts.max(initial=0) > slots(k):
        raise ValueError(f"a panel claims {int(counts.max())} escapes, it has room for {slots(k)}")
    if places.max(initial=0) >= PANEL * k:  # unused places are zeros
        raise ValueError(f"an escape is element {int(places.max())} of a panel of {PANEL * k}")


def _pack_panel(columns: np.ndarray, out: np.ndarray) -> int:
    """Fills ``out`` with up to 32 ``columns`` [n, K]; the number of escapes, which were left out if too many."""
    n, k = columns.shape
    if n < PANEL:
        columns = np.concatenate([columns, np.zeros((PANEL - n, k), columns.dtype)])
    # pairs of k [half, lane, column, k / 2] -> [k / 2, lane, half, column]
    pairs = np.ascontiguousarray(columns).view(np.uint32).reshape(2, 4, 4, k // 2).transpose(3, 1, 0, 2)
    ordered = np.ascontiguousarray(pairs).view(np.uint16).reshape(k // 2, 64)
    low, high = ordered.astype(np.uint8), (ordered >> 8).astype(np.uint8)
    table, code = tabulate(high.reshape(-1)[:: max(1, high.size // _SAMPLE)], CODES)
    codes = np.frombuffer(high.tobytes().translate(code.tobytes()), np.uint8).reshape(high.shape)
    escaped = np.flatnonzero(codes == 0)
    escaped = escaped[high.reshape(-1)[escaped] != 0]
    low.reshape(-1)[escaped] = 0
    out[:CODES] = table
    out[CODES : CODES + 4] = np.array([escaped.size], "<u4").view(np.uint8)
    body = out[HEAD_BYTES : HEAD_BYTES + PANEL * k * 3 // 2].reshape(k // 4, 3, 64)
    body[:, 0] = codes[0::2] | codes[1::2] << 4
    body[:, 1:] = low.reshape(k // 4, 2, 64)
    if escaped.size <= slots(k):
        out[HEAD_BYTES + body.size :].view(_ESCAPE)[: escaped.size] = _escapes(ordered, escaped)
    return int(escaped.size)


def _escapes(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    unit, byte = at // 64, at % 64
    column = byte // 8 % 2 * 16 + byte // 16 * 4 + byte // 2 % 4
    out = np.empty(at.size, _ESCAPE)
    out["at"] = (2 * unit + byte % 2) * PANEL + column
    out["value"] = (ordered.reshape(-1)[at].astype(np.uint32) << 16).view(np.float32)
    return out[np.argsort(out["at"], kind="stable")]
