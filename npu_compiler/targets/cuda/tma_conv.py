"""Convolutions of few channels on Hopper: lines of pixels come once, and all taps of a filter read them there.

To the wide unit 8 neighbouring results of a line are a block of rows, and 8 lines of results are such blocks; another
tap is another address. A group brings the lines that 8 lines of results visit, all at once, and keeps the filters.
It takes

* 64 channels: a pixel is a row of a swizzled tile, and what lies outside of the image arrives as zeros;
* images that ``image_rows.py`` laid out, where the pixels that a filter's row visits are neighbouring elements, if
  neighbouring results begin 16 bytes apart: such rows overlap.
"""

from __future__ import annotations

import math

from ...schedule.kernel import Conv2d
from ..simt.kernels.epilogue import Epilogue
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import blocks
from ..simt.lang.program import TileMap
from .tile_selection import CORE_BYTES, CORE_REGISTERS, GROUP_EXTRA, ONE_TILE, PIECE, WIDTHS, Plan, registers
from .tma_epilogue import Pairs, leaves_as_tiles, residual_of, row_pitch
from .tma_gemm import Streamed, distances

BLOCK = 8  # results of a line, and lines, that the unit multiplies together
ROW, APART = 32, 8  # elements of an image's row of pixels, and between the beginnings of two
CHANNELS = 64
MOST_BOX = 256  # pixels and lines that the copy engine brings at once
MOST_APART = (1 << 14) - 1  # distance in the unit's description of an operand, in 16 bytes
LEAST_UNITS = 96  # that give the cores enough to do
LEAST_RESULTS = 0.75  # of what is computed: blocks reach beyond lines that are no multiple of 8
ALIGNED = 512  # elements after which the swizzle repeats
MOST_KEPT = 64  # columns whose scales and shifts stay in registers
# (rows of the teams, stages, groups of a core, whether results leave as tiles), best first.
PLANS = ((128, 2, 2, False), (256, 2, 1, False), (128, 2, 1, False))
TILED = ((128, 2, 2, True), (256, 2, 1, True), (128, 2, 1, True))
LEAST_RING = 1 << 13  # elements, so that the array begins where the swizzle does


def takes_pixels(kernel: Conv2d) -> bool:
    """Whether ``conv2d`` kernel ``kernel`` has lines that fit the group memory, and enough of them."""
    a, w = kernel.inputs[0], kernel.inputs[kernel.rhs]
    if a.dtype not in ("float16", "bfloat16") or w.dtype != a.dtype:
        return False
    if kernel.groups > 1 or kernel.splits > 1 or a.offset % 8 or w.offset % 8 or kernel.stride[1] > 1:
        return False
    if any(s <= 0 or s % 8 for s in distances(a)) or a.strides[3] != 1:
        return False
    if _is_rows(kernel):
        fits = a.shape[3] == ROW and kernel.kernel_size[1] == 1 and tuple(kernel.padding) == (0, 0, 0, 0)
    else:
        _, oh, ow, _ = kernel.outputs[0].shape
        dense = oh * ow >= LEAST_RESULTS * _bands(kernel) * _tiles(kernel) * BLOCK * BLOCK
        fits = a.shape[3] == CHANNELS <= a.strides[2] and math.prod(kernel.kernel_size) > 1 and dense
    return fits and _plan(kernel) is not None and _bands(kernel) * kernel.outputs[0].shape[0] >= _least(kernel)


def emit_pixels(kernel: Conv2d, dialect: Dialect) -> Emission:
    """The function of a kernel for which :func:`takes_pixels`."""
    plan = _plan(kernel)
    assert plan is not None
    return _Pixels(kernel, dialect, plan).emit()


def _is_rows(kernel: Conv2d) -> bool:
    return kernel.inputs[0].strides[2] == APART


def _bands(kernel: Conv2d) -> int:
    return blocks(kernel.outputs[0].shape[1], BLOCK)


def _tiles(kernel: Conv2d) -> int:
    return blocks(kernel.outputs[0].shape[2], BLOCK)


