"""Views become load indices: a loop node reads the source of a view directly."""

from __future__ import annotations

from collections.abc import Collection

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import LOOPS, VIEWS, Graph, Node, Value


def absorb_views(graph: Graph) -> None:
    """Make loads of permuted, expanded, sliced or unit-reshaped values read the source through changed indices."""
    for node in graph.nodes:
        if node.op in LOOPS:
            dedupe(node)
            if any(v.op in VIEWS for v in node.inputs):
                node.inputs, node.attrs["expr"] = read_through(node, VIEWS)
                dedupe(node)
    graph.clean()


def read_through(node: Node, views: Collection[str]) -> tuple[list[Value], Expr]:
    """Return inputs and expression of a loop node that reads the sources of inputs whose op is in ``views``."""
    inputs = list(node.inputs)

    def through(load: Expr) -> Expr:
        v, idx = node.inputs[load.value], load.args
        while v.op in views and (source := _source_index(v, idx)):
            v, idx = v.node.inputs[0], tuple(source)
        inputs[load.value] = v
        return expr.load(load.value, load.dtype, idx)

    return inputs, expr.substitute(node.attrs["expr"], loads=through)


def _source_index(v: Value, idx: tuple[Expr, ...]) -> list[Expr]:
    """Translate indices of a view to indices of its source; empty if there is no such translation."""
    zero = expr.const(0, "int64")
    if v.op == "permute":
        out = [zero] * v.rank
        for i, p in enumerate(v.node.attrs["perm"]):
            out[p] = idx[i]
        return out
    if v.op == "expand":
        return [zero if n == 1 else i for i, n in zip(idx, v.node.inputs[0].shape, strict=True)]
    if v.op == "slice":
        a = v.node.attrs
        return [i * st + s for i, s, st in zip(idx, a["starts"], a["steps"], strict=True)]
    if v.op == "reshape":
        source = v.node.inputs[0].shape
        if source and [n for n in source if n != 1] == [n for n in v.shape if n != 1]:
            live = iter(i for i, n in zip(idx, v.shape, strict=True) if n != 1)
            return [zero if n == 1 else next(live) for n in source]
    return []


def dedupe(node: Node) -> None:
    """Keep one copy of each input that the expression loads, and renumber the loads."""
    order: list[Value] = []
    number: dict[int, int] = {}
    for i in expr.operands(node.attrs["expr"]):
        v = node.inputs[i]
        if v not in order:
            order.append(v)
        number[i] = order.index(v)
    node.attrs["expr"] = expr.substitute(
        node.attrs["expr"], loads=lambda x: expr.load(number[x.value], x.dtype, x.args)
    )
    node.inputs = order
