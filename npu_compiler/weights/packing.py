"""Packing of weights at load time (``pack`` nodes) into the order in which a target's micro-kernels read them.

A weight [G, K, T, C] has G groups, K output channels per group, T taps and C input channels. Its elements are packed
into zero-padded panels of output channels:

========== =================================================
``panels`` [G, ceil(K / panel), T, C, panel]
``vnni2``  [G, ceil(K / panel), T, ceil(C / 2), panel, 2], for dot products of two elements
========== =================================================

A matrix [1, N, 1, C] may have a layout of a weight format (:mod:`npu_compiler.weights.format`) instead, as bytes.
"""

from __future__ import annotations

import numpy as np

from .format import BlockFormat, Shape, find_layout

ELEMENTS = ("panels", "vnni2")


def packed_spec(layout: str, shape: Shape, dtype: str, panel: int) -> tuple[Shape, str]:
    """Return shape and dtype of a packed weight. Raises ``ValueError`` if the layout cannot hold such a weight."""
    g, k, t, c = shape
    if layout == "panels":
        return (g, -(-k // panel), t, c, panel), dtype
    if layout == "vnni2":
        return (g, -(-k // panel), t, -(-c // 2), panel, 2), dtype
    format, found = find_layout(layout)
    dtypes = ("uint8",) if isinstance(format, BlockFormat) else format.dtypes
    packed = found.packed_shape(k, c) if (g, t, panel) == (1, 1, found.panel) and dtype in dtypes else None
    if packed is None:
        raise ValueError(f"{dtype}{list(shape)} cannot be packed as {layout!r} in panels of {panel}")
    return packed, "uint8"


def pack(w: np.ndarray, panel: int, layout: str) -> np.ndarray:
    """Return a weight [G, K, T, C] in a layout. Layouts of weight formats may raise ``IncompressibleError``."""
    if layout == "panels":
        return np.ascontiguousarray(_padded(w, panel, even=False).transpose(0, 1, 3, 4, 2))
    if layout == "vnni2":
        out = _padded(w, panel, even=True)
        out = out.reshape(*out.shape[:-1], out.shape[-1] // 2, 2)
        return np.ascontiguousarray(out.transpose(0, 1, 3, 4, 2, 5))
    return find_layout(layout)[1].pack(w[0, :, 0])


def unpack_matrix(packed: np.ndarray, layout: str, n: int, k: int) -> np.ndarray:
    """Return the elements [n, k] of a matrix in a layout of a weight format."""
    format, found = find_layout(layout)
    if not isinstance(format, BlockFormat):
        return found.unpack(packed, n, k)
    row_bytes = format.row_bytes(k)
    assert row_bytes is not None
    return format.decode(found.unpack(packed, n, row_bytes), k)


def _padded(w: np.ndarray, panel: int, even: bool) -> np.ndarray:
    """Return a weight as [G, K / panel, panel, T, C], padded to whole panels and, if ``even``, to an even C."""
    g, k, t, c = w.shape
    kp = -(-k // panel) * panel
    out = np.zeros((g, kp, t, c + c % 2 if even else c), w.dtype)
    out[:, :k, :, :c] = w
    return out.reshape(g, kp // panel, panel, t, out.shape[-1])
