"""Convolutions of few terms between images in channels-first order become pointwise nodes.

Their micro-kernels need channels-last images. A depthwise convolution, or one of few channels a group, takes less time
than the two transpositions around it; a loop nest whose lanes are neighbouring pixels needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..graph.direct_convolution import ATTRIBUTES, direct_convolution
from ..graph.graph import Graph, Node, Value
from ..support import dtypes
from .layout import sink_permutes
from .load_time import static_values

MOST_TERMS = 25  # of a result: a vector of each stays in a register while all channels of a group are computed
DEPTHWISE_TERMS = 16  # which no other result reads: with more, transpositions are the smaller part
CACHED = 1 << 18  # elements of an image that is transposed in the cache


def short_convolutions(graph: Graph, lanes: int) -> None:
    """Replace convolutions of few terms whose input and result are both transposed. ``lanes``: of a vector; with 0,
    where threads compute elements, only depthwise ones, whose results share no load."""
    if not any(_is_short(node, lanes) for node in graph.nodes):
        return
    users, static = graph.users(), static_values(graph)
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if _is_short(node, lanes) and _is_turned(node.inputs[0]) and _becomes_turned(node.out, users):
            graph.sources = node.sources
            new[node.out] = _pointwise(node, static)
    graph.sources = ()
    graph.replace(new)
    if new:
        sink_permutes(graph)


def _is_short(node: Node, lanes: int) -> bool:
    if node.op != "conv2d":
        return False
    x, w = node.inputs
    if not dtypes.is_float(x.dtype):
        return False
    groups = node.attrs["groups"]
    if not lanes:
        return groups == x.shape[3] > 1 and 0 < w.numel <= MOST_TERMS * w.shape[0]
    if groups == 1 or groups < w.shape[0]:
        return 0 < w.numel <= MOST_TERMS * w.shape[0]
    return 0 < w.numel <= DEPTHWISE_TERMS * w.shape[0] and (_fills_vectors(node.out, lanes) or x.numel > CACHED)


def _fills_vectors(y: Value, lanes: int) -> bool:
    """Whether vectors of neighbouring pixels have few lanes that are in no row."""
    return y.shape[2] >= 0.7 * lanes * -(-y.shape[2] // lanes)


def _is_turned(x: Value) -> bool:
    """Whether the channels of an image [N, H, W, C] are not innermost in memory."""
    if x.shape[3] == 1 or x.op != "permute":
        return x.shape[3] == 1
    perm = x.node.attrs["perm"]
    return any(n > 1 for n in x.node.inputs[0].shape[perm[3] + 1 :])


def _becomes_turned(y: Value, users: Mapping[Value, list[Node]]) -> bool:
    """Whether results [N, H, W, K] are only read, through pointwise nodes, by a permute that moves their channels."""
    if y.shape[3] == 1:
        return True
    while len(readers := set(users.get(y, ()))) == 1:
        (node,) = readers
        if node.op == "permute":
            perm = node.attrs["perm"]
            return any(y.shape[d] > 1 for d in perm[perm.index(y.rank - 1) + 1 :])
        same = [n for n in node.out.shape if n != 1] == [n for n in y.shape if n != 1]
        if not same or not (node.op == "reshape" or (node.op == "pointwise" and node.out.shape == y.shape)):
            return False
        y = node.out
    return False


def _pointwise(node: Node, static: set[Value]) -> Value:
    """Return the results of a convolution as the sum of its terms at each pixel of each channel."""
    x, w = node.inputs
    dtype, (stride, padding, dilation, groups) = node.out.dtype, (node.attrs[name] for name in ATTRIBUTES)
    x, w = x.permute(0, 3, 1, 2), w.cast(dtype) if w in static else w  # cast when weights are loaded
    y = direct_convolution(x, w, stride, padding[:2], dilation, groups, node.out.shape[1:3], dtype)
    return y.permute(0, 2, 3, 1)
