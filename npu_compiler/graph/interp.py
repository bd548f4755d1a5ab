"""The core graph in numpy: the reference semantics of every primitive.

Constant folding, weight recipes and the tests of rewrites all use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..support import dtypes
from ..weights import packing
from ..weights.format import block_format
from . import expr
from .expr_interp import evaluate, most_held
from .graph import LEAVES, SCAN_EXTREMES, Graph, Node, Value
from .scalar_ops import EXPENSIVE, SCALAR_OPS

Arrays = list[np.ndarray]


def run(
    graph: Graph, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Return the outputs by name, and state updates as ``state:<key>``.

    ``inputs`` by name; ``weights`` by state_dict key, with the contents of states before the run. Raises ``IndexError``
    for an index out of range in the data.
    """
    held: dict[Value, np.ndarray] = {}
    weights = weights or {}
    for node in graph.nodes:
        if node.op == "input":
            held[node.out] = np.asarray(inputs[node.attrs["name"]])
        elif node.op in ("weight", "state"):
            held[node.out] = np.asarray(weights[node.attrs["key"]])
        else:
            for v, arr in zip(node.outputs, evaluate_node(node, [held[v] for v in node.inputs]), strict=True):
                assert arr.shape == v.shape, (node, arr.shape)
                held[v] = arr
    results = {name: held[v] for name, v in graph.outputs}
    results.update({f"state:{key}": held[v] for key, v in graph.updates})
    return results


def evaluate_node(node: Node, args: Arrays) -> Arrays:
    """Return the results of one primitive for ``args``, in the dtypes that the node declares."""
    outs = _EVAL[node.op](node, args)
    outs = outs if isinstance(outs, list) else [outs]
    return [np.asarray(a, dtype=dtypes.numpy_dtype(v.dtype)) for a, v in zip(outs, node.outputs, strict=True)]


class Cost(NamedTuple):
    """The cost of evaluating a node: bytes of memory beside its inputs, and operations of about a nanosecond each."""

    bytes: int
    operations: int


_PRODUCTS = 16  # multiplications of a matrix product that take as long as one other operation


