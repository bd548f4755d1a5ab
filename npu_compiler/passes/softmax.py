"""Softmax from its parts, as lowering and PyTorch's decompositions write it."""

from __future__ import annotations

import math

from ..graph.expr import Expr
from ..graph.graph import Node, Value
from .patterns import loaded, number, see_through, sides, strip


def softmax_input(p: Value, inner: set[Node]) -> Value | None:
    """Return x if ``p`` is softmax(x) over the last dim, or that with zeros for rows of -inf, else None."""
    e = strip(p.node.attrs["expr"]) if p.op == "pointwise" else None
    if e is None or e.op != "where":
        return _plain(p, inner)
    softmax = loaded(p.node, e.args[2])
    if softmax is None or number(p.node, e.args[1]) != 0.0:
        return None
    seen = {p.node}
    hidden, x = _rows_of(p.node, e.args[0], seen), _plain(see_through(softmax, seen), seen)
    if hidden is None or x is None or see_through(hidden, set()) is not see_through(x, set()):
        return None
    inner |= seen
    return x


def _rows_of(node: Node, e: Expr, inner: set[Node]) -> Value | None:
    """Return x if ``e`` says whether all of a row of x is -inf: its maximum is, or ``not any(not (x == -inf))``."""
    value = loaded(node, e)
    if value is not None and value.op == "pointwise":
        inner.add(value.node)
        return _rows_of(value.node, value.node.attrs["expr"], inner)
    top = _equals(node, e, -math.inf)
    if top is not None and _folds_last(top, "max"):
        inner.add(top.node)
        return top.node.inputs[0]
    others = _negated(node, e)
    if others is None or not _folds_last(others, "max"):
        return None
    visible = others.node.inputs[0]
    infinite = _negated(visible.node, visible.node.attrs["expr"]) if visible.op == "pointwise" else None
    if infinite is None or infinite.op != "pointwise":
        return None
    inner |= {others.node, visible.node, infinite.node}
    return _equals(infinite.node, infinite.node.attrs["expr"], -math.inf)


def _negated(node: Node, e: Expr) -> Value | None:
    """Return x if ``e`` is its negation, else None."""
    return loaded(node, e.args[0]) if e.op == "not" else None


def _equals(node: Node, e: Expr, constant: float) -> Value | None:
    """Return x if ``e`` is ``x == constant``, else None."""
    for a, b in sides(e, "eq"):
        if number(node, b) == constant:
            return loaded(node, a)
    return None


def _plain(p: Value, inner: set[Node]) -> Value | None:
    """Return x if ``p`` is exp(x - max(x)) / sum(exp(x - max(x))) over the last dim, else None."""
    seen: set[Node] = set()
    e, total = _operands(p, "div")
    if e is None or total is None:
        return None
    e, total = see_through(e, seen), see_through(total, seen)
    if not _folds_last(total, "sum") or see_through(total.node.inputs[0], seen) is not e or e.op != "pointwise":
        return None
    exponential = strip(e.node.attrs["expr"])
    if exponential.op != "exp":
        return None
    shifted, difference = e, exponential.args[0]
    if (inside := loaded(e.node, difference)) is not None:  # the subtraction is a node of its own
        shifted = see_through(inside, seen)
        seen.add(shifted.node)
        difference = shifted.node.attrs.get("expr", difference)
    x, top = _operands(shifted, "sub", difference)
    if x is None or top is None:
        return None
    top = see_through(top, seen)
    if not _folds_last(top, "max") or see_through(top.node.inputs[0], seen) is not see_through(x, seen):
        return None
    inner |= {*seen, p.node, total.node, e.node, top.node}
    return x


def _operands(v: Value, op: str, e: Expr | None = None) -> tuple[Value | None, Value | None]:
    """Return both operands of ``op`` if ``v`` is that op of two values read element by element."""
    if v.op != "pointwise":
        return None, None
    e = strip(v.node.attrs["expr"] if e is None else e)
    return (loaded(v.node, e.args[0]), loaded(v.node, e.args[1])) if e.op == op else (None, None)


def _folds_last(v: Value, kind: str) -> bool:
    a = v.node.attrs
    if v.op != "reduce" or a["kind"] != kind or a["axes"] != (len(a["domain"]) - 1,):
        return False
    return loaded(v.node, a["expr"]) is v.node.inputs[0] and v.node.inputs[0].shape == a["domain"]
