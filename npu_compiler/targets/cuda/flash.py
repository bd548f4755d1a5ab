"""Attention of many queries on Hopper: the copy engine brings keys and values, teams of four simds multiply 64 rows.

Scores never leave the registers; one team's softmax runs beside the other's products.
"""

from __future__ import annotations

from ...kernel import Kernel, Operand
from ..simt.dialect import SIMD, Dialect
from ..simt.emission import Emission
from ..simt.flash import Flash
from ..simt.function import blocks
from ..simt.program import TileMap

SLOTS = 4  # tiles of keys or of values in group memory


def takes_attention(kernel: Kernel) -> bool:
    """Whether the wide unit takes it: no mask but causality and positions, head sizes of whole tiles."""
    if not kernel.inputs[0].shape[2]:
        return False
    masked = len(kernel.inputs) > 3 and not kernel.attrs.get("by_position")
    wide = kernel.inputs[0].shape[3] in (64, 128) and "splits" not in kernel.attrs
    rows = all(s > 0 for o in kernel.inputs[:3] for s, n in zip(o.strides, o.shape, strict=True) if n > 1)
    return wide and rows and not masked


def emit_wide_flash(kernel: Kernel, dialect: Dialect) -> Emission:
    """The function of an ``attention`` kernel for which :func:`takes_attention`."""
    return _WideFlash(kernel, dialect).emit()


