"""A concatenation that only loop nodes read becomes a ``where``: ``cat(-x2, x1) * sin`` then copies neither half."""

from __future__ import annotations

import math

from ..graph import expr
from ..graph.graph import LEAVES, LOOPS, VIEWS, Graph, Node, Value
from .load_time import static_values

MAX_PARTS = 4


def concat_to_select(graph: Graph) -> None:
    """Replace a concatenation that only loop nodes read by a pointwise node that selects the part by index.

    If there are several readers, this happens only if every part would otherwise be copied.
    """
    static = static_values(graph)
    users = graph.users()
    outputs = set(graph.results())
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op != "concat" or node.out in static or node.out in outputs or len(node.inputs) > MAX_PARTS:
            continue
        readers = users.get(node.out, [])
        if readers and all(u.op in LOOPS for u in readers) and _pays(node, readers, users, static, outputs):
            graph.sources = node.sources
            new[node.out] = _select(graph, node)
    graph.sources = ()
    graph.replace(new)


def _pays(
    node: Node, readers: list[Node], users: dict[Value, list[Node]], static: set[Value], outputs: set[Value]
) -> bool:
    """Whether selecting costs less than the memory traffic that it saves.

    It does if no part can be written in place, or if nodes that only compute parts fuse into the only reader.
    """
    written = [v for v in node.inputs if _left_in_place(v, users, static, outputs)]
    if not written:
        return True
    computed = all(v.op == "pointwise" for v in written) and math.prod(readers[0].domain) <= node.out.numel
    return len(readers) == 1 and (computed or len(written) < len(node.inputs))


def _left_in_place(v: Value, users: dict[Value, list[Node]], static: set[Value], outputs: set[Value]) -> bool:
    """Whether the kernel that produces a part can write it directly into the concatenation."""
    return v.op not in LEAVES | VIEWS and v not in static and v not in outputs and len(users[v]) == 1


def _select(graph: Graph, node: Node) -> Value:
    axis, dtype = node.attrs["axis"], node.out.dtype
    starts = [0]
    for v in node.inputs:
        starts.append(starts[-1] + v.shape[axis])

    def part(i: int) -> expr.Expr:
        idx = list(expr.identity_index(node.inputs[i].shape))
        idx[axis] = expr.index(axis) - starts[i] if node.inputs[i].shape[axis] != 1 else expr.const(0, "int64")
        return expr.load(i, dtype, idx)

    e = part(len(node.inputs) - 1)
    for i in range(len(node.inputs) - 2, -1, -1):
        e = expr.where(expr.index(axis) < starts[i + 1], part(i), e)
    return graph.elementwise(node.out.shape, node.inputs, e)
