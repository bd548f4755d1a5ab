"""Runs a planned :class:`Schedule` in numpy, kernel by kernel, on one arena of bytes: no C++ involved.

Memory that nothing has written yet holds 0xFF (NaN as a float), every window is checked against its buffer, and a
kernel that reads what it writes must do so at the same place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from npu_compiler.graph import expr, interp
from npu_compiler.graph.expr import Expr
from npu_compiler.graph.graph import Graph
from npu_compiler.pipeline import State
from npu_compiler.schedule.kernel import (
    Anchor,
    Attention,
    Buffer,
    Contraction,
    Convolution,
    DepthwiseConv2d,
    DualConv2d,
    FusedLoops,
    Gemm,
    Kernel,
    Loops,
    Operand,
    Pack,
    WinogradConv2d,
)
from npu_compiler.support import dtypes
from npu_compiler.targets.cpu.winograd import filter_transform
from npu_compiler.weights import packing

from .cpu_harness import expected, view

Arrays = dict[int, np.ndarray]


def run(
    state: State, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Outputs and ``state:<key>`` updates of a program compiled up to phase ``memory``, as ``interp.run`` gives
    them."""
    schedule = state.schedule
    assert schedule is not None
    weights = weights or {}
    recipes = Graph("recipes")
    recipes.nodes, recipes.outputs = state.graph.nodes, state.recipes
    recipes.clean()
    recipes.nodes = [n for n in recipes.nodes if n.op not in ("input", "state")]
    made = interp.run(recipes, {}, weights)
    arena = np.full(schedule.arena_bytes, 0xFF, np.uint8)
    arrays = {b.id: _memory(b, arena, inputs, weights, made) for b in schedule.buffers}
    for _, phase in itertools.groupby(schedule.kernels, lambda k: k.phase):
        for kernel in reversed(list(phase)):  # any order must do
            execute(kernel, arrays)
    results = {name: arrays[b.id].reshape(b.shape) for name, b in schedule.outputs}
    results.update({f"state:{b.name}": arrays[b.id].reshape(b.shape) for b in schedule.buffers if b.kind == "state"})
    return results


def _memory(b: Buffer, arena: np.ndarray, inputs: Mapping, weights: Mapping, made: Mapping) -> np.ndarray:
    dtype = dtypes.numpy_dtype(b.dtype)
    if b.kind == "arena":
        return arena[b.offset : b.offset + b.nbytes].view(dtype)
    if b.kind == "output":
        return np.full(b.nbytes, 0xFF, np.uint8).view(dtype)
    source = {"input": inputs, "state": weights}.get(b.kind, made)[b.name]
    assert source.shape == b.shape and source.dtype == dtype, (b, source.shape, source.dtype)
    return np.array(source, order="C").reshape(-1)


def execute(kernel: Kernel, arrays: Arrays) -> None:
    """One kernel on flat arrays by buffer id."""
    if isinstance(kernel, FusedLoops):
        for part in reversed(kernel.parts):  # any order must do
            execute(part, arrays)
        return
    for op in (*kernel.inputs, *kernel.outputs):
        last = op.offset + sum((n - 1) * s for n, s in zip(op.shape, op.strides, strict=True))
        assert 0 in op.shape or (op.offset >= 0 and 0 <= last < math.prod(op.buffer.shape)), (kernel.name, op)
    for out in kernel.outputs:
        for x in kernel.inputs:
            shared = x.buffer.id == out.buffer.id and np.shares_memory(view(x, arrays), view(out, arrays))
            assert not shared or isinstance(kernel, Loops), f"{kernel.name} overwrites its input"
    if isinstance(kernel, Loops) and kernel.body.serial:
        _one_by_one(kernel, arrays)
    elif isinstance(kernel, Anchor):
        _anchor(kernel, arrays)
    elif isinstance(kernel, Pack):
        view(kernel.outputs[0], arrays)[...] = _pack(kernel, view(kernel.inputs[0], arrays))
    else:
        expected(kernel, arrays)


