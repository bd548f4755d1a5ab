"""Canonical form: without no-ops, chains of views, common subexpressions and computable constants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..graph import expr, interp
from ..graph.graph import LEAVES, VIEWS, Graph, Node, Value
from ..support import dtypes
from .patterns import is_float_cast

FOLD_LIMIT = 1 << 16  # elements; larger constants are cheaper to compute where they are used


def normalise(graph: Graph) -> None:
    """Eliminate no-ops and common subexpressions and compose views, in one ordered walk.

    ``permute(permute(x))`` becomes one permute, ``reshape`` likewise. Identity views, casts and copies are removed, as
    is a cast to a wider float type and back. A permute that only moves size-1 dims becomes a reshape.
    """
    new: dict[Value, Value] = {}
    seen: dict[Any, Node] = {}
    keep: list[Node] = []
    for node in list(graph.nodes):
        node.inputs = [new.get(v, v) for v in node.inputs]
        original = node
        simpler = _simplify(node)
        while isinstance(simpler, Node):
            node = simpler
            simpler = _simplify(node)
        if simpler is not None:
            new[original.out] = new.get(simpler, simpler)
            continue
        first = seen.setdefault(_key(node), node) if node.op not in ("input", "state") else node
        if first is not node:
            first.sources = tuple(dict.fromkeys((*first.sources, *node.sources)))
        else:
            keep.append(node)
        if first is not original:
            new.update(zip(original.outputs, first.outputs, strict=True))
    graph.nodes = keep
    graph.replace(new)


def _key(node: Node) -> Any:
    """Return a key that is equal for nodes that compute the same."""
    attrs = tuple((k, _frozen(v)) for k, v in sorted(node.attrs.items()))
    return node.op, tuple(node.inputs), attrs, tuple((v.dtype, v.shape) for v in node.outputs)


def _frozen(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return (x.shape, x.dtype.str, x.tobytes())
    return tuple(map(_frozen, x)) if isinstance(x, list) else x


def _simplify(node: Node) -> Value | Node | None:
    """Return a Value that the node equals, a simpler Node, or None."""
    if node.op == "pointwise":
        e = node.attrs["expr"]
        if e.op == "load" and e.dtype == node.out.dtype:
            x = node.inputs[e.value]
            if x.shape == node.out.shape and e.args == expr.identity_index(x.shape):
                return x
        return _never_widened(node)
    if node.op not in VIEWS:
        return None
    graph, x, out = node.inputs[0].graph, node.inputs[0], node.out
    if node.op == "permute":
        if x.op == "permute":
            inner = x.node.attrs["perm"]
            return _made(graph.permute(x.node.inputs[0], [inner[p] for p in node.attrs["perm"]]), node)
        moved = [p for p in node.attrs["perm"] if x.shape[p] != 1]
        if moved == sorted(moved):
            return _made(graph.reshape(x, out.shape), node)
    elif node.op == "reshape":
        if x.op == "reshape":
            return _made(graph.reshape(x.node.inputs[0], out.shape), node)
        if x.shape == out.shape:
            return x
    return None


def _never_widened(node: Node) -> Value | None:
    """Return the source if ``node`` undoes a cast to a type that holds all its values, else None."""
    if not is_float_cast(node):
        return None
    wide = node.inputs[0].node
    if wide.op != "pointwise" or not is_float_cast(wide):
        return None
    source = wide.inputs[0]
    holds = dtypes.promote(source.dtype, wide.out.dtype) == wide.out.dtype
    return source if holds and source.dtype == node.out.dtype else None


def _made(value: Value, old: Node) -> Value | Node:
    """Remove a node that was just appended from the graph and return it, so that the caller can place it; return any
    other value."""
    graph = value.graph
    if graph.nodes and graph.nodes[-1] is value.node and value.node.id > old.id:
        graph.nodes.pop()
        value.node.sources = old.sources
        return value.node
    return value


def fold_constants(graph: Graph) -> None:
    """Evaluate nodes that depend only on constants if the result is small. Views that only repeat data stay views."""
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op in LEAVES or node.op == "expand":
            continue
        if all(v.numel == 0 for v in node.outputs):  # nothing to compute, whatever the op
            new.update({v: graph.const(np.empty(v.shape, dtypes.numpy_dtype(v.dtype))) for v in node.outputs})
            continue
        if not all(new.get(v, v).op == "const" for v in node.inputs):
            continue
        if (
            any(v.numel > FOLD_LIMIT for v in node.outputs)
            or math.prod(node.domain if node.op == "reduce" else ()) > 1 << 22
        ):
            continue
        try:
            results = interp.evaluate_node(node, [new.get(v, v).node.attrs["data"] for v in node.inputs])
        except IndexError:
            continue  # an index out of range is reported at run time
        for v, arr in zip(node.outputs, results, strict=True):
            new[v] = graph.const(np.ascontiguousarray(arr).reshape(v.shape))
            new[v].node.sources = node.sources
    graph.replace(new)
