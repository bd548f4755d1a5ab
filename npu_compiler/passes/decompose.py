"""Matmuls, convolutions and attention that a target has no micro-kernel for (such as integers) become plain loops."""

from __future__ import annotations

import math

from ..graph import expr
from ..graph.direct_convolution import ATTRIBUTES, input_position
from ..graph.expr import Expr
from ..graph.graph import SCAN_EXTREMES, Graph, Node, Value
from ..support import dtypes
from ..target_config import TargetConfig
from .layout import sink_reshapes
from .load_time import static_values


def decompose(graph: Graph, config: TargetConfig) -> None:
    """Rewrite nodes that ``config`` has no kernel for as multiply-and-sum reductions.

    These are matmul and conv2d over dtypes outside ``matrix_dtypes``, attention over these and float64, convolutions
    whose weight is computed at run time where the target does not pack it then, and products with one vector whose
    right operand is computed at run time. A reduction over one element becomes pointwise. A running extreme with its
    position becomes two scans, unless the target scans pairs.
    """
    for steps in ({"attention": _attention}, {"matmul": _matmul, "conv2d": _conv2d, "reduce": _reduce, "scan": _scan}):
        if not any(node.op in steps for node in graph.nodes):
            continue
        static = static_values(graph)
        new: dict[Value, Value] = {}
        for node in list(graph.nodes):
            if node.op in steps and node.outputs[0] not in static and not _served(node, config, static):
                graph.sources = node.sources
                made = steps[node.op](graph, node)
                new |= zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True)
        graph.sources = ()
        graph.replace(new)
        if new:
            sink_reshapes(graph)  # so that a cast joins the loops of a product


def _served(node: Node, config: TargetConfig, static: set[Value]) -> bool:
    """Whether the target has a kernel for this node as it is."""
    if node.op == "reduce":
        return any(node.domain[a] != 1 for a in node.attrs["axes"])
    if node.op == "scan":
        plain, x = node.attrs["kind"] not in SCAN_EXTREMES, node.inputs[0]
        return plain or (config.scans_pairs and x.shape[node.attrs["axis"]] < 2**31)
    if node.inputs[0].dtype not in config.matrix_dtypes:
        return False
    if node.inputs[0].dtype == "uint8":
        w = node.inputs[1]
        if w.dtype != "int8" or (w.rank != 2 if node.op == "matmul" else w not in static):
            return False
    if node.op == "conv2d":
        return node.inputs[1] in static or _packs_filters(node, config)
    if node.op == "matmul" and 1 in node.out.shape[-2:] and node.inputs[1] not in static:
        return False  # no element of the matrix is used twice: packing panels or filling tiles would take longer
    depth = node.inputs[0].shape[-1]
    if node.op == "attention":
        return depth <= config.max_head_dim and node.inputs[0].dtype != "float64"  # its kernels compute in float32
    return depth > 1  # an outer product has no sums


def _packs_filters(node: Node, config: TargetConfig) -> bool:
    """Whether filters that are computed at run time can be packed into panels like those of a matrix: pairs of terms
    must not cross taps. Depthwise filters are not packed."""
    x, w = node.inputs
    paired = x.dtype in config.pair_dtypes and w.shape[3] % 2 > 0
    depthwise = w.shape[3] == 1 and w.shape[0] == x.shape[3]
    return config.packs_weights and dtypes.is_float(x.dtype) and w.numel > 0 and not paired and not depthwise


def _reduce(graph: Graph, node: Node) -> Value:
    if node.attrs["kind"].startswith("arg"):
        return graph.elementwise(node.out.shape, [], expr.const(0, "int64"))
    return graph.elementwise(node.out.shape, node.inputs, node.attrs["expr"])


