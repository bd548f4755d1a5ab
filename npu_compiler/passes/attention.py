"""Attention from its decomposed spelling: ``softmax(q @ k^T * scale + mask) @ v`` becomes one kernel.

The scores may be scaled by a multiplication or division, masked by an additive tensor or a ``where`` with minus infinity,
computed in another float type, and the heads of k and v may have been repeated (expand + reshape) for grouped queries.
"""

from __future__ import annotations

import math

import numpy as np

from .. import expr, patterns
from ..expr import Expr
from ..graph import Graph, Node, Value
from ..patterns import Match, Rewrite, loaded, see_through, sides, strip


def fuse_attention(graph: Graph) -> None:
    """Apply :data:`ATTENTION`, then tell each kernel how far its keys are valid where the mask says so."""
    patterns.apply(graph, REWRITES)
    for node in graph.nodes:
        if node.op == "attention" and not node.attrs["limited"] and len(node.inputs) == 4:
            positions = last_visible_key(node.inputs[3], node.inputs[0].shape[2])
            if positions is not None:
                node.inputs.append(positions)
                node.attrs["limited"] = True
    graph.clean()


def last_visible_key(mask: Value, queries: int) -> Value | None:
    """The int64 vector ``p`` [queries] if ``mask`` hides every key beyond ``p[query]``: ``key <= p[query]``, alone or
    with further conditions. It lets a kernel read the valid part of a cache only; the mask itself stays."""
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
    return v.op == "const" and v.dtype == "int64" and bool((v.node.attrs["data"].reshape(-1) == np.arange(v.numel)).all())


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


def _find(graph: Graph, node: Node) -> Match | None:
    inner: set[Node] = set()
    probabilities = see_through(node.inputs[0], inner)
    scores = _softmax_input(probabilities, inner)
    if scores is None:
        return None
    mask: Value | None = None
    scale = 1.0
    flags: set[str] = set()
    value = scores
    while True:
        value = see_through(value, inner)
        if value.op == "matmul":
            break
        step = _score_step(value)
        if step is None:
            return None
        value_next, factor, added, kind = step
        if added is not None:
            if mask is not None or scale != 1.0:
                return None  # a mask inside a scaling would be scaled too
            mask = added
            flags.add(kind)
        scale *= factor
        inner.add(value.node)
        value = value_next
    first = value.node
    inner.add(first)
    q, kt, v = first.inputs[0], first.inputs[1], node.inputs[1]
    if q.rank < 3 or kt.rank != q.rank or v.rank != q.rank or node.out.rank != q.rank:
        return None
    if q.shape[:-2] != node.out.shape[:-2] or (mask is not None and _mask_rank(mask, q.rank) is None):
        return None
    return Match({"q": q, "kt": kt, "v": v, "mask": mask}, {"scale": scale}, frozenset(inner), frozenset(flags))


def _mask_rank(mask: Value, rank: int) -> int | None:
    return mask.rank if mask.rank <= rank else None


def _softmax_input(p: Value, inner: set[Node]) -> Value | None:
    """x if ``p`` is exp(x - max(x)) / sum(exp(x - max(x))) over the last dim."""
    node = p.node
    if node.op != "pointwise":
        return None
    for top, bottom in sides(node.attrs["expr"], "div", commutative=False):
        e, total = loaded(node, top), loaded(node, bottom)
        if e is None or total is None:
            continue
        sums: set[Node] = set()
        total = see_through(total, sums)
        if total.op != "reduce" or total.node.attrs["kind"] != "sum" or total.node.attrs["axes"] != (p.rank - 1,):
            continue
        e, summed = see_through(e, sums), see_through(total.node.inputs[0], sums)
        if e is not summed or e.op != "pointwise" or strip(e.node.attrs["expr"]).op != "exp":
            continue
        for a, b in sides(strip(e.node.attrs["expr"]).args[0], "sub", commutative=False):
            x, m = loaded(e.node, a), loaded(e.node, b)
            if x is None or m is None:
                continue
            m = see_through(m, sums)
            if m.op == "reduce" and m.node.attrs["kind"] == "max" and m.node.attrs["axes"] == (p.rank - 1,):
                if see_through(m.node.inputs[0], sums) is see_through(x, sums):
                    inner.update(sums, (node, total.node, e.node, m.node))
                    return x
    return None


