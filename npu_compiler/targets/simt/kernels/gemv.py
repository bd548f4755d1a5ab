"""Products of one row (a decode step): weights are streamed once, 16 bytes a load, before the inputs are awaited."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ....graph import affine, expr
from ....schedule.kernel import Gemm
from ....support import dtypes
from ....weights.formats.bf16c12.rows4 import PIECE
from ...codegen.nest import build_nest
from ...codegen.row_passes import make_row
from ..lang.dialect import SIMD, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks, simds
from ..lang.scalar import storage, stored
from ..lang.vectorize import Points, scalars_for, vector_width
from .epilogue import Epilogue
from .reductions import RowFold

MOST_ROWS = 4  # of the left operand; more is a tile's work
REGISTERS = 16  # 16-byte loads a thread holds at most
AT_ONCE = 5  # those it should hold
IN_FLIGHT = 120 << 10  # bytes on their way to a core
OTHER_REGISTERS = 28  # of a thread, beside weights and left operand


def is_gemv(kernel: Gemm) -> bool:
    """Few rows against weights that lie row by row."""
    a, w = kernel, kernel.weight
    if w.format:
        return True
    size = dtypes.DTYPES[w.dtype].size
    dense = (w.strides[2] == 1 or a.k == 1) and not any(s * size % 16 for s in (a.k, w.strides[1], w.offset))
    return a.m <= MOST_ROWS and a.batch == 1 and dense and a.splits == 1


@dataclass(frozen=True)
class Shape:
    """``threads`` take ``vectors`` 16-byte pieces each of every one of ``rows`` weight rows; 0 vectors: in a loop.
    ``per_core``: groups that stay on a core and take rows in turns; 0: a group for each unit of rows."""

    threads: int
    vectors: int
    rows: int
    per_core: int = 0


def choose_shape(pieces: int, columns: int, cores: int, registers: int) -> Shape:
    """``pieces``: 16-byte pieces in a weight row; ``registers``: of a core, 0 if groups that stay are not worth it."""
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
    return Shape(threads, vectors, rows, _per_core(threads, vectors, rows, pieces, registers))


def item_of(kernel: Gemm) -> int:
    """Columns of a piece: what a thread multiplies at once."""
    if kernel.weight.format:
        return PIECE
    return 16 // dtypes.DTYPES[kernel.inputs[kernel.rhs].dtype].size


def shape_of(kernel: Gemm, dialect: Dialect) -> Shape:
    a = kernel
    return choose_shape(a.k // item_of(kernel), a.n * (1 + a.dual), dialect.cores, dialect.registers)


def _per_core(threads: int, vectors: int, rows: int, pieces: int, registers: int) -> int:
    """Groups whose weights of two turns are enough to keep memory busy, as far as they fit into the registers: those of
    a quarter of a core serve every fourth simd."""
    needed = 2 * 4 * rows * vectors + 4 * vectors + OTHER_REGISTERS
    count = IN_FLIGHT // (2 * 16 * rows * pieces)
    while count > 0 and blocks(count * simds(threads), 4) * SIMD * needed > registers // 4:
        count -= 1
    return count


def _turns(shape: Shape, units: int, dialect: Dialect) -> int:
    """Groups that take units in turns, or 0 if each unit has a group."""
    resident = shape.per_core * dialect.cores
    return resident if shape.vectors and 0 < resident < units else 0


def emit_gemv(kernel: Gemm, dialect: Dialect) -> Emission:
    return Gemv(kernel, dialect, shape_of(kernel, dialect)).emit()


def takes_prologue(kernel: Gemm, dialect: Dialect) -> bool:
    """Whether the row that the prologue makes can be computed where it is needed: in pieces of 16 bytes of the weight,
    along one dim."""
    inner, a = kernel.prologue, kernel
    assert inner is not None
    if not is_gemv(kernel) or a.m != 1:
        return False
    item = item_of(kernel)
    if not kernel.weight.format and not shape_of(kernel, dialect).vectors:
        return False
    nest = build_nest(inner)
    if nest.empty or nest.rows or len(nest.folds) != 1 or nest.points(nest.folds) != a.k:
        return False
    row = make_row(nest, 1, scratch=0)
    steps = [s for p in row.passes for s in p.steps]
    if row.stores or any(s.per_row for s in steps):
        return False
    return vector_width(nest, inner, steps, nest.folds[0], most=item) == item


class Gemv:
    """Each group makes ``rows`` results: partial sums of its threads meet in group memory, in a fixed order.

    A prologue (a norm, say) makes the left operand in every group, each thread its own part of it. In a paired product
    the rows of the weight take turns: two accumulators for each result.
    """

    def __init__(self, kernel: Gemm, dialect: Dialect, shape: Shape):
        self.kernel, a = kernel, kernel
        self.m, self.k, self.lanes = a.m, a.k, 1 + a.dual
        self.n = a.n * self.lanes  # rows of the weight
        self.dtype, self.item = dtypes.DTYPES[kernel.inputs[kernel.rhs].dtype].ctype, item_of(kernel)
        self.pieces = self.k // self.item
        self.threads, self.vectors, self.rows = shape.threads, shape.vectors, max(shape.rows, self.lanes)
        self.f = Function(kernel, dialect, early=True)
        self.epilogue = Epilogue(kernel, self.f)
        self.turns = _turns(shape, blocks(self.n, self.rows), dialect)
        self.f.per_core = shape.per_core if self.turns else 0

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        units = blocks(self.n, self.rows)
        f.array("float", "part", (2 if self.turns else 1) * simds(self.threads) * self.rows * self.m)
        if self.turns:
            self._in_turns(units)
            return f.finish(self.turns, self.threads)
        self._place("gid")
        if self.vectors:
            self._weights("w")
            self._load("w")
            prologue = _Prologue(self) if self.kernel.prologue is not None else None
            if prologue:
                prologue.fetch(constant=True)
            self.epilogue.fetch("row_of", "column", self._guard, constant=True)
            out.add("wait_inputs();")
            if prologue:
                prologue.fetch(constant=False)
            else:
                self._left()
            self.epilogue.fetch("row_of", "column", self._guard, constant=False)
            self._load_rest("w")
            if prologue:
                prologue.emit()
            self._share()
            self._multiply_all("w")
        else:
            out.add("wait_inputs();", f"float sum[{self.m}][{self.rows}] = {{}};", "#pragma unroll 4")
            with out.block(f"for (int piece = tid; piece < {self.pieces}; piece += {self.threads}) {{"):
                out.add(f"uint4 w[{self.rows}][1];", "#pragma unroll")
                out.add(f"for (int r = 0; r < {self.rows}; r++) w[r][0] = {self._piece('r', 'piece')};")
                out.add(f"{self._operand} x[{self.m}][1];")
                self._read("piece", "0")
                self._multiply("w", "0")
        self._finish("0")
        return f.finish(units, self.threads)

    def _in_turns(self, units: int) -> None:
        """Groups that stay take units of rows in turns: the left operand is made once, and while one unit is worked on
        the weights of the next are on their way."""
        out, step = self.f.lines, self.turns
        prologue = _Prologue(self) if self.kernel.prologue is not None else None
        for turn in range(2):
            self._weights(f"w{turn}")
            with out.block(f"if (gid + {turn * step} < {units}) {{"):
                out.add(f"const int first = (gid + {turn * step}) * {self.rows};")
                self._load(f"w{turn}")
        if prologue:
            prologue.fetch(constant=True)
        out.add("wait_inputs();")
        if prologue:
            prologue.fetch(constant=False)
            prologue.emit()
        else:
            self._left()
        self._share()
        with out.block(f"for (int unit = gid; unit < {units}; unit += {2 * step}) {{"):
            for turn in range(2):
                with out.block(f"if (unit + {turn * step} < {units}) {{"):
                    self._place(f"(unit + {turn * step})")
                    self.epilogue.fetch("row_of", "column", self._guard)
                    self._multiply_all(f"w{turn}")
                    with out.block(f"if (unit + {(turn + 2) * step} < {units}) {{"):
                        out.add(f"const int first = (unit + {(turn + 2) * step}) * {self.rows};")
                        self._load(f"w{turn}")
                    self._finish(str(turn))

    def _place(self, unit: str) -> None:
        columns = self.rows // self.lanes
        self.f.lines.add(f"const int first = {unit} * {self.rows};")
        self.f.lines.add(
            f"const int row_of = tid / {columns}, column = first / {self.lanes} + tid % {columns}; (void)row_of;"
        )

    @property
    def _guard(self) -> str:
        """Whether a thread has a result to store."""
        inside = f" && column < {self.n // self.lanes}" if self.n % self.rows else ""
        return f"tid < {self.rows // self.lanes * self.m}{inside}"

    def _finish(self, turn: str) -> None:
        """The simds' sums meet, and results are stored. Turns use different memory: one barrier for each is enough."""
        out, total = self.f.lines, self.rows * self.m
        base = simds(self.threads) * total
        self._meet(f"part[{turn} * {base} + sid * {total} + ")
        out.add("barrier();")
        with out.block(f"if ({self._guard}) {{"):
            for n in range(self.lanes):
                at = f"{turn} * {base} + s * {total} + tid * {self.lanes} + {n}"
                out.add(f"float total{n} = 0.0f;", "#pragma unroll")
                out.add(f"for (int s = 0; s < {simds(self.threads)}; s++) total{n} += part[{at}];")
            self.epilogue.store("row_of", "column", 1, lambda which, at: f"total{which}")

    def _meet(self, at: str) -> None:
        """Store the sums of a simd at ``at`` + number."""
        out, total = self.f.lines, self.rows * self.m
        out.add("#pragma unroll")
        with out.block(f"for (int n = 0; n < {total}; n++) {{"):
            out.add(f"const float t = simd_sum(sum[n / {self.rows}][n % {self.rows}]);")
            out.add(f"if (lane == 0) {at}n] = t;")

    def _share(self) -> None:
        """What else is made of the left operand, once."""

    @property
    def _operand(self) -> str:
        """The type of a piece of the left operand: as it is stored, or what a prologue makes."""
        kept = self.kernel.prologue is None
        return f"Vec<{dtypes.DTYPES[self.kernel.inputs[0].dtype].ctype if kept else 'float'}, {self.item}>"

    def _piece(self, row: str, piece: str) -> str:
        number = self.kernel.rhs
        w = self.kernel.inputs[number]
        at = f"first + {row}"
        if self.n % self.rows:
            at = f"({at} < {self.n} ? {at} : {self.n - 1})"
        load = "stream16" if w.buffer.kind in ("weight", "const") else "load16"
        return f"{load}({self.f.pointer(number)} + (int64_t)({at}) * {w.strides[1]} + {piece} * {self.item})"

    def _weights(self, name: str) -> None:
        self.f.lines.add(f"uint4 {name}[{self.rows}][{self.vectors}];")

    def _load(self, name: str) -> None:
        out = self.f.lines
        whole = self.vectors * self.threads == self.pieces
        if self.kernel.inputs[self.kernel.rhs].buffer.kind not in ("weight", "const"):
            out.add("wait_inputs();")
        out.add("#pragma unroll", f"for (int r = 0; r < {self.rows}; r++)", "#pragma unroll")
        with out.block(f"  for (int v = 0; v < {self.vectors}; v++) {{"):
            out.add(f"const int piece = v * {self.threads} + tid;")
            load = self._piece("r", "piece")
            if whole:
                out.add(f"{name}[r][v] = {load};")
            else:
                out.add(f"if (piece < {self.pieces}) {name}[r][v] = {load}; else {name}[r][v] = zero16();")

    def _load_rest(self, name: str) -> None:
        """Weights that are not asked for before the inputs are there."""

    def _left(self) -> None:
        """``x[m][v]``: this thread's pieces of the left operand."""
        out = self.f.lines
        out.add(f"{self._operand} x[{self.m}][{self.vectors}];", "#pragma unroll")
        with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
            out.add(f"const int piece = v * {self.threads} + tid;")
            self._read("piece", "v", self.vectors * self.threads != self.pieces)

    def _read(self, piece: str, v: str, guarded: bool = False) -> None:
        out, op, a = self.f.lines, self.kernel.inputs[0], self.kernel
        size = dtypes.DTYPES[op.dtype].size
        whole = size * self.item <= 16 and op.offset * size % 16 == 0 and (self.m == 1 or a.lda * size % 16 == 0)
        for m in range(self.m):
            at = f"{self.f.pointer(0)} + {m * a.lda} + {piece} * {self.item}"
            if guarded:
                zero = storage("0.0f", op.dtype)
                out.add(
                    f"if ({piece} >= {self.pieces}) for (int e = 0; e < {self.item}; e++) x[{m}][{v}].v[e] = {zero};"
                )
            with out.block("else {" if guarded else "{"):
                if whole:
                    out.add(f"x[{m}][{v}] = *(DEVICE const {self._operand}*)({at});")
                else:
                    out.add(f"for (int e = 0; e < {self.item}; e++) x[{m}][{v}].v[e] = ({at})[e];")

    def _multiply_all(self, name: str) -> None:
        out = self.f.lines
        out.add(f"float sum[{self.m}][{self.rows}] = {{}};", "#pragma unroll")
        with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
            self._multiply(name, "v")

    def _multiply(self, name: str, v: str) -> None:
        out = self.f.lines
        out.add("#pragma unroll")
        with out.block(f"for (int r = 0; r < {self.rows}; r++) {{"):
            out.add(f"float y[{self.item}];", f"unpack({name}[r][{v}], y, (THREAD {self.dtype}*)nullptr);")
            out.add("#pragma unroll", f"for (int e = 0; e < {self.item}; e++) {{")
            for m in range(self.m):
                out.add(f"  sum[{m}][r] += to_f32(x[{m}][{v}].v[e]) * y[e];")
            out.add("}")


