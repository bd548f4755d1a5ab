"""Products of one row (a decode step): weights are streamed once, 16 bytes a load, before the inputs are awaited."""

from __future__ import annotations

from dataclasses import dataclass

from ... import dtypes
from ...kernel import Kernel
from ..nest import build_nest
from ..row_passes import make_row
from .dialect import Dialect
from .epilogue import Epilogue
from .function import Emission, Function, blocks, simds
from .loops import Points, RowFold, scalars_for, vector_width

MOST_ROWS = 4  # of the left operand; more is a tile's work
REGISTERS = 16  # 16-byte loads a thread holds at most
AT_ONCE = 5  # those it should hold


def is_gemv(kernel: Kernel) -> bool:
    """Few rows against weights that lie row by row."""
    a, w = kernel.attrs, kernel.inputs[kernel.fixed]
    size = dtypes.DTYPES[w.dtype].size
    dense = (w.strides[2] == 1 or a["k"] == 1) and not any(s * size % 16 for s in (a["k"], w.strides[1], w.offset))
    return a["m"] <= MOST_ROWS and a["batch"] == 1 and dense and "splits" not in a


@dataclass(frozen=True)
class Shape:
    """``threads`` take ``vectors`` 16-byte pieces each of every one of ``rows`` weight rows; 0 vectors: in a loop."""

    threads: int
    vectors: int
    rows: int


