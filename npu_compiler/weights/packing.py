"""Packing of weights at load time (``pack`` nodes) into the order in which a target's micro-kernels read them.

A weight [G, K, T, C] has G groups, K output channels per group, T taps and C input channels. Its elements are packed
into zero-padded panels of output channels:

========== =================================================
``panels`` [G, ceil(K / panel), T, C, panel]
``vnni2``  [G, ceil(K / panel), T, ceil(C / 2), panel, 2], for dot products of two elements
``vnni4``  [G, ceil(K / panel), T, ceil(C / 4), panel, 4], of four
``bf16x2`` bfloat16 [G, ceil(K / panel), size]: each float16 number as the sum of two, see :func:`_split`
``bf16x3`` the same for float32 numbers, as the sum of three
``tf32``   a float32 weight of any shape as it is, its elements rounded to 10 bits of fraction
========== =================================================

A matrix [1, N, 1, C] may have a layout of a weight format (:mod:`npu_compiler.weights.format`) instead, as bytes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .format import BlockFormat, Shape, find_layout

ELEMENTS = {"panels": 1, "vnni2": 2, "vnni4": 4}  # layout -> neighbouring input channels of a panel's column
LIMBS = {"bf16x2": 2, "bf16x3": 3}  # layout -> bfloat16 numbers for each element
LIMBS_OF = {"float16": "bf16x2", "float32": "bf16x3"}
TF32 = "tf32"  # the layout whose elements are rounded for matrix units that read only the first bits
_GROUP = 32  # input channels that are split together
_LINE = 32  # numbers at the end of a panel, of which the first is 1 if an element is an infinity or NaN


def packed_spec(layout: str, shape: Shape, dtype: str, panel: int) -> tuple[Shape, str]:
    """Return shape and dtype of a packed weight. Raises ``ValueError`` if the layout cannot hold such a weight."""
    if layout == TF32:
        if dtype != "float32":
            raise ValueError(f"{dtype} cannot be packed as {layout!r}")
        return shape, dtype
    g, k, t, c = shape
    if layout == "panels":
        return (g, -(-k // panel), t, c, panel), dtype
    if (depth := ELEMENTS.get(layout)) is not None:
        return (g, -(-k // panel), t, -(-c // depth), panel, depth), dtype
    if (limbs := LIMBS.get(layout)) is not None:
        if LIMBS_OF.get(dtype) != layout:
            raise ValueError(f"{dtype} cannot be packed as {layout!r}")
        return (g, -(-k // panel), t * -(-c // _GROUP) * _GROUP * limbs * panel + _LINE), "bfloat16"
    format, found = find_layout(layout)
    dtypes = ("uint8",) if isinstance(format, BlockFormat) else format.dtypes
    packed = found.packed_shape(k, c) if (g, t, panel) == (1, 1, found.panel) and dtype in dtypes else None
    if packed is None:
        raise ValueError(f"{dtype}{list(shape)} cannot be packed as {layout!r} in panels of {panel}")
    return packed, "uint8"


def pack(w: np.ndarray, panel: int, layout: str) -> np.ndarray:
    """Return a weight [G, K, T, C] in a layout. Layouts of weight formats may raise ``IncompressibleError``."""
    if layout == TF32:
        return _rounded(w)
    if layout == "panels":
        return np.ascontiguousarray(_padded(w, panel, 1).transpose(0, 1, 3, 4, 2))
    if (depth := ELEMENTS.get(layout)) is not None:
        out = _padded(w, panel, depth)
        out = out.reshape(*out.shape[:-1], out.shape[-1] // depth, depth)
        return np.ascontiguousarray(out.transpose(0, 1, 3, 4, 2, 5))
    if layout in LIMBS:
        return _split(w, panel, LIMBS[layout])
    return find_layout(layout)[1].pack(w[0, :, 0])


def _split(w: np.ndarray, panel: int, limbs: int) -> np.ndarray:
    """Return a weight [G, K, T, C] as bfloat16 numbers (limbs) whose sums are its elements, for products on units
    that multiply bfloat16 (``kernels/amx_limbs.h``).

    A panel is [T, ceil(C / 32), limbs, 16, panel, 2]: the last dim holds channels u and u + 16 of 32. Then follows
    a line of 32 numbers, of which the first is 1 if an element is an infinity or NaN, else 0. Elements of float16 are
    rounded to their first limb, those of float32 are cut off, because the largest would become infinite.
    """
    whole = _padded(w, panel, _GROUP)
    g, panels, _, t, c = whole.shape
    whole = whole.reshape(g, panels, panel, t, c // _GROUP, 2, _GROUP // 2).transpose(0, 1, 3, 4, 6, 2, 5)
    rest = np.ascontiguousarray(whole, np.float32)  # [g, panels, t, groups, 16, panel, 2]
    out = np.zeros((g, panels, t * c * limbs * panel + _LINE), np.uint16)
    body = out[..., :-_LINE].reshape(*rest.shape[:4], limbs, *rest.shape[4:])
    special = ~np.isfinite(rest)
    out[..., -_LINE] = np.where(special.any((2, 3, 4, 5, 6)), 0x3F80, 0)
    for p in range(limbs):
        bits = rest.view(np.uint32)
        if w.dtype == np.float16:
            bits = bits + np.where(special, np.uint32(0), np.uint32(0x7FFF))
        if p == 0:
            bits = np.where(np.isnan(rest), np.uint32(0x7FC00000), bits)
        kept = bits & np.uint32(0xFFFF0000)
        body[:, :, :, :, p] = kept >> 16
        with np.errstate(invalid="ignore"):
            rest -= kept.view(np.float32)
        rest[special] = 0
        special[...] = False
    return out.view(ml_dtypes.bfloat16)


def _rounded(w: np.ndarray) -> np.ndarray:
    """Return float32 elements rounded to 10 bits of fraction, halves away from zero."""
    bits = np.ascontiguousarray(w).view(np.uint32)
    up = np.where(np.isfinite(w), np.uint32(0x1000), np.uint32(0))
    kept = np.where(np.isnan(w), np.uint32(0xFFFFFFFF), np.uint32(0xFFFFE000))
    return ((bits + up) & kept).view(np.float32)


def join(packed: np.ndarray, limbs: int, taps: int, c: int) -> np.ndarray:
    """Return the elements float32 [G, K, T, C] of a weight in limbs; K is padded."""
    g, panels, _ = packed.shape
    parts = packed[..., :-_LINE].reshape(g, panels, taps, -(-c // _GROUP), limbs, _GROUP // 2, -1, 2)
    whole = parts.astype(np.float32)[:, :, :, :, ::-1].sum(4)  # [G, panels, T, groups, 16, panel, 2]
    return whole.transpose(0, 1, 5, 2, 3, 6, 4).reshape(g, panels * parts.shape[6], taps, -1)[..., :c]


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
