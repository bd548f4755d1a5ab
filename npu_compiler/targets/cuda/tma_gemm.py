"""Products and convolutions on Hopper whose operands TMA loads: the supported kernels, and the arguments of the
template in ``kernels/tma_gemm.h``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ...schedule.anchors import Conv2d, Gemm
from ...schedule.kernel import Kernel, Operand
from ...support import dtypes
from ...weights.block_rows import ROWS
from ..simt.kernels.epilogue import Epilogue, Functor
from ..simt.kernels.gemm import WGMMA_ROWS, product_of
from ..simt.kernels.operand_types import LIMBS, TF32, as_b16, operand_type
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, Members, blocks, constants
from ..simt.lang.program import TileMap
from .split_rms_norm import row_scale
from .tile_selection import (
    GROUP_EXTRA,
    HALF,
    N_MAJOR_COLUMNS,
    STEP,
    SUBTILE,
    Plan,
    choose,
    column_scale_floats,
    device_of,
    padded_product,
    result_stages,
    split_floats,
    stage_elements,
    subtile_columns,
)
from .tma_epilogue import hold_vectors, residual_of, row_pitch, supports_tma_store, vector_bytes

MAX_PREFETCHED = 2  # the most vectors of residuals that a thread of a cluster reads before the main loop
MIN_USED = 0.6  # the smallest fraction of the elements in stages that are channels
MAX_PRIMED = 36 << 10  # bytes of weights: an SM's loads are served in order, so they delay the first left operands


def supports_tma(kernel: Gemm | Conv2d) -> bool:
    """Whether TMA can load the operands of ``kernel``: rows that begin at multiples of 16 bytes, and for a convolution
    a multiple of 64 bytes of channels. Rows of a stage of floats that are split have 128 bytes."""
    viewed = None if isinstance(kernel, Gemm) and kernel.prologue is not None else as_b16(kernel)
    if viewed is None or (operand_type(kernel) is LIMBS and tile_k(kernel) < STEP):
        return False
    kernel, p = viewed, product_of(viewed)
    a, w = kernel.inputs[0], kernel.weight
    if p.splits > 1 or p.m <= WGMMA_ROWS or p.n < 16 or a.offset % 8 or w.offset % 8 or p.k % 8:
        return False
    if isinstance(kernel, Conv2d):
        pixels = a.strides[3] == 1 and all(s > 0 and s % 8 == 0 for s in pixel_strides(a))
        apart = a.strides[2] >= a.shape[3]  # for overlapping rows, loads by threads are faster: they hit the L1 cache
        return pixels and apart and kernel.groups == 1 and tile_k(kernel) > 0 and _window_fits(kernel)
    rows = kernel.lda, kernel.batch_stride if p.batch > 1 else 8
    if w.format:  # groups of four rows
        return p.batch == 1 and kernel.lda % 8 == 0
    batch = w.strides[0] if w.shape[0] > 1 else 8
    if kernel.n_major:  # if its columns fill a tile
        wide = isinstance(kernel, Gemm) and not kernel.dual and kernel.n > N_MAJOR_COLUMNS // 2
        return wide and all(n > 0 and n % 8 == 0 for n in (*rows, w.strides[2], batch))
    return w.strides[2] == 1 and all(n > 0 and n % 8 == 0 for n in (*rows, w.strides[1], batch))


def tile_k(kernel: Gemm | Conv2d) -> int:
    """Return the b16 elements of a stage along K, 64 or 32; 0 if the channels of a convolution are a multiple of
    neither. TMA must be able to load the operands (:func:`supports_tma`)."""
    viewed = as_b16(kernel)
    assert viewed is not None
    if isinstance(viewed, Gemm) or is_plain(viewed):
        return STEP if product_of(viewed).k > 32 else 32
    channels = viewed.channels[0]
    if operand_type(kernel) is LIMBS:  # the last stage of a tap may have fewer
        return STEP if channels >= MIN_USED * blocks(channels, STEP) * STEP else 0
    return STEP if channels % STEP == 0 else 32 if channels % 32 == 0 else 0


def is_plain(kernel: Conv2d) -> bool:
    """Whether a convolution is 1x1 and reads every pixel, like a matrix product."""
    whole = kernel.stride == (1, 1) and tuple(kernel.padding) == (0, 0, 0, 0)
    return kernel.inputs[0].contiguous and kernel.kernel_size == (1, 1) and whole


def without_stride(kernel: Gemm | Conv2d) -> Gemm | Conv2d:
    """Return a strided 1x1 convolution as one without stride, of an image that only has the pixels that are read. TMA
    loads strided windows slowly. Other kernels are returned unchanged."""
    if isinstance(kernel, Gemm) or kernel.kernel_size != (1, 1) or any(kernel.padding):
        return kernel
    a, (sh, sw), (n, oh, ow, _) = kernel.inputs[0], kernel.stride, kernel.outputs[0].shape
    strides = (a.strides[0], a.strides[1] * sh, a.strides[2] * sw, a.strides[3])
    image = replace(a, shape=(n, oh, ow, a.shape[3]), strides=strides) if max(sh, sw) > 1 else a
    return replace(kernel, inputs=(image, *kernel.inputs[1:]), stride=(1, 1))


def pixel_strides(a: Operand) -> list[int]:
    """Return the strides along N, H and W in elements; 8 for a dimension of size 1, whose stride is not used."""
    return [s if n > 1 else 8 for s, n in zip(a.strides[:3], a.shape[:3], strict=True)]


def _window_fits(kernel: Conv2d) -> bool:
    """Whether the window is within the limits of im2col loads: strides up to 8, and corners that fit a signed byte."""
    low, high = _corners(kernel)
    return max(kernel.stride) <= 8 and all(-128 <= x <= 127 for x in (*low, *high))


def _corners(kernel: Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the window of a filter's first tap as (W, H): its first pixel, and its last relative to the image's
    last."""
    _, h, w, _ = kernel.inputs[0].shape
    _, oh, ow, _ = kernel.outputs[0].shape
    (sh, sw), (top, left) = kernel.stride, kernel.padding[:2]
    return (-left, -top), ((ow - 1) * sw + 1 - left - w, (oh - 1) * sh + 1 - top - h)


