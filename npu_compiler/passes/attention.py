"""Attention from its decomposed form: ``softmax(q @ k^T * scale + mask) @ v`` becomes one node.

The scores (or q, or k) may be multiplied or divided by a number. Masks may be additive tensors or a ``where`` with a
large negative number. The softmax may run in another float type, and may give zeros for rows whose scores are all -inf,
as the node does. Grouped queries may have repeated the heads of k and v by expand + reshape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import VIEWS, Graph, Node, Value
from ..support import dtypes
from . import patterns
from .attention_masks import hides_nothing, is_causal, last_visible_key
from .normalise import normalise
from .patterns import Match, Rewrite, is_float_cast, loaded, number, see_through, sides, strip
from .softmax import softmax_input


def fuse_attention(graph: Graph) -> None:
    """Apply :data:`REWRITES`, then simplify operands: factors of queries and keys become part of the scale, and heads
    of keys and values are not repeated.

    A mask that hides nothing is dropped, a causal one becomes the attribute ``causal``. If a mask hides every key
    beyond a position per query, that position becomes an operand, so a kernel can stop there.
    """
    if not patterns.apply(graph, REWRITES) and not any(n.op == "attention" for n in graph.nodes):
        return
    for node in [n for n in graph.nodes if n.op == "attention"]:
        for i in range(2):
            x, factor = _unscaled(node.inputs[i])
            node.inputs[i], node.attrs["scale"] = x.cast(node.inputs[i].dtype), node.attrs["scale"] * factor
        node.inputs[1:3] = _shared_heads(*node.inputs[1:3])
        if not node.attrs["limited"] and len(node.inputs) == 4:
            mask = node.inputs[3]
            if hides_nothing(mask) or is_causal(mask, node.inputs[0].shape[2], node.inputs[1].shape[2]):
                node.attrs["causal"] = node.attrs["causal"] or not hides_nothing(mask)
                node.inputs.pop()
                continue
            positions = last_visible_key(node.inputs[3], node.inputs[0].shape[2])
            if positions is not None:
                node.inputs.append(positions)
                node.attrs["limited"] = True
    graph.clean()
    normalise(graph)  # The casts are those around the softmax of a half-precision model.


def _find(graph: Graph, node: Node) -> Match | None:
    inner: set[Node] = set()
    scores = softmax_input(see_through(node.inputs[0], inner), inner)
    steps = _score_steps(scores, inner) if scores is not None else None
    if steps is None:
        return None
    first, scale, masks = steps
    inner.add(first)
    (q, kt), v = first.inputs, node.inputs[1]
    if q.rank < 3 or kt.rank != q.rank or q.shape[:-3] != kt.shape[:-3] or not dtypes.is_float(node.out.dtype):
        return None
    if not _same_batch(q, node.out) or not _same_batch(kt, v):
        return None
    if v.rank != q.rank and node.inputs[0].shape[:-2] != v.shape[:-2]:
        return None  # v is repeated for some of the dims
    values: dict[str, Value | None] = {"q": q, "kt": kt, "v": _as_narrow(graph, node, v, q.dtype)}
    numbers, flags = {"scale": scale}, set()
    for i, mask in enumerate(masks):
        batch = mask.value.shape[: max(mask.value.rank - 3, 0)]
        if mask.value.rank > q.rank or (math.prod(batch) != 1 and batch != q.shape[:-3]):
            return None
        values[f"mask{i}"], numbers[f"fill{i}"] = mask.value, mask.fill
        flags |= {f"hide{i}"} if mask.hides else set()
    return Match(values, numbers, frozenset(inner), frozenset(flags))


def _same_batch(a: Value, b: Value) -> bool:
    """Whether the dims before the last two are the same, but for dims of size 1 if the ranks differ."""
    if a.rank == b.rank:
        return a.shape[:-2] == b.shape[:-2]
    return [n for n in a.shape[:-2] if n != 1] == [n for n in b.shape[:-2] if n != 1]


def _as_narrow(graph: Graph, node: Node, v: Value, dtype: str) -> Value:
    """Return the source of ``v`` if it has been widened from ``dtype`` and all readers of ``node`` round to that type,
    as the attention node does, else ``v``."""
    if not (v.op == "pointwise" and is_float_cast(v.node) and v.node.inputs[0].dtype == dtype != v.dtype):
        return v
    readers = graph.users().get(node.out, [])
    rounds = all(n.op == "pointwise" and is_float_cast(n) and n.out.dtype == dtype for n in readers)
    return v.node.inputs[0] if rounds and node.out not in graph.results() else v


@dataclass(frozen=True)
class _Mask:
    """A mask: ``scores + value``, or for a bool ``value`` the number ``fill`` where it is false (true if ``hides``)."""

    value: Value
    fill: float = 0.0
    hides: bool = False


def _score_steps(scores: Value, inner: set[Node]) -> tuple[Node, float, list[_Mask]] | None:
    """Return the matmul that computes the scores, their scale, and the masks in the order they are applied."""
    scale, masks = 1.0, []
    value = see_through(scores, inner)
    while value.op != "matmul":
        step = _score_step(value)
        if step is None:
            return None
        inner.add(value.node)
        source, factor, mask = step
        if mask is not None:
            if scale != 1.0 and not (math.isinf(mask.fill) and scale > 0):
                return None  # the scaling would apply to the mask, too
            masks.append(mask)
        scale *= factor
        value = see_through(source, inner)
    return value.node, scale, masks[::-1]


def _score_step(value: Value) -> tuple[Value, float, _Mask | None] | None:
    """Return (the scores it reads, factor, mask) of one op between q @ k^T and the softmax, or None."""
    node = value.node
    if node.op != "pointwise":
        return None
    e = strip(node.attrs["expr"])
    scaled = _scaling(value)
    if scaled is not None:
        return *scaled, None
    for a, b in sides(e, "add"):
        x, m = loaded(node, a), loaded(node, b)
        if x is not None and m is not None and x.shape == value.shape and _comes_from_matmul(x):
            return x, 1.0, _Mask(m)
    if e.op == "where":
        cond = loaded(node, e.args[0])
        for keeps, (a, b) in ((True, e.args[1:]), (False, e.args[:0:-1])):
            x, fill = loaded(node, a), number(node, b)
            # A finite fill beyond 1e12 absorbs any score, so adding it is the same as replacing the score.
            if cond is not None and x is not None and fill is not None and x.shape == value.shape and fill < -1e12:
                return x, 1.0, _Mask(cond, fill, hides=not keeps)
    return None


def _scaling(value: Value) -> tuple[Value, float] | None:
    """Return (x, factor) if ``value`` is x multiplied or divided by a number, else None."""
    node = value.node
    if node.op != "pointwise":
        return None
    for op in ("mul", "div"):
        for a, b in sides(node.attrs["expr"], op, commutative=op == "mul"):
            x, c = loaded(node, a), number(node, b)
            if x is not None and c and x.shape == value.shape and dtypes.is_float(x.dtype):
                return x, c if op == "mul" else 1.0 / c
    return None


def _comes_from_matmul(v: Value) -> bool:
    for _ in range(8):
        v = see_through(v, set())
        if v.op == "matmul":
            return True
        step = _score_step(v)
        if step is None:
            return False
        v = step[0]
    return False


def _build(graph: Graph, node: Node, match: Match) -> Value:
    q, kt, v = (match.values[n] for n in ("q", "kt", "v"))
    assert q is not None and kt is not None and v is not None
    v = v.reshape(*kt.shape[:-2], *v.shape[-2:])
    rank, wide = q.rank, dtypes.promote(q.dtype, v.dtype)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    q, scale_q = _unscaled(q)
    kt, scale_kt = _unscaled(kt)
    k, scale_k = _unscaled(
        kt.permute(*swap) if kt.op != "permute" or kt.node.attrs["perm"] != swap else kt.node.inputs[0]
    )
    k, v = _shared_heads(k, v)

    def four(x: Value) -> Value:
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]).cast(wide)

    scale = match.numbers["scale"] * scale_q * scale_k * scale_kt
    mask, causal = _combined(graph, match)
    if mask is not None:
        if mask.op == "pointwise" and is_float_cast(mask.node) and mask.node.inputs[0].dtype == wide:
            mask = mask.node.inputs[0]
        mask = mask.reshape(*(1,) * (3 - mask.rank), *mask.shape)
        mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
    out = graph.attention(four(q), four(k), four(v), mask, scale, causal)
    return out.reshape(*node.out.shape).cast(node.out.dtype)


def _unscaled(x: Value) -> tuple[Value, float]:
    """Return (y, factor) with ``x = y * factor``, also before views: scaling q or k is the same as scaling scores."""
    if x.op in VIEWS:
        source, factor = _unscaled(x.node.inputs[0])
        outputs = [(x.shape, source.dtype)]
        return (x, 1.0) if factor == 1.0 else (x.graph.add(x.op, [source], outputs, **x.node.attrs).out, factor)
    below = see_through(x, set()) if x.op == "pointwise" else x
    found = _scaling(below) if below.shape == x.shape else None
    if found is None:
        return x, 1.0
    source, factor = _unscaled(found[0])
    return source, factor * found[1]


def _shared_heads(k: Value, v: Value) -> tuple[Value, Value]:
    """Return keys and values without repetitions of their heads, if both repeat the same number of heads."""
    shared_k, shared_v = _ungroup(k), _ungroup(v)
    return (shared_k, shared_v) if shared_k.shape[:-2] == shared_v.shape[:-2] else (k, v)


def _ungroup(x: Value) -> Value:
    """Return [.., HK, S, D] if unsqueeze, expand and reshape repeated its heads to ``x`` [.., H, S, D], else ``x``."""
    e = x.node.inputs[0] if x.op == "reshape" else x
    if e.op != "expand" or e.rank != x.rank + 1:
        return x
    source, axis = e.node.inputs[0], x.rank - 2
    repeats_heads = all((n != m) <= (d == axis) for d, (n, m) in enumerate(zip(source.shape, e.shape, strict=True)))
    joins_heads = (*e.shape[: axis - 1], e.shape[axis - 1] * e.shape[axis], *e.shape[axis + 1 :]) == x.shape
    if not repeats_heads or not joins_heads or source.shape[axis] != 1:
        return x
    return source.reshape(*source.shape[:axis], *source.shape[axis + 1 :])


def _combined(graph: Graph, match: Match) -> tuple[Value | None, bool]:
    """Combine all masks of the match into one; also return whether a causal mask is among them."""
    total: Value | None = None
    causal = False
    q, kt = match.values["q"], match.values["kt"]
    assert q is not None and kt is not None
    queries, keys = q.shape[-2], kt.shape[-1]
    for i in range(sum(name.startswith("mask") for name in match.values)):
        mask, fill = match.values[f"mask{i}"], match.numbers[f"fill{i}"]
        assert mask is not None
        if f"hide{i}" in match.flags:
            mask = graph.pointwise(lambda m: ~m, mask, promote=False)
        if not causal and is_causal(mask, queries, keys) and not math.isfinite(fill):
            causal = True
            continue
        if mask.dtype == "bool" and math.isfinite(fill):
            mask = graph.pointwise(
                lambda m, fill=fill: expr.where(m, expr.const(0.0, "float32"), fill), mask, promote=False
            )
        if total is None:
            total = mask
        elif total.dtype == mask.dtype == "bool":
            total = graph.pointwise(lambda a, b: a & b, total, mask, promote=False)
        elif total.dtype != "bool" and mask.dtype != "bool":
            total = total + mask
        else:
            keep, added = (total, mask) if total.dtype == "bool" else (mask, total)
            total = graph.pointwise(lambda m, x: expr.where(m, x, -math.inf), keep, added, promote=False)
    return total, causal


# -- examples
def _example(
    scores: Callable[[Value], Value] = lambda s: s * 0.25,
    heads: Callable[[Value], Value] = lambda x: x,
    leak: bool = False,
    dtype: str = "float32",
) -> Graph:
    """Attention over [2, 4, 5, 8]: ``scores`` scales and masks q @ k^T, ``heads`` changes q and k before it."""
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 4, 5, 8), dtype) for n in "qkv")
    s = scores(heads(q).cast(dtype).matmul(heads(k).cast(dtype).transpose(2, 3)))
    e = g.pointwise(expr.fn("exp"), s - s.amax([3]))
    p = e / e.sum([3])
    g.outputs = [("out", p.cast(dtype).matmul(v))] + ([("p", p)] if leak else [])
    return g


def _safe(find_rows: Callable[[Value], Value], fill: float = 0.0) -> Graph:
    """A softmax with ``fill`` in the rows of the scores for which ``find_rows`` is true."""
    g = Graph("safe softmax")
    q, k, v = (g.input(n, (2, 4, 5, 8), "float32") for n in "qkv")
    s = _filled(q.matmul(k.transpose(2, 3)), _input(q, "bool"))
    e = g.pointwise(expr.fn("exp"), s - s.amax([3]))
    p = g.pointwise(lambda m, x: expr.where(m, fill, x), find_rows(s), e / e.sum([3]), promote=False)
    g.outputs = [("out", p.matmul(v))]
    return g


def _is_hidden(x: Value) -> Value:
    return x.graph.pointwise(lambda a: expr.fn("eq")(a, -math.inf), x, promote=False)


def _not(x: Value) -> Value:
    return x.graph.pointwise(lambda a: ~a, x, promote=False)


def _none_visible(scores: Value) -> Value:
    return _not(_not(_is_hidden(scores)).amax([3]))


def _grouped() -> Graph:
    g = Graph("grouped")
    q, k, v = (g.input(n, (2, 4 if n == "q" else 2, 5, 8), "float32") for n in "qkv")
    k, v = (x.reshape(2, 2, 1, 5, 8).expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8) for x in (k, v))
    s = q.matmul(k.transpose(2, 3)) / 3.0
    e = g.pointwise(expr.fn("exp"), s - s.amax([3]))
    g.outputs = [("out", (e / e.sum([3])).matmul(v))]
    return g


def _ranks(heads: int) -> Graph:
    """The second product has three dims: without that of one head, or values for each head that batches share."""
    g = Graph("ranks")
    q, k, v = (g.input(n, s, "float32") for n, s in (("q", (2, heads, 5, 8)), ("k", (2, 1, 5, 8)), ("v", (2, 5, 8))))
    s = q.matmul(k.transpose(2, 3)) / 3.0
    e = g.pointwise(expr.fn("exp"), s - s.amax([3]))
    p = e / e.sum([3])
    g.outputs = [("out", (p.reshape(2, 5, 5) if heads == 1 else p).matmul(v))]
    return g


def _filled(s: Value, mask: Value, fill: float = -math.inf, hides: bool = False) -> Value:
    def f(m: Expr, x: Expr) -> Expr:
        return expr.where(m, fill, x) if hides else expr.where(m, x, fill)

    return s.graph.pointwise(f, mask, s, promote=False)


def _input(s: Value, dtype: str = "float32", shape: tuple[int, ...] = (2, 1, 1, 5)) -> Value:
    return s.graph.input("mask", shape, dtype)


def _triangle(s: Value) -> Value:
    return s.graph.elementwise((5, 5), [], expr.index(1) <= expr.index(0))


def _not_softmax() -> Graph:
    g = Graph("no softmax")
    q, k, v = (g.input(n, (2, 4, 5, 8), "float32") for n in "qkv")
    s = q.matmul(k.transpose(2, 3))
    g.outputs = [("out", (s / s.sum([3])).matmul(v))]
    return g


ATTENTION = Rewrite(
    "attention", "matmul", _find, _build,
    examples=(
        _example,
        lambda: _example(dtype="float16"),
        lambda: _example(lambda s: s / 2.5 + _input(s)),
        lambda: _example(lambda s: _input(s) + s),
        lambda: _example(lambda s: _filled(s * 0.3, _triangle(s))),
        lambda: _example(lambda s: _filled(s, _input(s, "bool", (5,)), hides=True) * 0.5),
        lambda: _example(lambda s: _filled(s, _input(s, "bool"), -3.0e38)),
        lambda: _example(lambda s: _filled(_filled(s + _input(s), _triangle(s)), _triangle(s), hides=False)),
        lambda: _example(lambda s: s, heads=lambda x: x * 0.5),
        lambda: _example(heads=lambda x: x / 1.5, dtype="bfloat16"),
        _grouped,
        lambda: _ranks(heads=1),
        lambda: _safe(lambda s: _is_hidden(s.amax([3]))),
        lambda: _safe(_none_visible),
    ),
    counter_examples=(
        lambda: _example(leak=True),
        _not_softmax,
        lambda: _ranks(heads=2),
        lambda: _safe(lambda s: _is_hidden(s.amax([3])), fill=1.0),
        lambda: _safe(lambda s: _not(_is_hidden(s.amax([3])))),
        lambda: _safe(lambda s: _is_hidden((s * 2.0).amax([3]))),
        lambda: _example(lambda s: (s + _input(s)) * 0.5),  # scales the mask too
        lambda: _example(lambda s: _filled(s, _input(s, "bool"), -3.0)),  # hides nothing
        lambda: _example(lambda s: s * _input(s)),
    ),
)  # fmt: skip
REWRITES = (ATTENTION,)
