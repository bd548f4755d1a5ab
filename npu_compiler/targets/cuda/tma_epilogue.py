"""Results that leave through the ring: the last stages of a tile are for what becomes of its sums.

The simd that asks for tiles hands such stages over like any other, with the tile's residual in them if there is one.
Teams put their results in its place, in the order in which the matrix unit leaves the sums, and the copy engine stores
them. The stages are free again when it has read them, which the next tile's products wait for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ...graph import expr
from ...schedule.kernel import Conv2d, Gemm, Operand
from ...support import dtypes
from ..simt.kernels.epilogue import Epilogue
from ..simt.kernels.gemm import Product, product_of
from ..simt.lang.function import Function, blocks
from ..simt.lang.program import TileMap
from .tile_selection import PIECE, Plan, result_stages


def row_pitch(o: Operand) -> int:
    """Elements between neighbouring rows, if all rows are dense, as far apart, and at multiples of 16 bytes; else 0."""
    dims = [(n, s) for n, s in zip(o.shape[:-1], o.strides[:-1], strict=True) if n > 1]
    pitch = step = dims[-1][1] if dims else o.shape[-1]
    for n, stride in reversed(dims):
        if stride != step:
            return 0
        step *= n
    dense = o.strides[-1] == 1 and pitch >= o.shape[-1]
    return pitch if dense and pitch % 8 == 0 and o.offset % 8 == 0 else 0


def residual_of(kernel: Gemm | Conv2d) -> int | None:
    """The number of the input of which the epilogue reads an element for every result; -1 if there is none. None if it
    reads what the copy engine cannot bring as tiles, other than vectors along the columns."""
    assert kernel.epilogue is not None
    out, found, values = kernel.outputs[0], -1, [kernel.epilogue, *(s.expr for s in kernel.extra_stages)]
    last, identity = expr.index(len(out.shape) - 1), expr.identity_index(out.shape)
    for x in (x for value in values for x in expr.walk(value) if x.op == "load"):
        o = kernel.inputs[x.value]
        along = [i for i in x.args if i.op != "const"]
        if x.args == identity and o.shape == out.shape and o.dtype == out.dtype and row_pitch(o):
            if found not in (-1, x.value):
                return None
            found = x.value
        elif along != [last] or o.strides[x.args.index(last)] != 1:
            return None
    return found


def leaves_as_tiles(kernel: Gemm | Conv2d) -> bool:
    """Whether the copy engine can store the results: rows of the operands' type, evenly spaced."""
    p, out = product_of(kernel), kernel.outputs[0]
    fits = p.batch == p.splits == p.lanes == 1 and (math.prod(out.shape[:-1]), out.shape[-1]) == (p.m, p.n)
    return fits and out.dtype == kernel.inputs[0].dtype and row_pitch(out) > 0 and residual_of(kernel) is not None


