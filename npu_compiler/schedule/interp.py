"""Runs a :class:`Schedule` in numpy, kernel by kernel: the reference semantics of kernels.

Memory that no kernel has written holds 0xFF (NaN as a float). Every window is checked against its buffer, and a kernel
that reads a buffer that it writes must do so at the same index. ``NPU_VERIFY=2`` compares the schedule before and after
each rewrite. Tests compare planned schedules, whose buffers share one arena, with the graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..graph import expr, interp
from ..graph.expr import Expr
from ..graph.expr_interp import evaluate
from ..graph.graph import SCAN_EXTREMES, Graph, Node, Value
from ..support import dtypes
from ..weights.packing import unpack_matrix
from .anchors import (
    Anchor,
    Attention,
    B2bConv2d,
    CombineAttention,
    Contraction,
    Conv2d,
    Convolution,
    DecodeAttention,
    DualConv2d,
    Gemm,
    GemmWithLoops,
    PooledConv2d,
    WinogradConv2d,
)
from .interp_attention import attend, attention, attention_parts, combine, decoded, up_to
from .interp_contractions import check_rows, conv2d, conv2d_parts, gemm, pack, winograd
from .interp_scatter import scatter_result, scatter_updates
from .kernel import (
    Buffer,
    FusedLoops,
    Kernel,
    Loops,
    MergeRuns,
    Operand,
    Pack,
    Scan,
    ScanTotals,
    ScatterResult,
    ScatterUpdates,
    Sort,
    Unpack,
)
from .schedule import Schedule

Array = np.ndarray[Any, Any]
Arrays = dict[int, Array]  # flat, by buffer id


def load_time_values(
    nodes: Sequence[Node], recipes: Sequence[tuple[str, Value]], weights: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the contents of weight buffers by name, computed from ``weights`` by key. ``nodes`` contain the nodes of
    ``recipes`` in order."""
    graph = Graph("recipes")
    graph.nodes, graph.outputs = list(nodes), list(recipes)
    graph.clean()
    graph.nodes = [n for n in graph.nodes if n.op not in ("input", "state")]
    return interp.run(graph, {}, weights)


def run(
    schedule: Schedule, inputs: Mapping[str, Array], states: Mapping[str, Array], weights: Mapping[str, Array]
) -> dict[str, Array]:
    """Return outputs and ``state:<key>`` updates by name, as ``interp.run`` does for the graph.

    Args:
        schedule: if its memory is not planned yet, every buffer of the arena is an array of its own.
        inputs, states: contents of input and state buffers by name.
        weights: contents of weight buffers by name, see :func:`load_time_values`.

    Raises:
        IndexError: an index in the data is out of range.
        NotImplementedError: this module does not know a kernel's class.
        ValueError: a window leaves its buffer, or a kernel overwrites its input.
    """
    arena = np.full(schedule.arena_bytes, 0xFF, np.uint8)
    contents = {"input": inputs, "state": states, "weight": weights, "const": weights}
    arrays: Arrays = {}
    for b in schedule.buffers:
        if b.kind in contents:
            arrays[b.id] = _copied(b, contents[b.kind][b.name])
        elif b.kind == "arena" and schedule.arena_bytes and not b.persistent:
            arrays[b.id] = arena[b.offset : b.offset + b.nbytes].view(dtypes.numpy_dtype(b.dtype))
        else:
            arrays[b.id] = _unwritten(b)
    for _, group in itertools.groupby(schedule.kernels, lambda k: k.barrier_group if schedule.arena_bytes else k):
        for kernel in reversed(list(group)):  # kernels of a group may run in any order
            execute(kernel, arrays)
    results = {name: arrays[b.id].reshape(b.shape) for name, b in schedule.outputs}
    results.update({f"state:{b.name}": arrays[b.id].reshape(b.shape) for b in schedule.buffers if b.kind == "state"})
    return results


def _copied(b: Buffer, source: Array) -> Array:
    if source.shape != b.shape or source.dtype != dtypes.numpy_dtype(b.dtype):
        raise ValueError(f"{b} is given {source.dtype}{list(source.shape)}")
    return np.array(source, order="C").reshape(-1)


def _unwritten(b: Buffer) -> Array:
    return np.full(b.nbytes, 0 if b.persistent else 0xFF, np.uint8).view(dtypes.numpy_dtype(b.dtype))


def view(op: Operand, arrays: Arrays) -> Array:
    """Return the window ``op`` of its buffer's array; writes to it change the buffer."""
    base = arrays[op.buffer.id][op.offset :]
    return np.lib.stride_tricks.as_strided(base, op.shape, [s * base.itemsize for s in op.strides])


