"""Products of one row (a decode step): weights are streamed once, 16 bytes a load, before the inputs are awaited."""

from __future__ import annotations

from dataclasses import dataclass

from ... import dtypes
from ...kernel import Kernel
from ..nest import build_nest
from ..row_passes import make_row
from .dialect import SIMD, Dialect
from .epilogue import Epilogue
from .function import Emission, Function, blocks, simds
from .loops import Points, RowFold, scalars_for
from .part import Part

MOST_ROWS = 4  # of the left operand; more is a tile's work
REGISTERS = 16  # 16-byte loads a thread holds at once


def is_gemv(kernel: Kernel) -> bool:
    """Few rows against weights that lie row by row."""
    a, w = kernel.attrs, kernel.inputs[1]
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
    rows = max(1, min(8, REGISTERS * 3 // 4 // vectors))
    while rows > 1 and (columns % rows or blocks(columns, rows) < cores):
        rows //= 2
    return Shape(threads, vectors, rows)


def emit_gemv(kernel: Kernel, dialect: Dialect) -> Emission:
    """Each group makes ``rows`` results: partial sums of its threads meet in group memory, in a fixed order.

    With a second weight (attrs ``dual``) every result has two accumulators. ``prologue``, a :class:`Part` over a single
    row, makes the left operand in every group: a norm, say.
    """
    return _Gemv(kernel, dialect).emit()


class _Gemv:
    def __init__(self, kernel: Kernel, dialect: Dialect):
        self.kernel, a = kernel, kernel.attrs
        self.m, self.n, self.k = a["m"], a["n"], a["k"]
        self.weights = [1, 2] if a.get("dual") else [1]
        w = kernel.inputs[1]
        self.dtype, self.item = dtypes.DTYPES[w.dtype].ctype, 16 // dtypes.DTYPES[w.dtype].size
        self.pieces = self.k // self.item
        shape = choose_shape(self.pieces, self.n, dialect.cores)
        self.threads, self.vectors = shape.threads, shape.vectors
        self.rows = max(1, shape.rows // len(self.weights)) if self.vectors else shape.rows
        self.prologue: Part | None = a.get("prologue")
        if self.prologue is not None and not self.vectors:
            raise AssertionError("a prologue needs weights that fit registers")
        self.f = Function(kernel, dialect, early=True)

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        out.add(f"const int first = gid * {self.rows};")
        if self.vectors:
            self._preload()
            out.add("wait_inputs();")
            self._left()
            out.add(f"float sum[{len(self.weights)}][{self.m}][{self.rows}] = {{}};")
            out.add("#pragma unroll")
            with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
                self._multiply("v")
        else:
            out.add("wait_inputs();")
            out.add(f"float sum[{len(self.weights)}][{self.m}][{self.rows}] = {{}};", "#pragma unroll 4")
            with out.block(f"for (int piece = tid; piece < {self.pieces}; piece += {self.threads}) {{"):
                for n, number in enumerate(self.weights):
                    out.add(f"uint4 w{n}[{self.rows}][1];", "#pragma unroll")
                    out.add(f"for (int r = 0; r < {self.rows}; r++) w{n}[r][0] = {self._load(number, 'r', 'piece')};")
                out.add(f"float x[{self.m}][1][{self.item}];")
                self._read("piece", "0")
                self._multiply("0")
        self._meet()
        epilogue = Epilogue(self.kernel, f)
        columns = self.rows * self.m
        with out.block(f"if (tid < {columns}) {{"):
            out.add(f"const int row_of = tid / {self.rows}, column = first + tid % {self.rows}; (void)row_of;")
            for n in range(len(self.weights)):
                out.add(f"float total{n} = 0.0f;")
                at = f"s * {columns * len(self.weights)} + {n * columns} + tid"
                out.add(f"for (int s = 0; s < {simds(self.threads)}; s++) total{n} += part[{at}];")
            guard = f"if (column < {self.n}) {{" if self.n % self.rows else "{"
            with out.block(guard):
                epilogue.store("row_of", "column", 1, lambda which, at: f"total{which}")
        return f.finish(blocks(self.n, self.rows), self.threads)

    def _load(self, number: int, row: str, piece: str) -> str:
        w = self.kernel.inputs[number]
        at = f"first + {row}"
        if self.n % self.rows:
            at = f"({at} < {self.n} ? {at} : {self.n - 1})"
        load = "stream16" if w.buffer.kind in ("weight", "const") else "load16"
        return f"{load}({self.f.pointer(number)} + (int64_t)({at}) * {w.strides[1]} + {piece} * {self.item})"

    def _preload(self) -> None:
        out = self.f.lines
        whole = self.vectors * self.threads == self.pieces
        for n, number in enumerate(self.weights):
            if self.kernel.inputs[number].buffer.kind not in ("weight", "const"):
                out.add("wait_inputs();")
            out.add(f"uint4 w{n}[{self.rows}][{self.vectors}];")
            out.add("#pragma unroll", f"for (int r = 0; r < {self.rows}; r++)", "#pragma unroll")
            with out.block(f"  for (int v = 0; v < {self.vectors}; v++) {{"):
                out.add(f"const int piece = v * {self.threads} + tid;")
                load = self._load(number, "r", "piece")
                out.add(f"w{n}[r][v] = {load};" if whole else
                        f"if (piece < {self.pieces}) w{n}[r][v] = {load}; else w{n}[r][v] = zero16();")  # fmt: skip

    def _left(self) -> None:
        """``x[m][v][e]``: this thread's pieces of the left operand."""
        out = self.f.lines
        out.add(f"float x[{self.m}][{self.vectors}][{self.item}];")
        if self.prologue is not None:
            self._prologue(self.prologue)
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

    def _prologue(self, part: Part) -> None:
        f, out = self.f, self.f.lines
        nest = build_nest(part.bind(self.kernel))
        row = make_row(nest, 1, scratch=0)
        (lane,) = nest.folds
        s = scalars_for(nest, f, row.steps, part.numbers(self.kernel))
        points = Points(s, nest, lane, self.item)
        fold = RowFold(s, f)
        made = part.result
        whole = self.vectors * self.threads == self.pieces
        for p in row.passes:
            fold.begin(p)
            out.add("#pragma unroll")
            with s.scope(f"for (int v = 0; v < {self.vectors}; v++) {{"):
                out.add(f"const int i{lane} = (v * {self.threads} + tid) * {self.item};")
                mine = [st for st in p.stores if st.output == made]
                others = [st for st in p.stores if st.output != made]
                with s.scope("{" if whole else f"if (i{lane} < {self.k}) {{"):
                    if p.folds:
                        points.run(p.folds, position=nest.position)
                    for st in mine:
                        points.run([st], sink="x[0][v]")
                    if others:
                        with s.scope("if (gid == 0) {"):
                            points.run(others)
                if mine and not whole:
                    out.add(f"else for (int e = 0; e < {self.item}; e++) x[0][v][e] = 0.0f;")
            fold.meet_along(p, self.threads)
        f.checks |= s.checks

    def _multiply(self, v: str) -> None:
        out = self.f.lines
        out.add("#pragma unroll")
        with out.block(f"for (int r = 0; r < {self.rows}; r++) {{"):
            for n in range(len(self.weights)):
                out.add(f"float y{n}[{self.item}];", f"unpack(w{n}[r][{v}], y{n}, (THREAD {self.dtype}*)nullptr);")
                out.add("#pragma unroll", f"for (int e = 0; e < {self.item}; e++) {{")
                for m in range(self.m):
                    out.add(f"  sum[{n}][{m}][r] += x[{m}][{v}][e] * y{n}[e];")
                out.add("}")

    def _meet(self) -> None:
        out, columns = self.f.lines, self.rows * self.m
        total = columns * len(self.weights)
        self.f.array("float", "part", simds(self.threads) * total)
        out.add("#pragma unroll")
        with out.block(f"for (int n = 0; n < {total}; n++) {{"):
            out.add(f"const float t = simd_sum(sum[n / {columns}][n % {columns} / {self.rows}][n % {self.rows}]);")
            out.add(f"if (lane == 0) part[sid * {total} + n] = t;")
        out.add("barrier();")


__all__ = ["SIMD", "emit_gemv", "is_gemv"]
