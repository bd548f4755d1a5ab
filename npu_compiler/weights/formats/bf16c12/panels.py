"""The panels layout of bf16c12: 32 output columns together, for targets that compute a panel at once.

======================= =======================================================================================
bytes                   content
======================= =======================================================================================
16                      the high byte of each code; code 0 is 0x00
4 (+ 44 unused)         number of outliers
48 K                    for every four k: 64 bytes of codes (low nibbles: k and k + 1, high nibbles: k + 2 and
                        k + 3), 64 low bytes of k and k + 1, 64 of k + 2 and k + 3
8 :func:`max_outliers`  outliers by k: uint32 32 k + column, float32 value
======================= =======================================================================================

Codes stand for the most frequent high bytes of the panel (:func:`tabulate`). The 64 bytes of two k are ordered so that
interleaving bytes within 16-byte lanes yields pairs of k with the columns in order: each lane has its columns of the
lower 16, then of the upper 16, each with both k.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ....support import dtypes, env
from ....support.errors import IncompressibleError
from ...format import PANEL, Layout, Order, Shape

CODES = 16
HEAD_BYTES = 64
K_MULTIPLE = 8  # of the reduced dim
_OUTLIER = np.dtype([("at", "<u4"), ("value", "<f4")])
_SAMPLE = 8192  # sample of a panel's elements that determines its table
_ROOM = 128  # elements per outlier in the list, which thus takes half a bit per element


class Panels(Layout):
    """The layout 'bf16c12.panels': uint8 [panels, :func:`panel_bytes`]."""

    name = "bf16c12.panels"
    order = Order.PANELS
    panel = PANEL

    def packed_shape(self, n: int, c: int) -> Shape | None:
        return (-(-n // PANEL), panel_bytes(c)) if c and c % K_MULTIPLE == 0 else None

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, k = stored.shape
        out = np.zeros((-(-n // PANEL), panel_bytes(k)), np.uint8)
        bits = stored.view(np.uint16)
        with ThreadPoolExecutor(min(8, env.usable_cpus())) as pool:
            counts = pool.map(lambda p: _pack_panel(bits[p * PANEL : (p + 1) * PANEL], out[p]), range(len(out)))
            most = max(counts, default=0)
        if most > max_outliers(k):
            raise IncompressibleError(
                f"{most} of {PANEL * k} neighbouring weights have an unusual exponent; a panel of bf16c12 has room for "
                f"{max_outliers(k)}"
            )
        return out

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        units = c // 2
        body = packed[:, HEAD_BYTES : HEAD_BYTES + PANEL * c * 3 // 2].reshape(-1, c // 4, 3, 64)
        codes = np.stack([body[:, :, 0] & 15, body[:, :, 0] >> 4], 2).reshape(-1, units * 64)
        high = np.take_along_axis(packed[:, :CODES], codes, 1).reshape(-1, units, 64)
        low = body[:, :, 1:].reshape(-1, units, 64)
        bits = (high.astype(np.uint16) << 8 | low).reshape(-1, units, 4, 2, 4, 2)  # lane, half, column, k
        bits = bits.transpose(0, 3, 2, 4, 1, 5).reshape(-1, PANEL, c)
        counts = packed[:, CODES : CODES + 4].copy().view("<u4")[:, 0]
        listed = packed[:, HEAD_BYTES + PANEL * c * 3 // 2 :].copy().view(_OUTLIER)
        panel, place = np.nonzero(np.arange(listed.shape[1]) < counts[:, None])
        at, value = listed["at"][panel, place], listed["value"][panel, place]
        bits[panel, at % PANEL, at // PANEL] = value.view(np.uint32) >> 16
        return bits.reshape(-1, c)[:n].view(dtypes.numpy_dtype("bfloat16"))

    def check(self, packed: np.ndarray) -> None:
        """Check that outliers lie inside their panel: kernels trust the number of outliers and their positions."""
        size = packed.shape[-1]
        k = (size - HEAD_BYTES) * _ROOM // (PANEL * (_ROOM * 3 // 2 + _OUTLIER.itemsize)) // K_MULTIPLE * K_MULTIPLE
        if k < K_MULTIPLE or panel_bytes(k) != size:
            raise ValueError(f"no matrix has panels of {size} bytes")
        panels = packed.reshape(-1, size)
        counts = panels[:, CODES : CODES + 4].copy().view("<u4")
        places = panels[:, HEAD_BYTES + PANEL * k * 3 // 2 :].view(_OUTLIER)["at"]
        if counts.max(initial=0) > max_outliers(k):
            raise ValueError(f"a panel claims {int(counts.max())} outliers, it has room for {max_outliers(k)}")
        if places.max(initial=0) >= PANEL * k:  # unused places are zeros
            raise ValueError(f"an outlier is element {int(places.max())} of a panel of {PANEL * k}")


def max_outliers(k: int) -> int:
    """Return the number of outliers that a panel with ``k`` elements per column can hold."""
    return -(-PANEL * k // _ROOM // 8) * 8


def panel_bytes(k: int) -> int:
    """Return the bytes of a panel with ``k`` elements per column."""
    return HEAD_BYTES + PANEL * k * 3 // 2 + max_outliers(k) * _OUTLIER.itemsize


def tabulate(symbols: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the table of up to ``size`` symbols, and the code of every symbol.

    ``symbols``: uint8, any shape. Returns uint8 [size], where code 0 is the symbol 0 and the others are the most
    frequent ones, and uint8 [256]: the code of each symbol, 0 also for those without one.
    """
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    counts[0] = 0
    often = np.argsort(-counts, kind="stable")[: size - 1]
    often = often[counts[often] > 0]
    table, code = np.zeros(size, np.uint8), np.zeros(256, np.uint8)
    table[1 : 1 + often.size] = often
    code[often] = np.arange(1, 1 + often.size)
    return table, code


