"""Constant tables that are a function of the index (uniform, iota, affine) become index arithmetic.

An ``arange`` that a mask compares, or that is the index of a gather, becomes an index. Decisions that then depend on
constants alone (wrapping of negative positions, clamps) disappear, and the gather becomes a strided read.
"""

from __future__ import annotations

import numpy as np

from ..graph import affine, expr
from ..graph.expr import Expr
from ..graph.graph import LOOPS, Graph, Node, Value
from ..support import dtypes
from .absorb_views import dedupe, read_through
from .normalise import normalise


def fold_iota(graph: Graph) -> None:
    """Replace loads of constants: uniform ones by numbers, integer ones that are affine in their indices by arithmetic.

    A value that no longer depends on a dim is computed once along it and expanded. A uniform constant that is a result
    is a number, expanded: filling memory takes half as long as copying.
    """
    changed = False
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        node.inputs = [new.get(v, v) for v in node.inputs]
        if node.op in LOOPS and any(v.op in ("const", "expand") for v in node.inputs):
            inputs, e = read_through(node, ("expand",))
            e = _resolved(e, inputs, node.domain)
            if e is not node.attrs["expr"]:
                node.inputs, node.attrs["expr"] = inputs, e
                dedupe(node)
                changed = True
        elif node.op == "scatter" and any(v.op == "const" for v in node.inputs[2:]):
            changed = _scatter(node) or changed
        if node.op == "pointwise" and (once := _computed_once(graph, node)) is not None:
            new[node.out] = once
    if changed or new:
        graph.replace(new)
        normalise(graph)
    graph.outputs[:] = [(name, _filled(v) if v.op == "const" else v) for name, v in graph.outputs]


def _filled(value: Value) -> Value:
    """Return a uniform constant as a view of one number, and any other as it is."""
    data, graph = value.node.attrs["data"], value.graph
    if data.size < 2 or not _is_uniform(data):
        return value
    graph.sources = value.node.sources
    out = graph.const(data.reshape(-1)[:1].reshape(())).expand(*value.shape)
    graph.sources = ()
    return out


def _is_uniform(data: np.ndarray) -> bool:
    return data.tobytes() == data.flat[0].tobytes() * data.size


def _computed_once(graph: Graph, node: Node) -> Value | None:
    """Return ``expand(pointwise(x))`` for a node that does not use the index of some dims, or None."""
    used = {x.value for x in expr.walk(node.attrs["expr"]) if x.op == "index"}
    shape = tuple(n if d in used or n == 0 else 1 for d, n in enumerate(node.out.shape))
    if shape == node.out.shape:
        return None
    graph.sources = node.sources
    out = graph.expand(graph.elementwise(shape, node.inputs, node.attrs["expr"]), node.out.shape)
    graph.sources = ()
    return out


def _scatter(node: Node) -> bool:
    index, src = node.inputs[2:], node.inputs[1]
    idx = [_resolved(e, index, src.shape) for e in node.attrs["idx"]]
    if tuple(idx) == node.attrs["idx"]:
        return False
    used = sorted({n for e in idx for n in expr.operands(e)})
    node.attrs["idx"] = tuple(
        expr.substitute(e, loads=lambda x: expr.load(used.index(x.value), x.dtype, x.args)) for e in idx
    )
    node.inputs = [*node.inputs[:2], *(index[n] for n in used)]
    return True


def _resolved(e: Expr, inputs: list[Value], domain: tuple[int, ...]) -> Expr:
    def through(load: Expr) -> Expr | None:
        v = inputs[load.value]
        return _number_or_position(v.node.attrs["data"], load) if v.op == "const" else None

    resolved = expr.substitute(e, loads=through)
    if resolved is e or 0 in domain:
        return resolved
    return affine.simplify(resolved, {d: (0, n - 1) for d, n in enumerate(domain)})


def _number_or_position(data: np.ndarray, load: Expr) -> Expr | None:
    if any(x.op == "load" for i in load.args for x in expr.walk(i)):
        return None  # the index comes from data, and the load checks its range
    if data.size == 0 or dtypes.DTYPES[load.dtype].kind == "complex":
        return None
    if _is_uniform(data):
        return expr.const(data.flat[0].item(), load.dtype)
    if not dtypes.is_int(load.dtype):
        return None
    first = int(data.flat[0])
    position: Expr = expr.const(first, "int64")
    table = np.full((1,) * data.ndim, first, np.int64)
    for d, n in enumerate(data.shape):
        if n > 1:
            step = int(data[tuple(int(i == d) for i in range(data.ndim))]) - first
            position = position + load.args[d] * step
            table = table + (np.arange(n) * step).reshape([n if i == d else 1 for i in range(data.ndim)])
    return position.cast(load.dtype) if np.array_equal(table, data) else None