def execute(kernel: Kernel, arrays: Arrays) -> None:
    """Run one kernel on flat arrays by buffer id."""
    _check_windows(kernel, arrays)
    match kernel:
        case FusedLoops():
            for part in reversed(kernel.parts):  # parts may run in any order
                execute(part, arrays)
        case Loops():
            _loops(kernel, arrays)
        case DecodeAttention():
            _decode_attention(kernel, arrays)
        case B2bConv2d():
            execute(kernel.first, arrays)
            execute(kernel.second, arrays)
        case PooledConv2d():
            execute(kernel.pool, {**arrays, kernel.pool.inputs[0].buffer.id: _result_of(kernel.conv, arrays)})
        case GemmWithLoops():
            made = {kernel.product.outputs[0].buffer.id: _result_of(kernel.product, arrays)}
            for consumer in reversed(kernel.consumers):  # they may run in any order
                execute(consumer, {**arrays, **made})
        case Anchor():
            _anchor(kernel, arrays)
        case Pack():
            _store(kernel, arrays, [pack(kernel, view(kernel.inputs[0], arrays))])
        case Unpack():
            packed = view(kernel.inputs[0], arrays)
            _store(kernel, arrays, [unpack_matrix(packed, kernel.inputs[0].format, kernel.n, kernel.k)])
        case Scan():
            _store(kernel, arrays, _scan(kernel, [view(o, arrays) for o in kernel.inputs]))
        case ScanTotals():
            _store(kernel, arrays, [_sections(kernel, view(kernel.inputs[0], arrays))[1]])
        case ScatterUpdates():
            scatter_updates(kernel, [view(o, arrays) for o in kernel.inputs], view(kernel.outputs[0], arrays))
        case ScatterResult():
            scatter_result(kernel, [view(o, arrays) for o in kernel.inputs], view(kernel.outputs[0], arrays))
        case Sort():
            _store(kernel, arrays, _sort(kernel, view(kernel.inputs[0], arrays)))
        case MergeRuns():
            _store(kernel, arrays, _merge_runs(kernel, [view(o, arrays) for o in kernel.inputs]))
        case _:
            raise NotImplementedError(f"{kernel.kind} kernels")


def _store(kernel: Kernel, arrays: Arrays, results: Sequence[Array]) -> None:
    for op, result in zip(kernel.outputs, results, strict=True):
        view(op, arrays)[...] = result.reshape(op.shape)


def _check_windows(kernel: Kernel, arrays: Arrays) -> None:
    for op in (*kernel.inputs, *kernel.outputs):
        last = op.offset + sum((n - 1) * s for n, s in zip(op.shape, op.strides, strict=True))
        if 0 not in op.shape and not (op.offset >= 0 and 0 <= last < math.prod(op.buffer.shape)):
            raise ValueError(f"kernel {kernel.name}: {op} leaves its buffer")
    if isinstance(kernel, Loops | FusedLoops | DecodeAttention | ScatterUpdates | ScatterResult):
        return
    for out in kernel.outputs:
        for x in kernel.inputs:
            if x.buffer.id == out.buffer.id and np.shares_memory(view(x, arrays), view(out, arrays)):
                raise ValueError(f"kernel {kernel.name} overwrites its input")


# -- loop nests -----------------------------------------------------------------------------------------------------
def _loops(kernel: Loops, arrays: Arrays) -> None:
    body = kernel.body
    written = {o.buffer.id for o in kernel.outputs}
    if body.serial and any(o.buffer.id in written for o in kernel.inputs):
        _one_by_one(kernel, arrays)
        return
    inputs = [view(o, arrays) for o in kernel.inputs]
    rows = tuple(1 if d in body.axes else n for d, n in enumerate(body.domain))
    known: dict[Expr, Array] = {}
    writes = []
    for n, s in enumerate(body.stages):
        if s.kind == "store":
            shape = rows if s.per_row else body.domain
            value = evaluate(s.expr, shape, inputs, known)
            index = tuple(evaluate(i, shape, inputs, known) for i in s.index)
            writes.append((s.output, index, value))
            continue
        x = evaluate(s.expr, body.domain, inputs, known)
        if s.kind == "temp":
            known[expr.stage(n, x.dtype.name)] = x
        else:
            made = _fold(s.reduce, x, body.domain, body.axes)
            known[expr.stage(n, "int64" if s.reduce.startswith("arg") else s.expr.dtype)] = made
    for number, index, value in writes:
        out = view(kernel.outputs[number], arrays)
        if out.size:
            _assign(out, index, value)


def _assign(out: Array, index: tuple[Array, ...], value: Array) -> None:
    """Store values at indices; of several values for one element the last one stays.

    The indices are flattened, because numpy assigns in order in one dim only.
    """
    if not index:
        out[...] = value
        return
    *places, values = (a.reshape(-1) for a in np.broadcast_arrays(*index, value))
    out[tuple(places)] = values


