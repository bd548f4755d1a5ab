"""Running reductions along rows, and where a row lies."""

from __future__ import annotations

import math

from ... import dtypes
from ...kernel import Kernel, Operand
from .dialect import Dialect
from .function import Emission, Function, blocks
from .scalar import accumulator, combine, kind_of, read, storage, wrap

THREADS = 128
LONG_ROW, FEW_ROWS = 2048, 4096  # elements of a row that a group shares, if rows are too few to keep threads busy
SHARING = 1024  # threads


def row_offset(op: Operand, axis: int, row: str) -> str:
    """Text of the offset of number ``row`` of the rows along ``axis``, counted in order over all other dims."""
    unit, terms = 1, []
    for d in reversed(range(len(op.shape))):
        if d != axis:
            if op.strides[d]:
                terms.append(f"(int64_t)({row} / {unit} % {op.shape[d]}) * {op.strides[d]}")
            unit *= op.shape[d]
    return " + ".join(terms) or "0"


def emit_scan(kernel: Kernel, dialect: Dialect) -> Emission:
    """A thread runs along a row. Threads of a group share a long one: each folds its part, learns what comes before
    it, and runs along its part."""
    f = Function(kernel, dialect)
    out, x, y = f.lines, kernel.inputs[0], kernel.outputs[0]
    axis, kind = kernel.attrs["axis"], kernel.attrs["kind"]
    dtype = "float64" if x.dtype == "float32" and kind in ("sum", "prod") and dialect.doubles else x.dtype
    register = kind_of(dtype)
    n = x.shape[axis] if x.shape else 1
    if not math.prod(x.shape):
        return f.finish(0, THREADS)
    rows = math.prod(x.shape) // n
    shared = n >= LONG_ROW and rows <= FEW_ROWS
    steps = [op.strides[axis] if op.strides else 0 for op in (x, y)]
    out.add("const int row = gid;" if shared else f"const int row = gid * {THREADS} + tid;  if (row >= {rows}) return;")
    out.add(f"const int64_t from = {row_offset(x, axis, 'row')}, to = {row_offset(y, axis, 'row')};")

    def combined(a: str, b: str) -> str:
        made = combine(kind, register, a, b)
        return made if dtypes.is_float(x.dtype) else wrap(made, x.dtype)

    element = read(f.pointer(0), f"from + (int64_t)i * {steps[0]}", x.dtype).text
    begin, end, threads = "0", str(n), THREADS
    out.add(f"{register} total = {accumulator(kind, dtype)};")
    if shared:
        begin, end, threads, part = "begin", "end", SHARING, blocks(n, SHARING)
        out.add(f"const int begin = tid * {part}, end = begin + {part} < {n} ? begin + {part} : {n};")
        out.add("#pragma unroll 8", "for (int i = begin; i < end; i++)", f"  total = {combined('total', element)};")
        f.array(register, "totals", 2 * SHARING)
        out.add(
            f"GROUP {register}* seen = totals;", f"GROUP {register}* next = totals + {SHARING};", "seen[tid] = total;"
        )
        with out.block(f"for (int apart = 1; apart < {SHARING}; apart *= 2) {{"):
            out.add(
                "barrier();", f"next[tid] = tid < apart ? seen[tid] : {combined('seen[tid - apart]', 'seen[tid]')};"
            )
            out.add(f"GROUP {register}* const other = seen;  seen = next;  next = other;")
        out.add("barrier();", f"total = tid ? seen[tid - 1] : {accumulator(kind, dtype)};")
    out.add("#pragma unroll 8")
    with out.block(f"for (int i = {begin}; i < {end}; i++) {{"):
        out.add(f"total = {combined('total', element)};")
        out.add(f"{f.pointer(~0)}[to + (int64_t)i * {steps[1]}] = {storage('total', y.dtype)};")
    return f.finish(rows if shared else blocks(rows, threads), threads)
