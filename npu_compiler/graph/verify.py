"""The invariants of a core graph: every node's shapes and dtypes, derived again from its inputs and attributes.

:mod:`.interp` can evaluate a graph that passes without accesses out of bounds. Graphs from files must pass, and
``NPU_VERIFY`` checks graphs between passes. :data:`ATTRS` lists the attributes of each primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..support import dtypes
from ..weights.format import block_format
from ..weights.packing import TF32, packed_spec
from . import expr, graph
from .expr import Expr
from .graph import SCAN_EXTREMES, SCATTER_MODES, Graph, Node, Value
from .scalar_ops import SCALAR_OPS, takes

MAX_RANK = 32
MAX_BYTES = 2**44
_MAX_PARAMETER = 2**31  # limit of strides, paddings and panel widths: beyond it, products of sizes overflow

# _ATTR_CHECKS defines each kind; serialize.py writes and reads the same kinds.
ATTRS: dict[str, dict[str, str]] = {
    "input": {"name": "text"},
    "weight": {"key": "text"},
    "state": {"key": "text"},
    "const": {"data": "array"},
    "pointwise": {"expr": "expr"},
    "reduce": {"kind": "text", "axes": "ints", "expr": "expr", "domain": "ints"},
    "reshape": {"shape": "ints"},
    "permute": {"perm": "ints"},
    "expand": {"shape": "ints"},
    "slice": {"starts": "ints", "steps": "ints", "shape": "ints"},
    "matmul": {},
    "conv2d": {"stride": "ints", "padding": "ints", "dilation": "ints", "groups": "int"},
    "attention": {"scale": "float", "causal": "bool", "limited": "bool"},
    "concat": {"axis": "int"},
    "scatter": {"idx": "exprs", "mode": "text"},
    "scan": {"kind": "text", "axis": "int"},
    "sort": {"axis": "int", "descending": "bool", "k": "int"},
    "quantize": {"format": "text"},
    "dequantize": {"format": "text", "k": "int", "dtype": "text"},
    "pack": {"panel": "int", "layout": "text"},
}

_ATTR_CHECKS: dict[str, Callable[[Any], bool]] = {
    "text": lambda v: isinstance(v, str),
    "int": lambda v: _is_int(v),
    "ints": lambda v: isinstance(v, tuple | list) and all(map(_is_int, v)),
    "float": lambda v: isinstance(v, float | int | np.floating) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool | np.bool_),
    "expr": lambda v: isinstance(v, Expr),
    "exprs": lambda v: isinstance(v, tuple | list) and all(isinstance(e, Expr) for e in v),
    "array": lambda v: isinstance(v, np.ndarray),
}

Signature = list[tuple[tuple[int, ...], str]]


def check_graph(g: Graph) -> None:
    """Raise ``ValueError`` for the first node that is out of order, malformed or differs from its declared type."""
    made: set[Value] = set()
    for position, node in enumerate(g.nodes):
        where = f"node {position} ({node.op})"
        if not all(v in made for v in node.inputs):
            raise ValueError(f"{where}: an input is not the output of an earlier node")
        try:
            check_node(node)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        made.update(node.outputs)
    for name, v in [*g.outputs, *g.updates]:
        if v not in made:
            raise ValueError(f"output {name!r} is not computed by any node")


def check_node(node: Node) -> None:
    """Raise ``ValueError`` unless the attributes and the output types of ``node`` are those that its op defines."""
    schema = ATTRS.get(node.op)
    if schema is None:
        raise ValueError(f"unknown op {node.op!r}")
    if node.attrs.keys() != schema.keys():
        raise ValueError(f"attributes {sorted(map(str, node.attrs))}, expected {sorted(schema)}")
    for name, kind in schema.items():
        _require(_ATTR_CHECKS[kind](node.attrs[name]), f"attribute {name} is not of kind {kind}")
    for v in node.outputs:
        check_type(v.shape, v.dtype)
    have = [(v.shape, v.dtype) for v in node.outputs]
    if node.op in ("input", "weight", "state"):
        _require(not node.inputs and len(have) == 1, "a leaf has no input and one output")
        return
    want = _SIGNATURES[node.op](node, node.inputs)
    for shape, dtype in want:
        check_type(shape, dtype)
    if have != want:
        raise ValueError(f"declares {_show(have)}, but computes {_show(want)}")


def check_type(shape: Sequence[int], dtype: str) -> None:
    """Raise ``ValueError`` unless a tensor of this type can exist."""
    if not isinstance(dtype, str) or dtype not in dtypes.DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if len(shape) > MAX_RANK or not all(_is_int(n) and n >= 0 for n in shape):
        raise ValueError(f"bad shape {list(shape)}")
    # Empty dims are counted as 1: numpy refuses a shape whose other dims overflow, even if it holds nothing.
    if math.prod(n or 1 for n in shape) * dtypes.DTYPES[dtype].size > MAX_BYTES:
        raise ValueError(f"a {dtype} tensor of shape {list(shape)} is too large")


def _is_int(v: Any) -> bool:
    return type(v) is int or (isinstance(v, int | np.integer) and not isinstance(v, bool))


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _show(types: Signature) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)


def _inputs(inputs: Sequence[Value], count: int) -> None:
    _require(len(inputs) == count, f"{len(inputs)} inputs, expected {count}")


def _axis(axis: int, x: Value) -> None:
    _require(0 <= axis < x.rank, f"axis {axis} of a tensor of rank {x.rank}")


# -- expressions ------------------------------------------------------------------------------------------------------
_COMPUTED = frozenset(("bool", "int", "uint", "float"))


def check_expr(e: Expr, inputs: Sequence[Value], rank: int) -> None:
    """Raise ``ValueError`` unless ``e`` can be evaluated over a domain of ``rank`` dims with operands ``inputs``."""
    for x in expr.walk(e):
        _require(dtypes.DTYPES[x.dtype].kind in _COMPUTED or x.op == "load", f"{x.op} of dtype {x.dtype}")
        if x.op == "const":
            _require(isinstance(x.value, int | float), "a constant is a number")
            if not dtypes.is_float(x.dtype):
                _require(isinstance(x.value, int) and -(2**63) <= x.value < 2**64, f"constant {x.value!r} as {x.dtype}")
        elif x.op == "index":
            _require(x.dtype == "int64" and not x.args and 0 <= x.value < rank, f"index {x.value} of {rank} dims")
        elif x.op == "load":
            _check_load(x, inputs)
        elif x.op in SCALAR_OPS:
            _check_call(x)
        else:
            raise ValueError(f"{x.op} has no meaning outside a kernel")


def _check_load(x: Expr, inputs: Sequence[Value]) -> None:
    _require(_is_int(x.value) and 0 <= x.value < len(inputs), f"load of operand {x.value} of {len(inputs)}")
    v = inputs[x.value]
    _require(x.dtype == v.dtype, f"operand {x.value} is {v.dtype}, loaded as {x.dtype}")
    _require(len(x.args) == v.rank, f"operand {x.value} has {v.rank} dims, loaded with {len(x.args)}")
    _require(all(a.dtype == "int64" for a in x.args), f"an index of operand {x.value} is not int64")


def _check_call(x: Expr) -> None:
    spec = SCALAR_OPS[x.op]
    _require(len(x.args) == spec.arity and x.value is None, f"{x.op} takes {spec.arity} arguments and no value")
    types = [a.dtype for a in x.args]
    if x.op == "cast":
        _require(dtypes.DTYPES[types[0]].kind in _COMPUTED, f"cast from {types[0]}")
        return
    if x.op == "where":
        _require(types.pop(0) == "bool", "the condition of a where is not a bool")
    _require(len(set(types)) == 1, f"{x.op} of mixed dtypes {types}")
    _require(x.dtype == ("bool" if spec.result == "bool" else types[0]), f"{x.op} of {types[0]} gives no {x.dtype}")
    _require(takes(x.op, types[0]), f"{x.op} of {types[0]}")


# -- one function per op: the outputs' types --------------------------------------------------------------------------
def _const(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 0)
    data = node.attrs["data"]
    try:
        return [(data.shape, dtypes.name_of(data.dtype))]
    except TypeError as error:
        raise ValueError(str(error)) from None


def _pointwise(node: Node, inputs: Sequence[Value]) -> Signature:
    _require(len(node.outputs) == 1, "a pointwise node has one output")
    check_expr(node.attrs["expr"], inputs, node.out.rank)
    return [(node.out.shape, node.attrs["expr"].dtype)]


def _reduce(node: Node, inputs: Sequence[Value]) -> Signature:
    kind, axes, domain, e = (node.attrs[k] for k in ("kind", "axes", "domain", "expr"))
    _require(kind in ("sum", "prod", "max", "min", "argmax", "argmin"), f"unknown reduction {kind!r}")
    _require(list(axes) == sorted({*axes}) and all(0 <= a < len(domain) for a in axes), f"axes {list(axes)}")
    check_type(domain, e.dtype)
    check_expr(e, inputs, len(domain))
    empty = any(domain[a] == 0 for a in axes)
    _require(kind in ("sum", "prod") or not empty, f"{kind} over no elements")
    if kind in ("sum", "prod"):
        accumulates = dtypes.opmath(e.dtype) if dtypes.category(e.dtype) >= 2 else "int64"
        _require(e.dtype == accumulates, f"{kind} of {e.dtype} accumulates in {accumulates}")
    shape = tuple(1 if d in axes else n for d, n in enumerate(domain))
    return [(shape, "int64" if kind.startswith("arg") else e.dtype)]


def _reshape(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    shape = tuple(node.attrs["shape"])
    check_type(shape, inputs[0].dtype)
    _require(math.prod(shape) == inputs[0].numel, f"reshape of {list(inputs[0].shape)} to {list(shape)}")
    return [(shape, inputs[0].dtype)]


def _permute(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    perm = node.attrs["perm"]
    _require(sorted(perm) == list(range(inputs[0].rank)), f"perm {list(perm)} of rank {inputs[0].rank}")
    return [(tuple(inputs[0].shape[p] for p in perm), inputs[0].dtype)]


def _expand(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    shape = tuple(node.attrs["shape"])
    fits = len(shape) == inputs[0].rank and all(o in (1, n) for n, o in zip(shape, inputs[0].shape, strict=True))
    _require(fits, f"expand of {list(inputs[0].shape)} to {list(shape)}")
    return [(shape, inputs[0].dtype)]


def _slice(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    x, (starts, steps, shape) = inputs[0], (tuple(node.attrs[k]) for k in ("starts", "steps", "shape"))
    _require(len(starts) == len(steps) == len(shape) == x.rank, "starts, steps and shape need one entry per dim")
    for size, start, step, n in zip(x.shape, starts, steps, shape, strict=True):
        inside = n == 0 or start + (n - 1) * step < size
        _require(start >= 0 and step > 0 and n >= 0 and inside, f"slice outside of {list(x.shape)}")
    return [(shape, x.dtype)]


def _matmul(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 2)
    a, b = inputs
    _require(dtypes.multiply(a.dtype, b.dtype) and a.rank >= 2 and b.rank >= 2, f"matmul of {_types(inputs)}")
    _require(a.shape[-1] == b.shape[-2], f"matmul of {_types(inputs)}")
    batch = graph.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return [((*batch, a.shape[-2], b.shape[-1]), dtypes.accumulator(a.dtype))]


def _types(inputs: Sequence[Value]) -> str:
    return _show([(v.shape, v.dtype) for v in inputs])


def _conv2d(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 2)
    (x, w), a = inputs, node.attrs
    stride, padding, dilation, groups = a["stride"], a["padding"], a["dilation"], a["groups"]
    _require(x.rank == 4 and w.rank == 4 and dtypes.multiply(x.dtype, w.dtype), f"conv2d of {_types(inputs)}")
    _require((len(stride), len(padding), len(dilation)) == (2, 4, 2), "conv2d has 2 strides, 4 paddings, 2 dilations")
    _require(all(0 < n < _MAX_PARAMETER for n in (*stride, *dilation, groups)), "strides, dilations, groups are >= 1")
    _require(all(0 <= n < _MAX_PARAMETER for n in padding), "paddings are not negative")
    n, h, wd, c = x.shape
    k, r, s, cg = w.shape
    _require(c == cg * groups and k % groups == 0, f"conv2d of {_types(inputs)} in {groups} groups")
    top, left, bottom, right = padding
    check_type((n, h + top + bottom, wd + left + right, c), x.dtype)
    oh = (h + top + bottom - dilation[0] * (r - 1) - 1) // stride[0] + 1
    ow = (wd + left + right - dilation[1] * (s - 1) - 1) // stride[1] + 1
    _require(oh >= 0 and ow >= 0 and r and s, f"conv2d of {_types(inputs)}: the kernel is larger than the padded input")
    return [((n, oh, ow, k), dtypes.accumulator(x.dtype))]


def _attention(node: Node, inputs: Sequence[Value]) -> Signature:
    limited = node.attrs["limited"]
    fits = len(inputs) == 5 if limited else len(inputs) in (3, 4)
    _require(fits and all(v.rank == 4 for v in inputs[:3]), f"attention of {_types(inputs)}")
    q, k, v = inputs[:3]
    if limited:
        _require((inputs[4].shape, inputs[4].dtype) == ((q.shape[2],), "int64"), f"key limits of {_types(inputs)}")
    _require(q.dtype == k.dtype == v.dtype and dtypes.is_float(q.dtype), f"attention of {_types(inputs)}")
    heads_fit = k.shape[1] and q.shape[1] % k.shape[1] == 0 and k.shape[:3] == v.shape[:3]
    _require(heads_fit and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3], f"attention of {_types(inputs)}")
    scores = (*q.shape[:3], k.shape[2])
    check_type(scores, dtypes.opmath(q.dtype))
    if len(inputs) > 3:
        mask = inputs[3]
        fits = graph.broadcast_shapes(mask.shape, scores) == scores
        _require(fits, f"a mask of {list(mask.shape)} for {list(scores)}")
        _require(mask.dtype == "bool" or dtypes.is_float(mask.dtype), f"a mask of dtype {mask.dtype}")
    return [((*q.shape[:3], v.shape[3]), q.dtype)]


def _concat(node: Node, inputs: Sequence[Value]) -> Signature:
    _require(inputs, "concat of nothing")
    first, axis = inputs[0], node.attrs["axis"]
    _axis(axis, first)
    shape = list(first.shape)
    shape[axis] = sum(x.shape[axis] for x in inputs if x.rank == first.rank)
    for x in inputs:
        fits = x.rank == first.rank and x.dtype == first.dtype
        fits = fits and all(n == m for d, (n, m) in enumerate(zip(x.shape, first.shape, strict=True)) if d != axis)
        _require(fits, f"concat of {_types([first, x])} along {axis}")
    return [(tuple(shape), first.dtype)]


def _scatter(node: Node, inputs: Sequence[Value]) -> Signature:
    _require(len(inputs) >= 2, "scatter needs a base and a source")
    base, src, idx = inputs[0], inputs[1], node.attrs["idx"]
    _require(node.attrs["mode"] in SCATTER_MODES, f"unknown mode {node.attrs['mode']!r}")
    _require(base.dtype == src.dtype and len(idx) == base.rank, f"scatter of {_types(inputs)} with {len(idx)} indices")
    for e in idx:
        check_expr(e, inputs[2:], src.rank)
        _require(e.dtype == "int64", f"a scatter index of dtype {e.dtype}")
    return [(base.shape, base.dtype)]


def _scan(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    _axis(node.attrs["axis"], inputs[0])
    kind, x = node.attrs["kind"], inputs[0]
    _require(kind in ("sum", "prod", "max", "min", "logaddexp", *SCAN_EXTREMES), f"unknown scan {kind!r}")
    return [(x.shape, x.dtype), (x.shape, "int64")] if kind in SCAN_EXTREMES else [(x.shape, x.dtype)]


def _sort(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    axis, k, shape = node.attrs["axis"], node.attrs["k"], list(inputs[0].shape)
    _axis(axis, inputs[0])
    _require(0 <= k <= shape[axis], f"the first {k} of {shape[axis]}")
    shape[axis] = k
    return [(tuple(shape), inputs[0].dtype), (tuple(shape), "int64")]


def _quantize(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    w, format = inputs[0], block_format(node.attrs["format"])
    row_bytes = format.row_bytes(w.shape[1]) if w.rank == 2 and dtypes.is_float(w.dtype) else None
    _require(row_bytes is not None, f"{_types(inputs)} cannot be stored as {format.name}")
    return [((w.shape[0], row_bytes or 0), "uint8")]


def _dequantize(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    blocks, format, k, dtype = inputs[0], block_format(node.attrs["format"]), node.attrs["k"], node.attrs["dtype"]
    fits = blocks.rank == 2 and blocks.dtype == "uint8" and 0 < k < _MAX_PARAMETER and dtype in format.dtypes
    _require(fits and format.row_bytes(k) == blocks.shape[1], f"{_types(inputs)} are not rows of {k} in {format.name}")
    return [((blocks.shape[0], k), dtype)]


def _pack(node: Node, inputs: Sequence[Value]) -> Signature:
    _inputs(inputs, 1)
    panel, layout, w = node.attrs["panel"], node.attrs["layout"], inputs[0]
    _require(w.rank == 4 or layout == TF32, f"pack of {_types(inputs)}, which needs four dims")
    _require(0 < panel < _MAX_PARAMETER, f"pack of {_types(inputs)} in panels of {panel}")
    return [packed_spec(layout, w.shape, w.dtype, panel)]


_SIGNATURES: dict[str, Callable[[Node, Sequence[Value]], Signature]] = {
    "const": _const,
    "pointwise": _pointwise,
    "reduce": _reduce,
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "attention": _attention,
    "concat": _concat,
    "scatter": _scatter,
    "scan": _scan,
    "sort": _sort,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "pack": _pack,
}
