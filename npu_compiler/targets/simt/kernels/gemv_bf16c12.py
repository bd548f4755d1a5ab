"""Products of one row with weights in bf16c12: four rows at a time, decoded in registers (``bf16c12/rows4.py``)."""

from __future__ import annotations

from ....schedule.kernel import Gemm
from ....weights.formats.bf16c12.rows4 import ROWS, FourRows
from ..lang.dialect import SIMD, Dialect
from ..lang.emission import Emission
from ..lang.function import blocks, simds
from .gemv import Gemv, Shape

MOST_PIECES = 10  # of a thread
IN_FLIGHT = 114 << 10  # bytes on their way to a core
AHEAD = 66 << 10  # of these before the inputs are there: more would delay what the kernel before still has to write


def emit_quads(kernel: Gemm, dialect: Dialect) -> Emission:
    a = kernel
    quads = blocks(a.n * (1 + a.dual), ROWS)
    return _Quads(kernel, dialect, choose_shape(FourRows(a.k), quads, dialect)).emit()


def choose_shape(layout: FourRows, quads: int, dialect: Dialect) -> Shape:
    """Few threads without a piece, two pieces or more for each, and many threads. Groups take quads in turns if not
    all quads can be on the cores at once."""
    shapes = [(threads, blocks(layout.pieces, threads)) for threads in range(256, 0, -SIMD)]
    idle = {s: max(8 * (s[0] * s[1] - layout.pieces) - layout.pieces, 0) for s in shapes}  # beyond an eighth
    threads, vectors = min(shapes, key=lambda s: (s[1] > MOST_PIECES, idle[s], s[1] < 2, -s[0]))
    if not dialect.registers or blocks(quads, dialect.cores) <= _fit(threads, 12 * vectors + 20, dialect):
        return Shape(threads, vectors, ROWS)
    count = min(IN_FLIGHT // (2 * layout.nbytes), _fit(threads, 28 * vectors + 30, dialect))
    return Shape(threads, vectors, ROWS, count)


def _fit(threads: int, registers: int, dialect: Dialect) -> int:
    """Groups of threads with so many registers on a core; those of a quarter of it serve every fourth simd."""
    simds_of_quarter = dialect.registers // 4 // (SIMD * registers)
    return min(4 * simds_of_quarter // simds(threads), 2048 // threads, 32)


class _Quads(Gemv):
    """Weights are joined from their bytes as they are multiplied. With a matrix unit whose fragments can be filled, it
    multiplies: each four lanes bring their columns as a row of the left fragment and the operand's elements at the
    same columns as a column of the right one, so their sums are on the diagonal of what it makes."""

    def __init__(self, kernel: Gemm, dialect: Dialect, shape: Shape):
        super().__init__(kernel, dialect, shape)
        self.layout = FourRows(self.k)
        self.places = blocks(self.layout.max_outliers, self.threads)  # outliers of a thread
        self.unit = dialect.flash
        if not self.turns and dialect.registers:
            fit = _fit(self.threads, 12 * self.vectors + 20, dialect)
            self.f.per_core = min(blocks(blocks(self.n, ROWS), dialect.cores), fit)
        self.ahead = min(self.vectors, max(1, AHEAD // (3 * 16 * self.threads * max(1, self.f.per_core))))

    def _weights(self, name: str) -> None:
        self.f.lines.add(
            f"uint4 {name}_codes[{self.vectors}], {name}_low[{self.vectors}][2];",
            f"uint {name}_escapes[{self.places}];",
            f"Vec<uint, 2> {name}_scales;",
        )

    def _load(self, name: str) -> None:
        out, layout = self.f.lines, self.layout
        out.add(f"DEVICE const uint8_t* quad = {self.f.pointer(self.kernel.rhs)};")
        out.add(f"quad += (int64_t)(first / {ROWS}) * {layout.nbytes};")
        self._load_pieces(name, 0, self.vectors if self.turns else self.ahead)
        out.add(f"{name}_scales = *(DEVICE const Vec<uint, 2>*)(quad + {layout.scales});", "#pragma unroll")
        with out.block(f"for (int n = 0; n < {self.places}; n++) {{"):
            out.add(f"const int place = n * {self.threads} + tid;")
            out.add(f"{name}_escapes[n] = 0;")
            out.add(f"if (place < {layout.max_outliers})")
            out.add(f"  {name}_escapes[n] = *(DEVICE const uint*)(quad + {layout.outliers} + place * 4);")

    def _load_rest(self, name: str) -> None:
        self._load_pieces(name, self.ahead, self.vectors)

    def _load_pieces(self, name: str, begin: int, end: int) -> None:
        out, pieces = self.f.lines, self.pieces
        if begin == end:
            return
        out.add("#pragma unroll")
        with out.block(f"for (int v = {begin}; v < {end}; v++) {{"):
            out.add(f"const int piece = v * {self.threads} + tid;")
            whole = self.vectors * self.threads == pieces
            if not whole:
                out.add(f"{name}_codes[v] = {name}_low[v][0] = {name}_low[v][1] = zero16();")
            with out.block("{" if whole else f"if (piece < {pieces}) {{"):
                out.add(f"{name}_codes[v] = stream16(quad + piece * 16);")
                for half in range(2):
                    out.add(f"{name}_low[v][{half}] = stream16(quad + {(1 + half) * 16 * pieces} + piece * 16);")

    def _share(self) -> None:
        """What a prologue made, where outliers find it; the operand as the matrix unit takes it."""
        out, prologue = self.f.lines, self.kernel.prologue is not None
        if prologue:
            self.f.array("bf16", "whole", self.k)
        if self.unit:
            out.add(f"FragB<bf16> operand[{self.vectors}][2];")
        if not prologue and not self.unit:
            return
        out.add("#pragma unroll")
        with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
            out.add(f"const int piece = v * {self.threads} + tid;", "(void)piece;")
            whole = "" if self.vectors * self.threads == self.pieces else f"if (piece < {self.pieces}) "
            if self.unit:
                out.add("uint4 pairs;")
                for n, word in enumerate("xyzw"):
                    x = (f"to_f32(x[0][v].v[{2 * n + i}])" for i in range(2))
                    out.add(f"pairs.{word} = pack_pair({', '.join(x)}, (bf16*)nullptr);")
                out.add("frag_b_of(operand[v][0], pairs.x, pairs.y, lane);")
                out.add("frag_b_of(operand[v][1], pairs.z, pairs.w, lane);")
                if prologue:
                    out.add(f"{whole}*(GROUP uint4*)(whole + piece * {self.item}) = pairs;")
            else:
                out.add(f"{whole}for (int e = 0; e < {self.item}; e++)")
                out.add(f"  whole[piece * {self.item} + e] = to_bf16(x[0][v].v[e]);")
        if prologue:
            out.add("barrier();")

    def _multiply_all(self, name: str) -> None:
        out = self.f.lines
        at = f"{name}_escapes[n] >> 16 & 0x3fffu"
        left = "whole" if self.kernel.prologue is not None else self.f.pointer(0)
        out.add(f"float sum[1][{ROWS}] = {{}}, far[{self.places}];", "#pragma unroll")
        with out.block(f"for (int n = 0; n < {self.places}; n++) {{"):
            out.add(f"far[n] = to_f32({left}[{at}]);")
        if self.unit:
            self._by_fragments(name)
        else:
            self._by_lanes(name)
        for r in range(ROWS):
            word = f"{name}_scales.v[{r // 2}]"
            out.add(f"sum[0][{r}] *= f32_of_bits({word} {'& 0xffff0000u' if r % 2 else '<< 16'});")
        out.add("#pragma unroll")
        with out.block(f"for (int n = 0; n < {self.places}; n++) {{"):
            out.add(f"const uint escape = {name}_escapes[n];")
            out.add("const float y = (escape << 17) != 0 ? far[n] * f32_of_bits(escape << 16) : 0.0f;")
            for r in range(ROWS):
                out.add(f"sum[0][{r}] += escape >> 30 == {r} ? y : 0.0f;")

    def _row(self, name: str, r: int, v: str) -> str:
        low, word = f"{name}_low[{v}][{r // 2}]", f"{name}_codes[{v}].{'xyzw'[r]}"
        first, second = "xy" if r % 2 == 0 else "zw"
        return f"quad_row({low}.{first}, {low}.{second}, {word})"

    def _by_lanes(self, name: str) -> None:
        out = self.f.lines
        out.add("#pragma unroll")
        with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
            for r in range(ROWS):
                with out.block("{"):
                    out.add(f"float y[{self.item}];", f"unpack({self._row(name, r, 'v')}, y, (THREAD bf16*)nullptr);")
                    out.add("#pragma unroll", f"for (int e = 0; e < {self.item}; e++)")
                    out.add(f"  sum[0][{r}] += to_f32(x[0][v].v[e]) * y[e];")

    def _by_fragments(self, name: str) -> None:
        out = self.f.lines
        out.add("FragC acc[2];", "frag_zero(acc[0]);", "frag_zero(acc[1]);", "#pragma unroll")
        with out.block(f"for (int v = 0; v < {self.vectors}; v++) {{"):
            for q in range(2):
                with out.block("{"):
                    out.add(f"const uint4 a = {self._row(name, 2 * q, 'v')}, b = {self._row(name, 2 * q + 1, 'v')};")
                    out.add("FragA<bf16> left, right;")
                    out.add("frag_a_of(left, a.x, b.x, a.y, b.y, lane);", "frag_a_of(right, a.z, b.z, a.w, b.w, lane);")
                    for n in range(2):
                        out.add(f"frag_mma(acc[{q}], {('left', 'right')[n]}, operand[v][{n}]);")
        with out.block("if ((lane & 3) == lane >> 3) {"):
            for r in range(ROWS):
                c = f"acc[{r // 2}].v"
                out.add(f"sum[0][{r}] = (lane & 4) != 0 ? {c}[{2 * (r % 2) + 1}] : {c}[{2 * (r % 2)}];")

    def _meet(self, at: str) -> None:
        self.f.lines.add(
            "const float met = simd_sum4(sum[0][0], sum[0][1], sum[0][2], sum[0][3], lane);",
            f"if (lane < {ROWS}) {at}lane] = met;",
        )
