"""Running reductions along rows, and where a row lies."""

from __future__ import annotations

import math

from ....schedule.kernel import Operand, Scan
from ....support import dtypes
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import accumulator, combine, kind_of, read, storage, wrap

THREADS = 128
LONG_ROW, FEW_ROWS = 2048, 4096  # elements of a row that a group shares, if rows are too few to keep threads busy
SHARING, EACH = 1024, 4  # threads, and neighbours that one of them takes at a time


def row_offset(op: Operand, axis: int, row: str) -> str:
    """Text of the offset of number ``row`` of the rows along ``axis``, counted in order over all other dims."""
    unit, terms = 1, []
    for d in reversed(range(len(op.shape))):
        if d != axis:
            if op.strides[d]:
                terms.append(f"(int64_t)({row} / {unit} % {op.shape[d]}) * {op.strides[d]}")
            unit *= op.shape[d]
    return " + ".join(terms) or "0"


def emit_scan(kernel: Scan, dialect: Dialect) -> Emission:
    """A thread runs along a row; a group shares a long one."""
    x, axis = kernel.inputs[0], kernel.axis
    n = x.shape[axis] if x.shape else 1
    if not math.prod(x.shape):
        return Function(kernel, dialect).finish(0, THREADS)
    scan = _Scan(kernel, dialect, axis, n)
    return scan.shared() if n >= LONG_ROW and scan.rows <= FEW_ROWS else scan.alone()


class _Scan:
    def __init__(self, kernel: Scan, dialect: Dialect, axis: int, n: int):
        self.f, self.n, self.axis, self.kind = Function(kernel, dialect), n, axis, kernel.op
        self.x, self.y = kernel.inputs[0], kernel.outputs[0]
        self.rows = math.prod(self.x.shape) // n
        double = self.x.dtype == "float32" and self.kind in ("sum", "prod") and dialect.doubles
        self.dtype = "float64" if double else self.x.dtype
        self.register, self.start = kind_of(self.dtype), accumulator(self.kind, self.dtype)
        steps = [op.strides[axis] if op.strides else 0 for op in (self.x, self.y)]
        self.element = read(self.f.pointer(0), f"from + (int64_t)i * {steps[0]}", self.x.dtype).text
        self.target = f"{self.f.pointer(~0)}[to + (int64_t)i * {steps[1]}]"

    def combined(self, a: str, b: str) -> str:
        made = combine(self.kind, self.register, a, b)
        return made if dtypes.is_float(self.x.dtype) else wrap(made, self.x.dtype)

    def _places(self) -> None:
        offsets = [row_offset(op, self.axis, "row") for op in (self.x, self.y)]
        self.f.lines.add(f"const int64_t from = {offsets[0]}, to = {offsets[1]};")

    def alone(self) -> Emission:
        """In order."""
        out = self.f.lines
        out.add(f"const int row = gid * {THREADS} + tid;  if (row >= {self.rows}) return;")
        self._places()
        out.add(f"{self.register} total = {self.start};", "#pragma unroll 8")
        with out.block(f"for (int i = 0; i < {self.n}; i++) {{"):
            out.add(f"total = {self.combined('total', self.element)};")
            out.add(f"{self.target} = {storage('total', self.y.dtype)};")
        return self.f.finish(blocks(self.rows, THREADS), THREADS)

    def shared(self) -> Emission:
        """Piece by piece: each thread runs along its neighbours, learns what comes before them, and adds that."""
        out, T = self.f.lines, self.register
        self.f.array(T, "totals", 2 * SHARING)
        out.add("const int row = gid;")
        self._places()
        out.add(f"{T} before = {self.start};")
        with out.block(
            f"for (int first = tid * {EACH}; first - tid * {EACH} < {self.n}; first += {SHARING * EACH}) {{"
        ):
            out.add(f"{T} v[{EACH}];", "#pragma unroll")
            with out.block(f"for (int e = 0; e < {EACH}; e++) {{"):
                out.add("const int i = first + e;", f"v[e] = i < {self.n} ? {self.element} : {self.start};")
            out.add("#pragma unroll", f"for (int e = 1; e < {EACH}; e++) v[e] = {self.combined('v[e - 1]', 'v[e]')};")
            out.add(f"GROUP {T}* seen = totals;", f"GROUP {T}* next = totals + {SHARING};")
            out.add("barrier();  // all have read what the piece before left", f"seen[tid] = v[{EACH - 1}];")
            with out.block(f"for (int apart = 1; apart < {SHARING}; apart *= 2) {{"):
                both = self.combined("seen[tid - apart]", "seen[tid]")
                out.add("barrier();", f"next[tid] = tid < apart ? seen[tid] : {both};")
                out.add(f"GROUP {T}* const other = seen;  seen = next;  next = other;")
            out.add("barrier();", f"const {T} mine = tid ? {self.combined('before', 'seen[tid - 1]')} : before;")
            out.add(f"before = {self.combined('before', f'seen[{SHARING - 1}]')};", "#pragma unroll")
            with out.block(f"for (int e = 0; e < {EACH}; e++) {{"):
                out.add("const int i = first + e;", f"const {T} total = {self.combined('mine', 'v[e]')};")
                out.add(f"if (i < {self.n}) {self.target} = {storage('total', self.y.dtype)};")
        return self.f.finish(self.rows, SHARING)
