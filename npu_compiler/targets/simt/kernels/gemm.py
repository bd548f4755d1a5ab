"""Matrix products: one row by streaming the weights, more by tiles; convolutions are tiles whose rows are gathered.

The left operand is [batch, M, K] or an image, the right one [batch or 1, N, K] with any strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....schedule.kernel import Conv2d, Gemm
from ....support import dtypes
from ..lang.dialect import SIMD, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import convert, read, storage
from .epilogue import Epilogue
from .gemv import emit_gemv, is_gemv
from .gemv_bf16c12 import emit_quads

# layout of a weight format -> products that read it
READERS = {"bf16c12.rows4": emit_quads}


@dataclass(frozen=True)
class Product:
    """The sizes of a product, all in elements: ``batch`` times M x K by K x N, cut along K into ``splits`` parts.
    ``lanes`` 2: columns take turns in two products, whose accumulators make one result."""

    batch: int
    m: int
    n: int
    k: int
    splits: int = 1
    lanes: int = 1


def emit_gemm(kernel: Gemm, dialect: Dialect) -> Emission:
    """The function of a ``gemm`` kernel."""
    if kernel.weight.format:
        return READERS[kernel.weight.format](kernel, dialect)
    if is_gemv(kernel):
        return emit_gemv(kernel, dialect)
    p = product_of(kernel)
    return _tiles(kernel, dialect, p, _Rows(kernel, p))


def emit_conv(kernel: Conv2d, dialect: Dialect) -> Emission:
    """The function of a ``conv2d`` kernel: an implicit matrix product over (taps, channels)."""
    return _tiles(kernel, dialect, conv_product(kernel), _Image(kernel))


def product_of(kernel: Gemm | Conv2d) -> Product:
    """The sizes of a ``gemm`` or ``conv2d`` kernel."""
    if isinstance(kernel, Conv2d):
        return conv_product(kernel)
    lanes = 1 + kernel.dual
    return Product(kernel.batch, kernel.m, kernel.n * lanes, kernel.k, kernel.splits, lanes)


def conv_product(kernel: Conv2d) -> Product:
    n, oh, ow, _ = kernel.result_shape
    (r, s), (c, k), groups = kernel.kernel_size, kernel.channels, kernel.groups
    return Product(groups, n * oh * ow, k // groups, r * s * c // groups, kernel.splits)


class _Side:
    """Where the elements of one operand lie. ``vectors``: whether 8 neighbours along K can be copied at once."""

    vectors = False
    along_k = True  # neighbouring threads should take neighbours along K

    def __init__(self, number: int):
        self.number = number

    def setup(self, f: Function, name: str, row: str) -> None:
        """Declare what depends on the row alone; ``v{name}``: whether it exists."""
        raise NotImplementedError

    def place(self, f: Function, name: str, k: str, tag: str) -> tuple[str, str]:
        """(condition, offset) of element ``k`` of the row that was set up as ``name``."""
        raise NotImplementedError


class _Rows(_Side):
    """The left operand of a matmul."""

    def __init__(self, kernel: Gemm, p: Product):
        super().__init__(0)
        op = kernel.inputs[0]
        self.p = p
        self.row, self.batch = kernel.lda, kernel.batch_stride
        size = dtypes.DTYPES[op.dtype].size
        per = 16 // size
        self.vectors = size == 2 and not any(n % per for n in (p.k, self.row, self.batch, op.offset))

    def setup(self, f: Function, name: str, row: str) -> None:
        f.lines.add(f"const bool v{name} = {row} < {self.p.m};")
        batch = f"(int64_t)tb * {self.batch} + " if self.p.batch > 1 else ""
        f.lines.add(f"const int64_t o{name} = {batch}(int64_t)(v{name} ? {row} : 0) * {self.row};")

    def place(self, f: Function, name: str, k: str, tag: str) -> tuple[str, str]:
        return f"v{name} && {k} < {self.p.k}", f"o{name} + {k}"


class _Image(_Side):
    """The left operand of a convolution: a row is an output pixel, K runs over taps and channels."""

    def __init__(self, kernel: Conv2d):
        super().__init__(0)
        op, self.a = kernel.inputs[0], kernel
        self.p = conv_product(kernel)
        _, self.h, self.w, self.c = op.shape
        self.image, self.line, self.pixel, _ = op.strides  # rows of pixels may overlap
        _, self.oh, self.ow, _ = kernel.result_shape
        self.cg = self.c // self.a.groups
        self.vectors = dtypes.DTYPES[op.dtype].size == 2 and not any(
            n % 8 for n in (self.cg, *op.strides[:3], op.offset)
        )

    @property
    def plain(self) -> bool:
        """A 1x1 convolution that takes every pixel: its rows are the pixels."""
        a = self.a
        dense = (self.image, self.line) == (self.h * self.w * self.pixel, self.w * self.pixel)
        return dense and a.kernel_size == (1, 1) and a.stride == (1, 1) and tuple(a.padding) == (0, 0, 0, 0)

    def setup(self, f: Function, name: str, row: str) -> None:
        out, (sh, sw), (top, left) = f.lines, self.a.stride, self.a.padding[:2]
        out.add(f"const bool v{name} = {row} < {self.p.m};", f"const uint m{name} = v{name} ? (uint)({row}) : 0u;")
        group = f" + tb * {self.cg}" if self.p.batch > 1 else ""
        if self.plain:
            out.add(f"const int64_t o{name} = (int64_t)m{name} * {self.pixel}{group};")
            return
        out.add(
            f"const int y{name} = (int)(m{name} / {self.ow}u % {self.oh}u) * {sh} - {top};",
            f"const int x{name} = (int)(m{name} % {self.ow}u) * {sw} - {left};",
            f"const int64_t o{name} = (int64_t)(m{name} / {self.oh * self.ow}u) * {self.image}{group};",
        )

    def place(self, f: Function, name: str, k: str, tag: str) -> tuple[str, str]:
        if self.plain:
            return f"v{name} && {k} < {self.p.k}", f"o{name} + {k}"
        (_, s), (dh, dw) = self.a.kernel_size, self.a.dilation
        f.lines.add(
            f"const int tap{tag} = (int)((uint)({k}) / {self.cg}u), c{tag} = {k} - tap{tag} * {self.cg};",
            f"const int y{tag} = y{name} + tap{tag} / {s} * {dh}, x{tag} = x{name} + tap{tag} % {s} * {dw};",
        )
        inside = f"y{tag} >= 0 && y{tag} < {self.h} && x{tag} >= 0 && x{tag} < {self.w}"
        return (
            f"v{name} && {k} < {self.p.k} && {inside}",
            f"o{name} + y{tag} * {self.line} + x{tag} * {self.pixel} + c{tag}",
        )


class _Weights(_Side):
    """The right operand: a row is an output column."""

    def __init__(self, kernel: Gemm | Conv2d, p: Product):
        super().__init__(kernel.rhs)
        op = kernel.inputs[kernel.rhs]
        self.p = p
        if len(op.shape) == 4:  # convolution: [groups, columns, taps, channels], dense
            self.batch, self.row, self.step = p.n * p.k, p.k, 1
        else:
            self.batch, self.row, self.step = op.strides if op.shape[0] > 1 else (0, *op.strides[1:])
        if p.n == 1:
            self.row = 0
        self.along_k = self.step == 1 or p.k == 1
        size = dtypes.DTYPES[op.dtype].size
        dense = self.step == 1 or p.k == 1
        self.vectors = size == 2 and dense and not any(x % 8 for x in (p.k, self.row, self.batch, op.offset))

    def setup(self, f: Function, name: str, row: str) -> None:
        f.lines.add(f"const bool v{name} = {row} < {self.p.n};")
        batch = f"(int64_t)tb * {self.batch} + " if self.p.batch > 1 and self.batch else ""
        f.lines.add(f"const int64_t o{name} = {batch}(int64_t)(v{name} ? {row} : 0) * {self.row};")

    def place(self, f: Function, name: str, k: str, tag: str) -> tuple[str, str]:
        at = k if self.step == 1 else f"(int64_t)({k}) * {self.step}"
        return f"v{name} && {k} < {self.p.k}", f"o{name} + {at}"


# -- tiles ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tile:
    """A group makes ``m`` x ``n`` results, ``k`` terms at a time, with ``simds_m`` x ``simds_n`` simds."""

    m: int
    n: int
    k: int
    simds_m: int = 1
    simds_n: int = 1

    @property
    def threads(self) -> int:
        return self.simds_m * self.simds_n * SIMD


def choose_tile(p: Product, dialect: Dialect) -> Tile:
    """The largest tile for the matrix unit that still fills the cores."""
    small = Tile(64, 64, 32, 2, 2)
    if dialect.group_bytes < 64 << 10:
        return small
    for tile in (Tile(128, 128, 32, 2, 4), Tile(128, 64, 32, 4, 2), Tile(64, 128, 32, 2, 4)):
        count = blocks(p.m, tile.m) * blocks(p.n, tile.n) * p.batch * p.splits
        if count >= dialect.cores and p.m > tile.m // 2 and p.n > tile.n // 2:
            return tile
    return Tile(32, 64, 64, 1, 4) if p.m <= 32 else Tile(64, 64, 64, 2, 2)


def _tiles(kernel: Gemm | Conv2d, dialect: Dialect, p: Product, left: _Side) -> Emission:
    if kernel.inputs[0].dtype in dialect.matrix_types and p.m > WIDE_ROWS and dialect.wide:
        return _WideTiles(kernel, dialect, p, left).emit()
    if kernel.inputs[0].dtype in dialect.matrix_types:
        return _MatrixTiles(kernel, dialect, p, left).emit()
    return _plain_tiles(kernel, dialect, p, left)


def _group_indices(f: Function, p: Product, tiles_m: int, tiles_n: int) -> None:
    f.lines.add(f"const int tm = gid % {tiles_m}, tn = gid / {tiles_m} % {tiles_n};")
    f.lines.add(f"const int tb = gid / {tiles_m * tiles_n} % {p.batch}; (void)tb;")
    if p.splits > 1:
        f.lines.add(f"const int part = gid / {tiles_m * tiles_n * p.batch};")


def output_place(kernel: Gemm | Conv2d, p: Product, n: str) -> tuple[str, str]:
    """(the start of the row number, the column) in the output: groups of a convolution lie along its columns."""
    part = f"part * {p.m * (p.batch if isinstance(kernel, Gemm) else 1)} + " if p.splits > 1 else ""
    if isinstance(kernel, Gemm):
        return part + (f"tb * {p.m} + " if p.batch > 1 else ""), n
    return part, f"tb * {p.n} + {n}" if p.batch > 1 else n


def output_column(n: str, p: Product) -> str:
    """The column of the output that column ``n`` of the product belongs to."""
    return n if p.lanes == 1 else f"{n} / {p.lanes}"


def spread(which: int, at: str, p: Product) -> str:
    """Where accumulator ``which`` of result ``at`` stands among neighbouring columns of the product."""
    return at if p.lanes == 1 else f"({at}) * {p.lanes} + {which}"


def _plain_tiles(kernel: Gemm | Conv2d, dialect: Dialect, p: Product, left: _Side) -> Emission:
    """64 x 64 results a group in float32, 4 x 4 a thread."""
    f = Function(kernel, dialect)
    out, right = f.lines, _Weights(kernel, p)
    tiles_m, tiles_n, steps = blocks(p.m, 64), blocks(p.n, 64), blocks(p.k, 16 * p.splits)
    _group_indices(f, p, tiles_m, tiles_n)
    f.array("float", "as", 16 * 68)
    f.array("float", "bs", 16 * 68)
    for letter, side, tile in (("a", left, "tm"), ("b", right, "tn")):
        k, row = ("tid % 16", "tid / 16 + {} * 16") if side.along_k else ("tid / 64 + {} * 4", "tid % 64")
        for i in range(4):
            if side.along_k or i == 0:
                side.setup(f, f"{letter}{i}", f"{tile} * 64 + {row.format(i)}")
            out.add(f"const int k{letter}{i} = {k.format(i)};")
    out.add("float acc[4][4] = {};", "const int tx = tid % 16 * 4, ty = tid / 16 * 4;")
    first = f"part * {steps * 16}" if p.splits > 1 else "0"
    with out.block(f"for (int step = 0; step < {steps}; step++) {{"):
        for letter, side in (("a", left), ("b", right)):
            row = "tid / 16 + {} * 16" if side.along_k else "tid % 64"
            for i in range(4):
                name = f"{letter}{i if side.along_k else 0}"
                out.add(f"const int kk{letter}{i} = {first} + step * 16 + k{letter}{i};")
                valid, offset = side.place(f, name, f"kk{letter}{i}", f"{letter}{i}e")
                text = convert(read(f.pointer(side.number), offset, f.operand(side.number).dtype), "float")
                out.add(f"const float x{letter}{i} = {valid} ? {text} : 0.0f;")
                out.add(f"{letter}s[k{letter}{i} * 68 + {row.format(i)}] = x{letter}{i};")
        out.add(
            "barrier();", "float sum[4][4] = {};  // short sums, and a sum of those: less rounding", "#pragma unroll"
        )
        with out.block("for (int k = 0; k < 16; k++) {"):
            out.add("float x[4], y[4];", "#pragma unroll")
            out.add("for (int i = 0; i < 4; i++) { x[i] = as[k * 68 + ty + i]; y[i] = bs[k * 68 + tx + i]; }")
            out.add("#pragma unroll", "for (int i = 0; i < 4; i++)", "#pragma unroll")
            out.add("  for (int j = 0; j < 4; j++) sum[i][j] += x[i] * y[j];")
        out.add("#pragma unroll", "for (int i = 0; i < 4; i++)", "#pragma unroll")
        out.add("  for (int j = 0; j < 4; j++) acc[i][j] += sum[i][j];", "barrier();")
    epilogue = Epilogue(kernel, f)
    width = min(epilogue.width, 4 // p.lanes) if p.n % 4 == 0 else 1
    row, _ = output_place(kernel, p, "")
    out.add("#pragma unroll")
    with out.block("for (int i = 0; i < 4; i++) {"):
        out.add(f"const int m = tm * 64 + ty + i;  if (m >= {p.m}) break;", "#pragma unroll")
        with out.block(f"for (int j = 0; j < 4; j += {width * p.lanes}) {{"):
            out.add(f"if (tn * 64 + tx + j >= {p.n}) break;")
            _, column = output_place(kernel, p, output_column("(tn * 64 + tx + j)", p))
            epilogue.store(row + "m", column, width, lambda which, at: f"acc[i][j + {spread(which, at, p)}]")
    return f.finish(tiles_m * tiles_n * p.batch * p.splits, 256)


WIDE_ROWS = 16  # of the left operand, from which the wide unit pays


class _MatrixTiles:
    """Tiles for the matrix unit: operands go through a ring of stages in group memory, results through it once."""

    def __init__(self, kernel: Gemm | Conv2d, dialect: Dialect, p: Product, left: _Side):
        self.kernel, self.dialect, self.p = kernel, dialect, p
        self.tile = t = self._choose()
        self.f = Function(kernel, dialect)
        self.sides = (("a", left, "tm", t.m), ("b", _Weights(kernel, p), "tn", t.n))
        self.ctype = dtypes.DTYPES[kernel.inputs[0].dtype].ctype
        self.ld = t.k + 8  # keeps rows that are read together in different banks
        self.stage = (t.m + t.n) * self.ld
        self.results = t.m * (t.n + 4) * 4
        room = dialect.group_bytes // (self.stage * 2)
        self.stages = max(2, min(dialect.stages, room, blocks(blocks(p.k, t.k), p.splits) + 1))

    def _choose(self) -> Tile:
        return choose_tile(self.p, self.dialect)

    def _place(self, name: str) -> str:
        """Where in a stage's part this thread's chunk ``name`` goes."""
        return f"r{name} * {self.ld} + k{name}"

    def emit(self) -> Emission:
        f, out, t, p = self.f, self.f.lines, self.tile, self.p
        tiles_m, tiles_n = blocks(p.m, t.m), blocks(p.n, t.n)
        _group_indices(f, p, tiles_m, tiles_n)
        count = max(self.stages * self.stage * 2, self.results) // 4
        f.array("int", "memory", -(-count // 4) * 4)
        out.add(f"GROUP {self.ctype}* const ring = (GROUP {self.ctype}*)memory;")
        steps = blocks(blocks(p.k, t.k), p.splits)
        out.add(f"const int first = {f'part * {steps * t.k}' if p.splits > 1 else '0'};")
        for letter, side, tile, rows in self.sides:
            for i in range(self._chunks(rows)):
                c = f"(tid + {i * t.threads})"
                row, col = self._chunk(side, rows, c)
                out.add(f"const int r{letter}{i} = {row}, k{letter}{i} = {col};")
                side.setup(f, f"{letter}{i}", f"{tile} * {rows} + r{letter}{i}")
        self._multiply(steps)
        self._store()
        return f.finish(tiles_m * tiles_n * p.batch * p.splits, t.threads)

    def _multiply(self, steps: int) -> None:
        """The loop over K: stages are filled ahead of their use."""
        out, t = self.f.lines, self.tile
        mm, nn, _ = self.dialect.matrix
        self.tiles_m, self.tiles_n = t.m // t.simds_m // mm, t.n // t.simds_n // nn
        out.add(f"FragC acc[{self.tiles_m}][{self.tiles_n}];", "#pragma unroll")
        out.add(f"for (int i = 0; i < {self.tiles_m}; i++)", "#pragma unroll")
        out.add(f"  for (int j = 0; j < {self.tiles_n}; j++) frag_zero(acc[i][j]);")
        for n in range(self.stages - 1):
            with out.block("{"):
                self._load(str(n), str(n), steps)
            out.add("copy_commit();")
        with out.block(f"for (int step = 0; step < {steps}; step++) {{"):
            out.add(f"copy_wait<{self.stages - 2}>();", "barrier();")
            out.add(f"const int ahead = step + {self.stages - 1};")
            with out.block(f"if (ahead < {steps}) {{"):
                self._load("ahead", f"(ahead % {self.stages})", steps)
            out.add("copy_commit();")
            self._compute(f"(step % {self.stages})")

    def _chunks(self, rows: int) -> int:
        return blocks(rows * self.tile.k // 8, self.tile.threads)

    def _chunk(self, side: _Side, rows: int, c: str) -> tuple[str, str]:
        """Row and first K of the 8 neighbours that chunk ``c`` is."""
        if side.along_k:
            return f"{c} / {self.tile.k // 8}", f"{c} % {self.tile.k // 8} * 8"
        return f"{c} % {rows}", f"{c} / {rows} * 8"

    def _load(self, step: str, slot: str, steps: int) -> None:
        f, out, t = self.f, self.f.lines, self.tile
        base, zero = 0, storage("0.0f", self.kernel.inputs[0].dtype)
        for letter, side, _, rows in self.sides:
            pointer = f.pointer(side.number)
            whole = rows * t.k // 8 % t.threads == 0
            for i in range(self._chunks(rows)):
                name = f"{letter}{i}"
                guard = "{" if whole else f"if (tid + {i * t.threads} < {rows * t.k // 8}) {{"
                with out.block(guard):
                    out.add(f"const int k = first + {step} * {t.k} + k{name};")
                    to = f"ring + {slot} * {self.stage} + {base} + {self._place(name)}"
                    if side.vectors:
                        valid, offset = side.place(f, name, "k", "e")
                        out.add(f"const bool ok = {valid};", f"copy16({to}, {pointer} + (ok ? {offset} : 0), ok);")
                    else:
                        out.add(f"Vec<{self.ctype}, 8> v;", "#pragma unroll")
                        with out.block("for (int e = 0; e < 8; e++) {"):
                            valid, offset = side.place(f, name, "(k + e)", "e")
                            out.add(f"v.v[e] = {valid} ? {pointer}[{offset}] : {zero};")
                        out.add(f"*(GROUP Vec<{self.ctype}, 8>*)({to}) = v;")
            base += rows * self.ld

    def _compute(self, slot: str) -> None:
        out, t = self.f.lines, self.tile
        mm, nn, kk = self.dialect.matrix
        out.add(f"GROUP const {self.ctype}* const as = ring + {slot} * {self.stage};")
        out.add(f"GROUP const {self.ctype}* const bs = as + {t.m * self.ld};")
        wm, wn = t.m // t.simds_m, t.n // t.simds_n
        out.add("#pragma unroll")
        with out.block(f"for (int k = 0; k < {t.k}; k += {kk}) {{"):
            out.add(f"FragA<{self.ctype}> a[{self.tiles_m}];", f"FragB<{self.ctype}> b[{self.tiles_n}];")
            out.add("#pragma unroll", f"for (int i = 0; i < {self.tiles_m}; i++)")
            out.add(
                f"  frag_load_a(a[i], as + (sid / {t.simds_n} * {wm} + i * {mm}) * {self.ld} + k, {self.ld}, lane);"
            )
            out.add("#pragma unroll", f"for (int j = 0; j < {self.tiles_n}; j++)")
            out.add(
                f"  frag_load_b(b[j], bs + (sid % {t.simds_n} * {wn} + j * {nn}) * {self.ld} + k, {self.ld}, lane);"
            )
            out.add("#pragma unroll", f"for (int i = 0; i < {self.tiles_m}; i++)", "#pragma unroll")
            out.add(f"  for (int j = 0; j < {self.tiles_n}; j++) frag_mma(acc[i][j], a[i], b[j]);")

    def _store(self) -> None:
        """Through group memory, so that neighbouring threads store neighbouring columns."""
        f, out, t, p = self.f, self.f.lines, self.tile, self.p
        ld = t.n + 4
        out.add("copy_wait<0>();", "barrier();", "GROUP float* const results = (GROUP float*)memory;")
        self._results(ld)
        out.add("barrier();")
        epilogue = Epilogue(self.kernel, f)
        width = epilogue.width
        while p.n // p.lanes % width:
            width //= 2
        per_row = t.n // p.lanes // width
        with out.block(f"for (int c = tid; c < {t.m * per_row}; c += {t.threads}) {{"):
            out.add(f"const int m = c / {per_row}, n = c % {per_row} * {width * p.lanes};")
            with out.block(f"if (tm * {t.m} + m < {p.m} && tn * {t.n} + n < {p.n}) {{"):
                out.add(f"float acc[{width * p.lanes}];")
                if width % 4 == 0:
                    out.add("#pragma unroll", f"for (int e = 0; e < {width * p.lanes}; e += 4) {{")
                    out.add(f"  const Vec<float, 4> v = *(GROUP const Vec<float, 4>*)(results + m * {ld} + n + e);")
                    out.add("  acc[e] = v.v[0]; acc[e + 1] = v.v[1]; acc[e + 2] = v.v[2]; acc[e + 3] = v.v[3];", "}")
                else:
                    out.add(f"for (int e = 0; e < {width * p.lanes}; e++) acc[e] = results[m * {ld} + n + e];")
                start, column = output_place(self.kernel, p, output_column(f"(tn * {t.n} + n)", p))
                row = f"{start}tm * {t.m} + m"
                epilogue.store(row, column, width, lambda which, at: f"acc[{spread(which, at, p)}]")

    def _results(self, ld: int) -> None:
        """Every simd's accumulators to their places in ``results``."""
        out, t = self.f.lines, self.tile
        mm, nn, _ = self.dialect.matrix
        out.add("#pragma unroll", f"for (int i = 0; i < {self.tiles_m}; i++)", "#pragma unroll")
        out.add(f"  for (int j = 0; j < {self.tiles_n}; j++)")
        row = f"(sid / {t.simds_n} * {t.m // t.simds_m} + i * {mm})"
        out.add(f"    frag_store(results + {row} * {ld} + sid % {t.simds_n} * {t.n // t.simds_n} + j * {nn}, {ld}, "
                "acc[i][j], lane);")  # fmt: skip


