"""A streamed product's share of a row norm: the sums of its rows that the next product needs, and the factors that come
of those that the one before left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...graph import expr
from ...schedule.kernel import Conv2d, Gemm
from ..codegen.nest import Nest
from ..simt.lang.function import Function, blocks
from ..simt.lang.scalar import Scalars, Value

if TYPE_CHECKING:
    from .tma_gemm import Streamed


class NormShare:
    """Text for a kernel with ``row_scale`` or ``extra_stages``; nothing for others. ``times``: what follows a sum of
    half ``h`` of a lane's rows."""

    def __init__(self, kernel: Gemm | Conv2d, f: Function):
        self.kernel, self.f = kernel, f
        self.times = " * factor[h]" if kernel.row_scale is not None else ""

    # -- factors
    def read_sums(self, s: Streamed) -> None:
        """What the product before left of each row of the tile. Lanes of a row have a quarter of it each; groups that
        share a tile, which wait for their first operands now, add it up at once."""
        if not self.times:
            return
        out, number = self.f.lines, len(self.kernel.inputs) - 1
        (tiles, rows), sums = self.kernel.inputs[number].shape, self.f.pointer(number)
        if s.plan.parts > 1:
            out.add(f"float factor[{s.turns()}];")
            with s.each_of_share():
                out.add("float total = 0.0f;", "#pragma unroll")
                out.add(f"for (int part = 0; part < {tiles}; part++) total += {sums}[part * {rows} + m];")
                out.add(f"factor[i] = {self._factor('total')};")
            return
        out.add(f"float sums[2][{blocks(tiles, 4)}];", "#pragma unroll")
        with out.block("for (int h = 0; h < 2; h++) {"):
            out.add(s.row(), "#pragma unroll")
            with out.block(f"for (int i = 0; i < {blocks(tiles, 4)}; i++) {{"):
                out.add("const int part = i * 4 + (lane & 3);")
                out.add(f"sums[h][i] = part < {tiles} && m < {rows} ? {sums}[part * {rows} + m] : 0.0f;")

    def find_factors(self) -> None:
        """``factor`` of a lane's two rows, of what :meth:`read_sums` read."""
        if not self.times:
            return
        out, parts = self.f.lines, blocks(self.kernel.inputs[-1].shape[0], 4)
        out.add("float factor[2];", "#pragma unroll")
        with out.block("for (int h = 0; h < 2; h++) {"):
            out.add("float total = 0.0f;", "#pragma unroll", f"for (int i = 0; i < {parts}; i++) total += sums[h][i];")
            out.add("total += simd_xor(total, 1);", "total += simd_xor(total, 2);")
            out.add(f"factor[h] = {self._factor('total')};")

    def _factor(self, total: str) -> str:
        assert self.kernel.row_scale is not None
        s = Scalars(Nest((), (), [], {}, set(), [], False), {}, self.f.lines)
        s.bound[expr.stage(0, "float32")] = Value(total, "float")
        return s.text(self.kernel.row_scale, "float")

    # -- sums
    def _place(self) -> str:
        number = len(self.kernel.outputs) - 1
        return f"{self.f.pointer(~number)}[tn * {self.kernel.outputs[number].shape[1]} + m]"

    def store_folded(self, row: str) -> None:
        """This tile's sums of its rows: the lanes of a row have added up a quarter of it each."""
        out, rows = self.f.lines, self.kernel.outputs[-1].shape[1]
        out.add("#pragma unroll")
        with out.block("for (int h = 0; h < 2; h++) {"):
            out.add("folded[h] += simd_xor(folded[h], 1);", "folded[h] += simd_xor(folded[h], 2);", row)
            out.add(f"if ((lane & 3) == 0 && m < {rows}) {self._place()} = folded[h];")

    def add_folded(self, s: Streamed, share: int, ld: int) -> None:
        """This tile's sums of a share of its rows, whose vectors' sums are in ``results``."""
        out, plan, threads = self.f.lines, s.plan, s.teams * 128
        out.add(f"team_barrier(1, {threads});")
        with out.block(f"for (int r = tid; r < {share}; r += {threads}) {{"):
            out.add(f"const int m = tm * {plan.m} + rank * {share} + r;", "float total = 0.0f;")
            with out.block(f"for (int n0 = 0; n0 < {plan.n}; n0 += {s.width}) {{"):
                out.add(f"if (tn * {plan.n} + n0 < {s.p.n}) total += results[r * {ld} + n0];")
            out.add(f"if (m < {s.p.m}) {self._place()} = total;")