def _fold(reduce: str, x: Array, domain: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    rows = tuple(1 if d in axes else n for d, n in enumerate(domain))
    folded = math.prod(domain[d] for d in axes)
    if reduce in ("argmax", "argmin"):
        keep = [d for d in range(len(domain)) if d not in axes]
        flat = x.transpose(*keep, *axes).reshape(*(domain[d] for d in keep), folded)
        return np.asarray((np.argmax if reduce == "argmax" else np.argmin)(flat, axis=-1).reshape(rows))
    if folded == 0:
        return np.full(rows, 1 if reduce == "prod" else 0, x.dtype)
    return np.asarray(interp.REDUCERS[reduce](x, tuple(axes)), x.dtype)


def _one_by_one(kernel: Loops, arrays: Arrays) -> None:
    """Run a serial loop nest point by point, because a point reads what earlier points wrote."""
    body = kernel.body
    (store,), out = body.stages, view(kernel.outputs[0], arrays)
    inputs = [view(o, arrays) for o in kernel.inputs]
    for point in np.ndindex(*body.domain):
        at = {d: expr.const(i, "int64") for d, i in enumerate(point)}
        where = tuple(int(evaluate(expr.substitute(i, at), (), inputs)) for i in store.index)
        out[where] = evaluate(expr.substitute(store.expr, at), (), inputs)


# -- kernels with an epilogue ---------------------------------------------------------------------------------------
def _anchor(kernel: Anchor, arrays: Arrays) -> None:
    inputs = [view(o, arrays) for o in kernel.inputs]
    target = view(kernel.outputs[0], arrays)
    products = _products(kernel, inputs, arrays)
    split = isinstance(kernel, Contraction | Attention) and kernel.splits > 1
    if split:
        target[...] = products[0].reshape(target.shape)
        return
    if isinstance(kernel, Contraction) and kernel.row_scale is not None:
        products = tuple(x * _row_factors(kernel.row_scale, inputs)[:, None] for x in products)
    accs = [x for x in expr.walk(kernel.epilogue) if x.op == "acc"]
    known = {x: products[x.value].reshape(target.shape).astype(dtypes.numpy_dtype(x.dtype)) for x in accs}
    if isinstance(kernel, Contraction):
        _extra_results(kernel, inputs, known, arrays)
    target[...] = evaluate(kernel.epilogue, target.shape, inputs, known).reshape(target.shape)


def _products(kernel: Anchor, inputs: list[Array], arrays: Arrays) -> tuple[Array, ...]:
    """Return the values of ``acc``, ``acc1`` … for the epilogue; with ``splits``, the partial results."""
    match kernel:
        case Gemm(prologue=Loops() as prologue):
            left = _result_of(prologue, arrays).reshape(1, kernel.m, kernel.k)
            return gemm(kernel, left, inputs[kernel.rhs])
        case Gemm():
            check_rows(kernel)
            return gemm(kernel, inputs[0], inputs[1])
        case DualConv2d():
            return conv2d(kernel, inputs), _result_of(kernel.residual, arrays)
        case WinogradConv2d():
            return (winograd(kernel, inputs),)
        case Conv2d() if kernel.splits > 1:
            return (conv2d_parts(kernel, inputs),)
        case Convolution():
            return (conv2d(kernel, inputs),)
        case Attention():
            inputs = decoded(kernel, inputs)
            return (attention_parts(kernel, inputs) if kernel.splits > 1 else attention(kernel, inputs),)
        case CombineAttention():
            return (combine(inputs[0]),)
    raise NotImplementedError(f"{kernel.kind} kernels")


def _row_factors(scale: Expr, inputs: list[Array]) -> Array:
    """Return the factor float32 [M] of each row, from the sums that the previous product stored."""
    total = inputs[-1].sum(0)
    return evaluate(scale, total.shape, inputs, {expr.stage(0, "float32"): total})


def _extra_results(kernel: Contraction, inputs: list[Array], known: dict[Expr, Array], arrays: Arrays) -> None:
    """Store the results of extra stages: a second output, and the sums of each row over tiles of columns."""
    shape = kernel.outputs[0].shape
    for stage in kernel.extra_stages:
        value = np.broadcast_to(evaluate(stage.expr, shape, inputs, known), shape)
        if stage.kind == "store":
            view(kernel.outputs[stage.output], arrays)[...] = value
        else:
            sums = view(kernel.outputs[-1], arrays)
            tiles = np.array_split(value.reshape(-1, shape[-1]), len(sums), axis=1)
            sums[...] = [tile.sum(1) for tile in tiles]


def _result_of(kernel: Kernel, arrays: Arrays) -> Array:
    """Run a nested kernel and return its result, which it stores in scratch memory."""
    scratch = kernel.outputs[0].buffer
    made = _unwritten(scratch)
    execute(kernel, {**arrays, scratch.id: made})
    return made


# -- attention ------------------------------------------------------------------------------------------------------
def _decode_attention(k: DecodeAttention, arrays: Arrays) -> None:
    keys, values, positions = k.inputs[:3]
    q = _result_of(k.queries, arrays).reshape(k.queries.outputs[0].shape)
    for row in k.new_rows:
        execute(row, arrays)
    mask = up_to(view(positions, arrays).reshape(-1)[:1], keys.shape[2])
    got = attend([q, view(keys, arrays), view(values, arrays)], mask, k.scale, False)
    out = view(k.outputs[0], arrays)
    known = {x: got.astype(dtypes.numpy_dtype(x.dtype)) for x in expr.walk(k.epilogue) if x.op == "acc"}
    out[...] = evaluate(k.epilogue, out.shape, [], known).reshape(out.shape)


# -- scans and sorts ------------------------------------------------------------------------------------------------
def _scan(k: Scan, inputs: list[Array]) -> list[Array]:
    """Return the scans of whole rows, or of sections from the totals of those before them."""
    x, *totals = inputs
    if k.op in SCAN_EXTREMES:  # totals only divide the work
        return interp.scan_extreme(k.op, x, k.axis)
    if not totals:
        wide = dtypes.numpy_dtype(dtypes.opmath(k.inputs[0].dtype))
        return [interp.SCANS[k.op].accumulate(x, axis=k.axis, dtype=wide)]
    parts, _ = _sections(k, x)
    before = interp.SCANS[k.op].accumulate(totals[0], axis=1)
    found = [p if n == 0 else interp.SCANS[k.op](before[:, n - 1 : n], p) for n, p in enumerate(parts)]
    rows = np.concatenate(found, 1).astype(x.dtype)
    last = (*x.shape[: k.axis], *x.shape[k.axis + 1 :], x.shape[k.axis])
    return [np.moveaxis(rows.reshape(last), -1, k.axis)]


def _sections(k: Scan | ScanTotals, x: Array) -> tuple[list[Array], Array]:
    """Return (scanned sections [rows, length], their totals [rows, sections]) in the dtype of the totals."""
    if k.op in SCAN_EXTREMES:
        rows = np.moveaxis(x, k.axis, -1).reshape(-1, x.shape[k.axis])
        places = [
            interp.scan_extreme(k.op, rows[:, at : at + k.section], 1)[1] + at
            for at in range(0, rows.shape[1], k.section)
        ]
        return places, np.stack([p[:, -1] for p in places], 1).astype(np.int32)
    wide = dtypes.numpy_dtype((k.inputs[1] if isinstance(k, Scan) else k.outputs[0]).dtype)
    rows = np.moveaxis(x, k.axis, -1).reshape(-1, x.shape[k.axis]).astype(wide)
    starts = range(0, rows.shape[1], k.section)
    parts = [interp.SCANS[k.op].accumulate(rows[:, at : at + k.section], axis=1, dtype=wide) for at in starts]
    return parts, np.stack([p[:, -1] for p in parts], 1)


def _sort(k: Sort, x: Array) -> list[Array]:
    """Return the first elements of each row and their positions; with ``section``, the first ``run`` of each section,
    [rows, total]."""
    if not k.section:
        graph = Graph("rows")
        value = graph.input("x", x.shape, k.inputs[0].dtype)
        return interp.evaluate_node(graph.sort(value, k.axis, k.descending, k.k)[0].node, [x])
    rows = np.moveaxis(x, k.axis, -1).reshape(-1, x.shape[k.axis])
    values, places = [], []
    for at in range(0, rows.shape[1], k.section):
        some = rows[:, at : at + k.section]
        found, place = _sorted(some, k.descending)
        values.append(found[:, : k.run])
        places.append(place[:, : k.run] + at)
    return [np.concatenate(values, 1), np.concatenate(places, 1)]


def _sorted(rows: Array, descending: bool) -> tuple[Array, Array]:
    graph = Graph("sort")
    value = graph.input("x", rows.shape, dtypes.name_of(rows.dtype))
    values, places = interp.evaluate_node(graph.sort(value, 1, descending)[0].node, [rows])
    return values, places


def _merge_runs(k: MergeRuns, inputs: list[Array]) -> list[Array]:
    values, places = inputs
    found = []
    for at in range(0, values.shape[1], 2 * k.run):
        some = slice(at, at + 2 * k.run)
        merged, order = _sorted(values[:, some], k.descending)
        found.append((merged[:, : k.kept], np.take_along_axis(places[:, some], order, 1)[:, : k.kept]))
    results = [np.concatenate(arrays, 1) for arrays in zip(*found, strict=True)]
    out = k.outputs[0]
    moved = (*out.shape[: k.axis], *out.shape[k.axis + 1 :], out.shape[k.axis]) if out.shape else ()
    return [np.moveaxis(r.reshape(moved), -1, k.axis) if out.shape else r.reshape(()) for r in results]
