"""Products and convolutions on Hopper: the copy engine brings tiles into a ring, teams of four simds multiply them.

One simd asks for tiles as stages of the ring become free; each team multiplies 64 rows. Groups stay and take tile after
tile, so the next tile's operands travel while this one's results are stored. Where tiles are few, the groups of a
cluster share the terms of a sum: they send each other the parts, and each adds up its share of the rows in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ...schedule.kernel import Conv2d, Gemm, Operand
from ...support import dtypes
from ..simt.kernels.epilogue import Epilogue
from ..simt.kernels.gemm import WIDE_ROWS, output_column, output_place, product_of, spread
from ..simt.lang.dialect import SIMD, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, blocks
from ..simt.lang.program import TileMap
from .split_rms_norm import NormShare
from .tile_selection import PAD, Plan, choose, part_floats
from .tma_epilogue import Results, leaves_as_tiles

MOST_AHEAD = 2  # vectors of a share that a thread keeps from before the products
BAND = 16  # tiles of rows that take turns before the next tile of columns


def takes(kernel: Gemm | Conv2d) -> bool:
    """Whether the copy engine can bring the operands: rows of half types at multiples of 16 bytes, and whole groups of
    channels."""
    a, w = kernel.inputs[0], kernel.inputs[kernel.rhs]
    if isinstance(kernel, Gemm) and kernel.prologue is not None:
        return False
    if a.dtype not in ("float16", "bfloat16") or w.dtype != a.dtype:
        return False
    p = product_of(kernel)
    if p.splits > 1 or p.m <= WIDE_ROWS or p.n < 16 or a.offset % 8 or w.offset % 8 or p.k % 8:
        return False
    if isinstance(kernel, Conv2d):
        pixels = a.strides[3] == 1 and all(s > 0 and s % 8 == 0 for s in distances(a))
        apart = a.strides[2] >= a.shape[3]  # rows that overlap come faster by threads, which find them in the cache
        return pixels and apart and kernel.groups == 1 and step_of(kernel) > 0 and _window_fits(kernel)
    rows = kernel.lda, kernel.batch_stride if p.batch > 1 else 8
    columns = w.strides[1], w.strides[0] if w.shape[0] > 1 else 8
    return w.strides[2] == 1 and all(n > 0 and n % 8 == 0 for n in (*rows, *columns))


def step_of(kernel: Gemm | Conv2d) -> int:
    """Terms of a stage, 64 or 32; 0 if the channels of a convolution are not a multiple."""
    if isinstance(kernel, Gemm) or _is_plain(kernel):
        return 64
    channels = kernel.channels[0]
    return 64 if channels % 64 == 0 else 32 if channels % 32 == 0 else 0


def _is_plain(kernel: Conv2d) -> bool:
    """A 1x1 convolution that takes every pixel is a product."""
    whole = kernel.stride == (1, 1) and tuple(kernel.padding) == (0, 0, 0, 0)
    return kernel.inputs[0].contiguous and kernel.kernel_size == (1, 1) and whole


def thinned(kernel: Gemm | Conv2d) -> Gemm | Conv2d:
    """A 1x1 convolution that skips pixels as one of an image that lacks them: the copy engine would take its time."""
    if isinstance(kernel, Gemm) or kernel.kernel_size != (1, 1) or any(kernel.padding):
        return kernel
    a, (sh, sw), (n, oh, ow, _) = kernel.inputs[0], kernel.stride, kernel.outputs[0].shape
    strides = (a.strides[0], a.strides[1] * sh, a.strides[2] * sw, a.strides[3])
    image = replace(a, shape=(n, oh, ow, a.shape[3]), strides=strides) if max(sh, sw) > 1 else a
    return replace(kernel, inputs=(image, *kernel.inputs[1:]), stride=(1, 1))


def distances(a: Operand) -> list[int]:
    """Elements between neighbours along H, W and N; anything where there is only one."""
    return [s if n > 1 else 8 for s, n in zip(a.strides[:3], a.shape[:3], strict=True)]


def _window_fits(kernel: Conv2d) -> bool:
    """Limits of the copy engine: steps up to 8, corners in a signed byte."""
    low, high = _corners(kernel)
    return max(kernel.stride) <= 8 and all(-128 <= x <= 127 for x in (*low, *high))


def _corners(kernel: Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """The window that a filter's first tap visits, (W, H): from its first pixel, and beyond the last of the image."""
    _, h, w, _ = kernel.inputs[0].shape
    _, oh, ow, _ = kernel.outputs[0].shape
    (sh, sw), (top, left) = kernel.stride, kernel.padding[:2]
    return (-left, -top), ((ow - 1) * sw + 1 - left - w, (oh - 1) * sh + 1 - top - h)


