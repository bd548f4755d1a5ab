"""Products and convolutions on Hopper whose tiles TMA loads: which kernels they are, and how ``kernels/tma_gemm.h`` is
instantiated for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ...schedule.kernel import Conv2d, Gemm, Operand
from ...support import dtypes
from ..simt.kernels.epilogue import Epilogue, Functor
from ..simt.kernels.gemm import WIDE_ROWS, product_of
from ..simt.lang.dialect import SIMD, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, Members, blocks, constants
from ..simt.lang.program import TileMap
from .split_rms_norm import row_scale
from .tile_selection import PIECE, Plan, choose, part_floats, result_stages
from .tma_epilogue import leaves_as_tiles, residual_of, row_pitch

MOST_AHEAD = 2  # vectors of a share that a thread keeps from before the products


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
    operands."""

    kernel: Gemm | Conv2d
    left: int
    right: int


class Streamed:
    """The function of a product or convolution whose tiles are cut by ``plan``. ``sums``: that make a result which TMA
    stores."""

    sums = 1

    def __init__(self, kernel: Gemm | Conv2d, dialect: Dialect, plan: Plan):
        self.kernel, self.dialect, self.plan = kernel, dialect, plan
        self.p = product_of(kernel)
        self.f = Function(kernel, dialect, early=True)
        self.ctype = dtypes.DTYPES[kernel.inputs[0].dtype].ctype
        self.step = step_of(kernel)
        self.threads = plan.m * 2 + SIMD
        self.sum = Sum(thinned(kernel), 0, kernel.rhs)

    def emit(self) -> Emission:
        f, plan, p = self.f, self.plan, self.p
        f.cluster, f.per_core = plan.parts, plan.per_core
        f.before.append('#include "tma_gemm.h"\n')
        before = self._kept()
        operands = self._operands(self.sum, "@NAME@_product")
        outputs = self._outputs()
        f.prefetch_constants(self.kernel.rhs + 1)
        ring = f.array(self.ctype, "ring", plan.stages * (plan.m + plan.n) * self.step)
        parts = f.array("float", "parts", part_floats(plan.m, plan.n)) if plan.parts > 1 else "nullptr"
        full = f.array("int64_t", "full", 2 * plan.stages)
        flags, epilogue = self._epilogue()
        scale = row_scale(self.kernel, f) if self.kernel.row_scale is not None else "NoRowScale{}"
        tiles = blocks(p.m, plan.m) * blocks(p.n, plan.n) * p.batch  # each is made by ``parts`` thread blocks
        clusters = tiles if plan.parts > 1 else min(tiles, self.dialect.device.units * plan.per_core)
        sums = self.kernel.outputs[-1].shape[1] if self.folds else 0
        sizes = dict(
            M=p.m, N=p.n, BATCH=p.batch, LANES=p.lanes, BATCHED_RIGHT=self._batches(self.sum.kernel) > 1,
            SPLITS=plan.parts, TILE_M=plan.m, TILE_N=plan.n, TILE_K=self.step, STAGES=plan.stages, TILES=tiles,
            STEP=clusters, PRIMED=self._primed(), OUTPUTS=self.outputs, SUM_ROWS=sums, **flags,
        )  # fmt: skip
        row_sums = f.pointer(~(len(self.kernel.outputs) - 1)) if sums else "nullptr"
        f.template(
            "tma_gemm", "tma_gemm.h", {"T": self.ctype}, sizes, operands, ring, full, parts, epilogue, scale, outputs,
            row_sums, before,
        )  # fmt: skip
        return f.finish(clusters * plan.parts, self.threads)

    @property
    def outputs(self) -> int:
        """Results of the shape of the product; the last output of a kernel with ``more`` are sums of rows."""
        return 2 if self.kernel.extra_stages else 1

    @property
    def folds(self) -> bool:
        return any(s.kind == "reduce" for s in self.kernel.extra_stages)

    def _kept(self) -> str:
        """A product before this one whose results are kept."""
        return "NoSum{}"

    def _first(self) -> Sum:
        """The product whose operands are loaded first."""
        return self.sum

    def _primed(self) -> int:
        """Stages of weights that do not wait for the kernels before."""
        s = self._first()
        constant = s.kernel.inputs[s.kernel.rhs].buffer.kind in ("weight", "const")
        return min(self.plan.stages, self._steps(s) // self.plan.parts) if constant else 0

    # -- operands
    def _steps(self, s: Sum) -> int:
        return blocks(product_of(s.kernel).k, self.step)

    def _batches(self, kernel: Gemm | Conv2d) -> int:
        """Right operands."""
        return kernel.inputs[kernel.rhs].shape[0] if isinstance(kernel, Gemm) and self.p.batch > 1 else 1

    def _operands(self, s: Sum, name: str) -> str:
        """The operands of a product, whose constants are struct ``name``."""
        left, right = (self.f.tile_map(n, tiles) for n, tiles in zip((s.left, s.right), self._maps(s), strict=True))
        a, values = s.kernel, {"K_TILES": self._steps(s), "IM2COL": False}
        if isinstance(a, Conv2d) and not _is_plain(a):
            _, oh, ow, _ = a.outputs[0].shape
            values |= dict(
                IM2COL=True, OH=oh, OW=ow, KERNEL_W=a.kernel_size[1], STRIDE_H=a.stride[0], STRIDE_W=a.stride[1],
                PAD_TOP=a.padding[0], PAD_LEFT=a.padding[1], DILATION_H=a.dilation[0],
                DILATION_W=a.dilation[1], CHANNEL_TILES=a.channels[0] // self.step,
            )  # fmt: skip
        self.f.before.append(constants(name, {}, values))
        return f"Operands<{name}>{{{left}, {right}}}"

    def _maps(self, s: Sum) -> tuple[TileMap, TileMap]:
        k, p = s.kernel, product_of(s.kernel)
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
        batches, row, batch = self._batches(k), p.k * 2, p.n * p.k * 2
        if isinstance(k, Gemm):
            row, batch = w.strides[1] * 2, (w.strides[0] if batches > 1 else w.strides[1] * p.n) * 2
        return left, TileMap((p.k, p.n, batches), (row, batch), (self.step, self.plan.n, 1), swizzle)

    # -- results
    def _outputs(self) -> str:
        """The tensor maps of results that TMA stores and of their residual."""
        if not self.plan.tiled:
            return "TileOutputs{}"
        numbers = [~0, ~1 if self.outputs > 1 else None, self._residual()]
        maps = ("nullptr" if n is None else f"&{self._result_map(n)}" for n in numbers)
        return f"TileOutputs{{{', '.join(maps)}}}"

    def _residual(self) -> int | None:
        """The input of which the epilogue reads an element for every result."""
        found = residual_of(self.kernel)
        return None if found == -1 else found

    def _result_map(self, number: int) -> str:
        pitch, p = row_pitch(self.f.operand(number)) * 2, self.p
        return self.f.tile_map(number, TileMap((p.n, p.m, 1), (pitch, pitch * p.m), (PIECE, PIECE, 1), PIECE * 2))

    def _epilogue(self) -> tuple[dict[str, bool | int], str]:
        """How sums become results, as constants, and the functor that makes them."""
        plan, lanes = self.plan, self.p.lanes
        members = Members(self.f, "@NAME@_epilogue")
        epilogue = Epilogue(self.kernel, members, most=8, columns=plan.parts > 1)  # more than 16 bytes
        slots = result_stages(plan.m, plan.n, self.outputs) if plan.tiled else 0
        flags = dict(
            READ_AHEAD=False, SHARED=False, MERGED=False, RESULT_STAGES=slots,
            RESIDUAL=slots > 0 and self._residual() is not None,
        )  # fmt: skip
        if plan.tiled:
            made = Functor(epilogue, members, 2, self.sums)
            made.types()
            made.read_shared()
            made.compute(ahead=True, shared=True)
            return flags, made.finish()
        width = self._width(epilogue)
        made = Functor(epilogue, members, width, lanes)
        made.types()
        flags["MERGED"] = plan.parts == 1 and lanes > 1 and epilogue.alone and width == 8
        if flags["MERGED"]:
            made.compute()
            made.put()
        else:
            soon = self._vectors(width) <= MOST_AHEAD if plan.parts > 1 else width == 8 and plan.early
            flags["READ_AHEAD"] = bool(epilogue.ahead) and lanes == 1 and soon
            flags["SHARED"] = plan.parts == 1 and self._can_share(epilogue, width)
            self._vector_methods(made, flags)
        if plan.parts == 1 and plan.n % (32 * lanes):
            made.store_rest(min(width, 2 // lanes))
        return flags, made.finish()

    def _vector_methods(self, made: Functor, flags: Mapping[str, bool | int]) -> None:
        """The methods with which threads store vectors."""
        if flags["READ_AHEAD"]:
            made.read_ahead()
        if flags["SHARED"]:
            made.read_shared()
        made.store_read(bool(flags["READ_AHEAD"]), bool(flags["SHARED"]))

    def _width(self, epilogue: Epilogue) -> int:
        """Neighbours that lanes exchange and store at once."""
        lanes, width = self.p.lanes, min(epilogue.width, 8)
        while self.p.n // lanes % width or self.plan.n // lanes % width:
            width //= 2
        return width

    def _can_share(self, epilogue: Epilogue, width: int) -> bool:
        """Whether both rows of a piece can use the same registers of what all rows share."""
        return bool(epilogue.shared) and self.p.lanes == 1 and width == 8 and self.p.n % self.plan.n == 0

    def _vectors(self, width: int) -> int:
        """Vectors of its block's share that a thread finishes."""
        plan = self.plan
        return blocks(plan.m // plan.parts * (plan.n // self.p.lanes // width), plan.m * 2)
