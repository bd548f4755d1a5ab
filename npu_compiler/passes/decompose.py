"""Anchors a target has no micro-kernel for become plain loops: integer and double matmuls and convolutions."""

from __future__ import annotations

from .. import expr
from ..expr import Expr
from ..graph import Graph, Node, Value
from ..target_config import TargetConfig
from .static import static_values


def decompose(graph: Graph, config: TargetConfig) -> None:
    """Rewrite matmul and conv2d over dtypes without a matrix kernel, and convolutions whose weight is computed at run
    time or whose groups are narrower than a vector, as multiply-and-sum reductions."""
    static = static_values(graph)
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op not in ("matmul", "conv2d") or node.out in static:
            continue
        graph.sources = node.sources
        if node.op == "matmul" and node.inputs[0].dtype not in config.matrix_dtypes:
            new[node.out] = _matmul(graph, node)
        elif node.op == "matmul" and node.inputs[0].shape[-1] == 0:
            new[node.out] = _matmul(graph, node)
        elif node.op == "conv2d" and (node.inputs[0].dtype not in config.matrix_dtypes or node.inputs[1] not in static):
            new[node.out] = _conv2d(graph, node)
    graph.sources = ()
    graph.replace(new)


def _matmul(graph: Graph, node: Node) -> Value:
    a, b = node.inputs
    *batch, m, n = node.out.shape
    k, r = a.shape[-1], len(batch)
    zero = expr.const(0, "int64")

    def batch_index(v: Value) -> list[Expr]:
        off = r - (v.rank - 2)
        return [expr.index(d + off) if s != 1 else zero for d, s in enumerate(v.shape[:-2])]

    i, j, t = expr.index(r), expr.index(r + 1), expr.index(r + 2)
    dtype = node.out.dtype
    product = expr.load(0, a.dtype, [*batch_index(a), i, t]).cast(dtype) * expr.load(1, b.dtype, [*batch_index(b), t, j]).cast(dtype)
    out = graph.reduce_expr("sum", [a, b], product, (*batch, m, n, k), [r + 2])
    return out.reshape(*batch, m, n).cast(dtype)


def _conv2d(graph: Graph, node: Node) -> Value:
    x, w = node.inputs
    attrs = node.attrs
    n, oh, ow, k = node.out.shape
    _, r, s, cg = w.shape
    (sh, sw), (top, left, _, _), (dh, dw) = attrs["stride"], attrs["padding"], attrs["dilation"]
    b, y, z, o, i, j, c = (expr.index(d) for d in range(7))
    row, col = y * sh + i * dh - top, z * sw + j * dw - left
    channel = (o // (k // attrs["groups"])) * cg + c
    inside = (row >= 0) & (row < x.shape[1]) & (col >= 0) & (col < x.shape[2])
    dtype = node.out.dtype
    value = expr.where(inside, expr.load(0, x.dtype, [b, row, col, channel]).cast(dtype), 0)
    product = value * expr.load(1, w.dtype, [o, i, j, c]).cast(dtype)
    out = graph.reduce_expr("sum", [x, w], product, (n, oh, ow, k, r, s, cg), [4, 5, 6])
    return out.reshape(n, oh, ow, k).cast(dtype)