def emit_streamed(kernel: Gemm | Conv2d, dialect: Dialect) -> Emission:
    """The function of a ``gemm`` or ``conv2d`` kernel that :func:`takes`."""
    return Streamed(kernel, dialect, choose(kernel, step_of(kernel), leaves_as_tiles(kernel), dialect)).emit()


def column_tiles(kernel: Gemm | Conv2d, dialect: Dialect) -> int:
    """Into how many tiles the columns of a product that :func:`takes` are cut if it stores two results."""
    both = replace(kernel, outputs=(*kernel.outputs[:1], *kernel.outputs[:1]))
    return blocks(product_of(kernel).n, choose(both, step_of(kernel), leaves_as_tiles(kernel), dialect).n)


class Sum(NamedTuple):
    """A product of the function's kernel: ``kernel`` says what is multiplied, ``left`` and ``right`` are the function's
    operands, ``maps`` the names of their tile maps."""

    kernel: Gemm | Conv2d
    left: int
    right: int
    steps: int
    maps: tuple[str, str] = ("", "")


class Streamed:
    """The function of a product or convolution whose tiles are cut by ``plan``."""

    kept = False  # whether what all rows share was read before the first tile

    def __init__(self, kernel: Gemm | Conv2d, dialect: Dialect, plan: Plan):
        self.kernel, self.dialect, self.plan = kernel, dialect, plan
        self.p = product_of(kernel)
        self.f = Function(kernel, dialect, early=True)
        self.norm = NormShare(kernel, self.f)
        self.ctype = dtypes.DTYPES[kernel.inputs[0].dtype].ctype
        self.step = step_of(kernel)
        self.teams = plan.m // 64
        self.threads = self.teams * 128 + SIMD
        self.sums = [Sum(thinned(kernel), 0, kernel.rhs, blocks(self.p.k, self.step))]
        self.stage = (plan.m + plan.n) * self.step
        self.tiles_m, self.tiles_n = blocks(self.p.m, plan.m), blocks(self.p.n, plan.n)
        self.units = self.tiles_m * self.tiles_n * self.p.batch  # tiles, each made by ``parts`` groups
        self.clusters = self.units if plan.parts > 1 else min(self.units, dialect.cores * plan.per_core)

    def emit(self) -> Emission:
        f, out, plan = self.f, self.f.lines, self.plan
        f.cluster, f.per_core = plan.parts, plan.per_core
        self.sums = [s._replace(maps=self._maps(s)) for s in self.sums]
        self.results = Results(self.kernel, f, plan, self.p, self.stage) if plan.tiled else None
        f.ask_for_given(self.kernel.rhs + 1)
        f.array(self.ctype, "ring", self.plan.stages * self.stage)
        if plan.parts > 1:
            f.array("float", "results", part_floats(plan.m, plan.n))
        f.array("int64_t", "full", 2 * plan.stages)
        out.add(f"int64_t* const empty = full + {plan.stages};")
        if plan.parts > 1:
            out.add("const int rank = cluster_rank();")
        with out.block("if (tid == 0) {"):
            out.add(f"for (int i = 0; i < {plan.stages}; i++) {{ ring_init(full + i, 1); "
                    f"ring_init(empty + i, {self.teams}); }}", "ring_ready();")  # fmt: skip
        out.add("cluster_barrier();" if plan.parts > 1 else "barrier();")
        with out.block(f"if (sid == {self.teams * 4}) {{"):
            with out.block("if (lane == 0) {"):
                self._ask()
            if plan.parts > 1:
                out.add("cluster_barrier();")
        with out.block("else {"):
            self._work()
        return f.finish(self.clusters * plan.parts, self.threads)

    # -- operands
    def _maps(self, s: Sum) -> tuple[str, str]:
        k, p, f = s.kernel, product_of(s.kernel), self.f
        a, w = k.inputs[0], k.inputs[k.rhs]
        swizzle = self.step * 2
        if isinstance(k, Gemm):
            lda, batch = k.lda, k.batch_stride if p.batch > 1 else p.m * k.lda
            left = TileMap((p.k, p.m, p.batch), (lda * 2, batch * 2), (self.step, self.plan.m, 1), swizzle)
        elif _is_plain(k):
            left = TileMap((p.k, p.m, 1), (p.k * 2, p.m * p.k * 2), (self.step, self.plan.m, 1), swizzle)
        else:
            n, h, width, c = a.shape
            low, high = _corners(k)
            sh, sw = k.stride
            strides, box = tuple(x * 2 for x in reversed(distances(a))), (self.step, self.plan.m)
            left = TileMap((c, width, h, n), strides, box, swizzle, (*low, *high), (sw, sh))
        if isinstance(k, Gemm):
            batches = w.shape[0] if p.batch > 1 else 1
            row, batch = w.strides[1] * 2, (w.strides[0] if batches > 1 else w.strides[1] * p.n) * 2
        else:
            batches, row, batch = 1, p.k * 2, p.n * p.k * 2
        right = TileMap((p.k, p.n, batches), (row, batch), (self.step, self.plan.n, 1), swizzle)
        self.batches = batches
        return f.tile_map(s.left, left), f.tile_map(s.right, right)

    def _indices(self) -> None:
        """``tm``, ``tn``, ``tb`` of unit ``t``: bands of rows, so that what neighbours read stays in the cache."""
        out, per_band = self.f.lines, BAND * self.tiles_n
        count = self.tiles_m * self.tiles_n
        out.add(f"const int tb = t / {count}; (void)tb;" if self.p.batch > 1 else "const int tb = 0; (void)tb;")
        out.add(f"const int inner = t % {count};" if self.p.batch > 1 else "const int inner = t;")
        if self.tiles_m <= BAND:
            out.add(f"const int tm = inner % {self.tiles_m}, tn = inner / {self.tiles_m};")
        else:
            out.add(f"const int band = inner / {per_band} * {BAND}, inside = inner % {per_band};")
            out.add(f"const int high = {self.tiles_m} - band < {BAND} ? {self.tiles_m} - band : {BAND};")
            out.add("const int tm = band + inside % high, tn = inside / high;")

    def _range(self, s: Sum) -> None:
        """The steps of this group's part of a sum."""
        out, plan = self.f.lines, self.plan
        if plan.parts > 1:
            out.add(f"const int first = rank * {s.steps} / {plan.parts};")
            out.add(f"const int last = (rank + 1) * {s.steps} / {plan.parts};")
        else:
            out.add("const int first = 0;", f"const int last = {s.steps};")

    # -- the simd that asks for tiles
    def _ask(self) -> None:
        out, plan, s = self.f.lines, self.plan, self.sums[0]
        constant = s.kernel.inputs[s.kernel.rhs].buffer.kind in ("weight", "const")
        primed = min(plan.stages, s.steps // plan.parts) if constant else 0
        out.add(*(f"tile_map_ready({name});" for s in self.sums for name in s.maps))
        if primed:
            with out.block("{  // weights do not wait for the kernel before"):
                self._range(s)
                out.add(f"const int t = gid / {plan.parts};")
                self._indices()
                with out.block(f"for (int i = 0; i < {primed}; i++) {{"):
                    out.add("const int step = first + i, slot = i;", f"ring_expect(full + slot, {self.stage * 2});")
                    self._ask_right(s)
        out.add("wait_inputs();", "copies_follow();", "int slot = 0, turn = 1, count = 0;", "(void)count;")
        with out.block(f"for (int t = gid / {plan.parts}; t < {self.units}; t += {self.clusters}) {{"):
            self._indices()
            out.add(f"const int row0 = tm * {plan.m};")
            for s in self.sums:
                with out.block("{"):
                    self._ask_sum(s, primed if s is self.sums[0] else 0)
            if self.results is not None:
                self.results.ask()

    def _ask_sum(self, s: Sum, primed: int) -> None:
        """The stages of a sum; the right halves of the first ``primed`` of all have been asked for."""
        out = self.f.lines
        self._range(s)
        self._pixel(s)
        with out.block("for (int step = first; step < last; step++) {"):
            with out.block(f"if (count >= {primed}) {{" if primed else "{"):
                out.add("ring_wait(empty + slot, turn);", f"ring_expect(full + slot, {self.stage * 2});")
                self._ask_right(s)
            self._ask_left(s)
            out.add(f"count++; if (++slot == {self.plan.stages}) {{ slot = 0; turn ^= 1; }}")

    def _ask_right(self, s: Sum) -> None:
        place = f"ring + slot * {self.stage} + {self.plan.m * self.step}"
        row, batch = f"tn * {self.plan.n}", "tb" if self.batches > 1 else "0"
        self.f.lines.add(f"tile_copy({place}, {s.maps[1]}, full + slot, step * {self.step}, {row}, {batch});")

    def _pixel(self, s: Sum) -> None:
        """Where the first row of the tile lies in the image."""
        out, k = self.f.lines, s.kernel
        if isinstance(k, Conv2d) and not _is_plain(k):
            _, oh, ow, _ = k.outputs[0].shape
            (sh, sw), (top, left) = k.stride, k.padding[:2]
            out.add(f"const int image = row0 / {oh * ow}, y0 = row0 / {ow} % {oh} * {sh} - {top};")
            out.add(f"const int x0 = row0 % {ow} * {sw} - {left};")

    def _ask_left(self, s: Sum) -> None:
        out, k, place = self.f.lines, s.kernel, f"ring + slot * {self.stage}"
        if isinstance(k, Gemm) or _is_plain(k):
            batch = "tb" if self.p.batch > 1 else "0"
            out.add(f"tile_copy({place}, {s.maps[0]}, full + slot, step * {self.step}, row0, {batch});")
            return
        (_, width), (dh, dw) = k.kernel_size, k.dilation
        pieces = k.channels[0] // self.step
        out.add(f"const int tap = step / {pieces}, c = step % {pieces} * {self.step};")
        moved = f"tap % {width} * {dw}, tap / {width} * {dh}"
        out.add(f"pixel_copy({place}, {s.maps[0]}, full + slot, c, x0, y0, image, {moved});")

    # -- the teams that multiply
    def _work(self) -> None:
        out, plan = self.f.lines, self.plan
        shared, lanes = plan.parts > 1, self.p.lanes
        epilogue = self._epilogue()
        soon = self.turns() <= MOST_AHEAD if shared else self.width == 8 and plan.early
        self.ahead = bool(epilogue.ahead) and lanes == 1 and soon and not plan.tiled
        out.add("wait_inputs();", "int slot = 0, turn = 0;", *["int held = -1;"] * plan.tiled)
        with out.block(f"for (int t = gid / {plan.parts}; t < {self.units}; t += {self.clusters}) {{"):
            self._indices()
            if self.ahead:
                self._read_ahead(epilogue)
            self.norm.read_sums(self)
            out.add(f"WideC<{plan.n}> acc;")
            for s in self.sums[:-1]:
                self._add_up(s)
                self._keep(s)
            self._add_up(self.sums[-1])
            if plan.parts > 1:
                self._add_parts(epilogue)
            else:
                self._finish(epilogue)
        if self.results is not None:
            out.add("if (tid % 128 == 0) stores_read();")

    def _finish(self, epilogue: Epilogue) -> None:
        """What becomes of sums that no other group has parts of."""
        self.norm.find_factors()
        if epilogue.folded:
            self.f.lines.add("float folded[2] = {};")
        if self.results is not None:
            self.results.store(epilogue, self.row(), self.norm.times)
        else:
            self._store(epilogue)
        if epilogue.folded:
            self.norm.store_folded(self.row())

    def _add_up(self, s: Sum) -> None:
        """The sums ``acc`` of a tile; all of its stages are free afterwards."""
        out, plan = self.f.lines, self.plan
        with out.block("{"):
            self._range(s)
            out.add("wide_zero(acc);", "int used = 0;", "#pragma unroll 1")
            with out.block("for (int step = first; step < last; step++) {"):
                out.add("ring_wait(full + slot, turn);")
                out.add(f"{self.ctype}* const as = ring + slot * {self.stage};", "wide_begin();")
                out.add(f"wide_mma<{self.step}>(acc, as + sid / 4 * {64 * self.step}, as + {plan.m * self.step});")
                out.add("wide_commit();")
                if self.results is not None and s is self.sums[0]:
                    self.results.let_go()
                out.add("wide_wait<1>();")
                with out.block("if (step > first) {"):
                    self._release("used")
                out.add(f"used = slot; if (++slot == {plan.stages}) {{ slot = 0; turn ^= 1; }}")
            out.add("wide_settle(acc);")
            if plan.parts == 1:
                self._release("used")

    def _keep(self, s: Sum) -> None:
        """What the epilogue needs of a sum that is not the last."""
        raise NotImplementedError

    def _epilogue(self) -> Epilogue:
        """What becomes of the sums, ``width`` neighbours at a time."""
        lanes, n = self.p.lanes, self.plan.n
        epilogue = Epilogue(self.kernel, self.f, most=8, columns=self.plan.parts > 1)  # more than 16 bytes
        self.width = min(epilogue.width, 8)  # what lanes exchange
        while self.p.n // lanes % self.width or n // lanes % self.width:
            self.width //= 2
        self.ahead = False
        return epilogue

    def _release(self, slot: str) -> None:
        self.f.lines.add(f"if (tid % 128 == 0) ring_arrive(empty + {slot});")

    def row(self) -> str:
        """Statement: row ``m`` of the product that this lane has of half ``h``."""
        return f"const int m = tm * {self.plan.m} + sid * 16 + (lane >> 2) + 8 * h;"

    def _can_share(self, epilogue: Epilogue) -> bool:
        """Whether both rows of a piece can use the same registers of what all rows share."""
        return bool(epilogue.shared) and self.p.lanes == 1 and self.width == 8 and self.p.n % self.plan.n == 0

    def _place(self) -> str:
        """Row ``m`` and column ``n`` of what this lane has of piece ``g`` after the exchange."""
        return f"{self.row()}\nconst int n = {self._column()};"

    def _column(self) -> str:
        wide = 8 * self.p.lanes
        return f"tn * {self.plan.n} + g * {4 * wide} + (lane & 3) * {wide}"

    def _pieces(self) -> int:
        """Whole pieces, whose results lanes exchange."""
        return self.plan.n // (32 * self.p.lanes)

    def _where(self, n: str) -> tuple[str, str]:
        start, column = output_place(self.kernel, self.p, output_column(n, self.p))
        return f"{start}m", column

    def _read_ahead(self, epilogue: Epilogue) -> None:
        out = self.f.lines
        if self.plan.parts > 1:
            epilogue.declare_ahead(self.turns(), self.width)
            with self.each_of_share():
                epilogue.read_ahead(*self._where("n"), self.width, "i")
            return
        epilogue.declare_ahead(2 * self._pieces(), self.width)
        out.add("#pragma unroll", f"for (int g = 0; g < {self._pieces()}; g++)", "#pragma unroll")
        with out.block("for (int h = 0; h < 2; h++) {"):
            out.add(self._place())
            with out.block(f"if (m < {self.p.m} && n < {self.p.n}) {{"):
                row, column = self._where("n")
                epilogue.read_ahead(row, column, self.width, "2 * g + h")

    def _store(self, epilogue: Epilogue) -> None:
        """Lanes exchange results until each has neighbours, and store them; what is left of a row goes as it is."""
        out, lanes = self.f.lines, self.p.lanes
        shared = "g" if self.kept else "0" if self._can_share(epilogue) else ""
        out.add("#pragma unroll")
        with out.block(f"for (int g = 0; g < {self._pieces()}; g++) {{"):
            if shared and not self.kept:
                epilogue.declare_shared(1, 8)
                epilogue.read_shared(self._where(self._column())[1], 8, "0")
            out.add("#pragma unroll")
            with out.block("for (int h = 0; h < 2; h++) {"):
                if lanes > 1 and epilogue.alone and self.width == 8:
                    self._store_merged(epilogue)
                else:
                    self._store_piece(epilogue, shared)
        self._store_rest(epilogue)

    def _store_merged(self, epilogue: Epilogue) -> None:
        """Two sums become one result before lanes exchange: half as much. A lane has every fourth column at first."""
        out = self.f.lines
        out.add("float y[8];", self._place())
        sums = f"acc.v[32 * g + 4 * {{}} + 2 * h + {{}}]{self.norm.times}"
        epilogue.compute("y", "m", "n / 2", 8, lambda which, i: f"({sums.format(i, which)})", "", "")
        out.add("quad_turn<1>(y, lane);")
        with out.block(f"if (m < {self.p.m} && n < {self.p.n}) {{"):
            epilogue.put(*self._where("n"), 8, lambda i: f"y[{i} % 4 * 2 + {i} / 4]")

    def _store_piece(self, epilogue: Epilogue, shared: str) -> None:
        out, lanes = self.f.lines, self.p.lanes
        out.add(f"float x[{8 * lanes}];", "#pragma unroll")
        out.add(f"for (int i = 0; i < {8 * lanes}; i++) "
                f"x[i] = acc.v[{16 * lanes} * g + i / 2 * 4 + 2 * h + i % 2]{self.norm.times};")  # fmt: skip
        out.add(f"quad_turn<{lanes}>(x, lane);", self._place())
        self._store_row(epilogue, 8, "2 * g + h" if self.ahead else "", shared)

    def _store_rest(self, epilogue: Epilogue) -> None:
        """What is left of a row behind the whole pieces."""
        out, lanes = self.f.lines, self.p.lanes
        whole = self._pieces() * 32 * lanes
        if whole == self.plan.n:
            return
        out.add("#pragma unroll", f"for (int g = {whole // 8}; g < {self.plan.n // 8}; g++)", "#pragma unroll")
        with out.block("for (int h = 0; h < 2; h++) {"):
            out.add(
                "const float x[2] = {", *(f"  acc.v[4 * g + 2 * h + {i}]{self.norm.times}," for i in range(2)), "};"
            )
            out.add(self.row(), f"const int n = tn * {self.plan.n} + g * 8 + (lane & 3) * 2;")
            self._store_row(epilogue, 2 // lanes, "")

    def _store_row(self, epilogue: Epilogue, count: int, ahead: str, shared: str = "") -> None:
        """``count`` results from column ``n`` on, whose sums are in ``x``."""
        lanes, width = self.p.lanes, min(self.width, count)
        for first in range(0, count * lanes, width * lanes):
            at = f"n + {first}" if first else "n"
            with self.f.lines.block(f"if (m < {self.p.m} && {at} < {self.p.n}) {{"):
                row, column = self._where(f"({at})")
                if epilogue.folded:
                    self.f.lines.add(f"float {epilogue.folded} = 0.0f;")
                epilogue.store(
                    row, column, width,
                    lambda which, i, first=first: f"x[{first} + {spread(which, i, self.p)}]",  # type: ignore[misc]
                    ahead, shared,
                )  # fmt: skip
                if epilogue.folded:
                    self.f.lines.add(f"folded[h] += {epilogue.folded};")

    def turns(self) -> int:
        """Vectors of its group's share that a thread finishes."""
        plan = self.plan
        return blocks(plan.m // plan.parts * (plan.n // self.p.lanes // self.width), self.teams * 128)

    @contextmanager
    def each_of_share(self) -> Iterator[None]:
        """For each vector ``i`` of this thread: its row ``m`` and column ``n``; ``r`` and ``n0`` within the share."""
        out, plan, p = self.f.lines, self.plan, self.p
        share, per_row, values = plan.m // plan.parts, plan.n // p.lanes // self.width, self.width * p.lanes
        out.add("#pragma unroll")
        with out.block(f"for (int i = 0; i < {self.turns()}; i++) {{"):
            out.add(f"const int c = tid + i * {self.teams * 128}, r = c / {per_row}, n0 = c % {per_row} * {values};")
            out.add(f"const int m = tm * {plan.m} + rank * {share} + r, n = tn * {plan.n} + n0;")
            with out.block(f"if (r < {share} && m < {p.m} && n < {p.n}) {{"):
                yield

    def _add_parts(self, epilogue: Epilogue) -> None:
        """Every group sends its sums to those that finish them, a share of the rows each."""
        out, plan, p = self.f.lines, self.plan, self.p
        share, ld, values = plan.m // plan.parts, plan.n + PAD, self.width * p.lanes
        out.add(f"peer_send<{share}, {ld}>(results, rank, acc, sid * 16, lane);", "cluster_barrier();")
        with self.each_of_share():
            out.add(f"float x[{values}] = {{}};", "#pragma unroll")
            out.add(f"for (int part = 0; part < {plan.parts}; part++)", "#pragma unroll")
            out.add(f"for (int e = 0; e < {values}; e++) x[e] += results[(part * {share} + r) * {ld} + n0 + e];")
            if epilogue.folded:
                out.add(f"float {epilogue.folded} = 0.0f;")
            row, column = self._where("n")
            times = " * factor[i]" if self.norm.times else ""
            epilogue.store(
                row,
                column,
                self.width,
                lambda which, i: f"(x[{spread(which, i, p)}]{times})",
                "i" if self.ahead else "",
            )
            if epilogue.folded:  # where nobody else reads
                out.add(f"results[r * {ld} + n0] = {epilogue.folded};")
        if epilogue.folded:
            self.norm.add_folded(self, share, ld)