def _score_step(value: Value) -> tuple[Value, float, Value | None, str] | None:
    """One op between q @ k^T and the softmax: (the scores it reads, factor, mask, mask kind)."""
    node = value.node
    if node.op != "pointwise":
        return None
    e = node.attrs["expr"]
    for a, b in sides(e, "mul"):
        x, c = loaded(node, a), _number(node, b)
        if x is not None and c is not None and x.shape == value.shape:
            return x, c, None, ""
    for a, b in sides(e, "div", commutative=False):
        x, c = loaded(node, a), _number(node, b)
        if x is not None and c and x.shape == value.shape:
            return x, 1.0 / c, None, ""
    for a, b in sides(e, "add"):
        x, m = loaded(node, a), loaded(node, b)
        if x is not None and m is not None and x.shape == value.shape and _comes_from_matmul(x):
            return x, 1.0, m, "additive"
    return None


def _number(node: Node, e: Expr) -> float | None:
    e = strip(e)
    if e.op == "const":
        return float(e.value)
    if e.op == "load" and node.inputs[e.value].op == "const" and node.inputs[e.value].numel == 1:
        return float(node.inputs[e.value].node.attrs["data"].reshape(()))
    return None


def _comes_from_matmul(v: Value) -> bool:
    for _ in range(8):
        v = see_through(v, set())
        if v.op == "matmul":
            return True
        step = _score_step(v) if v.op == "pointwise" else None
        if step is None:
            return False
        v = step[0]
    return False


def _ungroup(x: Value, heads_axis: int) -> Value:
    """The tensor before its heads were repeated by unsqueeze + expand + reshape, or ``x`` itself."""
    if x.op != "reshape":
        return x
    e = x.node.inputs[0]
    if e.op == "expand" and e.rank == x.rank + 1:
        source = e.node.inputs[0]
        axis = heads_axis + 1
        if source.shape[axis] == 1 and [n for d, n in enumerate(source.shape) if d != axis] == [n for d, n in enumerate(e.shape) if d != axis]:
            return source.reshape(*(n for d, n in enumerate(source.shape) if d != axis))
    return x


def _build(graph: Graph, node: Node, match: Match) -> Value:
    q, kt, v, mask = (match.values[n] for n in ("q", "kt", "v", "mask"))
    assert q is not None and kt is not None and v is not None
    rank = q.rank
    k = _grouped_transpose(kt)
    v = _ungroup(v, rank - 3)
    lead = q.shape[:-2]

    def four(x: Value) -> Value:
        batch = math.prod(x.shape[:-3])
        return x.reshape(batch, *x.shape[-3:])

    q4, k4, v4 = four(q), four(k), four(v)
    dtype = node.inputs[1].dtype
    if q4.dtype != dtype:
        q4, k4 = q4.cast(dtype), k4.cast(dtype)
    if mask is not None:
        mask = mask.reshape(*(1,) * (4 - mask.rank), *mask.shape) if mask.rank <= 4 else four(mask)
    out = graph.attention(q4, k4, v4, mask, match.numbers["scale"], causal=False)
    return out.reshape(*lead, q.shape[-2], v.shape[-1]).cast(node.out.dtype)


def _grouped_transpose(kt: Value) -> Value:
    """k [.., heads, S, D] from k^T [.., heads, D, S], before the heads were repeated."""
    rank = kt.rank
    swap = (*range(rank - 2), rank - 1, rank - 2)
    if kt.op == "permute" and kt.node.attrs["perm"] == swap:
        return _ungroup(kt.node.inputs[0], rank - 3)
    return kt.permute(*swap)


def _example(masked: bool = True, leak: bool = False) -> Graph:
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 4, 5, 8), "float32") for n in "qkv")
    s = q.matmul(k.transpose(2, 3)) * 0.25
    if masked:
        s = s + g.input("mask", (2, 1, 5, 5), "float32")
    e = g.pointwise(expr.fn("exp"), s - s.amax([3]))
    p = e / e.sum([3])
    g.outputs = [("out", p.matmul(v))] + ([("p", p)] if leak else [])
    return g


def _not_softmax() -> Graph:
    g = Graph("no softmax")
    q, k, v = (g.input(n, (2, 4, 5, 8), "float32") for n in "qkv")
    s = q.matmul(k.transpose(2, 3))
    g.outputs = [("out", (s / s.sum([3])).matmul(v))]
    return g


ATTENTION = Rewrite(
    "attention", "matmul", _find, _build, example=_example, counter_examples=(lambda: _example(leak=True), _not_softmax)
)
REWRITES = (ATTENTION,)

