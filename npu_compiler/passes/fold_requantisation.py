"""The scale of a quantised result is folded into those of the integer product that it comes from.

After :mod:`.integer_products` a quantised layer computes

    y = relu(sums * f + bias + (q - z) * s)          result = clamp(round(y / t) + zero_point)

with one f and bias for each channel and perhaps a quantised residual q. It becomes

    result = clamp(round(sums * (f / t) + (bias - z * s) / t + q * (s / t)) + zero_point)

whose factors are load-time values. The activation is part of the clamp, because rounding is monotonic. The sum is
rounded to float32 in other places than before, so a value next to the middle of two integers may be rounded to the
other one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..graph import expr
from ..graph.expr import Expr, fn, maximum, minimum
from ..graph.graph import Graph, Node, Value
from .integer_products import UNSIGNED_SHIFT, dequantised, stored_unsigned
from .load_time import static_values


@dataclass(frozen=True)
class _Sum:
    """A float32 value as a sum: ``sums * factor``, load-time values of one element for each channel, and residuals
    (q, zero point, scale)."""

    sums: Value | None = None
    factor: Value | None = None
    shifts: tuple[Value, ...] = ()
    residuals: tuple[tuple[Value, float, float], ...] = ()

    def __add__(self, other: _Sum) -> _Sum | None:
        if self.sums is not None and other.sums is not None:
            return None
        sums, factor = (self.sums, self.factor) if self.sums is not None else (other.sums, other.factor)
        return _Sum(sums, factor, self.shifts + other.shifts, self.residuals + other.residuals)


@dataclass(frozen=True)
class Quantisation:
    """``clamp(round(source * inverse) + zero, low, high)`` as uint8."""

    source: Value
    inverse: float
    zero: float
    low: float
    high: float


def fold_requantisation(graph: Graph) -> None:
    """Rewrite the quantised results of integer products."""
    matcher = _Matcher(graph)
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op != "pointwise" or node.out.dtype != "uint8" or (q := quantisation(node)) is None:
            continue
        value, q = matcher.without_clamp(q)
        found = matcher.terms(value)
        if found is not None and found.sums is not None and found.factor is not None:
            graph.sources = tuple(dict.fromkeys((*value.node.sources, *node.sources)))
            new[node.out] = _build(graph, node.out, found, q)
    graph.sources = ()
    graph.replace(new)


def _build(graph: Graph, out: Value, found: _Sum, q: Quantisation) -> Value:
    assert found.sums is not None and found.factor is not None
    inputs, channel = [found.sums, found.factor * q.inverse], expr.index(out.rank - 1)
    identity = expr.identity_index(out.shape)
    total = expr.load(0, "int32", identity).cast("float32") * expr.load(1, "float32", [channel])
    constant = -sum(zero * scale for _, zero, scale in found.residuals)
    shifts = [v * q.inverse for v in found.shifts]
    if constant:
        shifts.append(graph.const(np.full(found.factor.shape, constant * q.inverse), "float32"))
    if shifts:
        total = total + expr.load(len(inputs), "float32", [channel])
        inputs.append(functools.reduce(lambda a, b: a + b, shifts))
    for v, _, scale in found.residuals:
        total = total + expr.load(len(inputs), v.dtype, identity).cast("float32") * (scale * q.inverse)
        inputs.append(v)
    whole = fn("round")(total)
    whole = whole + q.zero if q.zero else whole
    return graph.elementwise(out.shape, inputs, minimum(maximum(whole, q.low), q.high).cast("uint8"))


def quantisation(node: Node) -> Quantisation | None:
    """Return what a node computes if it quantises its only input with constants, else None."""
    e = node.attrs["expr"]
    if e.op != "cast" or len(node.inputs) != 1:
        return None
    e, shift = e.args[0], 0.0
    if e.op == "add" and e.args[1].op == "const":  # stored as unsigned
        e, shift = e.args[0], float(e.args[1].value)
    found = _clamp(e)
    if found is None:
        return None
    e, low, high = found
    zero = 0.0
    if e.op == "add" and e.args[1].op == "const":
        e, zero = e.args[0], float(e.args[1].value)
    if e.op != "round" or e.args[0].op != "mul":
        return None
    x, factor = e.args[0].args
    if factor.op != "const" or not factor.value > 0 or not _is_whole(x, node, 0):
        return None
    return Quantisation(node.inputs[0], float(factor.value), zero + shift, low + shift, high + shift)


def _clamp(e: Expr) -> tuple[Expr, float, float] | None:
    """Return (x, low, high) of ``minimum(maximum(x, low), high)`` with constants."""
    if e.op != "minimum" or e.args[0].op != "maximum":
        return None
    (x, low), high = e.args[0].args, e.args[1]
    return (x, float(low.value), float(high.value)) if low.op == high.op == "const" else None


def _is_whole(e: Expr, node: Node, number: int) -> bool:
    """Whether ``e`` reads input ``number`` point by point."""
    return e.op == "load" and e.value == number and e.args == expr.identity_index(node.out.shape)


class _Matcher:
    """Recognises the sums of one graph."""

    def __init__(self, graph: Graph):
        self.users, self.static, self.results = graph.users(), static_values(graph), set(graph.results())

    def _alone(self, v: Value) -> bool:
        return len(self.users.get(v, ())) == 1 and v not in self.results

    def without_clamp(self, q: Quantisation) -> tuple[Value, Quantisation]:
        """Return the value before the activation, which becomes a part of the quantisation's clamp."""
        node = q.source.node
        if node.op != "pointwise" or len(node.inputs) != 1 or not self._alone(q.source):
            return q.source, q
        e, low, high = node.attrs["expr"], -np.inf, np.inf
        if (found := _clamp(e)) is not None:
            e, low, high = found
        elif e.op == "maximum" and e.args[1].op == "const":
            e, low = e.args[0], float(e.args[1].value)
        if node.inputs[0].dtype != "float32" or not _is_whole(e, node, 0):
            return q.source, q
        bounds = [float(np.rint(b * q.inverse) + q.zero) for b in (low, high)]
        at_least, at_most = min(max(q.low, bounds[0]), q.high), max(min(q.high, bounds[1]), q.low)
        return node.inputs[0], Quantisation(node.inputs[0], q.inverse, q.zero, at_least, at_most)

    def terms(self, v: Value) -> _Sum | None:
        """Return a value as a sum, or None."""
        residual = dequantised(v)
        if residual is not None and not isinstance(residual.scale, Value) and not isinstance(residual.zero, Value):
            q, zero = residual.q, float(residual.zero)
            if (stored := stored_unsigned(q)) is not None:
                q, zero = stored, zero + UNSIGNED_SHIFT
            if not residual.views and q.dtype == "uint8":
                return _Sum(residuals=((q, zero, residual.scale),))
        node = v.node
        if node.op != "pointwise" or v.dtype != "float32" or not self._alone(v):
            return None
        e = node.attrs["expr"]
        if e.op == "add":
            a, b = (self._operand(node, x) for x in e.args)
            return a + b if a is not None and b is not None else None
        return self._product(node, e) if e.op == "mul" else None

    def _operand(self, node: Node, e: Expr) -> _Sum | None:
        if e.op != "load":
            return None
        v = node.inputs[e.value]
        if (channel := self._per_channel(node, e)) is not None:
            return _Sum(shifts=(channel,))
        return self.terms(v) if _is_whole(e, node, e.value) else None

    def _per_channel(self, node: Node, e: Expr) -> Value | None:
        """Return the load-time vector that a load reads, one element for each channel, or None."""
        v, rank = node.inputs[e.value], node.out.rank
        vector = v in self.static and v.dtype == "float32" and v.numel == node.out.shape[-1]
        last = expr.index(rank - 1)
        if not vector or e.args.count(last) != 1 or any(i is not last and i.op != "const" for i in e.args):
            return None
        return v.reshape(-1)

    def _product(self, node: Node, e: Expr) -> _Sum | None:
        """Scaled sums of integers."""
        x, factor = e.args
        if x.op != "cast" or x.args[0].op != "load" or factor.op not in ("load", "const"):
            return None
        sums = node.inputs[x.args[0].value]
        if factor.op == "const":  # one scale for all channels
            channel: Value | None = sums.graph.const(np.full(node.out.shape[-1], factor.value), "float32")
        else:
            channel = self._per_channel(node, factor)
        if sums.dtype != "int32" or channel is None or not _is_whole(x.args[0], node, x.args[0].value):
            return None
        return _Sum(sums, channel)