def _one_by_one(kernel: Loops, arrays: Arrays) -> None:
    body = kernel.body
    assert len(body.stages) == 1
    store, out = body.stages[0], view(kernel.outputs[0], arrays)
    for point in np.ndindex(*body.domain):
        at = {d: expr.const(i, "int64") for d, i in enumerate(point)}
        inputs = [view(o, arrays) for o in kernel.inputs]
        where = tuple(int(expr.evaluate(expr.substitute(i, at), (), inputs)) for i in store.index)
        out[where] = expr.evaluate(expr.substitute(store.expr, at), (), inputs)


def _anchor(kernel: Anchor, arrays: Arrays) -> None:
    inputs = [view(o, arrays) for o in kernel.inputs]
    target = view(kernel.outputs[0], arrays)
    products = _products(kernel, inputs, arrays)
    accs = [x for x in expr.walk(kernel.epilogue) if x.op == "acc"]
    if isinstance(kernel, Contraction) and kernel.row_scale is not None:
        products = tuple(x * _row_factors(kernel.row_scale, inputs)[:, None] for x in products)
    extra = {x: products[x.value].reshape(target.shape).astype(dtypes.numpy_dtype(x.dtype)) for x in accs}
    if isinstance(kernel, Contraction):
        _store_more(kernel, inputs, extra, arrays)
    target[...] = expr.evaluate(kernel.epilogue, target.shape, inputs, extra).reshape(target.shape)


def _products(kernel: Anchor, inputs: list[np.ndarray], arrays: Arrays) -> tuple[np.ndarray, ...]:
    """What ``acc``, ``acc1`` .. of the epilogue are."""
    match kernel:
        case Gemm(prologue=Loops() as prologue):
            left = _result_of(prologue, arrays).reshape(1, kernel.m, kernel.k)
            return _gemm(kernel, left, inputs[kernel.rhs])
        case Gemm():
            _check_rows(kernel)
            return _gemm(kernel, inputs[0], inputs[1])
        case DualConv2d():
            return _conv2d(kernel, inputs), _result_of(kernel.residual, arrays)
        case WinogradConv2d():
            return (_winograd(kernel, inputs),)
        case Convolution():
            return (_conv2d(kernel, inputs),)
        case Attention():
            return (_attention(kernel, inputs),)
    raise NotImplementedError(f"{kernel.kind} kernels are not interpreted")


def _row_factors(scale: Expr, inputs: list[np.ndarray]) -> np.ndarray:
    """Of the sums that the product before left, float32 [M]."""
    total = inputs[-1].sum(0)
    return expr.evaluate(scale, total.shape, inputs, {expr.stage(0, "float32"): total})


def _store_more(kernel: Contraction, inputs: list[np.ndarray], extra: dict[Expr, np.ndarray], arrays: Arrays) -> None:
    """A second result, and the sums of each row over tiles of columns."""
    shape = kernel.outputs[0].shape
    for stage in kernel.extra_stages:
        value = np.broadcast_to(expr.evaluate(stage.expr, shape, inputs, extra), shape)
        if stage.kind == "store":
            view(kernel.outputs[stage.output], arrays)[...] = value
        else:
            sums = view(kernel.outputs[-1], arrays)
            tiles = np.array_split(value.reshape(-1, shape[-1]), len(sums), axis=1)
            sums[...] = [tile.sum(1) for tile in tiles]


def _result_of(kernel: Kernel, arrays: Arrays) -> np.ndarray:
    """What a nested kernel stores in memory of its own."""
    scratch = kernel.outputs[0].buffer
    made = np.full(scratch.nbytes, 0xFF, np.uint8).view(dtypes.numpy_dtype(scratch.dtype))
    execute(kernel, {**arrays, scratch.id: made})
    return made


def _unpacked(w: np.ndarray, op: Operand, lead: int) -> np.ndarray:
    """Packed panels [..., panels, C, panel] (or [.., C/2, panel, 2]) as [..., C, K], with ``lead`` leading dims."""
    if w.ndim == lead + 4:
        w = w.swapaxes(-1, -2)
        w = w.reshape(*w.shape[:-3], w.shape[-3] * 2, w.shape[-1])
    w = np.moveaxis(w, lead, -2)
    return w.reshape(*w.shape[:-2], w.shape[-2] * w.shape[-1])


def _check_rows(k: Gemm) -> None:
    op = k.inputs[0]
    assert op.shape == (k.batch, k.m, k.k) and (k.k == 1 or op.strides[2] == 1)
    assert k.m == 1 or op.strides[1] == k.lda > 0, "the micro-kernel steps lda elements from row to row"


