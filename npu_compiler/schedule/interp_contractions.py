"""Matmul and convolution kernels in numpy, whose right operands are packed as targets read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph import interp
from ..graph.graph import Graph
from ..weights import packing
from ..weights.format import Order, find_layout
from .anchors import Conv2d, Convolution, DepthwiseConv2d, Gemm, WinogradConv2d
from .kernel import Pack

Array = np.ndarray[Any, Any]


# -- products -------------------------------------------------------------------------------------------------------
def check_rows(k: Gemm) -> None:
    """Raise ``ValueError`` unless the left operand is [batch, m, k] with dense rows that are ``lda`` apart."""
    op = k.inputs[0]
    dense = op.shape == (k.batch, k.m, k.k) and (k.k == 1 or op.strides[2] == 1)
    if not dense or not (k.m == 1 or op.strides[1] == k.lda > 0):
        raise ValueError(f"kernel {k.name}: its left operand is not [batch, m, k] with rows lda apart")


def gemm(k: Gemm, left: Array, stored: Array) -> tuple[Array, ...]:
    """Return the product [batch, M, N], or both of a dual one; with ``splits``, partial sums [splits, M, N]. It is
    float32, or float64 if ``left`` is.

    ``left``: [batch, M, K]. ``stored``: the right operand as the kernel reads it.
    """
    x = left.astype(np.float64 if left.dtype in (np.float64, np.uint8) else np.float32)  # sums of integers are exact
    columns = _right_operands(k, stored)
    if k.splits > 1:
        (w,) = columns
        parts = zip(np.array_split(x, k.splits, axis=2), np.array_split(w, k.splits, axis=1), strict=True)
        return (np.concatenate([a @ b for a, b in parts]),)
    return tuple((x @ w).astype(np.int32) if left.dtype == np.uint8 else x @ w for w in columns)


def _right_operands(k: Gemm, w: Array) -> list[Array]:
    """Return the right operand [batch or 1, K, N], float32 or float64, or both of a dual product, from its stored
    form."""
    op, wide = k.weight, np.float64 if k.weight.dtype == "float64" else np.float32
    if op.format:
        return _stored_operands(k, op.format, w)
    if k.packs:
        return [w.astype(wide)]
    if w.ndim == 3:  # [batch or 1, N, K]; rows of the two matrices of a dual product alternate
        w = w.astype(wide).swapaxes(1, 2)
        return [w[..., 0::2], w[..., 1::2]] if k.dual else [w]
    paired = op.dtype in ("bfloat16", "int8")
    w = w[:, :, 0] if w.ndim - paired == 5 else w  # one tap
    w = _unpacked(w).astype(wide)[:, : k.k]
    if w.shape[0] != (1 if k.shared else k.batch):
        raise ValueError(f"kernel {k.name} has {w.shape[0]} right operands")
    if not k.dual:
        return [w[..., : k.n]]
    panels = w.reshape(w.shape[0], k.k, -1, 2, op.shape[-1 - paired])
    return [panels[:, :, :, i].reshape(w.shape[0], k.k, k.n) for i in (0, 1)]


def _stored_operands(k: Gemm, layout_name: str, packed: Array) -> list[Array]:
    """Return the right operands from a layout of a weight format."""
    _, layout = find_layout(layout_name)
    w = packing.unpack_matrix(packed, layout_name, k.n * (1 + k.dual), k.k).astype(np.float32)
    if not k.dual:
        return [w.T[None]]
    turns = w.reshape(-1, 2, layout.panel if layout.order is Order.PANELS else 1, k.k)
    return [turns[:, i].reshape(k.n, k.k).T[None] for i in (0, 1)]


def _unpacked(w: Array) -> Array:
    """Return packed panels [G, panels, C, panel] (or [G, panels, C/2, panel, 2], or of 4) as [G, C, K]."""
    if w.ndim == 5:
        depth = w.shape[-1]
        w = w.swapaxes(-1, -2)
        w = w.reshape(*w.shape[:-3], w.shape[-3] * depth, w.shape[-1])
    w = np.moveaxis(w, 1, -2)
    return w.reshape(*w.shape[:-2], w.shape[-2] * w.shape[-1])


def pack(k: Pack, b: Array) -> Array:
    """Return right operands [batch, K, N] in the panels of the kernel's output."""
    shape = k.outputs[0].shape
    layout = {2: "vnni2", 4: "vnni4"}.get(shape[-1], "panels")
    panel = shape[-1 if layout == "panels" else -2]
    return packing.pack(b.transpose(0, 2, 1)[:, :, None, :], panel, layout).reshape(shape)