def _pack_panel(columns: np.ndarray, out: np.ndarray) -> int:
    """Fill ``out`` with up to 32 ``columns`` [n, K]. Return the number of outliers; too many are not written."""
    n, k = columns.shape
    if n < PANEL:
        columns = np.concatenate([columns, np.zeros((PANEL - n, k), columns.dtype)])
    # pairs of k [half, lane, column, k / 2] -> [k / 2, lane, half, column]
    pairs = np.ascontiguousarray(columns).view(np.uint32).reshape(2, 4, 4, k // 2).transpose(3, 1, 0, 2)
    ordered = np.ascontiguousarray(pairs).view(np.uint16).reshape(k // 2, 64)
    low, high = ordered.astype(np.uint8), (ordered >> 8).astype(np.uint8)
    table, code = tabulate(high.reshape(-1)[:: max(1, high.size // _SAMPLE)], CODES)
    codes = np.frombuffer(high.tobytes().translate(code.tobytes()), np.uint8).reshape(high.shape)
    outliers = np.flatnonzero(codes == 0)
    outliers = outliers[high.reshape(-1)[outliers] != 0]
    low.reshape(-1)[outliers] = 0
    out[:CODES] = table
    out[CODES : CODES + 4] = np.array([outliers.size], "<u4").view(np.uint8)
    body = out[HEAD_BYTES : HEAD_BYTES + PANEL * k * 3 // 2].reshape(k // 4, 3, 64)
    body[:, 0] = codes[0::2] | codes[1::2] << 4
    body[:, 1:] = low.reshape(k // 4, 2, 64)
    if outliers.size <= max_outliers(k):
        out[HEAD_BYTES + body.size :].view(_OUTLIER)[: outliers.size] = _outliers(ordered, outliers)
    return int(outliers.size)


def _outliers(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    unit, byte = at // 64, at % 64
    column = byte // 8 % 2 * 16 + byte // 16 * 4 + byte // 2 % 4
    out = np.empty(at.size, _OUTLIER)
    out["at"] = (2 * unit + byte % 2) * PANEL + column
    out["value"] = (ordered.reshape(-1)[at].astype(np.uint32) << 16).view(np.float32)
    return out[np.argsort(out["at"], kind="stable")]
