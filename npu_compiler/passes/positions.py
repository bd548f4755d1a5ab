"""Constants that say no more than where they are: single numbers and tables of positions become part of the expression.

An ``arange`` that a mask compares or a gather reads through is an index; what it decides at compile time (wrapping of
negative positions, clamps) then disappears, and a gather at such positions is a strided read.
"""

from __future__ import annotations

import numpy as np

from .. import affine, dtypes, expr
from ..expr import Expr
from ..graph import LOOPS, Graph, Node, Value
from .fuse import dedupe
from .normalise import normalise


def fold_positions(graph: Graph) -> None:
    """Replace loads of one-element constants by numbers, and loads of integer constants that are affine in their indices
    by index arithmetic."""
    changed = False
    for node in graph.nodes:
        if node.op in LOOPS and any(v.op == "const" for v in node.inputs):
            e = _resolved(node.attrs["expr"], node.inputs, node.domain)
            if e is not node.attrs["expr"]:
                node.attrs["expr"] = e
                dedupe(node)
                changed = True
        elif node.op == "scatter" and any(v.op == "const" for v in node.inputs[2:]):
            changed = _scatter(node) or changed
    if changed:
        normalise(graph)


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
    if data.size == 1 and dtypes.DTYPES[load.dtype].kind != "complex":
        return expr.const(data.reshape(()).item(), load.dtype)
    if data.size == 0 or not dtypes.is_int(load.dtype):
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
