"""Products and convolutions of dequantised 8-bit operands become products of the integers, which are summed in int32.

With activations ``(q - z) * s`` and weights ``p * t``, where ``t`` has one value for each output channel,

    conv2d((q - z) * s, p * t) = (conv2d(q, p) - z * sum(p)) * (s * t)

exactly, but for the rounding of float32. The factor and ``z * sum(p)`` are load-time values. Where the convolution
pads, ``q`` is padded with ``z`` first. Scaling, bias, activation, residual and quantisation are pointwise, so they
become the epilogue of the integer kernel.

Kernels multiply unsigned activations by signed weights (as x86, Arm and NVIDIA's instructions can): an int8 activation
``q`` is stored as the uint8 ``q + 128``, with the zero point ``z + 128``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import VIEWS, Graph, Node, Value
from ..support import dtypes as dt
from ..target_config import TargetConfig
from .load_time import static_values

UNSIGNED_SHIFT = 128  # from int8 to uint8
MAX_DEPTH = 1 << 15  # products of 8-bit integers whose sum certainly fits in int32


@dataclass(frozen=True)
class Dequantised:
    """A float32 value ``(q - zero) * scale``. ``views`` lead from ``q`` to the dims of the value, in order; scale and
    zero point are constants or values that broadcast to ``q``."""

    q: Value
    scale: Value | float
    zero: Value | int
    views: tuple[Node, ...]

    @property
    def per_tensor(self) -> bool:
        """Whether one scale and zero point hold for all elements."""
        return all(not isinstance(v, Value) or v.numel == 1 for v in (self.scale, self.zero))

    def viewed(self, q: Value) -> Value:
        """Return the elements of ``q``, a value of the same shape, in the dims of the product."""
        for node in self.views:
            attrs = {k: v for k, v in node.attrs.items() if k != "shape"} | {"shape": node.out.shape}
            if node.op == "permute":
                attrs = dict(node.attrs)
            q = q.graph.add(node.op, [q], [(node.out.shape, q.dtype)], **attrs).out
        return q


def integer_products(graph: Graph, config: TargetConfig) -> None:
    """Rewrite the matmuls and convolutions of dequantised operands, and those of int8 activations, if the target has
    kernels for them."""
    if "uint8" not in config.matrix_dtypes:
        return
    _store_unsigned(graph)
    static = static_values(graph)
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op not in ("matmul", "conv2d") or node.out in static:
            continue
        graph.sources = node.sources
        if node.inputs[1] in static:
            out = _of_dequantised(graph, node) or _of_signed(graph, node)
        else:  # packed or transposed in each run, for products of two matrices
            out = _of_signed(graph, node) if node.op == "matmul" and 1 not in node.out.shape else None
        if out is not None:
            new[node.out] = out
    graph.sources = ()
    graph.replace(new)


# -- activations -----------------------------------------------------------------------------------------------------
def _store_unsigned(graph: Graph) -> None:
    """Store quantised int8 activations as uint8: the int8 values are computed from these by their readers."""
    static = static_values(graph)
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        e = node.attrs.get("expr")
        if node.op != "pointwise" or node.out in static or e is None or e.op != "cast" or e.dtype != "int8":
            continue
        if e.args[0].dtype == "float32" and _is_whole(e.args[0]) and node.out.numel > 1:
            graph.sources = node.sources
            unsigned = graph.elementwise(node.out.shape, node.inputs, (e.args[0] + UNSIGNED_SHIFT).cast("uint8"))
            new[node.out] = graph.pointwise(_signed, unsigned, opmath=False)
    graph.sources = ()
    graph.replace(new)


def _is_whole(e: Expr) -> bool:
    """Whether a float expression is certainly a whole number: a shift by another one does not change what a cast to
    integers cuts off."""
    if e.op == "const":
        return bool(e.value == math.floor(e.value)) if math.isfinite(e.value) else False
    if e.op in ("minimum", "maximum", "add", "sub", "neg"):
        return all(map(_is_whole, e.args))
    return e.op in ("round", "floor", "ceil", "trunc") or (e.op == "cast" and not dt.is_float(e.args[0].dtype))


def _signed(x: Expr) -> Expr:
    return (x.cast("int32") - UNSIGNED_SHIFT).cast("int8")


def stored_unsigned(q: Value) -> Value | None:
    """Return the uint8 values that int8 ones are computed from, if :func:`_store_unsigned` made them, else None."""
    if q.op == "pointwise" and len(q.node.inputs) == 1 and q.node.inputs[0].dtype == "uint8":
        load = expr.load(0, "uint8", expr.identity_index(q.shape))
        return q.node.inputs[0] if q.node.attrs["expr"] is _signed(load) else None
    return None


def _unsigned(q: Value) -> Value:
    """Return int8 values plus 128 as uint8: the values that they were computed from, if :func:`_store_unsigned` made
    them."""
    if q.op in VIEWS:
        source = _unsigned(q.node.inputs[0])
        attrs = dict(q.node.attrs)
        return q.graph.add(q.op, [source], [(q.shape, "uint8")], **attrs).out
    if (stored := stored_unsigned(q)) is not None:
        return stored
    return q.graph.pointwise(lambda x: (x.cast("int32") + UNSIGNED_SHIFT).cast("uint8"), q, opmath=False)


# -- recognition -----------------------------------------------------------------------------------------------------
def dequantised(v: Value) -> Dequantised | None:
    """Return the form of a float32 value that is dequantised from 8 bits, else None."""
    views: list[Node] = []
    while v.op in VIEWS:
        views.insert(0, v.node)
        v = v.node.inputs[0]
    if v.op != "pointwise" or v.dtype != "float32":
        return None
    e = v.node.attrs["expr"]
    pairs = ((e.args[0], e.args[1]), (e.args[1], e.args[0])) if e.op == "mul" else ()
    for core, factor in pairs:
        zero: Value | float | None = 0
        if core.op == "sub":
            core, zero = core.args[0], _operand(v.node, core.args[1])
        scale = _operand(v.node, factor)
        if core.op != "cast" or core.args[0].op != "load" or scale is None or zero is None:
            continue
        load = core.args[0]
        q = v.node.inputs[load.value]
        if q.dtype in ("int8", "uint8") and q.shape == v.shape and load.args == expr.identity_index(v.shape):
            if isinstance(zero, Value):
                return Dequantised(q, scale, zero, tuple(views)) if dt.is_int(zero.dtype) else None
            return Dequantised(q, scale, int(zero), tuple(views)) if zero == int(zero) else None
    return None


def _operand(node: Node, e: Expr) -> Value | float | None:
    """Return a scale or zero point: a constant, or an input that broadcasts to the domain; constants of the graph that
    are zero everywhere are the number 0. None for any other expression."""
    if e.op == "const":
        return float(e.value)
    e = e.args[0] if e.op == "cast" else e
    if e.op != "load":
        return None
    v = node.inputs[e.value]
    if e.args != expr.broadcast_index(v.shape, len(node.domain)):
        return None
    data = v.node.attrs["data"] if v.op == "const" else None
    return 0.0 if data is not None and not np.any(data) else v


def _channel_scale(w: Dequantised, axis: int) -> Value | float | None:
    """Return the scales of a weight as a vector, one for each index of dim ``axis`` of the weight, or the only one.
    None if they vary along another dim, or if there are zero points."""
    if isinstance(w.zero, Value) or w.zero != 0 or not isinstance(w.scale, Value):
        return w.scale if not isinstance(w.scale, Value) and w.zero == 0 and not isinstance(w.zero, Value) else None
    if w.scale.numel == 1:
        return w.scale.reshape()
    shape = (1,) * (w.q.rank - w.scale.rank) + w.scale.shape
    dims = [d for d, n in enumerate(shape) if n != 1]
    for node in w.views:
        before, after = ([d for d, n in enumerate(v.shape) if n != 1] for v in (node.inputs[0], node.out))
        if node.op == "permute":
            dims = [node.attrs["perm"].index(d) for d in dims]
        elif node.op == "reshape" and _without_units(node.inputs[0]) == _without_units(node.out):
            dims = [after[before.index(d)] for d in dims]
        else:
            return None
    return w.scale.reshape(-1) if dims == [axis] else None


def _without_units(v: Value) -> list[int]:
    return [n for n in v.shape if n != 1]


# -- rewriting --------------------------------------------------------------------------------------------------------
def _of_dequantised(graph: Graph, node: Node) -> Value | None:
    x, w = map(dequantised, node.inputs)
    channel = 0 if node.op == "conv2d" else node.inputs[1].rank - 1
    if x is None or w is None or not x.per_tensor or w.q.dtype != "int8" or not _fits(node):
        return None
    factor = _channel_scale(w, channel)
    zero = x.zero if isinstance(x.zero, Value) else x.zero + (UNSIGNED_SHIFT if x.q.dtype == "int8" else 0)
    padded = any(node.attrs.get("padding", ()))
    if factor is None or (isinstance(zero, Value) and padded) or not (isinstance(zero, Value) or 0 <= zero <= 255):
        return None
    q, p = x.viewed(x.q if x.q.dtype == "uint8" else _unsigned(x.q)), w.viewed(w.q)
    if isinstance(zero, Value):  # it may have any value, so it is subtracted in float32
        zero = zero.reshape().cast("float32")
        zero = zero + UNSIGNED_SHIFT if x.q.dtype == "int8" else zero
        sums = graph.pointwise(
            lambda a, s, z: a.cast("float32") - s * z,
            _product(graph, node, q, p, 0), _weight_sums(node, p).cast("float32"), zero, promote=False,
        )  # fmt: skip
    else:
        sums = _product(graph, node, q, p, zero)
    scale = x.scale.reshape().cast("float32") if isinstance(x.scale, Value) else x.scale
    both = factor * scale
    return graph.pointwise(lambda a, f: a.cast("float32") * f, sums, both, promote=False)


def _of_signed(graph: Graph, node: Node) -> Value | None:
    """A product of integers as it stands in the model, with int8 on the left."""
    x, w = node.inputs
    if (x.dtype, w.dtype) != ("int8", "int8") or not _fits(node):
        return None
    return _product(graph, node, _unsigned(x), w, UNSIGNED_SHIFT)


def _fits(node: Node) -> bool:
    """Whether there is a kernel for the integer product: no depthwise convolution, whose sums are short."""
    w = node.inputs[1]
    if node.op == "matmul":
        return w.rank == 2 and 0 < w.shape[0] <= MAX_DEPTH
    return w.shape[3] > 1 and math.prod(w.shape[1:]) <= MAX_DEPTH


def _weight_sums(node: Node, p: Value) -> Value:
    """Return the sum of the weights of each output channel, int32 [K]."""
    return p.sum([0] if node.op == "matmul" else [1, 2, 3]).reshape(-1).cast("int32")


def _product(graph: Graph, node: Node, q: Value, p: Value, zero: int) -> Value:
    """Return the sums of ``(q - zero) * p`` in int32."""
    shift = (_weight_sums(node, p) * zero).cast("int32") if zero else None  # first, so that an epilogue can read it
    if node.op == "matmul":
        sums = q.matmul(p)
    else:
        attrs = dict(node.attrs)
        if zero and any(attrs["padding"]):
            q = _pad(q, attrs["padding"], zero)
            attrs["padding"] = (0, 0, 0, 0)
        sums = graph.add("conv2d", [q, p], [(node.out.shape, "int32")], **attrs).out
    if shift is None:
        return sums
    return graph.pointwise(lambda a, s: a - s, sums, shift, promote=False)


def _pad(q: Value, padding: tuple[int, int, int, int], zero: int) -> Value:
    """Return an image [N, H, W, C] with ``zero`` around it."""
    top, left, bottom, right = padding
    n, h, w, c = q.shape
    i, j = expr.index(1) - top, expr.index(2) - left
    inside = (i >= 0) & (i < h) & (j >= 0) & (j < w)
    value = expr.load(0, "uint8", [expr.index(0), i, j, expr.index(3)])
    shape = (n, h + top + bottom, w + left + right, c)
    return q.graph.elementwise(shape, [q], expr.where(inside, value, expr.const(zero, "uint8")))
