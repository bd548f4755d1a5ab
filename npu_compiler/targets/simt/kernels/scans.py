"""Scans along rows: sizes for ``kernels/scan.h``."""

from __future__ import annotations

import math

from ....schedule.kernel import Scan
from ....support import dtypes
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import accumulator, combine, ctype, kind_of, wrap

THREADS = 128
LONG_ROW, FEW_ROWS = 2048, 4096  # a workgroup shares a row of this length if there are no more rows than this
SHARING, EACH = 1024, 4  # threads that share a row, and neighbours that a thread scans at a time


def emit_scan(kernel: Scan, dialect: Dialect) -> Emission:
    """Return the function of a ``scan`` kernel. A thread scans a row, or a workgroup a long one."""
    f, x, y, axis, kind = Function(kernel, dialect), kernel.inputs[0], kernel.outputs[0], kernel.axis, kernel.op
    n = x.shape[axis] if x.shape else 1
    if not math.prod(x.shape):
        return f.finish(0, THREADS)
    rows = math.prod(x.shape) // n
    double = x.dtype == "float32" and kind in ("sum", "prod") and dialect.has_double
    dtype = "float64" if double else x.dtype
    register = kind_of(dtype)
    step = combine(kind, register, "a", "b")
    op = f.functor(
        "op",
        {},
        start=(register, "", accumulator(kind, dtype)),
        of=(register, f"{register} a, {register} b", step if dtypes.is_float(dtype) else wrap(step, dtype)),
    )
    types = {"T": ctype(x.dtype), "Out": ctype(y.dtype), "R": register, "Op": op}
    types |= {"X": f.rows("x", x, axis), "Y": f.rows("y", y, axis)}
    if n >= LONG_ROW and rows <= FEW_ROWS:
        sizes = dict(ROWS=rows, N=n, THREADS=SHARING, EACH=EACH)
        totals = f.array(register, "totals", 2 * SHARING)
        f.template("scan_long_row", "scan.h", types, sizes, f.pointer(0), f.pointer(~0), totals)
        return f.finish(rows, SHARING)
    f.template("scan_rows", "scan.h", types, dict(ROWS=rows, N=n, THREADS=THREADS), f.pointer(0), f.pointer(~0))
    return f.finish(blocks(rows, THREADS), THREADS)
