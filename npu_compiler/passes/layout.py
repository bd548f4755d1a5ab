"""Channels-last layout: permutes sink through ops that work in any dim order, until they cancel or reach the outputs.

Convolutions and pools are lowered as ``permute -> op on [N,H,W,C] -> permute back``. Between two of them the permutes
meet and cancel, so a whole convolutional network runs in [N,H,W,C] and only its input is transposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from .absorb_views import read_through
from .load_time import static_values
from .normalise import normalise


def sink_permutes(graph: Graph) -> None:
    """Rewrite ``op(permute(x), ...)`` as ``permute(op'(x, ...))`` for pointwise, reduce, concat, slice, expand, and
    reshapes that join or split neighbouring dims. Values that matmuls or scatters read keep their row order, unless
    convolutions produce them.

    A unit reshape (one that adds or drops size-1 dims) of a reduction's result also sinks through a pointwise op, so
    that ops after a pool can join its kernel; so does any reshape of what a product or reductions compute through one
    that depends on no position.
    """
    static = static_values(graph)
    settled = _settled(graph)
    convolved: set[Value] = set()  # results of convolutions, and values computed from them in the same order
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        node.inputs = [new.get(v, v) for v in node.inputs]
        graph.sources = node.sources
        turned = [v.node.inputs[0] for v in node.inputs if v.op == "permute"]
        natural = any(v.op == "conv2d" or v in convolved for v in turned)
        stay = settled if not natural else set()
        if node.op in ("pointwise", "reduce"):
            out = _sink_loops(graph, node, static, stay)
        elif node.op in ("concat", "slice", "expand") and node.out not in stay:
            out = _sink_structural(graph, node)
        elif node.op == "reshape" and turned:
            out = _sink_reshape(graph, node)
        elif node.op == "permute" and turned:
            inner = node.inputs[0].node
            out = graph.permute(inner.inputs[0], [inner.attrs["perm"][p] for p in node.attrs["perm"]])
        else:
            continue
        if out is not None:
            new[node.out] = out
            if node.out in settled:
                settled.add(out)
            if natural and out.op == "permute":
                convolved.add(out.node.inputs[0])
    graph.sources = ()
    graph.replace(new)
    _permute_weights(graph, static)
    normalise(graph)


def sink_reshapes(graph: Graph) -> None:
    """Sink reshapes of what products and reductions compute through the pointwise ops behind them."""
    static = static_values(graph)
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        node.inputs = [new.get(v, v) for v in node.inputs]
        graph.sources = node.sources
        if (out := _sink_pointwise_reshape(graph, node.out, static)) is not None:
            new[node.out] = out
    graph.sources = ()
    graph.replace(new)


def _permute_weights(graph: Graph, static: set[Value]) -> None:
    """Rewrite ``flatten(permute(x)) @ w`` as ``flatten(x) @ w'`` for a load-time w, whose rows take the order of x:
    the classifier of a convolutional network then reads [N,H,W,C] features without a transposition."""
    for node in list(graph.nodes):
        if node.op != "matmul" or node.inputs[1] not in static or node.inputs[1].rank != 2:
            continue
        flat, w = node.inputs
        if flat.op != "reshape" or flat.node.inputs[0].op != "permute" or not flat.numel:
            continue
        turned = flat.node.inputs[0]
        perm = turned.node.attrs["perm"]
        lead = next((s for s in range(turned.rank) if math.prod(turned.shape[s:]) == flat.shape[-1]), None)
        if lead is None or perm[:lead] != tuple(range(lead)):
            continue
        graph.sources = node.sources
        rows = [perm.index(d) - lead for d in range(lead, len(perm))]
        w = w.reshape(*turned.shape[lead:], w.shape[1]).permute(*rows, len(rows)).reshape(*w.shape)
        node.inputs = [turned.node.inputs[0].reshape(*flat.shape), w]
    graph.sources = ()
    graph.clean()


def _settled(graph: Graph) -> set[Value]:
    """Return the values that reach matmuls or scatters without a permute on the way: they keep their order.

    Paths through reductions do not count: reductions read any order, and their results are small.
    """
    turned: set[Value] = set()
    rows: set[Value] = set()
    for node in reversed(graph.nodes):
        if node.op in ("matmul", "attention", "scatter"):
            rows.update(node.inputs)
        elif node.op == "permute":
            turned.update(node.inputs)
        elif node.op in ("pointwise", "expand", "slice", "concat", "reshape"):
            for wish in (turned, rows):
                if node.out in wish:
                    wish.update(node.inputs)
    return rows - turned


def _sink_loops(graph: Graph, node: Node, static: set[Value], settled: set[Value]) -> Value | None:
    domain = node.domain
    votes: dict[tuple[int, ...], int] = {}
    for v in node.inputs:
        if v in static or v.numel < math.prod(domain) // 8 or v.rank != len(domain):
            continue
        perm = v.node.attrs["perm"] if v.op == "permute" else tuple(range(v.rank))
        votes[perm] = votes.get(perm, 0) + v.numel
    if votes:
        perm = max(votes, key=lambda p: (votes[p], p != tuple(range(len(p)))))
        stays = node.out in settled if node.op == "pointwise" else any(v in settled for v in node.inputs)
        live = [p for d, p in enumerate(perm) if domain[d] != 1]
        stays = stays and live != sorted(live)
        if perm != tuple(range(len(domain))) and not stays and not _reorders_positions(node, perm):
            out = _permuted(graph, node, perm)
            sunk = _sink_pointwise_reshape(graph, out, static)  # which was above the permute
            return graph.permute(out if sunk is None else sunk, perm)
    return _sink_pointwise_reshape(graph, node.out, static)


def _sink_reshape(graph: Graph, node: Node) -> Value | None:
    """Rewrite ``reshape(permute(x))`` as ``permute(reshape(x))`` if the joined dims are also neighbours in x."""
    inner = node.inputs[0].node
    x, perm, shape = inner.inputs[0], inner.attrs["perm"], node.attrs["shape"]
    live = [p for p in perm if x.shape[p] != 1]
    order = sorted(live)
    blocks: list[tuple[list[int], list[int]]] = [([], [])]  # (dims of x, dims of the result) with equally many elements
    left = right = 1
    todo = list(live)
    for d, n in enumerate(shape):
        if left == right and blocks[-1][0] and n != 1:
            blocks.append(([], []))
            left = right = 1
        blocks[-1][1].append(d)
        right *= n
        while left < right and todo:
            blocks[-1][0].append(todo.pop(0))
            left *= x.shape[blocks[-1][0][-1]]
    if todo or left != right or 0 in shape:
        return None
    for dims, _ in blocks:
        at = [order.index(p) for p in dims]
        if at != list(range(at[0], at[0] + len(at))) if at else False:
            return None
    ordered = sorted(blocks, key=lambda b: b[0][:1])
    source = [d for _, outs in ordered for d in outs]
    place = {d: i for i, d in enumerate(source)}
    return graph.permute(graph.reshape(x, [shape[d] for d in source]), [place[d] for d in range(len(shape))])


def _reorders_positions(node: Node, perm: Sequence[int]) -> bool:
    """Whether ``perm`` reorders the reduced dims of an argmax or argmin, which number positions in that order."""
    axes = [perm[a] for a in node.attrs.get("axes", ())]
    return node.attrs.get("kind", "").startswith("arg") and axes != sorted(axes)


def _permuted(graph: Graph, node: Node, perm: Sequence[int]) -> Value:
    """Rebuild a loop node over the domain before ``perm``; old dim i is new dim perm[i]. Returns its result."""
    inputs, e = read_through(node, ("permute",))
    e = expr.substitute(e, {i: expr.index(p) for i, p in enumerate(perm)})
    domain = [0] * len(perm)
    for i, p in enumerate(perm):
        domain[p] = node.domain[i]
    if node.op == "pointwise":
        return graph.elementwise(domain, inputs, e)
    axes = sorted(perm[a] for a in node.attrs["axes"])
    return graph.add(
        "reduce", inputs, [(tuple(1 if d in axes else n for d, n in enumerate(domain)), node.out.dtype)],
        kind=node.attrs["kind"], axes=tuple(axes), expr=e, domain=tuple(domain),
    ).out  # fmt: skip


def _sink_pointwise_reshape(graph: Graph, out: Value, static: set[Value]) -> Value | None:
    """Sink the reshape that a pointwise result ``out`` reads, in one of the two ways below. None: it stays."""
    if out.op != "pointwise":
        return None
    sunk = _sink_unit_reshape(graph, out.node, static)
    return sunk if sunk is not None else _sink_computed_reshape(graph, out.node)


def _sink_unit_reshape(graph: Graph, node: Node, static: set[Value]) -> Value | None:
    live = [v for v in node.inputs if v not in static]
    if len(live) != 1 or live[0].op != "reshape" or live[0].shape != node.out.shape:
        return None
    source = live[0].node.inputs[0]
    if source.op not in ("reduce", "pointwise") or [n for n in source.shape if n != 1] != [
        n for n in node.out.shape if n != 1
    ]:
        return None
    old = [d for d, n in enumerate(node.out.shape) if n != 1]
    now = [d for d, n in enumerate(source.shape) if n != 1]
    which = node.inputs.index(live[0])
    loads_ok = all(
        x.args == expr.identity_index(node.out.shape)
        for x in expr.walk(node.attrs["expr"]) if x.op == "load" and x.value == which
    )  # fmt: skip
    if not loads_ok:
        return None
    dims = {d: expr.const(0, "int64") for d in range(node.out.rank)} | {
        o: expr.index(n) for o, n in zip(old, now, strict=True)
    }
    identity = expr.identity_index(source.shape)

    def through(load: Expr) -> Expr | None:
        return expr.load(which, load.dtype, identity) if load.value == which else None

    e = expr.substitute(node.attrs["expr"], dims, through)
    inputs = [source if i == which else v for i, v in enumerate(node.inputs)]
    return graph.reshape(graph.elementwise(source.shape, inputs, e), node.out.shape)


def _sink_computed_reshape(graph: Graph, node: Node) -> Value | None:
    """Rewrite ``f(reshape(x))`` as ``reshape(f(x))`` if a product or reductions compute x, or what x is a function of,
    and f depends on no position and reads nothing else: a cast or an activation can then join their kernel."""
    if len(node.inputs) != 1 or node.inputs[0].op != "reshape" or node.inputs[0].shape != node.out.shape:
        return None
    source = node.inputs[0].node.inputs[0]
    here, there = expr.identity_index(node.out.shape), expr.identity_index(source.shape)
    e = node.attrs["expr"]
    if not _computed(source) or any(x.op == "load" and x.args != here for x in expr.walk(e)):
        return None
    if any(x.op == "index" for x in expr.walk(expr.substitute(e, loads=lambda x: expr.load(0, x.dtype, ())))):
        return None
    e = expr.substitute(e, loads=lambda x: expr.load(0, x.dtype, there))
    return graph.reshape(graph.elementwise(source.shape, [source], e), node.out.shape)


def _computed(x: Value) -> bool:
    """Whether a product computes x, or what x is a function of, or reductions compute part of it, as in a norm."""
    while x.op == "pointwise" and len(x.node.inputs) == 1:
        x = x.node.inputs[0]
    if x.op != "pointwise":
        return x.op in ("matmul", "conv2d", "reduce")
    todo, seen = list(x.node.inputs), set(x.node.inputs)
    while todo:
        v = todo.pop()
        if v.op == "reduce":
            return True
        if v.op == "pointwise" and len(seen) < 16:  # a norm has fewer
            new = [i for i in v.node.inputs if i not in seen]
            todo += new
            seen.update(new)
    return False


def _sink_structural(graph: Graph, node: Node) -> Value | None:
    perms = {v.node.attrs["perm"] for v in node.inputs if v.op == "permute"}
    if len(perms) != 1:
        return None
    perm = perms.pop()
    inverse = sorted(range(len(perm)), key=perm.__getitem__)
    plain = [v for v in node.inputs if v.op != "permute"]
    if 2 * sum(v.numel for v in plain) > sum(v.numel for v in node.inputs):
        return None
    sources = [graph.permute(v, inverse) if v in plain else v.node.inputs[0] for v in node.inputs]
    if node.op == "concat":
        return graph.permute(graph.concat(sources, perm[node.attrs["axis"]]), perm)

    def back(items: Sequence[int]) -> tuple[int, ...]:
        out = [0] * len(perm)
        for i, p in enumerate(perm):
            out[p] = items[i]
        return tuple(out)

    attrs = {k: back(v) for k, v in node.attrs.items()}
    return graph.permute(graph.add(node.op, sources, [(attrs["shape"], node.out.dtype)], **attrs).out, perm)
