"""Convolutions of few channels (an image's red, green, blue) as convolutions over whole rows of pixels.

With pixels padded to four channels, a row of a filter reads ``row`` neighbouring elements. Windows of ``row`` elements,
one per position of the filter, are then the channels of a convolution with filters one column wide. The copy that adds
the padding also converts the image to [N, H, W, C].

Images of 8-bit integers become float16: a product of a uint8 and an int8 is exact, and so are sums in float32 as long
as they have up to 24 bits.
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
MAX_SUM = 1 << 24  # of whole numbers that float32 has
MAX_PRODUCT = 255 * 128  # of a uint8 and an int8


def is_image(node: Node, row: int) -> bool:
    """Whether the ``conv2d`` node can be computed on rows of ``row`` elements that start at multiples of 16 bytes."""
    x, w = node.inputs
    _, r, s, c = w.shape
    size = dtypes.DTYPES[row_dtype(node)].size
    step = node.attrs["stride"][1] * CELL * size
    fits = row and size == 2 and c <= CELL and s * CELL <= row and not step % 16
    if x.dtype == "uint8" and r * s * c * MAX_PRODUCT > MAX_SUM:
        return False
    return bool(fits and node.attrs["groups"] == 1 and node.attrs["dilation"][1] == 1 and s > 1 and node.out.numel)


def row_dtype(node: Node) -> str:
    """Return the dtype of the rows: that of the image, or float16 for 8-bit integers."""
    dtype = node.inputs[0].dtype
    return "float16" if dtype == "uint8" else dtype


def padded_image(
    node: Node, source: Operand, row: int, buffer: Callable[[tuple[int, ...]], Buffer]
) -> tuple[LoopBody, Operand, Operand, dict[str, Any]]:
    """Return the copy kernel, the padded image, its windows as an operand [N, H, OW, row], and the attributes of the
    convolution over these. ``buffer`` allocates memory of a shape."""
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


def filter_rows(w: Value, row: int) -> Value:
    """Return the filters [K, R, S, C] as [1, K, R, row], with zeros where a filter reads no pixel."""
    k, r, s, c = w.shape
    graph, kind = w.graph, dtypes.numpy_dtype(w.dtype)
    if c < CELL:
        w = graph.concat([w, graph.const(np.zeros((k, r, s, CELL - c), kind))], 3)
    if s * CELL < row:
        w = graph.concat([w, graph.const(np.zeros((k, r, row // CELL - s, CELL), kind))], 2)
    return w.reshape(1, k, r, row)
