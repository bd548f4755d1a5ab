"""Packing of weights at load time (``pack`` nodes) into the order in which a target's micro-kernels read them.

A weight [G, K, T, C] has G groups, K output channels per group, T taps and C input channels. Its elements are packed
into zero-padded panels of output channels:

========== =================================================
``panels`` [G, ceil(K / panel), T, C, panel]
``vnni2``  [G, ceil(K / panel), T, ceil(C / 2), panel, 2], for dot products of two elements
``vnni4``  [G, ceil(K / panel), T, ceil(C / 4), panel, 4], of four
========== =================================================

A matrix [1, N, 1, C] may have a layout of a weight format (:mod:`npu_compiler.weights.format`) instead, as bytes.
"""

from __future__ import annotations

import numpy as np

from .format import BlockFormat, Shape, find_layout

ELEMENTS = {"panels": 1, "vnni2": 2, "vnni4": 4}  # layout -> neighbouring input channels of a panel's column


def packed_spec(layout: str, shape: Shape, dtype: str, panel: int) -> tuple[Shape, str]:
    """Return shape and dtype of a packed weight. Raises ``ValueError`` if the layout cannot hold such a weight."""
    g, k, t, c = shape
    if layout == "panels":
        return (g, -(-k // panel), t, c, panel), dtype
    if (depth := ELEMENTS.get(layout)) is not None:
        return (g, -(-k // panel), t, -(-c // depth), panel, depth), dtype
    format, found = find_layout(layout)
    dtypes = ("uint8",) if isinstance(format, BlockFormat) else format.dtypes
    packed = found.packed_shape(k, c) if (g, t, panel) == (1, 1, found.panel) and dtype in dtypes else None
    if packed is None:
        raise ValueError(f"{dtype}{list(shape)} cannot be packed as {layout!r} in panels of {panel}")
    return packed, "uint8"


def pack(w: np.ndarray, panel: int, layout: str) -> np.ndarray:
    """Return a weight [G, K, T, C] in a layout. Layouts of weight formats may raise ``IncompressibleError``."""
    if layout == "panels":
        return np.ascontiguousarray(_padded(w, panel, 1).transpose(0, 1, 3, 4, 2))
    if (depth := ELEMENTS.get(layout)) is not None:
        out = _padded(w, panel, depth)
        out = out.reshape(*out.shape[:-1], out.shape[-1] // depth, depth)
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


def _padded(w: np.ndarray, panel: int, depth: int) -> np.ndarray:
    """Return a weight as [G, K / panel, panel, T, C], padded to whole panels and to a C that ``depth`` divides."""
    g, k, t, c = w.shape
    kp = -(-k // panel) * panel
    out = np.zeros((g, kp, t, -(-c // depth) * depth), w.dtype)
    out[:, :k, :, :c] = w
    return out.reshape(g, kp // panel, panel, t, out.shape[-1])