def choose_shape(pieces: int, columns: int, cores: int) -> Shape:
    """``pieces``: 16-byte pieces in a weight row."""
    best: tuple[tuple[int, int], int, int] | None = None
    for threads in (256, 224, 192, 160, 128, 96, 64, 32):
        vectors = blocks(pieces, threads)
        waste = vectors * threads - pieces
        if vectors <= REGISTERS and (best is None or (waste * 8 > pieces, waste) < best[0]):
            best = (waste * 8 > pieces, waste), threads, vectors
    if best is None:
        return Shape(256, 0, 2)
    _, threads, vectors = best
    rows = max(1, min(4, AT_ONCE // vectors))
    while rows > 1 and (columns % rows or blocks(columns, rows) < cores):
        rows //= 2
    return Shape(threads, vectors, rows)


def emit_gemv(kernel: Kernel, dialect: Dialect) -> Emission:
    """Each group makes ``rows`` results: partial sums of its threads meet in group memory, in a fixed order.

    A prologue (a norm, say) makes the left operand in every group, each thread its own part of it. In a paired product
    the rows of the weight take turns: two accumulators for each result.
    """
    return _Gemv(kernel, dialect).emit()


def takes_prologue(kernel: Kernel, dialect: Dialect) -> bool:
    """Whether the row that the prologue makes can be computed where it is needed: in pieces of 16 bytes of the weight,
    along one dim."""
    inner, a = kernel.prologue, kernel.attrs
    assert inner is not None
    if not is_gemv(kernel) or a["m"] != 1:
        return False
    item = 16 // dtypes.DTYPES[kernel.inputs[kernel.fixed].dtype].size
    if not choose_shape(a["k"] // item, a["n"] * (1 + a["paired"]), dialect.cores).vectors:
        return False
    nest = build_nest(inner)
    if nest.empty or nest.rows or len(nest.folds) != 1 or nest.points(nest.folds) != a["k"]:
        return False
    row = make_row(nest, 1, scratch=0)
    steps = [s for p in row.passes for s in p.steps]
    if row.stores or any(s.per_row for s in steps):
        return False
    return vector_width(nest, inner, steps, nest.folds[0], most=item) == item


class _Gemv:
    def __init__(self, kernel: Kernel, dialect: Dialect):
        self.kernel, a = kernel, kernel.attrs
        self.m, self.k, self.lanes = a["m"], a["k"], 1 + a["paired"]
        self.n = a["n"] * self.lanes  # rows of the weight
        w = kernel.inputs[kernel.fixed]
        self.dtype, self.item = dtypes.DTYPES[w.dtype].ctype, 16 // dtypes.DTYPES[w.dtype].size
        self.pieces = self.k // self.item
        shape = choose_shape(self.pieces, self.n, dialect.cores)
        self.threads, self.vectors, self.rows = shape.threads, shape.vectors, max(shape.rows, self.lanes)
        self.f = Function(kernel, dialect, early=True)

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        out.add(f"const int first = gid * {self.rows};")
        if self.vectors:
            self._preload()
            out.add("wait_inputs();")
            self._left()
            out.add(f"float sum[{self.m}][{self.rows}] = {{}};", "#pragma unroll")
            with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
                self._multiply("v")
        else:
            out.add("wait_inputs();", f"float sum[{self.m}][{self.rows}] = {{}};", "#pragma unroll 4")
            with out.block(f"for (int piece = tid; piece < {self.pieces}; piece += {self.threads}) {{"):
                out.add(f"uint4 w[{self.rows}][1];", "#pragma unroll")
                out.add(f"for (int r = 0; r < {self.rows}; r++) w[r][0] = {self._load('r', 'piece')};")
                out.add(f"float x[{self.m}][1][{self.item}];")
                self._read("piece", "0")
                self._multiply("0")
        self._meet()
        epilogue = Epilogue(self.kernel, f)
        columns, total = self.rows // self.lanes, self.rows * self.m
        with out.block(f"if (tid < {columns * self.m}) {{"):
            out.add(
                f"const int row_of = tid / {columns}, column = first / {self.lanes} + tid % {columns}; (void)row_of;"
            )
            for n in range(self.lanes):
                at = f"s * {total} + tid * {self.lanes} + {n}"
                out.add(f"float total{n} = 0.0f;")
                out.add(f"for (int s = 0; s < {simds(self.threads)}; s++) total{n} += part[{at}];")
            guard = f"if (column < {self.n // self.lanes}) {{" if self.n % self.rows else "{"
            with out.block(guard):
                epilogue.store("row_of", "column", 1, lambda which, at: f"total{which}")
        return f.finish(blocks(self.n, self.rows), self.threads)

    def _load(self, row: str, piece: str) -> str:
        number = self.kernel.fixed
        w = self.kernel.inputs[number]
        at = f"first + {row}"
        if self.n % self.rows:
            at = f"({at} < {self.n} ? {at} : {self.n - 1})"
        load = "stream16" if w.buffer.kind in ("weight", "const") else "load16"
        return f"{load}({self.f.pointer(number)} + (int64_t)({at}) * {w.strides[1]} + {piece} * {self.item})"

    def _preload(self) -> None:
        out = self.f.lines
        whole = self.vectors * self.threads == self.pieces
        if self.kernel.inputs[self.kernel.fixed].buffer.kind not in ("weight", "const"):
            out.add("wait_inputs();")
        out.add(f"uint4 w[{self.rows}][{self.vectors}];")
        out.add("#pragma unroll", f"for (int r = 0; r < {self.rows}; r++)", "#pragma unroll")
        with out.block(f"  for (int v = 0; v < {self.vectors}; v++) {{"):
            out.add(f"const int piece = v * {self.threads} + tid;")
            load = self._load("r", "piece")
            if whole:
                out.add(f"w[r][v] = {load};")
            else:
                out.add(f"if (piece < {self.pieces}) w[r][v] = {load}; else w[r][v] = zero16();")

    def _left(self) -> None:
        """``x[m][v][e]``: this thread's pieces of the left operand."""
        out = self.f.lines
        out.add(f"float x[{self.m}][{self.vectors}][{self.item}];")
        if self.kernel.prologue is not None:
            self._prologue(self.kernel.prologue)
            return
        out.add("#pragma unroll")
        with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
            out.add(f"const int piece = v * {self.threads} + tid;")
            self._read("piece", "v", self.vectors * self.threads != self.pieces)

    def _read(self, piece: str, v: str, guarded: bool = False) -> None:
        out, op, a = self.f.lines, self.kernel.inputs[0], self.kernel.attrs
        ctype, size = dtypes.DTYPES[op.dtype].ctype, dtypes.DTYPES[op.dtype].size
        width = self.item if size * self.item <= 16 and op.offset * size % 16 == 0 else 1
        width = width if self.m == 1 or a["lda"] * size % 16 == 0 else 1
        pointer = self.f.pointer(0)
        for m in range(self.m):
            at = f"{pointer} + {m * a['lda']} + {piece} * {self.item}"
            if guarded:
                out.add(
                    f"if ({piece} >= {self.pieces}) for (int e = 0; e < {self.item}; e++) x[{m}][{v}][e] = 0.0f; else"
                )
            with out.block("{"):
                if width > 1:
                    out.add(f"const Vec<{ctype}, {width}> xs = *(DEVICE const Vec<{ctype}, {width}>*)({at});")
                    out.add("#pragma unroll")
                    out.add(f"for (int e = 0; e < {self.item}; e++) x[{m}][{v}][e] = to_f32(xs.v[e]);")
                else:
                    out.add(f"for (int e = 0; e < {self.item}; e++) x[{m}][{v}][e] = to_f32(({at})[e]);")

    def _prologue(self, inner: Kernel) -> None:
        f, out = self.f, self.f.lines
        nest = build_nest(inner)
        row = make_row(nest, 1, scratch=0)
        (lane,) = nest.folds
        s = scalars_for(nest, f, row.steps)
        points = Points(s, nest, lane, self.item)
        fold = RowFold(s, f)
        whole = self.vectors * self.threads == self.pieces
        for p in row.passes:
            fold.begin(p)
            out.add("#pragma unroll")
            with s.scope(f"for (int v = 0; v < {self.vectors}; v++) {{"):
                out.add(f"const int i{lane} = (v * {self.threads} + tid) * {self.item};")
                with s.scope("{" if whole else f"if (i{lane} < {self.k}) {{"):
                    if p.folds:
                        points.run(p.folds, position=nest.position)
                    if p.stores:
                        points.run(p.stores, sink="x[0][v]")
                if p.stores and not whole:
                    out.add(f"else for (int e = 0; e < {self.item}; e++) x[0][v][e] = 0.0f;")
            fold.meet_along(p, self.threads)
        f.checks |= s.checks

    def _multiply(self, v: str) -> None:
        out = self.f.lines
        out.add("#pragma unroll")
        with out.block(f"for (int r = 0; r < {self.rows}; r++) {{"):
            out.add(f"float y[{self.item}];", f"unpack(w[r][{v}], y, (THREAD {self.dtype}*)nullptr);")
            out.add("#pragma unroll", f"for (int e = 0; e < {self.item}; e++) {{")
            for m in range(self.m):
                out.add(f"  sum[{m}][r] += x[{m}][{v}][e] * y[e];")
            out.add("}")

    def _meet(self) -> None:
        out, total = self.f.lines, self.rows * self.m
        self.f.array("float", "part", simds(self.threads) * total)
        out.add("#pragma unroll")
        with out.block(f"for (int n = 0; n < {total}; n++) {{"):
            out.add(f"const float t = simd_sum(sum[n / {self.rows}][n % {self.rows}]);")
            out.add(f"if (lane == 0) part[sid * {total} + n] = t;")
        out.add("barrier();")