def _gemm(k: Gemm, left: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
    """The product, or both of a dual one, whose panels alternate."""
    op = k.inputs[k.rhs]
    if w.ndim == 3:  # not packed: [batch or 1, N, K], columns of a dual product in turns
        left, w = left.astype(np.float32), w.astype(np.float32).swapaxes(1, 2)
        return (left @ w[..., 0::2], left @ w[..., 1::2]) if k.dual else (left @ w,)
    w = w[:, :, 0] if w.ndim - (op.dtype == "bfloat16") == 5 else w  # one tap
    w = _unpacked(w, op, 1).astype(np.float32)
    assert w.shape[0] == (1 if k.shared else k.batch)
    x = left.astype(np.float32)
    if k.dual:
        panels = w[:, : k.k].reshape(w.shape[0], k.k, -1, 2, op.shape[-1 - (op.dtype == "bfloat16")])
        return tuple(x @ panels[:, :, :, i].reshape(w.shape[0], k.k, k.n) for i in (0, 1))
    return (x @ w[:, : k.k, : k.n],)


def _conv2d(k: Convolution, inputs: list[np.ndarray]) -> np.ndarray:
    (r, s), (c, ko) = k.kernel_size, k.channels
    assert k.inputs[0].contiguous and k.inputs[0].shape[3] == c
    if isinstance(k, DepthwiseConv2d):
        w = inputs[1].transpose(2, 0, 1)[..., None]
    elif inputs[1].ndim == 4:  # not packed
        w = inputs[1].reshape(ko, r, s, -1)
    else:
        g = k.groups
        w = np.moveaxis(inputs[1], 1, 2)  # [G, T, panels, C, panel]
        if w.ndim == 6:
            w = w.swapaxes(-1, -2)
            w = w.reshape(*w.shape[:3], -1, w.shape[-1])
        w = w.transpose(0, 2, 4, 1, 3).reshape(g, -1, r, s, w.shape[3])[:, : ko // g, ..., : c // g]
        w = w.reshape(ko, r, s, c // g)
    graph = Graph("conv2d")
    x = graph.input("x", inputs[0].shape, k.inputs[0].dtype)
    y = graph.conv2d(x, graph.input("w", w.shape, x.dtype), k.stride, k.padding, k.dilation, k.groups)
    return interp.evaluate_node(y.node, [inputs[0], w])[0]


def _winograd(k: WinogradConv2d, inputs: list[np.ndarray]) -> np.ndarray:
    """The filters are found again from their transforms U = G w G^T, G being of full rank."""
    tile, (c, ko) = k.tile, k.channels
    g = filter_transform(tile)
    u = _unpacked(np.moveaxis(inputs[1][0], 1, 0), k.inputs[1], 1)[:, :c, :ko]  # [points, C, K]
    w = np.linalg.pinv(np.kron(g, g)) @ u.reshape((tile + 2) ** 2, -1).astype(np.float64)
    graph = Graph("winograd")
    x = graph.input("x", inputs[0].shape, "float64")
    weight = w.reshape(3, 3, c, ko).transpose(3, 0, 1, 2)
    y = graph.conv2d(x, graph.input("w", weight.shape, "float64"), (1, 1), k.padding, (1, 1), 1)
    return interp.evaluate_node(y.node, [inputs[0].astype(np.float64), weight])[0]


def _attention(k: Attention, inputs: list[np.ndarray]) -> np.ndarray:
    graph = Graph("attention")
    for op in k.inputs[:3]:
        assert op.shape[-1] == 1 or op.strides[-1] == 1, "rows of q, k and v are dense"
    values = [graph.input(str(i), op.shape, op.dtype) for i, op in enumerate(k.inputs)]
    y = graph.attention(*values[:3], values[3] if len(values) > 3 else None, k.scale, k.causal)
    return interp.evaluate_node(y.node, inputs)[0]


def _pack(k: Pack, b: np.ndarray) -> np.ndarray:
    shape = k.outputs[0].shape
    layout = "vnni2" if len(shape) == 5 else "panels"
    made = packing.pack(b.transpose(0, 2, 1)[:, :, None, :], shape[3 if layout == "vnni2" else -1], layout)
    return made.reshape(shape)