# -- convolutions ---------------------------------------------------------------------------------------------------
def conv2d(k: Convolution, inputs: list[Array]) -> Array:
    """Return the convolution [N, OH, OW, K] of ``inputs``: the image [N, H, W, C] and the stored filters."""
    if k.inputs[0].shape[3] != k.channels[0]:
        raise ValueError(f"kernel {k.name} has {k.inputs[0].shape[3]} input channels, not {k.channels[0]}")
    return _convolved(k, inputs[0], _filters(k, inputs[1]), k.groups)


def _filters(k: Convolution, w: Array) -> Array:
    """Return stored filters as [K, R, S, C / groups]."""
    (r, s), (c, ko), g = k.kernel_size, k.channels, k.groups
    if isinstance(k, DepthwiseConv2d):
        return w.transpose(2, 0, 1)[..., None]
    if w.ndim == 4:  # not packed
        return w.reshape(ko, r, s, -1)
    if isinstance(k, Conv2d) and k.limbs > 1:
        return packing.join(w, k.limbs, r * s, c // g)[:, : ko // g].reshape(ko, r, s, c // g)
    w = np.moveaxis(w, 1, 2)  # [G, T, panels, C, panel]
    if w.ndim == 6:
        w = w.swapaxes(-1, -2)
        w = w.reshape(*w.shape[:3], -1, w.shape[-1])
    if w.shape[1] == r != r * s:  # a row of the filter is one tap
        columns = w.shape[-1]
        w = w[..., : s * c, :].reshape(g, r, -1, s, c, columns).transpose(0, 1, 3, 2, 4, 5)
        w = w.reshape(g, r * s, -1, c, columns)
    w = w.transpose(0, 2, 4, 1, 3).reshape(g, -1, r, s, w.shape[3])[:, : ko // g, ..., : c // g]
    return w.reshape(ko, r, s, c // g)


def _convolved(k: Convolution, x: Array, w: Array, groups: int) -> Array:
    graph = Graph("conv2d")
    value = graph.input("x", x.shape, k.inputs[0].dtype)
    y = graph.conv2d(value, graph.input("w", w.shape, value.dtype), k.stride, k.padding, k.dilation, groups)
    return interp.evaluate_node(y.node, [x, w])[0]


def conv2d_parts(k: Conv2d, inputs: list[Array]) -> Array:
    """Return the partial sums [splits, N, OH, OW, K]; each part covers a share of the input channels."""
    x, w = (np.array_split(a, k.splits, axis=3) for a in (inputs[0], _filters(k, inputs[1])))
    return np.stack([_convolved(k, a, b, 1) for a, b in zip(x, w, strict=True)])


def winograd(k: WinogradConv2d, inputs: list[Array]) -> Array:
    """Return the convolution [N, OH, OW, K]. The filters are recovered from their transforms U = G w G^T, which is
    possible because G has full rank."""
    (c, ko), g = k.channels, np.array(k.transform)
    u = _unpacked(np.moveaxis(inputs[1][0], 1, 0))[:, :c, :ko]  # [points, C, K]
    w = np.linalg.pinv(np.kron(g, g)) @ u.reshape(len(g) ** 2, -1).astype(np.float64)
    return _convolved(k, inputs[0], w.reshape(3, 3, c, ko).transpose(3, 0, 1, 2), 1)
