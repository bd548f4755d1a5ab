"""Per-channel scales and shifts after a convolution or matmul (batch norm) become load-time recipes."""

from __future__ import annotations

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from .load_time import static_values

Affine = tuple[Expr | None, Expr | None]  # scale (None: 1) and shift (None: 0)

_LONG_SUM = 64


def fold_batch_norm(graph: Graph) -> None:
    """Rewrite ``conv(x, w) * scale + shift`` as ``conv(x, w * scale) + shift``, and ``matmul`` likewise, if scale and
    shift depend only on weights and vary only along the output channel. The bias is created if there is none.

    Scaling a weight rounds it to the storage dtype once more. PyTorch does not make this error, which is about as large
    as the rounding of the result. In long float32 sums the summation error hides it. For half types and short sums
    (depthwise convolutions) the weight stays unscaled, and the sum is scaled before it is rounded: ``conv(x, w) *
    scale + shift`` with one scale and one shift per channel.
    """
    static = static_values(graph)
    users = graph.users()
    outputs = set(graph.results())
    new: dict[Value, Value] = {}
    for anchor in list(graph.nodes):
        if anchor.op not in ("conv2d", "matmul") or anchor.out.dtype != "float32" or anchor.inputs[1] not in static:
            continue
        if anchor.inputs[1].rank != (4 if anchor.op == "conv2d" else 2):
            continue
        chain = _affine_chain(anchor, users, outputs, static)
        if chain is not None:
            last, inputs, scale, shift = chain
            new[last.out] = _rebuild(graph, anchor, last, inputs, scale, shift)
    graph.replace(new)


def _affine_chain(
    anchor: Node, users: dict[Value, list[Node]], outputs: set[Value], static: set[Value]
) -> tuple[Node, list[Value], Expr, Expr | None] | None:
    """Find the longest run of affine ops after ``anchor`` that ends in a scaling.

    Returns (last node, load-time inputs, scale, shift).
    """
    inputs: list[Value] = []
    scale: Expr | None = None
    shift: Expr | None = None
    best = None
    value = anchor.out
    while value not in outputs and len(users.get(value, ())) == 1:
        node = users[value][0]
        if (
            node.op != "pointwise"
            or node.out.shape != anchor.out.shape
            or not all(v in static or v is value for v in node.inputs)
        ):
            break
        numbers = {i: len(inputs) + n for n, i in enumerate(i for i, v in enumerate(node.inputs) if v is not value)}
        step = _affine(node.attrs["expr"], node.inputs.index(value), numbers, expr.identity_index(value.shape))
        if step is None:
            break
        inputs = [*inputs, *(v for v in node.inputs if v is not value)]
        a, b = step
        shift = _add(_mul(shift, a) if shift is not None else None, b)
        scale = a if scale is None else _mul(scale, a)
        if scale is not None:
            best = (node, inputs, scale, shift)
        value = node.out
    return best


def _affine(e: Expr, which: int, numbers: dict[int, int], identity: tuple[Expr, ...]) -> Affine | None:
    """Return (scale, shift) if ``e`` is scale * load(which) + shift with per-channel scale and shift, else None."""
    channel = len(identity) - 1

    def static_part(x: Expr) -> Expr | None:
        for y in expr.walk(x):
            if (y.op == "load" and y.value == which) or (y.op == "index" and y.value != channel):
                return None
        renumbered = expr.substitute(x, loads=lambda y: expr.load(numbers[y.value], y.dtype, y.args))
        return renumbered.cast("float32")

    if e.op == "load" and e.value == which:
        return (None, None) if e.args == identity else None
    if e.op == "cast" and e.dtype in ("float16", "bfloat16", "float32"):
        return _affine(e.args[0], which, numbers, identity)
    if e.op in ("add", "sub", "mul", "div") and e.dtype != "float64":
        for x, y in ((e.args[0], e.args[1]), (e.args[1], e.args[0])):
            s = static_part(y)
            if s is None:
                continue
            inner = _affine(x, which, numbers, identity)
            if inner is None or (e.op in ("sub", "div") and x is e.args[1]):
                return None
            a, b = inner
            if e.op in ("add", "sub"):
                return a, _add(b, s if e.op == "add" else -s)
            factor = s if e.op == "mul" else 1.0 / s
            return _mul(a, factor), _mul(b, factor) if b is not None else None
    return None


def _mul(a: Expr | None, b: Expr | None) -> Expr | None:
    return a if b is None else b if a is None else a * b


def _add(a: Expr | None, b: Expr | None) -> Expr | None:
    return a if b is None else b if a is None else a + b


def _rebuild(graph: Graph, anchor: Node, last: Node, inputs: list[Value], scale: Expr, shift: Expr | None) -> Value:
    x, w = anchor.inputs
    k, rank = anchor.out.shape[-1], anchor.out.rank
    graph.sources = tuple(dict.fromkeys((*anchor.sources, *last.sources)))
    vector = {rank - 1: expr.index(0)}
    factor = graph.elementwise((k,), inputs, expr.substitute(scale, vector))
    long = w.dtype == "float32" and w.numel // k >= _LONG_SUM
    if long:
        w = w * (factor.reshape(k, *(1,) * (w.rank - 1)) if anchor.op == "conv2d" else factor)
    out = graph.add(anchor.op, [x, w], [(anchor.out.shape, anchor.out.dtype)], **anchor.attrs).out
    if not long:
        out = out * factor
    if shift is not None:
        bias = graph.elementwise((k,), inputs, expr.substitute(shift, vector))
        out = out + bias
    out = out.cast(last.out.dtype)
    graph.sources = ()
    return out


def unrounded(w: Value) -> Value:
    """Return the float32 source of a narrowing cast: scaling it rounds once instead of twice."""
    if w.op == "permute":
        source = unrounded(w.node.inputs[0])
        return w if source is w.node.inputs[0] else source.permute(*w.node.attrs["perm"])
    if w.op == "pointwise" and w.node.attrs["expr"].op == "cast" and w.node.inputs[0].dtype == "float32":
        source = w.node.inputs[0]
        if source.shape == w.shape and w.node.attrs["expr"].args[0].args == expr.identity_index(w.shape):
            return source
    return w
