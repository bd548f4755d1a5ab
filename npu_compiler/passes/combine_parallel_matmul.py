"""Matmuls with the same left operand become one: Q, K and V projections are one product with a wider weight.

The concatenated weight is a load-time recipe. Pointwise nodes after the products (a bias, a rounding) are combined as
long as all branches have the same expression. The results are slices, which later ops read through strides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import expr
from ..graph.graph import VIEWS, Graph, Node, Value
from ..weights.format import WeightFormats
from .load_time import static_values
from .patterns import only_in_loads
from .quantize import chosen_format


def combine_parallel_matmul(graph: Graph, formats: WeightFormats | None = None) -> None:
    """``x @ a, x @ b, ...`` -> slices of ``x @ [a | b | ...]`` for weights known at load time whose ``formats`` are the
    same.

    Products that are followed by different pointwise nodes (a gated MLP) stay separate: these nodes run in the epilogue
    of each product, and an epilogue cannot treat some columns differently.
    """
    static = static_values(graph)
    users = graph.users()
    outputs = set(graph.results())
    new: dict[Value, Value] = {}
    for source, readers in list(users.items()):
        projections = [n for n in dict.fromkeys(readers) if _is_projection(n, source, static, outputs)]
        families: dict[str, list[Node]] = {}
        for n in projections:
            format = chosen_format(n.inputs[1], formats) if formats is not None else None
            families.setdefault(format.name if format is not None else "", []).append(n)
        for family in families.values():
            levels = _levels(family, users, static, outputs)
            if levels:
                new.update(_build(graph, source, levels))
    graph.sources = ()
    graph.replace(new)


def _levels(
    family: list[Node], users: dict[Value, list[Node]], static: set[Value], outputs: set[Value]
) -> list[list[Node]]:
    """Return the products and the pointwise nodes after them that can be combined, level by level; else nothing."""
    if len(family) < 2 or len({n.inputs[1].dtype for n in family}) > 1:
        return []
    levels = [family]
    while (after := _common_step(levels[-1], users, static, outputs)) is not None:
        levels.append(after)
    if any(
        u.op not in VIEWS and u.op not in ("attention", "scatter", "matmul")
        for n in levels[-1]
        for u in users.get(n.out, ())
    ):
        return []
    return levels


def _is_projection(node: Node, source: Value, static: set[Value], outputs: set[Value]) -> bool:
    if node.op != "matmul" or node.inputs[0] is not source or node.out in outputs or node.out in static:
        return False
    weight = node.inputs[1]
    return weight in static and weight.rank == 2


def _common_step(
    nodes: Sequence[Node], users: dict[Value, list[Node]], static: set[Value], outputs: set[Value]
) -> list[Node] | None:
    """Return the pointwise node after each of ``nodes`` if these differ only in per-column operands, else None."""
    after: list[Node] = []
    for node in nodes:
        readers = users.get(node.out, [])
        if len(readers) != 1 or node.out in outputs:
            return None
        step = readers[0]
        if step.op != "pointwise" or step.out.shape != node.out.shape or step.inputs[0] is not node.out:
            return None
        first = after[0] if after else step
        if step.attrs["expr"] is not first.attrs["expr"] or len(step.inputs) != len(first.inputs):
            return None
        last = expr.index(node.out.rank - 1)
        for x in expr.walk(step.attrs["expr"]):
            if x.op == "index" and x is not last and not only_in_loads(step, x):
                return None
            if x.op == "load" and x.value == 0 and x.args != expr.identity_index(node.out.shape):
                return None
            if x.op == "load" and x.value > 0 and (x.args != (last,) or step.inputs[x.value] not in static):
                return None
        after.append(step)
    return after


def _build(graph: Graph, source: Value, levels: list[list[Node]]) -> dict[Value, Value]:
    first = levels[0]
    graph.sources = tuple(dict.fromkeys(s for level in levels for n in level for s in n.sources))
    order = {n: i for i, n in enumerate(first)}
    y = graph.matmul(source, graph.concat([n.inputs[1] for n in first], 1))
    for level in levels[1:]:
        level.sort(key=lambda n: order[_root(n, order)])
        operands = [graph.concat([n.inputs[i] for n in level], 0) for i in range(1, len(level[0].inputs))]
        y = graph.elementwise(y.shape, [y, *operands], level[0].attrs["expr"])
    out: dict[Value, Value] = {}
    at = 0
    ends = {_root(n, order): n for n in levels[-1]}
    for node in first:
        width = node.out.shape[-1]
        out[ends[node].out] = y.slice(-1, at, at + width)
        at += width
    return out


def _root(node: Node, order: dict[Node, int]) -> Node:
    """Return the projection at the start of a branch."""
    while node not in order:
        node = node.inputs[0].node
    return node
