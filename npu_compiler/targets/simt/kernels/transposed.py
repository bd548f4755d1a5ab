"""``loops`` kernels that read along another dim than they store along: a workgroup computes a square of points, whose
inputs pass through shared memory, so that neighbouring threads load neighbours and store neighbours."""

from __future__ import annotations

from typing import NamedTuple

from ....graph import affine, expr
from ....graph.expr import Expr
from ....support import dtypes
from ...codegen.nest import Nest, use_counts
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, Pointers, blocks
from ..lang.scalar import Scalars, stored
from ..lang.vectorize import decode, is_along, memory_order

THREADS = 256
SIDES = 64, 32  # points of a side of the square; the first whose inputs fit SHARED_BYTES
SHARED_BYTES = 24 << 10
MIN_POINTS = 1 << 16  # fewer stay in the L1 caches
MIN_RESULTS = 1 << 18  # of a contraction; to transpose fewer takes longer than to store them apart
MIN_SIDE = 16  # points along both dims; a square of fewer would be mostly empty


class Transposition(NamedTuple):
    """``loads`` of a nest are contiguous along dim ``rows``, its store along dim ``columns``. ``side``: of a square."""

    rows: int
    columns: int
    loads: list[Expr]
    side: int


def transposition(nest: Nest, dialect: Dialect) -> Transposition | None:
    """Return the transposition that a pointwise nest performs, or None if it performs none or is too small."""
    step, *others = nest.steps
    if others or step.target is None or nest.serial or nest.points(nest.order) < MIN_POINTS:
        return None
    columns = memory_order(nest, nest.order)[-1]
    if not is_along(step.target, columns) or nest.size[columns] < MIN_SIDE:
        return None
    loads = [x for x in dict.fromkeys(expr.walk(step.value)) if x.op == "load" and x.value.operand >= 0]
    across = [x for x in loads if affine.affine(x.args[0]).coefficient(columns) not in (0, 1)]
    rows = {d for x in across for d in nest.order if d != columns and is_along(x, d)}
    if len(rows) != 1 or nest.size[(row := rows.pop())] < MIN_SIDE:
        return None
    for x in across:
        if x.value.guarded or x.value.checks or affine.affine(x.args[0]).opaque() or not is_along(x, row):
            return None
    room = min(SHARED_BYTES, dialect.device.shared_bytes)
    side = next((n for n in SIDES if sum(n * _pitch(x, n) * _size(x) for x in across) <= room), 0)
    return Transposition(row, columns, across, side) if side else None


def _size(x: Expr) -> int:
    return dtypes.DTYPES[x.dtype].size


def _pitch(x: Expr, side: int) -> int:
    """Return the elements between two rows of a square in shared memory, which puts a column into different banks."""
    return side + max(1, 4 // _size(x))


def emit_transposed(nest: Nest, function: Function, t: Transposition) -> Emission:
    """Return the function of a nest for which :func:`transposition` found ``t``."""
    (step,), out, side = nest.steps, function.lines, t.side
    s = Scalars(nest, Pointers(function), out, use_counts(step.exprs()))
    high, wide = blocks(nest.size[t.rows], side), blocks(nest.size[t.columns], side)
    others = [d for d in nest.order if d not in (t.rows, t.columns)]
    out.add(f"const int first_row = (int)((uint)workgroup % {high}u) * {side};")
    out.add(f"const int first_column = (int)((uint)workgroup / {high}u % {wide}u) * {side};")
    out.add(f"const int along = tid % {side}, across = tid / {side};")
    decode(s, nest, others, f"((uint)workgroup / {high * wide}u)")
    passes, apart = side * side // THREADS, THREADS // side
    inside = f"if (i{t.rows} < {nest.size[t.rows]} && i{t.columns} < {nest.size[t.columns]}) {{"
    names = [
        function.array(dtypes.DTYPES[x.dtype].ctype, f"square{n}", side * _pitch(x, side))
        for n, x in enumerate(t.loads)
    ]
    for n, x in enumerate(t.loads):
        out.add(f"{dtypes.DTYPES[x.dtype].ctype} held{n}[{passes}] = {{}};")
    out.add("#pragma unroll")
    with s.scope(f"for (int n = 0; n < {passes}; n++) {{"):
        out.add(f"const int i{t.rows} = first_row + along, i{t.columns} = first_column + across + n * {apart};")
        with s.scope(inside):
            for n, x in enumerate(t.loads):
                out.add(f"held{n}[n] = {s.pointers[x.value.operand]}[{s.address(x)}];")
    out.add("#pragma unroll")
    with s.scope(f"for (int n = 0; n < {passes}; n++) {{"):
        for n, (x, name) in enumerate(zip(t.loads, names, strict=True)):
            out.add(f"{name}[(across + n * {apart}) * {_pitch(x, side)} + along] = held{n}[n];")
    out.add("barrier();", "#pragma unroll")
    with s.scope(f"for (int n = 0; n < {passes}; n++) {{"):
        out.add(f"const int i{t.rows} = first_row + across + n * {apart}, i{t.columns} = first_column + along;")
        for x, name in zip(t.loads, names, strict=True):
            s.bound[x] = stored(f"{name}[along * {_pitch(x, side)} + across + n * {apart}]", x.dtype)
        with s.scope(inside):
            assert step.target is not None
            s.store(step.target, step.value, step.target.dtype)
    function.checks |= s.checks
    return function.finish(high * wide * nest.points(others), THREADS)