def wide_tiles(dialect: Dialect) -> list[Tile]:
    """The tiles of the wide matrix unit."""
    return [Tile(m, n, 64, m // 16, 1) for m in (128, 64) for n in dialect.wide if m * n != 64 * 256]


def wide_stages(t: Tile) -> int:
    """Stages of the ring: the largest tile has a core for itself, the others share one."""
    return 3 if 64 * 64 < t.m * t.n < 128 * 256 else 4


def wide_cost(p: Product, t: Tile, dialect: Dialect) -> float:
    """Estimated microseconds of a product. Measured on an H200: a step of the largest tile takes 1.05, smaller tiles
    multiply more slowly, a group takes 2 to start and its results leave a core at 32 KB."""
    steps = blocks(blocks(p.k, t.k), p.splits)
    together = max(1, dialect.group_bytes // (wide_stages(t) * (t.m + t.n) * t.k * 2))
    rate = {128 * 256: 1.0, 128 * 128: 0.8, 128 * 64: 0.75}.get(t.m * t.n, 0.7)
    multiply, store = 1.05 * steps * t.m * t.n / (128 * 256) / rate, t.m * t.n * 3 / 32768
    count = blocks(p.m, t.m) * blocks(p.n, t.n) * p.batch * p.splits
    alone = multiply + store + 2.0
    return blocks(count, dialect.cores * together) * max(together * multiply, together * store, alone)


class _WideTiles(_MatrixTiles):
    """Tiles for the wide matrix unit: it reads both operands from group memory while copies fill later stages."""

    def __init__(self, kernel: Gemm | Conv2d, dialect: Dialect, p: Product, left: _Side):
        super().__init__(kernel, dialect, p, left)
        t = self.tile
        self.ld = t.k  # swizzled instead
        self.stage = (t.m + t.n) * self.ld
        self.stages = wide_stages(t)

    def _choose(self) -> Tile:
        return min(wide_tiles(self.dialect), key=lambda t: wide_cost(self.p, t, self.dialect))

    def _place(self, name: str) -> str:
        return f"wide_at(r{name}, k{name} / 8)"

    def _multiply(self, steps: int) -> None:
        out, t, ahead = self.f.lines, self.tile, self.stages - 2
        out.add(f"WideC<{t.n}> acc;", "wide_zero(acc);")
        for n in range(ahead):
            with out.block(f"if ({n} < {steps}) {{"):
                self._load(str(n), str(n), steps)
            out.add("copy_commit();")
        out.add("#pragma unroll 1")
        with out.block(f"for (int step = 0; step < {steps}; step++) {{"):
            out.add(f"copy_wait<{ahead - 1}>();", "wide_ready();", "barrier();")
            out.add(f"GROUP const {self.ctype}* const as = ring + step % {self.stages} * {self.stage};")
            out.add("wide_begin();")
            out.add(f"wide_mma(acc, as + sid / 4 * {64 * self.ld}, as + {t.m * self.ld});", "wide_commit();")
            out.add("wide_wait<1>();  // so that nobody reads the stage that is filled next")
            out.add(f"const int ahead = step + {ahead};")
            with out.block(f"if (ahead < {steps}) {{"):
                self._load("ahead", f"(ahead % {self.stages})", steps)
            out.add("copy_commit();")
        out.add("wide_settle(acc);")

    def _results(self, ld: int) -> None:
        self.f.lines.add(f"wide_store(results + sid * {16 * ld}, {ld}, acc, lane);")