def _least(kernel: Conv2d) -> int:
    """Bands; an image's are cheap to bring, so that several groups may share one."""
    return blocks(LEAST_UNITS, max(1, _tiles(kernel) // 2) if _is_rows(kernel) else 1)


def _lines(kernel: Conv2d) -> int:
    """Lines of the image that a band of ``BLOCK`` lines of results visits."""
    return (BLOCK - 1) * kernel.stride[0] + (kernel.kernel_size[0] - 1) * kernel.dilation[0] + 1


def _pitch(kernel: Conv2d) -> int:
    """Elements between two lines in group memory."""
    if _is_rows(kernel):
        return kernel.inputs[0].strides[1]
    over = (kernel.kernel_size[1] - 1) * kernel.dilation[1]
    return (_tiles(kernel) * BLOCK + over) * CHANNELS


def _stage(kernel: Conv2d) -> int:
    return blocks(_lines(kernel) * _pitch(kernel), ALIGNED) * ALIGNED


def _filters(kernel: Conv2d, n: int) -> int:
    """Elements of ``n`` filters, all taps."""
    return blocks(math.prod(kernel.kernel_size) * n * kernel.channels[0], ALIGNED) * ALIGNED


def _ring(kernel: Conv2d, n: int, stages: int) -> int:
    """Elements of the filters and the ring; the last block of a line may reach out of it."""
    return max(_filters(kernel, n) + stages * _stage(kernel) + ALIGNED, LEAST_RING)


def _plan(kernel: Conv2d) -> Plan | None:
    """The first plan that fits the core. ``m``: 64 for each team; a stage is a band."""
    k, pitch = kernel.channels[1], _pitch(kernel)
    n = min((n for n in (*WIDTHS, *ONE_TILE) if n >= k), default=0)
    if not n or kernel.stride[0] * pitch // 8 > MOST_APART:
        return None
    if not _is_rows(kernel) and max(pitch // CHANNELS, _lines(kernel)) > MOST_BOX:
        return None
    early = len(kernel.inputs) > kernel.rhs + 1 and n <= 128
    tiles = n == k and n % PIECE == 0 and leaves_as_tiles(kernel) and residual_of(kernel) == -1
    many = _bands(kernel) * kernel.outputs[0].shape[0] >= LEAST_UNITS
    for m, stages, per_core, tiled in (*TILED * tiles, *PLANS):
        if tiled and m > 128 and not many:
            continue  # teams of several groups share a band
        nbytes = _ring(kernel, n, stages) * 2 + GROUP_EXTRA + m * n * 2 * tiled
        if nbytes * per_core <= CORE_BYTES and registers(m, n, per_core, early) <= CORE_REGISTERS:
            return Plan(m, n, stages, 1, per_core, early, tiled)
    return None


class _Pixels(Streamed):
    kernel: Conv2d

    def __init__(self, kernel: Conv2d, dialect: Dialect, plan: Plan):
        super().__init__(kernel, dialect, plan)
        (images, self.oh, self.ow, _), self.rows = kernel.outputs[0].shape, _is_rows(kernel)
        self.tiles, self.bands, self.pitch = _tiles(kernel), _bands(kernel), _pitch(kernel)
        at_once = dialect.cores * plan.per_core
        self.shares = max(1, min(self.tiles // self.teams, at_once // (images * self.bands)))  # groups of a band
        self.units = images * self.bands * self.shares
        self.clusters = min(self.units, at_once)
        self.step, self.stage = kernel.channels[0], _stage(kernel)
        self.taps = math.prod(kernel.kernel_size)
        self.tap = plan.n * self.step  # elements of a tap of all filters

    def emit(self) -> Emission:
        f, out, plan, fixed = self.f, self.f.lines, self.plan, self.kernel.rhs
        f.per_core, row, box = plan.per_core, self.p.k * 2, (self.step, plan.n, 1)
        self.right = f.tile_map(fixed, TileMap((self.p.k, self.p.n, 1), (row, row * self.p.n), box, self.step * 2))
        if not self.rows:
            n, h, w, c = self.kernel.inputs[0].shape
            strides = tuple(s * 2 for s in reversed(distances(self.kernel.inputs[0])))
            window = (c, self.pitch // c, _lines(self.kernel), 1)
            self.left = f.tile_map(0, TileMap((c, w, h, n), strides, window, c * 2))
        if plan.tiled:
            n, h, w, c = self.kernel.outputs[0].shape
            pitch = row_pitch(self.kernel.outputs[0]) * 2
            strides, self.pairs = (pitch, pitch * w, pitch * w * h), Pairs(self.kernel, f, plan)
            self.out = f.tile_map(~0, TileMap((c, w, h, n), strides, (PIECE, BLOCK, BLOCK, 1), PIECE * 2))
        f.ask_for_given(fixed + 1)
        f.array(self.ctype, "ring", _ring(self.kernel, plan.n, plan.stages))
        if plan.tiled:
            f.array(self.ctype, "leaving", plan.m * plan.n)
        f.array("int64_t", "full", 2 * plan.stages + 1)
        out.add(f"{self.ctype}* const lines = ring + {_filters(self.kernel, plan.n)};")
        out.add(f"int64_t *const empty = full + {plan.stages}, *const filters = full + {2 * plan.stages};")
        with out.block("if (tid == 0) {"):
            out.add(f"for (int i = 0; i < {plan.stages}; i++) {{ ring_init(full + i, 1); "
                    f"ring_init(empty + i, {self.teams}); }}", "ring_init(filters, 1);", "ring_ready();")  # fmt: skip
        out.add("barrier();")
        with out.block(f"if (sid == {self.teams * 4}) {{"), out.block("if (lane == 0) {"):
            self._ask()
        with out.block("else {"):
            self._work()
        return f.finish(self.clusters, self.threads)

    def _ask(self) -> None:
        out, (top, left) = self.f.lines, self.kernel.padding[:2]
        out.add(f"tile_map_ready({self.right});", f"ring_expect(filters, {self.taps * self.tap * 2});")
        out.add(f"for (int tap = 0; tap < {self.taps}; tap++)")
        out.add(f"  tile_copy(ring + tap * {self.tap}, {self.right}, filters, tap * {self.step}, 0, 0);")
        out.add("wait_inputs();", "copies_follow();", "int slot = 0, turn = 1;")
        with out.block(f"for (int t = gid; t < {self.units}; t += {self.clusters}) {{"):
            self._indices()
            out.add(f"const int y0 = band * {BLOCK * self.kernel.stride[0]};")
            out.add("ring_wait(empty + slot, turn);")
            lines, to = _lines(self.kernel), f"lines + slot * {self.stage}"
            if self.rows:
                image, high = self.kernel.inputs[0].strides[0], self.kernel.inputs[0].shape[1]
                out.add(f"const int bytes = ({high} - y0 < {lines} ? {high} - y0 : {lines}) * {self.pitch * 2};")
                out.add("ring_expect(full + slot, bytes);")
                at = f"{self.f.pointer(0)} + (int64_t)image * {image} + y0 * {self.pitch}"
                out.add(f"bytes_copy({to}, {at}, full + slot, bytes);")
            else:
                out.add(f"ring_expect(full + slot, {lines * self.pitch * 2});")
                out.add(f"tile_copy_4d({to}, {self.left}, full + slot, 0, -{left}, y0 - {top}, image);")
            self._next()

    def _next(self) -> None:
        self.f.lines.add(f"if (++slot == {self.plan.stages}) {{ slot = 0; turn ^= 1; }}")

    def _indices(self) -> None:
        """``image`` and ``band`` of unit ``t``."""
        self.f.lines.add(f"const int image = t / {self.shares * self.bands}, band = t / {self.shares} % {self.bands};")

    def _work(self) -> None:
        out, share, teams = self.f.lines, f"t % {self.shares}", self.teams
        epilogue = self._epilogue()
        self.ahead = bool(epilogue.ahead) and self.plan.early and self.width == 8
        out.add("wait_inputs();", "ring_wait(filters, 0);", "const int tn = 0;")
        few = self.plan.n <= MOST_KEPT
        self.kept = self._can_share(epilogue) and not self.ahead and few and not self.plan.tiled
        if self.plan.tiled and few:
            self.pairs.read_shared(epilogue)
        if self.kept:
            epilogue.declare_shared(self._pieces(), 8)
            out.add("#pragma unroll")
            with out.block(f"for (int g = 0; g < {self._pieces()}; g++) {{"):
                epilogue.read_shared(self._where(self._column())[1], 8, "g")
        out.add("int slot = 0, turn = 0, mine = sid / 4;  // teams take turns to have a tile more")
        with out.block(f"for (int t = gid; t < {self.units}; t += {self.clusters}) {{"):
            self._indices()
            out.add("ring_wait(full + slot, turn);")
            out.add(f"const int last = ({share} + 1) * {self.tiles} / {self.shares};", "#pragma unroll 1")
            first = f"{share} * {self.tiles} / {self.shares} + mine"
            with out.block(f"for (int tile = {first}; tile < last; tile += {teams}) {{"):
                if self.ahead:
                    self._read_ahead(epilogue)
                self._multiply()
                if self.plan.tiled:
                    self._leave(epilogue)
                else:
                    self._store(epilogue)
            self._release("slot")
            self._next()
            out.add(f"mine = (mine + {teams - self.tiles % teams}) % {teams};")
        if self.plan.tiled:
            out.add("if (tid % 128 == 0) stores_read();")

    def _leave(self, epilogue: Epilogue) -> None:
        """A team's results go through group memory of its own, when the copy engine has read those before."""
        out, pieces, piece = self.f.lines, self.plan.n // PIECE, PIECE * PIECE
        out.add("if (tid % 128 == 0) stores_read();", "team_barrier(1 + sid / 4, 128);")
        with out.block("{"):
            self.pairs.fill(f"leaving + sid / 4 * {pieces * piece}", piece, range(pieces), epilogue, self.row())
        with out.block("if (tid % 128 == 0) {"):
            for n in range(pieces):
                at = f"leaving + sid / 4 * {pieces * piece} + {n * piece}"
                out.add(f"tile_store_4d({self.out}, {at}, {n * PIECE}, tile * {BLOCK}, band * {BLOCK}, image);")
            out.add("stores_commit();")

    def _multiply(self) -> None:
        """The sums ``acc`` of 8 lines from ``tile`` on."""
        out, (_, s), (dh, dw) = self.f.lines, self.kernel.kernel_size, self.kernel.dilation
        out.add(f"WideC<{self.plan.n}> acc;", "wide_zero(acc);", "wide_begin();")
        apart, pitch = APART if self.rows else CHANNELS, self.kernel.stride[0] * self.pitch * 2
        left = f"wide_pixels<{pitch}, {'false' if self.rows else 'true'}>"
        out.add(f"const uint64_t left = {left}(lines + slot * {self.stage} + tile * {BLOCK * apart});")
        out.add(f"const uint64_t right = wide_tile<{self.step}>(ring);")
        out.add("#pragma unroll", f"for (int tap = 0; tap < {self.taps}; tap++)", "#pragma unroll")
        out.add(f"for (int k = 0; k < {self.step // 16}; k++)")
        tap = f"tap / {s} * {dh * self.pitch // 8} + tap % {s} * {dw * apart // 8}"
        out.add(f"  wide_step(acc, left + ({tap}) + 2 * k, right + tap * {self.tap // 8} + 2 * k, ring);")
        out.add("wide_commit();", "wide_settle(acc);")

    def row(self) -> str:
        y, x = f"band * {BLOCK} + sid % 4 * 2 + h", f"tile * {BLOCK} + (lane >> 2)"
        inside = f"down < {self.oh} && over < {self.ow}"
        return (
            f"const int down = {y}, over = {x};\n"
            f"const int m = {inside} ? (image * {self.oh} + down) * {self.ow} + over : {self.p.m};"
        )
