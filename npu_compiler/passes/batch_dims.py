"""Batch dims of products as they were before PyTorch decomposed a matmul to ``bmm``, as in Core ATen form.

A matmul of more than three dims becomes ``reshape(bmm(reshape(a), reshape(b)))``, where the views hide which dims are
heads. A matmul with a matrix, such as that of a linear layer, becomes a ``bmm`` with a copy of it for each batch, or
``reshape(addmm(reshape(a), matrix))``, whose views separate the product from what follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from . import patterns
from .normalise import normalise
from .patterns import Match, Rewrite


def restore_batch_dims(graph: Graph) -> None:
    """Apply :data:`REWRITES`, then compose the views of the operands."""
    if patterns.apply(graph, REWRITES):
        normalise(graph)


def _merged(graph: Graph, node: Node) -> Match | None:
    product = node.inputs[0]
    if product.op != "matmul" or product.rank < 3 or node.out.shape[-2:] != product.shape[-2:]:
        return None
    a, b = product.node.inputs
    lead, merged = node.out.shape[:-2], product.shape[:-2]
    if math.prod(lead) != math.prod(merged) or not a.shape[:-2] == b.shape[:-2] == merged:
        return None
    if not any(x.op == "reshape" and x.node.inputs[0].shape[:-2] == lead for x in (a, b)):
        return None
    return Match({"a": a, "b": b}, {}, frozenset({product.node}))


def _split(graph: Graph, node: Node, match: Match) -> Value:
    lead = node.out.shape[:-2]
    a, b = (x.reshape(*lead, *x.shape[-2:]) for x in (match.values["a"], match.values["b"]) if x is not None)
    return graph.matmul(a, b)


def _operands(graph: Graph, node: Node) -> Match | None:
    """A product of two views, of which one merges batch dims."""
    views = all(x.op == "reshape" and x.shape[:-2] == node.out.shape[:-2] for x in node.inputs)
    return Match({}, {}, frozenset()) if views and node.out.rank > 2 and _merged_dims(node) else None


def _merged_dims(product: Node) -> tuple[int, ...]:
    """Return the batch dims that the view of an operand merges, of the left one if both do, or nothing."""
    for x in product.inputs:
        source = x.node.inputs[0]
        if source.rank > x.rank and source.shape[-2:] == x.shape[-2:]:
            return source.shape[:-2]
    return ()


def _unmerged(graph: Graph, node: Node, match: Match) -> Value:
    a, b = (x.reshape(*_merged_dims(node), *x.shape[-2:]) for x in node.inputs)
    return graph.matmul(a, b).reshape(*node.out.shape)


def _repeated(graph: Graph, node: Node) -> Match | None:
    """A product whose right operand repeats one matrix for all batches that the left operand has."""
    a, b = node.inputs
    if b.op != "expand" or a.shape[:-2] != node.out.shape[:-2]:
        return None
    matrix = b.node.inputs[0]
    if matrix.shape[-2:] != b.shape[-2:] or math.prod(matrix.shape[:-2]) != 1:
        return None
    return Match({"a": a, "matrix": matrix}, {}, frozenset())


def _shared(graph: Graph, node: Node, match: Match) -> Value:
    a, matrix = match.values["a"], match.values["matrix"]
    assert a is not None and matrix is not None
    return graph.matmul(a, matrix.reshape(*matrix.shape[-2:]))


def _rows(graph: Graph, node: Node) -> Match | None:
    """A product of merged rows, and pointwise nodes after it, in front of a view that splits the rows again."""
    source = node.inputs[0]
    inner = _after_product(source) if 2 <= source.rank < node.out.rank else frozenset()
    return Match({}, {}, inner) if inner and _lead(node, inner) else None


def _lead(node: Node, inner: frozenset[Node]) -> tuple[int, ...]:
    """Return the dims into which a view splits rows: all but the last if that stays, or those that had been merged."""
    source = node.inputs[0]
    if node.out.shape[-1] == source.shape[-1]:
        return node.out.shape[:-1]
    (rows,) = (n.inputs[0].node.inputs[0].shape[:-1] for n in inner if n.op == "matmul")
    merged = len(rows) > source.rank - 1 and math.prod(rows) == math.prod(source.shape[:-1])
    return rows if merged and node.out.shape[: len(rows)] == rows else ()


def _after_product(v: Value) -> frozenset[Node]:
    """Return the nodes that compute ``v`` [.., N], a product of merged rows and pointwise nodes after it, or none."""
    if v.op == "matmul":
        return frozenset([v.node] if v.node.inputs[0].op == "reshape" and v.node.inputs[1].rank == 2 else [])
    if v.op != "pointwise" or not _reads_elements(v.node):
        return frozenset()
    if not all(x.shape[:-1] == v.shape[:-1] or math.prod(x.shape[:-1]) == 1 for x in v.node.inputs):
        return frozenset()
    products = [inner for x in v.node.inputs if x.shape == v.shape and (inner := _after_product(x))]
    return products[0] | {v.node} if len(products) == 1 else frozenset()


def _reads_elements(node: Node) -> bool:
    """Whether a pointwise node reads its operands element by element, and uses indices for nothing else."""
    steps = expr.walk(node.attrs["expr"])
    loads = all(patterns.loaded(node, x) is not None for x in steps if x.op == "load")
    return loads and all(patterns.only_in_loads(node, x) for x in steps if x.op == "index")


def _split_rows(graph: Graph, node: Node, match: Match) -> Value:
    lead = _lead(node, match.inner)

    def split(v: Value) -> Value:
        if v.node not in match.inner:
            rows = lead if math.prod(v.shape[:-1]) != 1 else ()
            return v.reshape(*rows, *v.shape[-1:])
        if v.op == "matmul":
            a, b = v.node.inputs
            return graph.matmul(a.reshape(*lead, a.shape[-1]), b)
        inputs = [split(x) for x in v.node.inputs]
        e = expr.rewrite(v.node.attrs["expr"], lambda x: _load(x, inputs, len(lead) + 1))
        return graph.elementwise((*lead, v.shape[-1]), inputs, e)

    return split(node.inputs[0]).reshape(*node.out.shape)


def _load(x: Expr, inputs: list[Value], rank: int) -> Expr | None:
    return expr.load(x.value, x.dtype, expr.broadcast_index(inputs[x.value].shape, rank)) if x.op == "load" else None


def _example(merged: tuple[int, ...] = (6,), after: tuple[int, ...] = (2, 3, 4, 5), leak: bool = False) -> Graph:
    g = Graph("merged batch")
    a, b = g.input("a", (2, 3, 4, 8), "float32"), g.input("b", (2, 3, 8, 5), "float32")
    product = a.reshape(*merged, 4, 8).matmul(b.reshape(*merged, 8, 5))
    g.outputs = [("out", product.reshape(*after))] + ([("product", product)] if leak else [])
    return g


def _one_view() -> Graph:
    g = Graph("one view")
    a, b = g.input("a", (2, 3, 4, 8), "float32"), g.input("b", (6, 8, 5), "float32")
    g.outputs = [("out", a.reshape(6, 4, 8).matmul(b).reshape(2, 3, 4, 5))]
    return g


def _linear(shape: tuple[int, ...] = (8, 5), batch: tuple[int, ...] = (3,)) -> Graph:
    g = Graph("linear")
    a, w = g.input("a", (*batch, 4, 8), "float32"), g.input("w", shape, "float32")
    g.outputs = [("out", a.matmul(w.reshape(*(1,) * (3 - w.rank), *shape).expand(3, 8, 5)))]
    return g


def _flat(
    after: Callable[[Value], Value], leak: bool = False, columns: int = 5, shape: tuple[int, ...] = (2, 3, 5)
) -> Graph:
    """A linear layer on merged rows, and ``after`` in front of the view that splits them."""
    g = Graph("merged rows")
    x, w = g.input("x", (2, 3, 8), "float32"), g.input("w", (8, columns), "float32")
    out = after(x.reshape(6, 8).matmul(w))
    g.outputs = [("out", out.reshape(*shape))] + ([("flat", out)] if leak else [])
    return g


def _windows(other: tuple[int, ...]) -> Graph:
    """A linear layer on the windows of an image."""
    g = Graph("windows")
    x, w = g.input("x", (2, 3, 2, 8), "float32"), g.input("w", (8, 5), "float32")
    out = x.reshape(2, 6, 8).matmul(w) + g.input("other", other, "float32")
    g.outputs = [("out", out.reshape(2, 3, 2, 5))]
    return g


def _added(shape: tuple[int, ...]) -> Callable[[Value], Value]:
    return lambda y: y.graph.input("other", shape, "float32") + y * 2.0


MERGED_BATCH = Rewrite(
    "merged_batch", "reshape", _merged, _split,
    examples=(_example, lambda: _example((3, 2)), _one_view),
    counter_examples=(
        lambda: _example(leak=True), lambda: _example(after=(6, 20)), lambda: _example(after=(1, 6, 4, 5)),
    ),
)  # fmt: skip
MERGED_OPERANDS = Rewrite(
    "merged_operands", "matmul", _operands, _unmerged,
    examples=(lambda: _example(leak=True),),
    counter_examples=(lambda: _example((3, 2)), _one_view, lambda: _example((2, 3))),
)  # fmt: skip
REPEATED_MATRIX = Rewrite(
    "repeated_matrix", "matmul", _repeated, _shared,
    examples=(_linear,),
    counter_examples=(lambda: _linear((3, 8, 1)), lambda: _linear(batch=(1,))),
)  # fmt: skip
MERGED_ROWS = Rewrite(
    "merged_rows", "reshape", _rows, _split_rows,
    examples=(
        lambda: _flat(lambda y: y), lambda: _flat(_added((5,))), lambda: _flat(_added((6, 5))),
        lambda: _flat(_added((6, 1))), lambda: _flat(_added((1, 5))), lambda: _flat(_added(())),
        lambda: _windows((2, 6, 5)), lambda: _windows((5,)),
        lambda: _flat(_added((4,)), columns=4, shape=(2, 3, 2, 2)),
    ),
    counter_examples=(
        lambda: _flat(lambda y: y, leak=True), lambda: _flat(lambda y: y.amax([1]).expand(6, 5)),
        lambda: _windows((2, 1, 5)), lambda: _flat(_added((4,)), columns=4, shape=(3, 2, 2, 2)),
        lambda: _flat(lambda y: y.graph.pointwise(lambda a: a + expr.index(0).cast("float32"), y)),
    ),
)  # fmt: skip
REWRITES = (MERGED_BATCH, MERGED_OPERANDS, REPEATED_MATRIX, MERGED_ROWS)