class _WideFlash(Flash):
    keys = 128

    def __init__(self, kernel: Kernel, dialect: Dialect):
        super().__init__(kernel, dialect)
        self.teams = 2 if blocks(self.sq, 128) * self.h * self.b >= dialect.cores else 1
        self.rows, self.threads = 64 * self.teams, 128 * self.teams + SIMD
        self.halves = self.d // 64

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        tiles, heads = blocks(self.sq, self.rows), self.h * self.b
        out.add(f"const int tile = {tiles - 1} - gid / {heads};  // those with the most keys first")
        out.add(f"const int h = gid % {self.h}, b = gid % {heads} / {self.h}, hk = h / {self.share};")
        out.add("(void)b; (void)hk;", f"const int q0 = tile * {self.rows};")
        f.array(self.ctype, "ring", SLOTS * self.keys * self.d)
        f.array(self.ctype, "qs", self.rows * self.d)
        f.array("int64_t", "full", 2 * SLOTS + 1)
        out.add(f"int64_t* const empty = full + {SLOTS};", f"int64_t* const queries = full + {2 * SLOTS};")
        maps = [f.tile_map(n, self._map(n, rows)) for n, rows in ((0, self.rows), (1, self.keys), (2, self.keys))]
        with out.block("if (tid == 0) {"):
            out.add(
                f"for (int i = 0; i < {SLOTS}; i++) {{ ring_init(full + i, 1); ring_init(empty + i, {self.teams}); }}"
            )
            out.add("ring_init(queries, 1);", "ring_ready();", *(f"tile_map_ready({m});" for m in maps))
        out.add("barrier();")
        self._range()
        out.add(f"const int steps = (valid + {self.keys - 1}) / {self.keys};")
        with out.block(f"if (sid == {self.teams * 4}) {{"), out.block("if (lane == 0) {"):
            self._ask(maps)
        with out.block("else {"):
            self._attend()
        return f.finish(tiles * heads, self.threads)

    def _map(self, number: int, rows: int) -> TileMap:
        """Of operand [B, H, rows, D], 64 columns wide."""
        op: Operand = self.kernel.inputs[number]
        b, h, n, d = op.shape
        strides = tuple(s * 2 if count > 1 else 16 for s, count in zip(op.strides[2::-1], (n, h, b), strict=True))
        return TileMap((d, n, h, b), strides, (64, rows, 1, 1), 128)

    def _ask(self, maps: list[str]) -> None:
        out, size = self.f.lines, self.keys * self.d
        q, k, v = maps
        out.add("copies_follow();", f"ring_expect(queries, {self.rows * self.d * 2});")
        for half in range(self.halves):
            out.add(f"tile_copy_4d(qs + {half * self.rows * 64}, {q}, queries, {half * 64}, q0, h, b);")
        out.add("int slot = 0, turn = 1;")
        with out.block("for (int step = 0; step < steps; step++) {"):
            for name in (k, v):
                out.add("ring_wait(empty + slot, turn);", f"ring_expect(full + slot, {size * 2});")
                for half in range(self.halves):
                    place = f"ring + slot * {size} + {half * self.keys * 64}"
                    out.add(f"tile_copy_4d({place}, {name}, full + slot, {half * 64}, step * {self.keys}, hk, b);")
                out.add(f"if (++slot == {SLOTS}) {{ slot = 0; turn ^= 1; }}")

    def _attend(self) -> None:
        out = self.f.lines
        out.add(f"WideC<{self.d}> results;", "wide_zero(results);", "FragC* const o = (FragC*)results.v;")
        out.add("float top[2] = {-m_inf_float(), -m_inf_float()}, sum[2] = {0.0f, 0.0f};")
        self._row_limits()
        out.add("int slot = 0, turn = 0;", "ring_wait(queries, 0);", "#pragma unroll 1")
        with out.block("for (int step = 0; step < steps; step++) {"):
            self._scores()
            self._softmax()
            self._values()
        self._store()

    def _next(self) -> None:
        self.f.lines.add("if (tid % 128 == 0) ring_arrive(empty + slot);")
        self.f.lines.add(f"if (++slot == {SLOTS}) {{ slot = 0; turn ^= 1; }}")

    def _scores(self) -> None:
        out = self.f.lines
        out.add(f"WideC<{self.keys}> scores;", "wide_zero(scores);", "FragC* const s = (FragC*)scores.v;")
        out.add("ring_wait(full + slot, turn);", "wide_begin();")
        for half in range(self.halves):
            queries = f"qs + {half * self.rows * 64} + sid / 4 * {64 * 64}"
            keys = f"ring + slot * {self.keys * self.d} + {half * self.keys * 64}"
            out.add(f"wide_mma<64>(scores, {queries}, {keys});")
        out.add("wide_commit();", "wide_settle(scores);")
        self._next()

    def _values(self) -> None:
        out = self.f.lines
        out.add(f"FragA<{self.ctype}> w[{self.keys // 16}];", "#pragma unroll")
        out.add(f"for (int k = 0; k < {self.keys // 16}; k++) frag_from_results(w[k], s[2 * k], s[2 * k + 1]);")
        out.add("ring_wait(full + slot, turn);", "wide_begin();")
        out.add(f"const uint64_t values = wide_turned_tile<{self.keys}>(ring + slot * {self.keys * self.d});")
        out.add("#pragma unroll", f"for (int k = 0; k < {self.keys // 16}; k++)")
        out.add(f"  wide_turned(results, w[k], values + k * {16 * 128 // 16});", "wide_commit();")
        out.add("wide_settle(results);")
        self._next()

    def _store(self) -> None:
        """Lanes of a row exchange results until each has 16 bytes."""
        out, o = self.f.lines, self.kernel.outputs[0]
        if any(s % 8 for s in (*o.strides[:3], o.offset)):
            super()._store()
            return
        base = self._place(Operand(o.buffer, o.shape[:3], o.strides[:3]), "b", "h", "i")
        out.add("#pragma unroll")
        with out.block("for (int r = 0; r < 2; r++) {"):
            out.add("const int i = q0 + sid * 16 + frag_row(lane, 2 * r);", "const float total = frag_row_sum(sum[r]);")
            out.add("const float scale = total > 0.0f ? 1.0f / total : 0.0f;", "#pragma unroll")
            with out.block(f"for (int g = 0; g < {self.d // 32}; g++) {{"):
                out.add("float x[8];", f"Vec<{self.ctype}, 8> row;", "#pragma unroll")
                out.add("for (int j = 0; j < 8; j++) x[j] = o[4 * g + j / 2].v[2 * r + j % 2] * scale;")
                out.add("quad_turn<1>(x, lane);", "#pragma unroll")
                out.add(f"for (int j = 0; j < 8; j++) row.v[j] = to_{self.ctype}(x[j]);")
                to = f"{self.f.pointer(~0)} + {base} + g * 32 + (lane & 3) * 8"
                out.add(f"if (i < {self.sq}) *(DEVICE Vec<{self.ctype}, 8>*)({to}) = row;")
