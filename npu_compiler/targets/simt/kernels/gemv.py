"""Products of a few rows (a decode step): sizes and functors for ``kernels/gemv.h``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ....graph import affine, expr
from ....schedule.kernel import Gemm
from ....support import dtypes
from ....weights.formats.bf16c12.rows4 import PIECE
from ...codegen.nest import build_nest
from ...codegen.row_passes import make_row
from ..lang.device import GPU
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Constants, Function, Members, blocks, subgroups
from ..lang.scalar import ctype, stored
from ..lang.vectorize import Points, scalars_for, vector_width
from .epilogue import Epilogue
from .reductions import RowReduction

MAX_ROWS = 4  # of the left operand; more is a tile's work
REGISTERS = 16  # 16-byte loads a thread holds at most
AT_ONCE = 5  # those it should hold
OTHER_REGISTERS = 28  # of a thread, beside weights and left operand


def is_gemv(kernel: Gemm) -> bool:
    """Few rows against weights that lie row by row."""
    a, w = kernel, kernel.weight
    if w.format:
        return True
    size = dtypes.DTYPES[w.dtype].size
    dense = (w.strides[2] == 1 or a.k == 1) and not any(s * size % 16 for s in (a.k, w.strides[1], w.offset))
    return a.m <= MAX_ROWS and a.batch == 1 and dense and a.splits == 1


@dataclass(frozen=True)
class Shape:
    """``threads`` take ``vectors`` 16-byte pieces each of every one of ``rows`` weight rows; 0 vectors: in a loop.
    ``per_unit``: persistent workgroups of an SM, which take rows in turns; 0: a workgroup for each unit of rows."""

    threads: int
    vectors: int
    rows: int
    per_unit: int = 0


def choose_shape(pieces: int, columns: int, device: GPU) -> Shape:
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
    while rows > 1 and (columns % rows or blocks(columns, rows) < device.units):
        rows //= 2
    return Shape(threads, vectors, rows, _per_core(threads, vectors, rows, pieces, device))


def item_of(kernel: Gemm) -> int:
    """Columns of a piece: what a thread multiplies at once."""
    if kernel.weight.format:
        return PIECE
    return 16 // dtypes.DTYPES[kernel.inputs[kernel.rhs].dtype].size


def shape_of(kernel: Gemm, dialect: Dialect) -> Shape:
    a = kernel
    return choose_shape(a.k // item_of(kernel), a.n * (1 + a.dual), dialect.device)


def _per_core(threads: int, vectors: int, rows: int, pieces: int, device: GPU) -> int:
    """Workgroups of an SM whose weights of two turns keep memory busy, as far as they fit into its registers: those of
    a quarter of an SM serve every fourth subgroup."""
    needed = 2 * 4 * rows * vectors + 4 * vectors + OTHER_REGISTERS
    count = device.gemv_bytes // (2 * 16 * rows * pieces)
    while count > 0 and blocks(count * subgroups(threads), 4) * SUBGROUP * needed > device.registers // 4:
        count -= 1
    return count


def _turns(shape: Shape, units: int, dialect: Dialect) -> int:
    """Persistent workgroups that take units in turns, or 0 if each unit has a workgroup."""
    resident = shape.per_unit * dialect.device.units
    return resident if shape.vectors and 0 < resident < units else 0


def supports_prologue(kernel: Gemm, dialect: Dialect) -> bool:
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
    if nest.empty or nest.rows or len(nest.reduction_dims) != 1 or nest.points(nest.reduction_dims) != a.k:
        return False
    row = make_row(nest, 1, scratch=0)
    steps = [s for p in row.passes for s in p.steps]
    if row.stores or any(s.per_row for s in steps):
        return False
    return vector_width(nest, inner, steps, nest.reduction_dims[0], most=item) == item


class Reader(NamedTuple):
    """A reader of weights that ``gemv.h`` is instantiated with: its class template, how it is made of the pointer to
    them ({0}), its header, the constants it wants beside those of ``gemv.h``, and the workgroups that should fit on an
    SM (0: any number)."""

    template: str
    made: str
    header: str
    sizes: Constants
    per_unit: int = 0


def emit_gemv(kernel: Gemm, dialect: Dialect) -> Emission:
    """The function of a product of a few rows with a dense weight."""
    w, shape = kernel.weight, shape_of(kernel, dialect)
    sizes = {"PITCH": w.strides[1], "STREAMED": w.buffer.kind in ("weight", "const")}

    def reader(turns: int) -> Reader:
        return Reader("DenseWeights", "{0}", "gemv.h", sizes, shape.per_unit if turns else 0)

    return instantiate(kernel, dialect, shape, reader)


def instantiate(kernel: Gemm, dialect: Dialect, shape: Shape, reader_of: Callable[[int], Reader]) -> Emission:
    """A product of a few rows on the weights that a reader reads. ``reader_of(turns)``: for as many workgroups that
    take units in turns, or for one workgroup a unit, 0."""
    f, a, x = Function(kernel, dialect, early=True), kernel, kernel.inputs[0]
    lanes, item, prologue = 1 + a.dual, item_of(kernel), kernel.prologue is not None
    rows, n, threads = max(shape.rows, lanes), a.n * lanes, shape.threads
    units, pieces, size = blocks(n, rows), a.k // item, dtypes.DTYPES[x.dtype].size
    turns = _turns(shape, units, dialect)
    reader = reader_of(turns)
    f.per_unit = reader.per_unit
    weights = f.pointer(kernel.rhs)
    sizes = dict(
        M=a.m, N=n, K=a.k, LDA=a.lda, ROWS=rows, LANES=lanes, THREADS=threads, ITEM=item, PIECES=pieces,
        VECTORS=shape.vectors or 1, UNITS=units, STEP=turns,
        ALIGNED=size * item <= 16 and x.offset * size % 16 == 0 and (a.m == 1 or a.lda * size % 16 == 0),
    )  # fmt: skip
    types = {"X": "float" if prologue else ctype(x.dtype), "W": ctype(kernel.weight.dtype)}
    if prologue:
        left = _Prologue(f, kernel, threads, shape.vectors, item).emit()
    else:
        left = f"LoadedLeft<@NAME@_sizes>{{{f.pointer(0)}}}"
    epilogue = _epilogue(kernel, f, lanes, bool(turns))
    part = f.array("float", "part", (2 if turns else 1) * subgroups(threads) * rows * a.m)
    name = "gemv_resident" if turns else "gemv" if shape.vectors else "gemv_long_rows"
    made = f"{reader.template}<@NAME@_sizes>{{{reader.made.format(weights)}}}"
    f.template(name, reader.header, types, {**sizes, **reader.sizes}, made, left, epilogue, part)
    return f.finish(turns or units, threads)


def _epilogue(kernel: Gemm, f: Function, lanes: int, resident: bool) -> str:
    """The functor of the epilogue: ``fetch_weights``, ``fetch`` and ``store`` (see ``gemv.h``)."""
    members = Members(f, "@NAME@_epilogue")
    epilogue, out = Epilogue(kernel, members), members.lines
    for name, constant in (("fetch_weights", True), ("fetch", False)):
        with out.method(f"void {name}(int row_of, int column, bool guard)"):
            if not resident or not constant:
                epilogue.fetch("row_of", "column", "guard", None if resident else constant)
    with out.method("void store(int row_of, int column, THREAD const float* total)"):
        epilogue.store("row_of", "column", 1, lambda which, at: f"total[{which}]")
    for name, kind in epilogue.registers.items():
        out.declare(kind, name)
    return members.finish()


class _Prologue:
    """The left operand of one row, made by every workgroup: a thread makes the pieces that it multiplies."""

    def __init__(self, f: Function, kernel: Gemm, threads: int, vectors: int, item: int):
        prologue, k = kernel.prologue, kernel.k
        assert prologue is not None
        self.threads, self.vectors, self.item, self.k = threads, vectors, item, k
        self.members = Members(f, "@NAME@_left")
        self.nest = build_nest(prologue)
        self.row = make_row(self.nest, 1, scratch=0)
        (self.lane,) = self.nest.reduction_dims
        self.s = scalars_for(self.nest, self.members, self.row.steps)
        self.points = Points(self.s, self.nest, self.lane, item)
        self.whole = vectors * threads * item == k
        self.compressed = bool(kernel.weight.format)

    def emit(self) -> str:
        """The functor: ``prefetch``, ``fetch`` and ``make``; for compressed weights ``put`` and ``element``."""
        out, x = self.members.lines, "THREAD Left& left"
        with self._method("void prefetch(Thread at)"):
            self._fetch(constant=True)
        with self._method(f"void fetch({x}, Thread at)"):
            self._fetch(constant=False)
        with self._method(f"void make({x}, Thread at)"):
            self._make()
        out.add(f"CONSTANTS bool PUTS = {'true' if self.compressed else 'false'};")
        if self.compressed:
            whole = self.members.array("bf16", "whole", self.k)
            out.add(f"INLINE float element(int k) const {{ return to_f32({whole}[k]); }}")
            out.add(f"INLINE void put(int k, float x) {{ {whole}[k] = to_bf16(x); }}")
            out.add(f"INLINE void put(int k, uint4 x) {{ *(SMEM uint4*)({whole} + k) = x; }}")
        self.members.checks |= self.s.checks
        return self.members.finish()

    @contextmanager
    def _method(self, head: str) -> Iterator[None]:
        out = self.members.lines
        with self.s.scope(f"template <class Left> INLINE {head} {{" if "Left" in head else f"INLINE {head} {{"):
            for word in ("tid", "lane", "sid"):
                out.let("int", word, f"at.{word}")
            out.add("(void)lane, (void)sid;")
            yield

    def _pieces(self) -> ExitStack:
        out = self.members.lines
        out.unrolled()
        stack = ExitStack()
        stack.enter_context(self.s.scope(f"for (int v = 0; v < {self.vectors}; v++) {{"))
        out.let("int", f"i{self.lane}", f"(v * {self.threads} + tid) * {self.item}")
        if not self.whole:
            stack.enter_context(self.s.scope(f"if (i{self.lane} < {self.k}) {{"))
        return stack

    def _fetch(self, constant: bool) -> None:
        """Load what the passes read along the row, once; weights (``constant``) before the inputs are awaited."""
        s, out, count = self.s, self.members.lines, 0
        for x in {x: None for st in self.row.steps for x in expr.walk(st.value) if x.op == "load"}:
            kind = self.nest.inputs[x.value.operand].buffer.kind
            along = affine.affine(x.args[0]).coefficient(self.lane) and not x.value.checks
            if not along or (kind in ("weight", "const")) != constant:
                continue
            name, vec = f"c{int(constant)}{count}", f"Vec<{ctype(x.dtype)}, {self.item}>"
            count += 1
            self.members.field(vec, f"{name}[{self.vectors}]")
            with self._pieces():
                out.assign(f"{name}[v]", f"*(DEVICE const {vec}*)({s.pointers[x.value.operand]} + {s.address(x)})")
            s.bound[expr.substitute(x, self.points.shift)] = stored(f"{name}[v].v[i{self.points.inner}]", x.dtype)

    def _make(self) -> None:
        out, fold = self.members.lines, RowReduction(self.s, self.members)
        for p in self.row.passes:
            fold.begin(p)
            with self._pieces():
                if p.reductions:
                    self.points.run(p.reductions, position=self.nest.position)
                if p.stores:
                    self.points.run(p.stores, sink="left.x[0][v].v")
            if p.stores and not self.whole:
                begin = f"(v * {self.threads} + tid) * {self.item}"
                with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"), out.when(f"{begin} >= {self.k}"):
                    out.add(f"for (int e = 0; e < {self.item}; e++) left.x[0][v].v[e] = 0.0f;")
            fold.meet_along(p, self.threads)
