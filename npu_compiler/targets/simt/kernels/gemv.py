"""Products of few rows (a decode step): sizes and functors for ``kernels/gemv.h``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ....graph import affine, expr
from ....schedule.anchors import Gemm
from ....support import dtypes
from ....weights.block_rows import PIECE
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

MAX_ROWS = 4  # of the left operand; products of more rows compute tiles
REGISTERS = 16  # the most 16-byte loads that a thread keeps in registers
AT_ONCE = 5  # how many it should keep
MAX_SHARING = 384  # threads of a workgroup whose groups share the left operand
OTHER_REGISTERS = 28  # of a thread, in addition to weights and left operand


def is_gemv(kernel: Gemm) -> bool:
    """Whether ``kernel`` is a product of few rows with weights that are dense along K, or in a weight format."""
    a, w = kernel, kernel.weight
    if w.format:
        return True
    if kernel.left.dtype == "uint8":
        return False  # sums of integers
    size = dtypes.DTYPES[w.dtype].size
    dense = (w.strides[2] == 1 or a.k == 1) and not any(s * size % 16 for s in (a.k, w.strides[1], w.offset))
    return a.m <= MAX_ROWS and a.batch == 1 and dense and a.splits == 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a workgroup of ``threads``. Each thread has ``vectors`` 16-byte pieces of each of ``rows`` weight
    rows; 0: it loads them in a loop. ``resident``: persistent workgroups of a compute unit; 0: one workgroup per
    ``rows`` rows. ``left``: pieces of the left operand of a thread; 0: those that it multiplies by its weights."""

    threads: int
    vectors: int
    rows: int
    resident: int = 0
    left: int = 0


def choose_shape(pieces: int, columns: int, device: GPU) -> Shape:
    """Choose a shape with few idle threads. ``pieces``: 16-byte pieces of a weight row. ``columns``: weight rows."""
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
    while rows > 1 and (columns % rows or blocks(columns, rows) < device.compute_units):
        rows //= 2
    return Shape(threads, vectors, rows, _resident(threads, vectors, rows, pieces, device))


def item_of(kernel: Gemm) -> int:
    """Return the columns of a piece, which a thread multiplies at once."""
    if kernel.weight.format:
        return PIECE
    return 16 // dtypes.DTYPES[kernel.inputs[kernel.rhs].dtype].size


