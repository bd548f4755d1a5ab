"""Maxima of dequantised values are the dequantised maxima of the integers; quantising these again gives the integers.

Max pooling between two quantised layers therefore runs on 8-bit integers:

    quantise(max(dequantise(q))) = max(q)

if both have the same positive scale, the same zero point and the whole range of the dtype. Without the second
quantisation, the dequantisation moves behind the maximum.
"""

from __future__ import annotations

import math

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from ..support import dtypes as dt
from .fold_requantisation import quantisation
from .integer_products import dequantised

TOLERANCE = 1e-6  # of scale * (1 / scale), which is rounded; far below 1 / (2 * 255), so integers stay


def quantised_maxima(graph: Graph) -> None:
    """Take maxima of integers instead of dequantised values, and drop quantisations that restore integers."""
    for rewrite in (_of_maximum, _of_quantised):
        new: dict[Value, Value] = {}
        for node in list(graph.nodes):
            graph.sources = node.sources
            if (out := rewrite(graph, node)) is not None:
                new[node.out] = out
        graph.sources = ()
        graph.replace(new)


def _of_maximum(graph: Graph, node: Node) -> Value | None:
    """The maximum of values with one scale and zero point, some of which may be outside a window."""
    if node.op != "reduce" or node.attrs["kind"] != "max" or len(node.inputs) != 1:
        return None
    q = dequantised(node.inputs[0])
    if q is None or isinstance(q.scale, Value) or isinstance(q.zero, Value) or q.scale <= 0:
        return None
    scale, zero = q.scale, q.zero
    e = _integers(node.attrs["expr"], q.q.dtype)
    if e is None:
        return None
    largest = graph.reduce_expr("max", [q.viewed(q.q)], e, node.attrs["domain"], node.attrs["axes"])
    return graph.pointwise(lambda v: (v.cast("float32") - zero) * scale if zero else v.cast("float32") * scale, largest)


def _integers(e: Expr, dtype: str) -> Expr | None:
    """Return the operand of a maximum of input 0, for integers of ``dtype``, or None if it is more than a guarded
    load."""
    if e.op == "load":
        return expr.load(0, dtype, e.args)
    if e.op != "where" or any(x.op == "load" for x in expr.walk(e.args[0])):
        return None
    condition, inside, outside = e.args
    lowest = outside.op == "const" and outside.value == -math.inf
    if inside.op != "load" or not lowest:
        return None
    return expr.where(condition, expr.load(0, dtype, inside.args), expr.const(dt.extremes(dtype)[0], dtype))


def _of_quantised(graph: Graph, node: Node) -> Value | None:
    """A quantisation of integers that were dequantised with the same scale and zero point."""
    if node.op != "pointwise" or node.out.dtype not in ("int8", "uint8"):
        return None
    found = quantisation(node)
    q = dequantised(found.source) if found is not None else None
    if found is None or q is None or isinstance(q.scale, Value) or q.q.dtype != node.out.dtype:
        return None
    least, greatest = dt.extremes(node.out.dtype)
    same = abs(found.inverse * q.scale - 1) <= TOLERANCE and not isinstance(q.zero, Value) and found.zero == q.zero
    return q.viewed(q.q) if same and found.low <= least and found.high >= greatest else None
