"""What masks of attention hide: nothing, later keys than the query, or all keys beyond a position per query."""

from __future__ import annotations

import math

import numpy as np

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import VIEWS, Node, Value


def last_visible_key(mask: Value, queries: int) -> Value | None:
    """Return the int64 vector ``p`` [queries] if ``mask`` hides every key beyond ``p[query]``, else None.

    The mask is then ``key <= p[query]``, alone or joined with further conditions, and stays. ``p`` lets a kernel read
    only the valid part of a cache.
    """
    while mask.op in ("reshape", "expand"):
        source = mask.node.inputs[0]
        if [n for n in source.shape if n != 1] != [n for n in mask.shape if n != 1]:
            return None
        mask = source
    if mask.op != "pointwise" or mask.dtype != "bool" or mask.rank < 1:
        return None
    terms, stack = [], [mask.node.attrs["expr"]]
    while stack:
        e = stack.pop()
        if e.op == "and":
            stack.extend(e.args)
        else:
            terms.append(e)
    for e in terms:
        if e.op in ("le", "ge"):
            key, limit = e.args if e.op == "le" else e.args[::-1]
            if _is_key_index(mask.node, key) and (found := _per_query(mask.node, limit, queries)) is not None:
                return found
    return None


def _is_key_index(node: Node, e: Expr) -> bool:
    last = node.out.rank - 1
    if e == expr.index(last):
        return True
    if e.op != "load" or not e.args or e.args[-1] != expr.index(last):
        return False
    v = _behind_unit_reshape(node.inputs[e.value])
    if v.op == "pointwise":  # a long arange is computed where it is used
        return v.rank == 1 and v.node.attrs["expr"] == expr.index(0)
    return (
        v.op == "const" and v.dtype == "int64" and bool((v.node.attrs["data"].reshape(-1) == np.arange(v.numel)).all())
    )


def _per_query(node: Node, e: Expr, queries: int) -> Value | None:
    if e.op != "load" or e.dtype != "int64":
        return None
    v = _behind_unit_reshape(node.inputs[e.value])
    live = [a for a in e.args if a.op != "const"]
    reads_queries = queries == 1 or live == [expr.index(node.out.rank - 2)]
    return v.reshape(queries) if v.numel == queries and reads_queries and len(live) <= 1 else None


def _behind_unit_reshape(v: Value) -> Value:
    while v.op == "reshape" and [n for n in v.shape if n != 1] == [n for n in v.node.inputs[0].shape if n != 1]:
        v = v.node.inputs[0]
    return v


def hides_nothing(mask: Value) -> bool:
    """Whether a constant mask adds zeros, or keeps everything."""
    while mask.op in VIEWS:
        mask = mask.node.inputs[0]
    return mask.op == "const" and bool((mask.node.attrs["data"] == (mask.dtype == "bool")).all())


def is_causal(mask: Value, queries: int, keys: int) -> bool:
    """Whether a bool mask [.., queries, keys] is true exactly on and below the diagonal."""
    while mask.op in ("reshape", "expand") and mask.shape[-2:] == mask.node.inputs[0].shape[-2:]:
        mask = mask.node.inputs[0]
    if mask.shape[-2:] != (queries, keys) or mask.dtype != "bool" or math.prod(mask.shape[:-2]) != 1:
        return False
    if mask.op == "const":
        return bool((mask.node.attrs["data"].reshape(queries, keys) == np.tri(queries, keys, dtype=np.bool_)).all())
    row, column = expr.index(mask.rank - 2), expr.index(mask.rank - 1)
    forms = (column <= row, row >= column, ~(column > row), ~(row < column))
    return mask.op == "pointwise" and mask.node.attrs["expr"] in forms