def emit_tma_gemm(kernel: Gemm | Conv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_tma`."""
    return TmaGemm(kernel, dialect, choose(kernel, tile_k(kernel), supports_tma_store(kernel), dialect)).emit()


def column_tiles(kernel: Gemm | Conv2d, dialect: Dialect) -> int:
    """Return the number of tiles along the columns of a product for which :func:`supports_tma`, if it stores two
    results."""
    both = replace(kernel, outputs=(*kernel.outputs[:1], *kernel.outputs[:1]))
    return blocks(product_of(kernel).n, choose(both, tile_k(kernel), supports_tma_store(kernel), dialect).n)


class Operands(NamedTuple):
    """The operands of the product ``kernel``. ``left``, ``right``: their numbers among the operands of the function."""

    kernel: Gemm | Conv2d
    left: int
    right: int


class TmaGemm:
    """The function of a product or convolution with the tile sizes of ``plan``. ``sums``: accumulators per result.
    ``decoders``: warps that decode the right operand, from ``codes`` bytes of shared memory. ``head``: the columns of a
    head if threads store pairs of its columns together, of which they read the operands ``pairs_ahead`` before; else 0.
    ``source``: the kernel whose operands the function takes, if they are not those of ``kernel``."""

    sums = 1
    decoders = codes = 0
    team = 1
    head = pairs_ahead = 0

    def __init__(self, kernel: Gemm | Conv2d, dialect: Dialect, plan: Plan, source: Kernel | None = None):
        viewed, kind = as_b16(kernel), operand_type(kernel)
        assert viewed is not None and kind is not None
        self.kernel, self.dialect, self.plan, self.kind = kernel, dialect, plan, kind
        self.p = product_of(viewed)
        self.f = Function(source or kernel, dialect, explicit_wait=True)
        result = dtypes.DTYPES[kernel.outputs[0].dtype]
        self.result_size = result.size
        self.types = {"T": kind.ctype, "Sum": kind.sum_ctype, "R": result.ctype}
        self.step = tile_k(kernel)
        self.threads = plan.m * 2 + plan.loaders * SUBGROUP
        self.operands = Operands(without_stride(viewed), 0, kernel.rhs)

    def emit(self) -> Emission:
        """Return the function."""
        f, plan, p = self.f, self.plan, self.p
        f.cluster, f.resident = plan.splits, plan.blocks_per_sm
        stages = plan.stages * stage_elements(plan.m, plan.n, self.step, plan.limbs)
        ring = f.array(self.kind.ctype, "ring", stages + self.codes // 2)
        parts = "nullptr"
        if plan.splits > 1:
            parts = f.array(self.kind.sum_ctype, "parts", split_floats(plan.m, plan.n))
        full = f.array("int64_t", "full", (2 + plan.limbs) * plan.stages + (plan.splits > 1))
        before, decoder = self._kept(), self._decoder(f"(char*)({ring} + {stages})")
        operands = self._operands(self.operands, "@NAME@_product")
        outputs = self._outputs()
        f.prefetch_constants(self.kernel.rhs + 1)
        flags, epilogue = self._epilogue()
        scale = row_scale(self.kernel, f) if self.kernel.row_scale is not None else "NoRowScale{}"
        columns = self._column_scale() if self.kind.stored else "NoColumnScale{}"
        tiles = blocks(p.m, plan.m) * blocks(p.n, plan.n) * p.batch  # each by ``splits`` thread blocks
        clusters = tiles if plan.splits > 1 else min(tiles, self.dialect.device.compute_units * plan.blocks_per_sm)
        sums = self.kernel.outputs[-1].shape[1] if self.sums_rows else 0
        more, fewer = plan.moved
        sizes = dict(
            M=p.m, N=p.n, BATCH=p.batch, PRODUCTS=p.products, BATCHED_RIGHT=self._batches(self.operands.kernel) > 1,
            SPLITS=plan.splits, TILE_M=plan.m, TILE_N=plan.n, TILE_K=self.step, STAGES=plan.stages, TILES=tiles,
            STEP=clusters, FOURS=self.kind.stored, N_MAJOR=self.kernel.n_major, ROUNDED=self.kind is TF32,
            LIMBS=plan.limbs, SPLITTERS=plan.splitters, SPLIT_TEAM=plan.split_team, PROMOTED=plan.promoted,
            OVERLAP=plan.overlap, STORE_PARTS=plan.store_parts(p.products), LOADERS=plan.loaders, MORE_REGISTERS=more,
            FEWER_REGISTERS=fewer, HEAD=self.head, PAIRS_AHEAD=self.pairs_ahead, PRIMED=self._primed(),
            DECODERS=self.decoders, TEAM=self.team, OUTPUTS=self.outputs, SUM_ROWS=sums, **flags,
        )  # fmt: skip
        row_sums = f.pointer(~(len(self.kernel.outputs) - 1)) if sums else "nullptr"
        f.template(
            "tma_gemm", "tma_gemm.h", self.types, sizes, operands, ring, full, parts, epilogue, scale, columns,
            outputs, row_sums, before, decoder,
        )  # fmt: skip
        return f.finish(clusters * plan.splits, self.threads)

    @property
    def outputs(self) -> int:
        """The number of outputs of the product's shape. The last output of a kernel with ``extra_stages`` has row
        sums."""
        return 2 if self.kernel.extra_stages else 1

    @property
    def sums_rows(self) -> bool:
        """Whether the kernel also stores the sum of every row of a tile."""
        return any(s.kind == "reduce" for s in self.kernel.extra_stages)

    def _kept(self) -> str:
        """Return the template's argument for an earlier product whose results are kept in registers."""
        return "NoSum{}"

    def _decoder(self, codes: str) -> str:
        """Return the template's argument for weights that are decoded from ``codes`` in shared memory."""
        return "NoDecoder{}"

    def _first(self) -> Operands:
        """Return the product whose operands are loaded first."""
        return self.operands

    def _primed(self) -> int:
        """Return the number of stages of weights that are loaded before preceding kernels end."""
        s = self._first()
        constant = s.kernel.inputs[s.kernel.rhs].buffer.constant
        few = max(1, MAX_PRIMED // (self.plan.n * self.step * 2))
        return min(self.plan.stages, self._steps(s) // self.plan.splits, few) if constant else 0

    # -- operands
    @property
    def _loaded_columns(self) -> int:
        """The columns of the right operand in one load: those of a tile, or of half of one."""
        return HALF if self.head > self.plan.n else self.plan.n

    def _steps(self, s: Operands) -> int:
        """Return the number of stages of the operands."""
        return blocks(padded_product(s.kernel, self.step).k, self.step)

    def _batches(self, kernel: Gemm | Conv2d) -> int:
        """Return the number of right operands."""
        return kernel.inputs[kernel.rhs].shape[0] if isinstance(kernel, Gemm) and self.p.batch > 1 else 1

    def _operands(self, s: Operands, name: str) -> str:
        """Define struct ``name`` with the constants of a product, and return the template's argument for its
        operands."""
        left, right = (self.f.tile_map(n, tiles) for n, tiles in zip((s.left, s.right), self._maps(s), strict=True))
        a, values = s.kernel, {"K_TILES": self._steps(s), "IM2COL": False}
        if isinstance(a, Conv2d) and not is_plain(a):
            _, oh, ow, _ = a.outputs[0].shape
            values |= dict(
                IM2COL=True, OH=oh, OW=ow, KERNEL_W=a.kernel_size[1], STRIDE_H=a.stride[0], STRIDE_W=a.stride[1],
                PAD_TOP=a.padding[0], PAD_LEFT=a.padding[1], DILATION_H=a.dilation[0],
                DILATION_W=a.dilation[1], CHANNELS=a.channels[0],
                CHANNEL_TILES=blocks(a.channels[0], self.step),
            )  # fmt: skip
        floats = ["nullptr", "nullptr"]
        if self.plan.limbs:
            values |= self._float_rows(s)
            floats = [self.f.pointer(n) for n in (s.left, s.right)]
        self.f.before.append(constants(name, {}, values))
        return f"Operands<{name}>{{{', '.join((left, right, *floats))}}}"

    def _float_rows(self, s: Operands) -> dict[str, int]:
        """Return the constants with which threads read floats of the operands: see ``kernels/tma_float_sums.h``."""
        k, p = s.kernel, product_of(s.kernel)
        a, w, row = k.inputs[0], k.inputs[k.rhs], p.k // 2
        if isinstance(k, Conv2d) and not is_plain(k):
            image, line, pixel = (n // 2 for n in a.strides[:3])
            sizes = dict(H=a.shape[1], W=a.shape[2], IMAGE=image, LINE=line, PIXEL=pixel)
        else:
            left = (k.lda // 2, k.batch_stride // 2) if isinstance(k, Gemm) else (row, 0)
            sizes = dict(zip(("LEFT_ROW", "LEFT_BATCH"), left, strict=True))
        right = (w.strides[1] // 2, w.strides[0] // 2) if isinstance(k, Gemm) else (row, 0)
        return dict(K=row, RIGHT_ROW=right[0], RIGHT_BATCH=right[1]) | sizes

    def _maps(self, s: Operands) -> tuple[TileMap, TileMap]:
        """Return the tensor maps of the left and the right operand."""
        k, p = s.kernel, product_of(s.kernel)
        a, w = k.inputs[0], k.inputs[k.rhs]
        swizzle = self.step * 2
        if isinstance(k, Gemm):
            lda, batch = k.lda, k.batch_stride if p.batch > 1 else p.m * k.lda
            left = TileMap((p.k, p.m, p.batch), (lda * 2, batch * 2), (self.step, self.plan.m, 1), swizzle)
        elif is_plain(k):
            left = TileMap((p.k, p.m, 1), (p.k * 2, p.m * p.k * 2), (self.step, self.plan.m, 1), swizzle)
        else:
            n, h, width, c = a.shape
            low, high = _corners(k)
            sh, sw = k.stride
            strides, box = tuple(x * 2 for x in reversed(pixel_strides(a))), (self.step, self.plan.m)
            left = TileMap((c, width, h, n), strides, box, swizzle, (*low, *high), (sw, sh))
        if w.format:
            shape, nbytes = (p.k, ROWS, w.shape[0]), w.strides[0] * 2
            return left, TileMap(shape, (p.k * 2, nbytes), (self.step, ROWS, self._loaded_columns // ROWS), swizzle)
        batches, row, batch = self._batches(k), p.k * 2, p.n * p.k * 2
        if k.n_major:
            row, batch = w.strides[2] * 2, (w.strides[0] if batches > 1 else w.strides[2] * p.k) * 2
            tile = N_MAJOR_COLUMNS, self.step, 1
            return left, TileMap((p.n, p.k, batches), (row, batch), tile, N_MAJOR_COLUMNS * 2)
        if isinstance(k, Gemm):
            row, batch = w.strides[1] * 2, (w.strides[0] if batches > 1 else w.strides[1] * p.n) * 2
        return left, TileMap((p.k, p.n, batches), (row, batch), (self.step, self._loaded_columns, 1), swizzle)

    def _column_scale(self) -> str:
        """Return the template's argument for the scales of the columns, which follow the codes of four rows."""
        plan, weights = self.plan, self.kernel.weight
        shared = self.f.array("float", "scales", column_scale_floats(plan.m, plan.n))
        codes = ROWS * self.kernel.k if isinstance(self.kernel, Gemm) else 0
        return f"FourScales<{weights.shape[1]}, {codes}>{{{self.f.pointer(self.kernel.rhs)}, {shared}}}"

    # -- results
    def _outputs(self) -> str:
        """Return the template's argument for the tensor maps of results that TMA stores, and of their residual."""
        if not self.plan.tma_store:
            return "TileOutputs{}"
        numbers = [~0, ~1 if self.outputs > 1 else None, self._residual()]
        maps = ("nullptr" if n is None else f"&{self._result_map(n)}" for n in numbers)
        return f"TileOutputs{{{', '.join(maps)}}}"

    def _residual(self) -> int | None:
        """Return the input of which the epilogue reads one element for every result, or None."""
        found = residual_of(self.kernel)
        return None if found == -1 else found

    def _result_map(self, number: int) -> str:
        size, p = self.result_size, self.p
        pitch, row = row_pitch(self.f.operand(number)) * size, subtile_columns(self.plan.n, size) * size
        return self.f.tile_map(
            number, TileMap((p.n * size // 2, p.m, 1), (pitch, pitch * p.m), (row // 2, SUBTILE, 1), row)
        )

    def _epilogue(self) -> tuple[dict[str, bool | int], str]:
        """Return (constants of the epilogue, the C++ expression that instantiates its functor)."""
        plan, products = self.plan, self.p.products
        members = Members(self.f, "@NAME@_epilogue")
        epilogue = Epilogue(
            self.kernel, members, max_width=8, columns=plan.splits > 1, widened=plan.tma_store, keeps=self.sums > 1
        )  # more than 16 bytes
        slots = 0
        if plan.tma_store:
            slots = result_stages(plan.m, plan.n, self.step, self.result_size, self.outputs)
        flags = dict(
            READ_AHEAD=False, SHARED=False, MERGED=False, RESULT_STAGES=slots,
            RESIDUAL=slots > 0 and self._residual() is not None, KEEPS=self.sums > 1,
        )  # fmt: skip
        if plan.tma_store:
            self._hold(self.kernel, members)
            made = Functor(epilogue, members, 2, self.sums)
            made.types()
            made.read_shared()
            made.compute(ahead=True, shared=True)
            return flags, made.finish()
        width = self._width(epilogue)
        made = Functor(epilogue, members, width, products)
        made.types()
        floats = self.kind.sums == "float32" and self.result_size > 1
        flags["MERGED"] = plan.splits == 1 and products > 1 and epilogue.only_sums and width == 8 and floats
        if flags["MERGED"]:
            made.compute()
            made.put()
        else:
            soon = self._vectors(width) <= MAX_PREFETCHED if plan.splits > 1 else width == 8 and plan.prefetch
            flags["READ_AHEAD"] = bool(epilogue.ahead) and products == 1 and soon
            flags["SHARED"] = plan.splits == 1 and self._can_share(epilogue, width)
            self._vector_methods(made, flags)
        if plan.splits == 1 and plan.n % (32 * products):
            made.store_rest(min(width, 2 // products))
        return flags, made.finish()

    def _hold(self, kernel: Gemm | Conv2d, members: Members, at: int = 0) -> None:
        """Keep the vectors of an epilogue in shared memory if there is room for them. ``at``: what is added to operand
        numbers."""
        room = device_of(self.dialect).shared_per_sm // self.plan.blocks_per_sm - GROUP_EXTRA
        if sum(a.nbytes for a in self.f.arrays) + vector_bytes(kernel) <= room:
            hold_vectors(kernel, members, self.threads, at)

    def _vector_methods(self, made: Functor, flags: Mapping[str, bool | int]) -> None:
        """Add the methods with which threads store vectors."""
        if flags["READ_AHEAD"]:
            made.read_ahead()
        if flags["SHARED"]:
            made.read_shared()
        made.store_read(bool(flags["READ_AHEAD"]), bool(flags["SHARED"]))

    def _width(self, epilogue: Epilogue) -> int:
        """Return the number of columns that a lane stores as a vector, after lanes have exchanged results."""
        products, width = self.p.products, min(epilogue.width, 8)
        while self.p.n // products % width or self.plan.n // products % width:
            width //= 2
        return width

    def _can_share(self, epilogue: Epilogue, width: int) -> bool:
        """Whether both rows of a thread can use the same registers for vectors that all rows share."""
        return bool(epilogue.shared) and self.p.products == 1 and width == 8 and self.p.n % self.plan.n == 0

    def _vectors(self, width: int) -> int:
        """Return the number of vectors that a thread completes in a cluster."""
        plan = self.plan
        return blocks(plan.m // plan.splits * (plan.n // self.p.products // width), plan.m * 2)
