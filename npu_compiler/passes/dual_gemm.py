"""Dual GEMM: two products with the same left operand that one epilogue combines become one kernel.

In ``silu(x @ gate) * (x @ up)`` the panels of both weights alternate in memory. A thread has the same columns of both
products in registers, so neither result is written to memory.
"""

from __future__ import annotations

from ..graph import expr
from ..graph.graph import Graph, Node, Value
from .fuse import Claims
from .load_time import static_values
from .quantize import dequantize_of


def dual_gemm(graph: Graph, claimed: Claims, panel: int) -> None:
    """Join pairs in ``claimed`` (anchor -> epilogue nodes): the second matmul precedes the epilogue nodes.

    ``panel``: columns of a weight panel; both weights must consist of whole panels.
    """
    static = static_values(graph)
    users = graph.users()
    outputs = set(graph.results())
    single = dict(claimed)
    ends = {(chain[-1] if chain else a).out: a for a, chain in single.items() if a.op == "matmul"}
    partners: set[Node] = set()
    for anchor, chain in single.items():
        if anchor.op != "matmul" or anchor in partners or not _is_projection(anchor, static, panel):
            continue
        for node in chain:
            for v in node.inputs:
                other = ends.get(v)
                if other is None or other is anchor or other in partners or claimed[other] != single[other]:
                    continue
                alike = _is_projection(other, static, panel) and _same_form(anchor, other)
                if alike and users[v] == [node] and v not in outputs and _point_by_point(node, v):
                    partners.add(other)
                    claimed[anchor] = [other, *single[other], *chain]
                    del claimed[other]
                    break
            if claimed[anchor] is not chain:
                break


def _is_projection(node: Node, static: set[Value], panel: int) -> bool:
    weight = node.inputs[1]
    return weight in static and weight.rank == 2 and weight.shape[1] % panel == 0


def _same_form(a: Node, b: Node) -> bool:
    (x, v), (y, w) = a.inputs, b.inputs
    return x is y and (v.shape, v.dtype, _format(v)) == (w.shape, w.dtype, _format(w))


def _format(w: Value) -> str:
    """Return the name of the block format of a matrix, or ''."""
    node = dequantize_of(w)
    return node.attrs["format"] if node is not None else ""


def _point_by_point(node: Node, v: Value) -> bool:
    which, identity = node.inputs.index(v), expr.identity_index(v.shape)
    loads = [x for x in expr.walk(node.attrs["expr"]) if x.op == "load" and x.value == which]
    return node.out.shape == v.shape and all(x.args == identity for x in loads)
