"""Convolutions of few channels (an image's red, green, blue) as convolutions over whole rows of pixels.

With pixels padded to four channels, a row of a filter reads ``row`` neighbouring elements. Windows of ``row`` elements,
one per position of the filter, are then the channels of a convolution with filters one column wide. The copy that adds
the padding also converts the image to [N, H, W, C].

Images of 8-bit integers that a filter visits in steps of two pixels consist of blocks of 2 x 2 padded pixels, 16 bytes
each (space to depth): then the filter moves by one block. All others become float16: a product of a uint8 and an int8
is exact, and so are sums in float32 as long as they have up to 24 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..graph import expr
from ..graph.graph import Node, Value
from ..support import dtypes
from .buffers import contiguous_strides
from .kernel import Buffer, LoopBody, Operand, Stage

CELL = 4  # elements of a padded pixel
BLOCK = 2  # pixels of a block along each side
MAX_SUM = 1 << 24  # of whole numbers that float32 has
MAX_PRODUCT = 255 * 128  # of a uint8 and an int8


def is_image(node: Node, row: int) -> bool:
    """Whether the ``conv2d`` node can be computed on rows of ``row`` two-byte elements that start at multiples of 16
    bytes."""
    x, w = node.inputs
    _, r, s, c = w.shape
    if in_blocks(node):
        return bool(blocks_of(s) * BLOCK * BLOCK * CELL <= 2 * row and node.out.numel)
    size = dtypes.DTYPES[row_dtype(node)].size
    step = node.attrs["stride"][1] * CELL * size
    fits = row and size == 2 and c <= CELL and s * CELL <= row and not step % 16
    if x.dtype == "uint8" and r * s * c * MAX_PRODUCT > MAX_SUM:
        return False
    return bool(fits and node.attrs["groups"] == 1 and node.attrs["dilation"][1] == 1 and s > 1 and node.out.numel)


def in_blocks(node: Node) -> bool:
    """Whether the image consists of blocks of pixels."""
    x, w = node.inputs
    _, _, s, c = w.shape
    steps = tuple(node.attrs["stride"]) == (BLOCK, BLOCK) and tuple(node.attrs["dilation"]) == (1, 1)
    return bool(x.dtype == "uint8" and steps and c <= CELL and s > 1 and node.attrs["groups"] == 1)


def blocks_of(taps: int) -> int:
    """Return the blocks that cover neighbouring taps of a filter, the first of which is in a block's first line."""
    return -(-taps // BLOCK)


def row_dtype(node: Node) -> str:
    """Return the dtype of the rows: that of the image, or float16 for 8-bit integers that are not in blocks."""
    dtype = node.inputs[0].dtype
    return "float16" if dtype == "uint8" and not in_blocks(node) else dtype


def padded_image(
    node: Node, source: Operand, row: int, buffer: Callable[[tuple[int, ...]], Buffer]
) -> tuple[LoopBody, Operand, Operand, dict[str, Any]]:
    """Return the copy kernel, the padded image, its windows as an operand [N, H, OW, row], and the attributes of the
    convolution over these. ``buffer`` allocates memory of a shape. ``row`` counts two-byte elements."""
    if in_blocks(node):
        return _blocks(node, source, 2 * row, buffer)
    (n, h, width, c), (k, r, _, _) = node.inputs[0].shape, node.inputs[1].shape
    _, oh, ow, _ = node.out.shape
    (sh, sw), (top, left), dh = node.attrs["stride"], node.attrs["padding"][:2], node.attrs["dilation"][0]
    high, wide = (oh - 1) * sh + (r - 1) * dh + 1, -(-((ow - 1) * sw + row // CELL) // 2) * 2
    shape = (n, high, wide, CELL)
    whole = Operand(buffer(shape), shape, contiguous_strides(shape))
    image, y, x, channel = (expr.index(d) for d in range(4))
    y, x = y - top, x - left
    inside = expr.call("ge", y, 0)
    for condition in (
        expr.call("lt", y, h),
        expr.call("ge", x, 0),
        expr.call("lt", x, width),
        expr.call("lt", channel, c),
    ):
        inside = expr.call("and", inside, condition)
    value = expr.where(inside, expr.load(0, source.dtype, (image, y, x, channel)).cast(whole.dtype), 0)
    body = LoopBody(shape, (), (Stage("store", value, output=0, index=expr.identity_index(shape)),))
    rows = Operand(whole.buffer, (n, high, ow, row), (high * wide * CELL, wide * CELL, sw * CELL, 1))
    attrs = dict(node.attrs) | {
        "stride": (sh, 1), "padding": (0, 0, 0, 0), "dilation": (dh, 1), "kernel_size": (r, 1), "channels": (row, k)
    }  # fmt: skip
    return body, whole, rows, attrs


def _blocks(
    node: Node, source: Operand, row: int, buffer: Callable[[tuple[int, ...]], Buffer]
) -> tuple[LoopBody, Operand, Operand, dict[str, Any]]:
    """:func:`padded_image` with pixels in blocks; ``row`` counts elements."""
    (_, h, width, c), (k, r, _, _) = node.inputs[0].shape, node.inputs[1].shape
    n, oh, ow, _ = node.out.shape
    top, left = node.attrs["padding"][:2]
    each = BLOCK * BLOCK * CELL
    high, wide = oh + blocks_of(r) - 1, ow - 1 + row // each
    shape = (n, high, wide, BLOCK, BLOCK, CELL)
    whole = Operand(buffer(shape), shape, contiguous_strides(shape))
    image, y, x, down, over, channel = (expr.index(d) for d in range(6))
    y, x = y * BLOCK + down - top, x * BLOCK + over - left
    inside = (y >= 0) & (y < h) & (x >= 0) & (x < width) & (channel < c)
    value = expr.where(inside, expr.load(0, source.dtype, (image, y, x, channel)), 0)
    body = LoopBody(shape, (), (Stage("store", value, output=0, index=expr.identity_index(shape)),))
    rows = Operand(whole.buffer, (n, high, ow, row), (high * wide * each, wide * each, each, 1))
    attrs = dict(node.attrs) | {
        "stride": (1, 1), "padding": (0, 0, 0, 0), "kernel_size": (blocks_of(r), 1), "channels": (row, k)
    }  # fmt: skip
    return body, whole, rows, attrs


def filter_rows(node: Node, row: int) -> Value:
    """Return the filters [K, R, S, C] as [1, K, R, row], with zeros where a filter reads no pixel. If the image is in
    blocks, R and the row count these. ``row`` counts two-byte elements."""
    w = node.inputs[1]
    k, r = w.shape[:2]
    if not in_blocks(node):
        return _padded(w.cast(row_dtype(node)), (k, r, row // CELL, CELL)).reshape(1, k, r, row)
    high, wide = blocks_of(r), 2 * row // (BLOCK * BLOCK * CELL)
    w = _padded(w, (k, high * BLOCK, wide * BLOCK, CELL)).reshape(k, high, BLOCK, wide, BLOCK, CELL)
    return w.permute(0, 1, 3, 2, 4, 5).reshape(1, k, high, 2 * row)


def _padded(w: Value, shape: tuple[int, ...]) -> Value:
    """Return ``w`` with zeros at the end of each dim."""
    kind = dtypes.numpy_dtype(w.dtype)
    for d, size in reversed(list(enumerate(shape))):
        if w.shape[d] < size:
            rest = (*w.shape[:d], size - w.shape[d], *w.shape[d + 1 :])
            w = w.graph.concat([w, w.graph.const(np.zeros(rest, kind))], d)
    return w