class Pairs:
    """The text that makes results of the sums ``acc`` as the matrix unit leaves them: two neighbours of a row each."""

    def __init__(self, kernel: Gemm | Conv2d, f: Function, plan: Plan):
        self.f, self.plan, self.pieces = f, plan, plan.n // PIECE
        self.ctype = dtypes.DTYPES[kernel.outputs[0].dtype].ctype
        self.kept = False  # whether sums before these are ``acc1``
        self.outputs = 2 if kernel.extra_stages else 1
        self.times = ""
        self.shared = False  # whether what all rows share has been read

    def read_shared(self, epilogue: Epilogue) -> None:
        """Read what all rows of all tiles share, of all columns."""
        epilogue.declare_shared(self.plan.n // 8, 2)
        self.f.lines.add("#pragma unroll")
        with self.f.lines.block(f"for (int g = 0; g < {self.plan.n // 8}; g++) {{"):
            epilogue.read_shared("g * 8 + (lane & 3) * 2", 2, "g")
        self.shared = True

    def fill(self, to: str, apart: int, parts: range, epilogue: Epilogue, row: str, residual: bool = False) -> None:
        """Put 64 rows of pieces ``parts`` into group memory, the first at ``to`` and the others ``apart`` elements from
        each other, where the ``residual`` may be; pieces of a second output follow those of the first."""
        out = self.f.lines
        out.add(f"{self.ctype}* const rows = {to} + (sid % 4 * 16 + (lane & 15)) * {PIECE};")
        with self._chunks(parts):
            piece = f"(q / 4 - {parts.start}) * {self.outputs * apart}"
            out.add(f"{self.ctype}* const place = rows + {piece} + ((q % 4 * 2 + (lane >> 4)) ^ (lane & 7)) * 8;")
            if residual:
                epilogue.declare_ahead(4, 2)
                out.add("pairs_take(ahead0, place);")
            out.add(f"uint pairs[{self.outputs}][4];")
            self._pairs(epilogue, row, [f"pairs[{n}][2 * j + h]" for n in range(self.outputs)])
            out.add(*(f"pairs_put(place + {n * apart}, pairs[{n}]);" for n in range(self.outputs)))
        out.add("wide_ready();", "team_barrier(1 + sid / 4, 128);")

    def keep(self, epilogue: Epilogue, row: str) -> None:
        """Keep the results as pairs in registers, for the epilogue of the next sums."""
        self.f.lines.add(f"uint kept[{self.plan.n // 4}];")
        with self._chunks(range(self.pieces)):
            self._pairs(epilogue, row, ["kept[4 * q + 2 * j + h]"])
        self.kept = True

    @contextmanager
    def _chunks(self, parts: range) -> Iterator[None]:
        """For each ``q``: 16 columns."""
        self.f.lines.add("#pragma unroll")
        with self.f.lines.block(f"for (int q = {parts.start * 4}; q < {parts.stop * 4}; q++) {{"):
            yield

    def _pairs(self, epilogue: Epilogue, row: str, to: list[str]) -> None:
        """Results of chunk ``q``, of each output: of half ``j`` of the columns, half ``h`` of the rows."""
        out = self.f.lines
        texts = [f"(acc.v[8 * q + 4 * j + 2 * h + {{}}]{self.times})", "to_f32(other.v[{}])"]
        out.add("#pragma unroll")
        with out.block("for (int j = 0; j < 2; j++) {"):
            out.add(f"const int n = tn * {self.plan.n} + q * 16 + j * 8 + (lane & 3) * 2;")
            if not self.shared:
                epilogue.declare_shared(1, 2)
                epilogue.read_shared("n", 2, "0")
            out.add("#pragma unroll")
            with out.block("for (int h = 0; h < 2; h++) {"):
                out.add(row, "float y[2];", *["float y1[2];"] * (len(to) - 1))
                if epilogue.folded:
                    out.add(f"float {epilogue.folded} = 0.0f;")
                if self.kept:
                    out.add(f"const Vec<{self.ctype}, 2> other = pair_of<{self.ctype}>(kept[4 * q + 2 * j + h]);")
                shared = "2 * q + j" if self.shared else "0"
                epilogue.compute("y", "m", "n", 2, lambda which, i: texts[which].format(i), "2 * j + h", shared)
                for name, y in zip(to, ("y", "y1"), strict=False):
                    out.add(f"{name} = pack_pair({y}[0], {y}[1], ({self.ctype}*)nullptr);")
                if epilogue.folded:
                    out.add(f"folded[h] += {epilogue.folded};")


class Results(Pairs):
    """The stages of a tile's results, ``slots`` of them with some columns each, and the text of who handles them."""

    def __init__(self, kernel: Gemm | Conv2d, f: Function, plan: Plan, p: Product, stage: int):
        super().__init__(kernel, f, plan)
        self.p, self.stage, self.teams = p, stage, plan.m // PIECE
        self.slots = result_stages(plan.m, plan.n, self.outputs)
        self.per_slot = blocks(self.pieces, self.slots)
        residual = residual_of(kernel)
        self.out = [self._map(~n) for n in range(self.outputs)]
        self.residual = self._map(residual) if residual is not None and residual >= 0 else ""

    def _map(self, number: int) -> str:
        pitch, p = row_pitch(self.f.operand(number)) * 2, self.p
        return self.f.tile_map(number, TileMap((p.n, p.m, 1), (pitch, pitch * p.m), (PIECE, PIECE, 1), PIECE * 2))

    def _parts(self, slot: int) -> range:
        return range(slot * self.per_slot, min((slot + 1) * self.per_slot, self.pieces))

    def _piece(self, at: int, team: str | int, output: int = 0) -> str:
        start = (at * self.outputs + output) * self.teams * PIECE * PIECE
        return f"ring + slot * {self.stage} + {start} + {team} * {PIECE * PIECE}"

    def ask(self) -> None:
        """What the simd that asks for tiles does behind the last step of tile (tm, tn)."""
        out = self.f.lines
        for slot in range(self.slots):
            out.add("ring_wait(empty + slot, turn);")
            if not self.residual:
                out.add("ring_arrive(full + slot);")
            else:
                pieces = [(at, n, team) for at, n in enumerate(self._parts(slot)) for team in range(self.teams)]
                out.add(f"ring_expect(full + slot, {len(pieces) * PIECE * PIECE * 2});")
                for at, n, team in pieces:
                    where = f"tn * {self.plan.n} + {n * PIECE}, tm * {self.plan.m} + {team * PIECE}, 0"
                    out.add(f"tile_copy({self._piece(at, team)}, {self.residual}, full + slot, {where});")
            self._next()

    def _next(self) -> None:
        self.f.lines.add(f"if (++slot == {self.plan.stages}) {{ slot = 0; turn ^= 1; }}")

    def let_go(self) -> None:
        """The stages of the tile before are free, once the copy engine has read them."""
        out = self.f.lines
        with out.block("if (step == first && held >= 0 && tid % 128 == 0) {"):
            out.add("stores_read();", "ring_arrive(empty + held);")
            for n in range(1, self.slots):
                out.add(f"ring_arrive(empty + (held + {n}) % {self.plan.stages});")

    def store(self, epilogue: Epilogue, row: str, times: str = "") -> None:
        """Make results of the sums ``acc``; ``row``: statement that finds row ``m`` of half ``h``; ``times``: what
        follows a sum."""
        out, self.times = self.f.lines, times
        out.add("held = slot;")
        for slot in range(self.slots):
            parts = self._parts(slot)
            out.add("ring_wait(full + slot, turn);")
            with out.block("{"):
                apart = self.teams * PIECE * PIECE
                self.fill(self._piece(0, "sid / 4"), apart, parts, epilogue, row, bool(self.residual))
            with out.block("if (tid % 128 == 0) {"):
                for at, n in enumerate(parts):
                    where = f"tn * {self.plan.n} + {n * PIECE}, tm * {self.plan.m} + sid / 4 * {PIECE}, 0"
                    for number, to in enumerate(self.out):
                        out.add(f"tile_store({to}, {self._piece(at, 'sid / 4', number)}, {where});")
                out.add("stores_commit();")
            self._next()