def _scan(graph: Graph, node: Node) -> tuple[Value, Value]:
    """The running extreme, and the running maximum of the positions where it is attained."""
    x, axis = node.inputs[0], node.attrs["axis"]
    values = graph.scan(SCAN_EXTREMES[node.attrs["kind"]], x, axis)
    place = "int32" if x.shape[axis] < 2**31 else "int64"

    def candidate(a: Expr, v: Expr) -> Expr:
        here = expr.fn("eq")(a, v) | expr.fn("isnan")(a) if dtypes.is_float(a.dtype) else expr.fn("eq")(a, v)
        return expr.where(here, expr.index(axis).cast(place), expr.const(0, place))

    return values, graph.scan("max", graph.pointwise(candidate, x, values), axis).cast("int64")


def _attention(graph: Graph, node: Node) -> Value:
    q, k, v = node.inputs[:3]
    masks = node.inputs[3:4]  # the mask implies the operand that may follow it
    (b, h, sq, d), (_, hk, sk, dv) = q.shape, v.shape
    grouped = q.reshape(b, hk, h // hk * sq, d)
    s = (grouped.matmul(k.transpose(2, 3)) * node.attrs["scale"]).reshape(b, h, sq, sk)
    if node.attrs["causal"]:
        masks.append(graph.elementwise((sq, sk), [], expr.index(1) <= expr.index(0)))
    for mask in masks:
        if mask.dtype == "bool":
            s = graph.pointwise(lambda m, x: expr.where(m, x, -math.inf), mask, s, promote=False)
        else:
            s = s + mask.cast(s.dtype)
    top = s.amax([3])
    e = graph.pointwise(lambda x, m: expr.where(expr.fn("eq")(m, -math.inf), 0.0, expr.fn("exp")(x - m)), s, top)
    p = graph.pointwise(lambda x, n: expr.where(expr.fn("eq")(n, 0.0), 0.0, x / n), e, e.sum([3]))
    out = p.cast(v.dtype).reshape(b, hk, h // hk * sq, sk).matmul(v)
    return out.reshape(b, h, sq, dv).cast(node.out.dtype)


def _matmul(graph: Graph, node: Node) -> Value:
    a, b = node.inputs
    *batch, m, n = node.out.shape
    k, r = a.shape[-1], len(batch)
    zero = expr.const(0, "int64")

    def batch_index(v: Value) -> list[Expr]:
        off = r - (v.rank - 2)
        return [expr.index(d + off) if s != 1 else zero for d, s in enumerate(v.shape[:-2])]

    i, j, t = expr.index(r), expr.index(r + 1), expr.index(r + 2)
    dtype = dtypes.opmath(node.out.dtype)
    product = expr.load(0, a.dtype, [*batch_index(a), i, t]).cast(dtype) * expr.load(
        1, b.dtype, [*batch_index(b), t, j]
    ).cast(dtype)
    out = graph.reduce_expr("sum", [a, b], product, (*batch, m, n, k), [r + 2])
    return out.reshape(*batch, m, n).cast(node.out.dtype)


def _conv2d(graph: Graph, node: Node) -> Value:
    x, w = node.inputs
    n, oh, ow, k = node.out.shape
    _, r, s, cg = w.shape
    b, y, z, o, i, j, c = (expr.index(d) for d in range(7))
    stride, padding, dilation, groups = (node.attrs[name] for name in ATTRIBUTES)
    row, col = input_position((y, z), (i, j), stride, padding[:2], dilation)
    channel = o // (k // groups) * cg + c
    inside = (row >= 0) & (row < x.shape[1]) & (col >= 0) & (col < x.shape[2])
    dtype = node.out.dtype
    value = expr.where(inside, expr.load(0, x.dtype, [b, row, col, channel]).cast(dtype), 0)
    product = value * expr.load(1, w.dtype, [o, i, j, c]).cast(dtype)
    out = graph.reduce_expr("sum", [x, w], product, (n, oh, ow, k, r, s, cg), [4, 5, 6])
    return out.reshape(n, oh, ow, k).cast(dtype)
