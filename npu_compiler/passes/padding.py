"""Zero padding before a convolution becomes the convolution's own padding, which saves a copy."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import affine, expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Value


def fold_padding(graph: Graph) -> None:
    """Rewrite ``conv2d(pad(x))`` as ``conv2d(x)`` with a larger ``padding`` if only spatial dims are padded with zeros.
    A permute may be between them."""
    for node in list(graph.nodes):
        while node.op == "conv2d" and (found := _padded_input(graph, node.inputs[0])) is not None:
            source, extra = found
            padding = tuple(p + e for p, e in zip(node.attrs["padding"], extra, strict=True))
            node.sources = tuple(dict.fromkeys((*node.inputs[0].node.sources, *node.sources)))
            node.inputs[0] = source
            node.attrs["padding"] = padding
    graph.clean()


def _padded_input(graph: Graph, v: Value) -> tuple[Value, tuple[int, int, int, int]] | None:
    """Return (x, (top, left, bottom, right)) if ``v`` [N,H,W,C] is x with these zeros around it, else None."""
    perm = v.node.attrs["perm"] if v.op == "permute" else tuple(range(v.rank))
    found = zero_padding(v.node.inputs[0] if v.op == "permute" else v)
    if found is None:
        return None
    x, before, after = found
    if any(before[perm[d]] or after[perm[d]] for d in (0, 3)):
        return None
    h, w = perm[1], perm[2]
    return graph.permute(x, perm), (before[h], before[w], after[h], after[w])


def zero_padding(v: Value) -> tuple[Value, list[int], list[int]] | None:
    """Return (x, zeros before, zeros after, per dim) if ``v`` is x with zeros around it, else None. A crop is not
    padding: the elements it cuts off are not zero."""
    node = v.node
    if node.op != "pointwise" or len(node.inputs) != 1 or not v.numel:
        return None
    x, e = node.inputs[0], node.attrs["expr"]
    if e.op != "where" or e.args[1].op != "load" or e.args[2].op != "const" or e.args[2].value != 0:
        return None
    if x.rank != v.rank or x.dtype != v.dtype:
        return None
    before: list[int] = []
    for d, i in enumerate(e.args[1].args):
        shift = affine.affine(i)
        if shift.terms != {expr.index(d): 1} and (shift.terms or (x.shape[d], v.shape[d]) != (1, 1)):
            return None
        before.append(-shift.const)
    after = [n - m - p for n, m, p in zip(v.shape, x.shape, before, strict=True)]
    if min((*before, *after), default=0) < 0 or not _guards_nothing_else(e.args[0], x, before):
        return None
    return x, before, after


def _guards_nothing_else(guard: Expr, x: Value, before: Sequence[int]) -> bool:
    """Whether the guard holds at every position that reads x inside its bounds."""
    ranges = {d: (p, p + n - 1) for d, (p, n) in enumerate(zip(before, x.shape, strict=True))}
    decided = affine.simplify(guard, ranges) if x.numel else guard
    return decided.op == "const" and bool(decided.value)