def shape_of(kernel: Gemm, dialect: Dialect) -> Shape:
    """Return the shape of a product with a dense weight."""
    a = kernel
    return choose_shape(a.k // item_of(kernel), a.n * (1 + a.dual), dialect.device)


def _resident(threads: int, vectors: int, rows: int, pieces: int, device: GPU) -> int:
    """Return the number of persistent workgroups of a compute unit that saturates the memory bandwidth with the weights
    of two tiles each, as far as they fit in its registers. A quarter of the registers serves every fourth subgroup."""
    needed = 2 * 4 * rows * vectors + 4 * vectors + OTHER_REGISTERS
    count = device.gemv_bytes // (2 * 16 * rows * pieces)
    while count > 0 and blocks(count * subgroups(threads), 4) * SUBGROUP * needed > device.registers // 4:
        count -= 1
    return count


def _persistent_workgroups(shape: Shape, tiles: int, dialect: Dialect) -> int:
    """Return the number of persistent workgroups, or 0 if there is one workgroup per tile."""
    resident = shape.resident * dialect.device.compute_units
    return resident if shape.vectors and 0 < resident < tiles else 0


def supports_prologue(kernel: Gemm, dialect: Dialect) -> bool:
    """Whether every workgroup can compute the prologue's row: its loops run along one dim, and are vectors of a
    piece."""
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
    return vector_width(nest, inner, steps, nest.reduction_dims[0], max_width=item) == item


class Reader(NamedTuple):
    """A reader of weights with which ``gemv.h`` is instantiated.

    ``template``: its class template. ``made``: its initialiser, where {0} is the pointer to the weights, and {1} and so
    on are those to ``arrays`` in shared memory (type, name, length). ``header``: the file that defines it. ``sizes``:
    constants in addition to those of ``gemv.h``. ``resident``: workgroups that should be resident on a compute unit; 0:
    any number. ``elements``: whether it reads single elements of the left operand.
    ``types``: aliases of C++ types in addition to those of ``gemv.h``. ``text``: what defines these types.
    ``shares``: whether groups of threads may share a left operand that they compute; it must be bfloat16.
    ``settles``: whether workgroups that are not persistent wait for weights before they wait for their inputs.
    """

    template: str
    made: str
    header: str
    sizes: Constants
    resident: int = 0
    elements: bool = False
    types: Mapping[str, str] = {}
    text: str = ""
    shares: bool = False
    settles: bool = False
    arrays: Sequence[tuple[str, str, int]] = ()


def emit_gemv(kernel: Gemm, dialect: Dialect) -> Emission:
    """Return the function of a product of few rows with a dense weight."""
    w, shape = kernel.weight, shape_of(kernel, dialect)
    sizes = {"PITCH": w.strides[1], "STREAMED": w.buffer.constant}

    def reader(persistent: int) -> Reader:
        return Reader("DenseWeights", "{0}", "gemv.h", sizes, shape.resident if persistent else 0)

    return instantiate(kernel, dialect, shape, reader)


def instantiate(kernel: Gemm, dialect: Dialect, shape: Shape, reader_of: Callable[[int], Reader]) -> Emission:
    """Return the function of a product of few rows. ``reader_of(persistent)`` returns the reader of its weights, given
    the number of persistent workgroups, or 0 for one workgroup per tile."""
    f, a, x = Function(kernel, dialect, explicit_wait=True), kernel, kernel.inputs[0]
    products, item, prologue = 1 + a.dual, item_of(kernel), kernel.prologue is not None
    rows, n, threads = max(shape.rows, products), a.n * products, shape.threads
    tiles, pieces, size = blocks(n, rows), a.k // item, dtypes.DTYPES[x.dtype].size
    persistent = _persistent_workgroups(shape, tiles, dialect)
    reader = reader_of(persistent)
    groups = _groups(shape, tiles, dialect) if prologue and reader.shares and not persistent else 1
    sharing = groups > 1
    shared_vectors = blocks(a.k // item, threads * groups)
    f.resident = max(1, reader.resident // groups) if reader.resident else 0
    weights = f.pointer(kernel.rhs)
    sizes = dict(
        M=a.m, N=n, K=a.k, LDA=a.lda, ROWS=rows, PRODUCTS=products, THREADS=threads, ITEM=item, PIECES=pieces,
        VECTORS=shape.vectors or 1, LEFT_VECTORS=shape.left or shape.vectors or 1, TILES=tiles, STEP=persistent,
        GROUPS=groups, SHARED_VECTORS=shared_vectors, SETTLES=reader.settles,
        ALIGNED=size * item <= 16 and x.offset * size % 16 == 0 and (a.m == 1 or a.lda * size % 16 == 0),
    )  # fmt: skip
    kind = "bf16" if sharing else "float" if prologue else ctype(x.dtype)
    types = {"X": kind, "W": ctype(kernel.weight.dtype), **reader.types}
    if reader.text:
        f.before.append(reader.text)
    if prologue:
        vectors = shared_vectors if sharing else shape.left or shape.vectors
        left = _Prologue(f, kernel, threads * groups, vectors, item, reader.elements, sharing).emit()
    else:
        left = f"LoadedLeft<@NAME@_sizes>{{{f.pointer(0)}}}"
    epilogue = _epilogue(kernel, f, bool(persistent))
    part = f.array("float", "part", groups * (2 if persistent else 1) * subgroups(threads) * rows * a.m)
    name = "gemv_persistent" if persistent else "gemv" if shape.vectors else "gemv_long_rows"
    arrays = [f.array(*array) for array in reader.arrays]
    made = f"{reader.template}<@NAME@_sizes>{{{reader.made.format(weights, *arrays)}}}"
    f.template(name, reader.header, types, {**sizes, **reader.sizes}, made, left, epilogue, part)
    return f.finish(persistent or blocks(tiles, groups), threads * groups)


def _groups(shape: Shape, tiles: int, dialect: Dialect) -> int:
    """Return the number of groups of threads in a workgroup that share the left operand: all that a compute unit has,
    as far as they divide into workgroups of no more than MAX_SHARING threads."""
    device = dialect.device
    if not device.registers:
        return 1
    most = blocks(tiles, device.compute_units)
    fit = [n for n in range(1, most + 1) if n * shape.threads <= MAX_SHARING]
    return max((n for n in fit if most % n == 0), default=1)


def _epilogue(kernel: Gemm, f: Function, persistent: bool) -> str:
    """Define the functor of the epilogue: ``load_weights``, ``load_inputs`` and ``store`` (see ``gemv.h``)."""
    members = Members(f, "@NAME@_epilogue")
    epilogue, out = Epilogue(kernel, members), members.lines
    for name, constant in (("load_weights", True), ("load_inputs", False)):
        with out.method(f"void {name}(int row_of, int column, bool guard)"):
            if not persistent or not constant:
                epilogue.fetch("row_of", "column", "guard", None if persistent else constant)
    with out.method("void store(int row_of, int column, THREAD const float* total)"):
        epilogue.store("row_of", "column", 1, lambda which, at: f"total[{which}]")
    for name, kind in epilogue.registers.items():
        out.declare(kind, name)
    return members.finish()


class _Prologue:
    """A left operand of one row that every workgroup computes. A thread computes the pieces that it multiplies."""

    def __init__(self, f: Function, kernel: Gemm, threads: int, vectors: int, item: int, elements: bool, shared: bool):
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
        self.elements, self.shared = elements, shared

    def emit(self) -> str:
        """Define the functor: ``load_weights``, ``load_inputs`` and ``make``; for readers of single elements also
        ``put`` and ``element``, and for groups that share it ``put`` and ``piece``."""
        out, x = self.members.lines, "THREAD Left& left"
        with self._method("void load_weights(Thread at)"):
            self._load(constant=True)
        with self._method(f"void load_inputs({x}, Thread at)"):
            self._load(constant=False)
        with self._method(f"void make({x}, Thread at)"):
            self._make()
        puts, shared = (str(x).lower() for x in (self.elements and not self.shared, self.shared))
        out.add(f"CONSTANTS bool PUTS = {puts}, SHARED = {shared};")
        if self.elements or self.shared:
            whole = self.members.array("bf16", "whole", self.k)
            out.add(f"INLINE float element(int k) const {{ return to_f32({whole}[k]); }}")
            out.add(f"INLINE void put(int k, float x) {{ {whole}[k] = to_bf16(x); }}")
            out.add(f"INLINE void put(int k, uint4 x) {{ *(SMEM uint4*)({whole} + k) = x; }}")
            vec = f"Vec<bf16, {self.item}>"
            out.add(f"INLINE void put(int k, THREAD const Vec<float, {self.item}>& x) {{")
            out.add(f"  {vec} y;")
            out.add(f"  for (int e = 0; e < {self.item}; e++) y.v[e] = to_bf16(x.v[e]);")
            out.add(f"  *(SMEM {vec}*)({whole} + k) = y;")
            out.add("}")
            out.add(f"INLINE {vec} piece(int k) const {{ return *(SMEM const {vec}*)({whole} + k); }}")
        self.members.checks |= self.s.checks
        return self.members.finish()

    @contextmanager
    def _method(self, head: str) -> Iterator[None]:
        out = self.members.lines
        with self.s.scope(f"template <class Left> INLINE {head} {{" if "Left" in head else f"INLINE {head} {{"):
            for word in ("tid", "lane", "subgroup"):
                out.let("int", word, f"at.{word}")
            out.add("(void)lane, (void)subgroup;")
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

    def _load(self, constant: bool) -> None:
        """Load the operands that the passes read along the row, once: weights (``constant``), or all others."""
        s, out, count = self.s, self.members.lines, 0
        for x in {x: None for st in self.row.steps for x in expr.walk(st.value) if x.op == "load"}:
            buffer = self.nest.inputs[x.value.operand].buffer
            along = affine.affine(x.args[0]).coefficient(self.lane) and not x.value.checks
            if not along or buffer.constant != constant:
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
            fold.combine_along(p, self.threads)