class _Prologue:
    """The left operand of one row, made by every group: a thread makes the pieces that it multiplies."""

    def __init__(self, gemv: Gemv):
        self.gemv, self.f = gemv, gemv.f
        assert gemv.kernel.prologue is not None
        self.nest = build_nest(gemv.kernel.prologue)
        self.row = make_row(self.nest, 1, scratch=0)
        (self.lane,) = self.nest.folds
        self.s = scalars_for(self.nest, self.f, self.row.steps)
        self.points = Points(self.s, self.nest, self.lane, gemv.item)
        self.whole = gemv.vectors * gemv.threads == gemv.pieces
        self._loads = 0

    def _pieces(self) -> ExitStack:
        g, out = self.gemv, self.f.lines
        out.add("#pragma unroll")
        stack = ExitStack()
        stack.enter_context(self.s.scope(f"for (int v = 0; v < {g.vectors}; v++) {{"))
        out.add(f"const int i{self.lane} = (v * {g.threads} + tid) * {g.item};")
        stack.enter_context(self.s.scope("{" if self.whole else f"if (i{self.lane} < {g.k}) {{"))
        return stack

    def fetch(self, constant: bool) -> None:
        """Load what the passes read along the row, once; weights (``constant``) before the inputs are awaited."""
        s, out = self.s, self.f.lines
        for x in {x: None for st in self.row.steps for x in expr.walk(st.value) if x.op == "load"}:
            kind = self.nest.inputs[x.value.operand].buffer.kind
            along = affine.affine(x.args[0]).coefficient(self.lane) and not x.value.checks
            if not along or (kind in ("weight", "const")) != constant:
                continue
            name, vec = f"c{int(constant)}{self._loads}", f"Vec<{dtypes.DTYPES[x.dtype].ctype}, {self.gemv.item}>"
            self._loads += 1
            out.add(f"{vec} {name}[{self.gemv.vectors}];")
            with self._pieces():
                out.add(f"{name}[v] = *(DEVICE const {vec}*)({s.pointers[x.value.operand]} + {s.address(x)});")
            s.bound[expr.substitute(x, self.points.shift)] = stored(f"{name}[v].v[i{self.points.inner}]", x.dtype)

    def emit(self) -> None:
        """``x[0][v]``: the pieces as floats."""
        g, out, fold = self.gemv, self.f.lines, RowFold(self.s, self.f)
        out.add(f"Vec<float, {g.item}> x[1][{g.vectors}];")
        for p in self.row.passes:
            fold.begin(p)
            with self._pieces():
                if p.folds:
                    self.points.run(p.folds, position=self.nest.position)
                if p.stores:
                    self.points.run(p.stores, sink="x[0][v].v")
            if p.stores and not self.whole:
                out.add(f"for (int v = 0; v < {g.vectors}; v++) if ((v * {g.threads} + tid) * {g.item} >= {g.k})")
                out.add(f"  for (int e = 0; e < {g.item}; e++) x[0][v].v[e] = 0.0f;")
            fold.meet_along(p, g.threads)
        self.f.checks |= self.s.checks