def cost(node: Node) -> Cost:
    """Return an upper estimate of the cost, from shapes alone."""
    made = sum(v.numel * dtypes.DTYPES[v.dtype].size for v in node.outputs)
    size = sum(v.numel for v in node.outputs)
    if node.op in LEAVES:
        return Cost(made, 0)
    if node.op in ("pointwise", "reduce"):
        e, points = node.attrs["expr"], math.prod(node.domain)
        steps = sum(16 if x.op in EXPENSIVE else 1 for x in expr.walk(e))
        return Cost(made + 8 * points * most_held(e), steps * points)
    read = sum(v.numel for v in node.inputs)
    if node.op == "matmul":
        products = size * node.inputs[0].shape[-1]
        return Cost(made + 4 * read, size + read + products // (_PRODUCTS if dtypes.is_float(node.out.dtype) else 1))
    if node.op == "conv2d":
        (n, h, w, c), (t, le, b, ri) = node.inputs[0].shape, node.attrs["padding"]
        padded, taps = n * (h + t + b) * (w + le + ri) * c, math.prod(node.inputs[1].shape[1:])
        return Cost(2 * made + 4 * (read + padded), padded + read + size * taps // _PRODUCTS)
    if node.op == "attention":
        (n, heads, q, d), keys = node.inputs[0].shape, node.inputs[1].shape[2]
        scores = n * heads * q * keys
        return Cost(made + 16 * scores + 4 * read * heads, scores * (16 + 2 * d // _PRODUCTS) + read)
    if node.op == "scatter":
        points = node.inputs[1].numel
        steps = sum(len(expr.walk(e)) for e in node.attrs["idx"])
        return Cost(made + 8 * points * (len(node.attrs["idx"]) + 2), read + steps * points)
    if node.op == "sort":
        return Cost(2 * made + 24 * read, read * 16)
    return Cost(made, 32 * read if node.op in ("pack", "quantize", "dequantize") else size + read)


def _pointwise(node: Node, args: Arrays) -> np.ndarray:
    return evaluate(node.attrs["expr"], node.out.shape, args)


REDUCERS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, axis: np.sum(x, axis=axis, keepdims=True),
    "prod": lambda x, axis: np.prod(x, axis=axis, keepdims=True),
    "max": lambda x, axis: np.max(x, axis=axis, keepdims=True),
    "min": lambda x, axis: np.min(x, axis=axis, keepdims=True),
}


def _reduce(node: Node, args: Arrays) -> np.ndarray:
    kind, axes, domain = node.attrs["kind"], node.attrs["axes"], node.attrs["domain"]
    x = evaluate(node.attrs["expr"], domain, args)
    if kind in ("argmax", "argmin"):  # first extreme in row-major order of the reduced axes
        keep = [d for d in range(len(domain)) if d not in axes]
        flat = x.transpose(*keep, *axes).reshape(*(domain[d] for d in keep), math.prod(domain[d] for d in axes))
        pick = np.argmax if kind == "argmax" else np.argmin
        return pick(flat, axis=-1).reshape(node.out.shape)
    return REDUCERS[kind](x, tuple(axes))


def _slice(node: Node, args: Arrays) -> np.ndarray:
    a = node.attrs
    return args[0][
        tuple(
            slice(s, s + (n - 1) * st + 1 if n else s, st)
            for s, st, n in zip(a["starts"], a["steps"], a["shape"], strict=True)
        )
    ]


def _matmul(node: Node, args: Arrays) -> np.ndarray:
    wide = dtypes.numpy_dtype(node.out.dtype)
    return np.matmul(args[0].astype(wide), args[1].astype(wide))


def _conv2d(node: Node, args: Arrays) -> np.ndarray:
    a = node.attrs
    wide = dtypes.numpy_dtype(node.out.dtype)
    x, w = args[0].astype(wide), args[1].astype(wide)
    (t, le, b, ri), (sh, sw), (dh, dw), groups = a["padding"], a["stride"], a["dilation"], a["groups"]
    x = np.pad(x, ((0, 0), (t, b), (le, ri), (0, 0)))
    k, r, s, cg = w.shape
    _, oh, ow, _ = node.out.shape
    out = np.zeros(node.out.shape, wide)
    for g in range(groups):
        ks, cs = slice(g * k // groups, (g + 1) * k // groups), slice(g * cg, (g + 1) * cg)
        for i in range(r):
            for j in range(s):
                patch = x[:, i * dh : i * dh + (oh - 1) * sh + 1 : sh, j * dw : j * dw + (ow - 1) * sw + 1 : sw, cs]
                out[..., ks] += patch @ w[ks, i, j].T
    return out


def _attention(node: Node, args: Arrays) -> np.ndarray:
    wide = dtypes.numpy_dtype(dtypes.opmath(node.out.dtype))
    q, k, v = (x.astype(wide) for x in args[:3])
    rep = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, rep, axis=1), np.repeat(v, rep, axis=1)
    s = q @ k.swapaxes(-1, -2) * wide.type(node.attrs["scale"])
    if node.attrs["causal"]:
        s = np.where(np.tri(s.shape[-2], s.shape[-1], dtype=bool), s, -np.inf)
    if len(args) > 3:
        s = np.where(args[3], s, -np.inf) if args[3].dtype == bool else s + args[3].astype(wide)
    with np.errstate(invalid="ignore"):
        top = s.max(-1, keepdims=True, initial=-np.inf)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        return np.where(total > 0, e / np.where(total == 0, 1, total), np.where(np.isnan(total), np.nan, 0)) @ v


def _scatter(node: Node, args: Arrays) -> np.ndarray:
    base, src, index = args[0].copy(), args[1], args[2:]
    idx = tuple(evaluate(e, src.shape, index) for e in node.attrs["idx"])
    for d, i in enumerate(idx):
        if i.size and (i.min() < 0 or i.max() >= base.shape[d]):
            raise IndexError(f"index out of range along dim {d} of {list(base.shape)}")
    if node.attrs["mode"] == "set":
        base[idx] = src
    else:
        combine: Any = SCALAR_OPS[node.attrs["mode"]].numpy  # a ufunc
        combine.at(base, idx, src)
    return base


# The kinds of scans: logaddexp(a, b) is log(exp(a) + exp(b)).
SCANS: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "logaddexp": np.logaddexp
}  # fmt: skip


def _scan(node: Node, args: Arrays) -> Any:
    if node.attrs["kind"] in SCAN_EXTREMES:
        return scan_extreme(node.attrs["kind"], args[0], node.attrs["axis"])
    wide = dtypes.numpy_dtype(dtypes.opmath(node.outputs[0].dtype))
    return SCANS[node.attrs["kind"]].accumulate(args[0], axis=node.attrs["axis"], dtype=wide)


def scan_extreme(kind: str, x: np.ndarray, axis: int) -> Arrays:
    """Return the running extreme of ``x`` along ``axis``, and the int64 position of its last occurrence so far."""
    values = SCANS[SCAN_EXTREMES[kind]].accumulate(x, axis=axis, dtype=x.dtype)
    here = (x == values) | (x != x)
    positions = np.arange(x.shape[axis]).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    return [values, np.maximum.accumulate(np.where(here, positions, 0), axis=axis)]


def _sort(node: Node, args: Arrays) -> Arrays:
    x, axis = args[0], node.attrs["axis"]
    if x.dtype == dtypes.numpy_dtype("bfloat16"):  # ml_dtypes' argsort does not order NaN
        x = x.astype(np.float32)
    if node.attrs["descending"]:  # stable: reverse, sort ascending, reverse back; NaN counts as largest
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    order = np.take(order, range(node.attrs["k"]), axis=axis)
    return [np.take_along_axis(x, order, axis), order]


_EVAL: dict[str, Callable[[Node, Arrays], Any]] = {
    "const": lambda n, a: n.attrs["data"],
    "pointwise": _pointwise,
    "reduce": _reduce,
    "reshape": lambda n, a: a[0].reshape(n.attrs["shape"]),
    "permute": lambda n, a: a[0].transpose(n.attrs["perm"]),
    "expand": lambda n, a: np.broadcast_to(a[0], n.attrs["shape"]),
    "slice": _slice,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "attention": _attention,
    "concat": lambda n, a: np.concatenate(a, axis=n.attrs["axis"]),
    "scatter": _scatter,
    "scan": _scan,
    "sort": _sort,
    "quantize": lambda n, a: block_format(n.attrs["format"]).encode(a[0]),
    "dequantize": lambda n, a: block_format(n.attrs["format"]).decode(a[0], n.attrs["k"]),
    "pack": lambda n, a: packing.pack(a[0], n.attrs["panel"], n.attrs["layout"]),
}
