"""Convolutions of few channels on Hopper: the supported kernels, and the arguments of the template in
``kernels/tma_conv.h``, which loads lines of pixels once for all taps of the filters.

It supports 64 channels of 8 or 16 bits, and images in the layout of ``image_rows.py``: the pixels that a row of a
filter reads are neighbouring elements, and neighbouring results begin 16 bytes apart, so their rows overlap.
"""

from __future__ import annotations

import math

from ...schedule.anchors import Conv2d
from ...support import dtypes
from ..simt.kernels.epilogue import Epilogue, Functor
from ..simt.kernels.operand_types import LIMBS, TF32, as_b16, operand_type
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Members, blocks
from ..simt.lang.program import TileMap
from .devices import CUDADevice
from .tile_selection import GROUP_EXTRA, ONE_TILE, WIDTHS, Plan, device_of, registers, subtile_columns
from .tma_epilogue import residual_of, row_pitch, supports_tma_store
from .tma_gemm import TmaGemm, pixel_strides

BLOCK = 8  # results of a line, and lines, that wgmma multiplies together
ROW, APART = 32, 8  # elements that a row of a filter reads of an image, and distance of two such rows
CHANNELS, BYTE_CHANNELS = 64, 32  # b16 elements of a pixel, and those of 8-bit channels
MAX_BOX = 256  # pixels and lines in one TMA load
MAX_PITCH = (1 << 14) - 1  # in the matrix descriptor of wgmma, in units of 16 bytes
MIN_DENSITY = 0.75  # the smallest fraction of computed results that are used: blocks extend beyond the ends of lines
ALIGNED = 512  # elements after which the swizzle repeats
MAX_KEPT = 64  # the most columns whose scales and shifts stay in registers
# (rows of the warpgroups, stages, thread blocks on an SM, whether TMA stores the results), best first.
PLANS = ((128, 2, 2, False), (256, 2, 1, False), (128, 2, 1, False))
TILED = ((128, 2, 2, True), (256, 2, 1, True), (128, 2, 1, True))
MIN_RING = 1 << 13  # elements, so that the array begins where the swizzle does


def supports_tma_conv(kernel: Conv2d, dialect: Dialect) -> bool:
    """Whether :func:`emit_tma_conv` supports ``kernel``: its lines fit in shared memory, and there are enough of
    them."""
    viewed, device = in_lines(kernel), device_of(dialect)
    if viewed is None or _plan(viewed, device) is None:
        return False
    return _bands(viewed) * viewed.outputs[0].shape[0] >= _min_bands(viewed, device)


def in_lines(kernel: Conv2d) -> Conv2d | None:
    """Return ``kernel`` with b16 operands if TMA can load the lines of pixels that it reads, else None."""
    viewed, kind = as_b16(kernel), operand_type(kernel)
    if not isinstance(viewed, Conv2d) or kind in (None, TF32, LIMBS) or kernel.channels[1] % kind.columns:
        return None
    a, w = viewed.inputs[0], viewed.weight
    if viewed.groups > 1 or viewed.splits > 1 or a.offset % 8 or w.offset % 8 or viewed.stride[1] > 1:
        return None
    if any(s <= 0 or s % 8 for s in pixel_strides(a)) or a.strides[3] != 1:
        return None
    if is_rows(viewed):
        fits = a.shape[3] == ROW and viewed.kernel_size[1] == 1 and tuple(viewed.padding) == (0, 0, 0, 0)
    else:
        _, oh, ow, _ = viewed.outputs[0].shape
        channels = BYTE_CHANNELS if kind.elements > 1 else CHANNELS
        dense = oh * ow >= MIN_DENSITY * _bands(viewed) * _tiles(viewed) * BLOCK * BLOCK
        fits = a.shape[3] == channels <= a.strides[2] and math.prod(viewed.kernel_size) > 1 and dense
    return viewed if fits else None


def emit_tma_conv(kernel: Conv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_tma_conv`."""
    viewed = as_b16(kernel)
    assert isinstance(viewed, Conv2d)
    plan = _plan(viewed, device_of(dialect))
    assert plan is not None
    return TmaConv(kernel, dialect, plan).emit()


def is_rows(kernel: Conv2d) -> bool:
    """Whether the lines are of an image in the layout of ``image_rows.py``."""
    return kernel.inputs[0].strides[2] == APART


def _bands(kernel: Conv2d) -> int:
    return blocks(kernel.outputs[0].shape[1], BLOCK)


def _tiles(kernel: Conv2d) -> int:
    return blocks(kernel.outputs[0].shape[2], BLOCK)


def _enough(device: CUDADevice) -> int:
    """Return the number of bands that occupies most SMs."""
    return device.compute_units * 8 // 11


def _min_bands(kernel: Conv2d, device: CUDADevice) -> int:
    """Return the fewest bands of a supported kernel. Those of an image are fast to load, so thread blocks share
    them."""
    return blocks(_enough(device), max(1, _tiles(kernel) // 2) if is_rows(kernel) else 1)


def _lines(kernel: Conv2d) -> int:
    """Return the number of image lines that a band of ``BLOCK`` lines of results reads."""
    return (BLOCK - 1) * kernel.stride[0] + (kernel.kernel_size[0] - 1) * kernel.dilation[0] + 1


def line_pitch(kernel: Conv2d) -> int:
    """Return the elements between two lines in shared memory."""
    if is_rows(kernel):
        return kernel.inputs[0].strides[1]
    over = (kernel.kernel_size[1] - 1) * kernel.dilation[1]
    return (_tiles(kernel) * BLOCK + over) * kernel.channels[0]


def _stage(kernel: Conv2d) -> int:
    return blocks(_lines(kernel) * line_pitch(kernel), ALIGNED) * ALIGNED


def _filters(kernel: Conv2d, n: int) -> int:
    """Return the elements of ``n`` filters with all taps."""
    return blocks(math.prod(kernel.kernel_size) * n * kernel.channels[0], ALIGNED) * ALIGNED


def _ring(kernel: Conv2d, n: int, stages: int) -> int:
    """Return the elements of the filters and the ring, padded because the last block of a line may extend beyond it."""
    return max(_filters(kernel, n) + stages * _stage(kernel) + ALIGNED, MIN_RING)


def _plan(kernel: Conv2d, device: CUDADevice) -> Plan | None:
    """Return the first plan that fits an SM, or None. Its ``m`` is 64 per warpgroup; a stage is a band."""
    k, n = kernel.channels[1], columns(kernel)
    prefetch, size = len(kernel.inputs) > kernel.rhs + 1 and n <= 128, dtypes.DTYPES[kernel.outputs[0].dtype].size
    tiles = n == k and n % 64 == 0 and supports_tma_store(kernel) and residual_of(kernel) == -1
    many = _bands(kernel) * kernel.outputs[0].shape[0] >= _enough(device)
    for m, stages, blocks_per_sm, tma_store in (*TILED * tiles, *PLANS):
        plan = Plan(m, n, stages, 1, blocks_per_sm, prefetch, tma_store)
        if tma_store and m > 128 and not many:
            continue  # with few bands, several smaller thread blocks share each
        if plan_fits(kernel, plan, m * n * size * tma_store, device):
            return plan
    return None


def columns(kernel: Conv2d) -> int:
    """Return the columns of a tile, which has all filters, or 0 if there are too many of them."""
    return min((n for n in (*WIDTHS, *ONE_TILE) if n >= kernel.channels[1]), default=0)


def plan_fits(kernel: Conv2d, plan: Plan, nbytes: int, device: CUDADevice) -> bool:
    """Whether ``plan`` fits an SM, if a thread block needs ``nbytes`` of shared memory besides filters and lines."""
    pitch = line_pitch(kernel)
    if not plan.n or kernel.stride[0] * pitch // 8 > MAX_PITCH:
        return False
    if not is_rows(kernel) and max(pitch // kernel.channels[0], _lines(kernel)) > MAX_BOX:
        return False
    total = _ring(kernel, plan.n, plan.stages) * 2 + GROUP_EXTRA + nbytes
    few = registers(plan) <= device.registers
    return few and total * plan.blocks_per_sm <= device.shared_per_sm


class TmaConv(TmaGemm):
    """The function of a convolution for which :func:`supports_tma_conv`."""

    kernel: Conv2d
    header = "tma_conv.h"

    def emit(self) -> Emission:
        f, plan, kernel = self.f, self.plan, as_b16(self.kernel)
        assert isinstance(kernel, Conv2d)
        f.resident, rows, attrs = plan.blocks_per_sm, is_rows(kernel), kernel
        (images, oh, ow, k), step = kernel.outputs[0].shape, attrs.channels[0]
        weights = TileMap((self.p.k, self.p.n, 1), (self.p.k * 2, self.p.k * 2 * k), (step, plan.n, 1), step * 2)
        right = f.tile_map(kernel.rhs, weights)
        left = "nullptr" if rows else f"&{f.tile_map(0, self._lines(kernel))}"
        out = self._out()
        f.prefetch_constants(kernel.rhs + 1)
        ring = f.array(self.kind.ctype, "ring", _ring(kernel, plan.n, plan.stages))
        staging = "nullptr"
        if plan.tma_store:
            staging = f.array(self.kind.ctype, "staging", plan.m * plan.n * self.result_size // 2)
        full = f.array("int64_t", "full", 2 * plan.stages + 1)
        bands, tiles, at_once = _bands(kernel), _tiles(kernel), self.dialect.device.compute_units * plan.blocks_per_sm
        shares = max(1, min(tiles // (plan.m // 64), at_once // (images * bands)))  # thread blocks of a band
        workgroups = min(self._parallelism(images, bands * shares), at_once)
        flags, epilogue = self._epilogue()
        sizes = dict(
            M=self.p.m, N=self.p.n, TILE_M=plan.m, TILE_N=plan.n, STAGES=plan.stages, STEP=workgroups, IMAGES=images,
            OH=oh, OW=ow, BANDS=bands, SHARES=shares, LINES=_lines(kernel), PITCH=line_pitch(kernel),
            LINES_SIZE=_stage(kernel), TAPS=math.prod(attrs.kernel_size), KERNEL_W=attrs.kernel_size[1], CHANNELS=step,
            STRIDE_H=attrs.stride[0], PAD_TOP=attrs.padding[0], PAD_LEFT=attrs.padding[1], DILATION_H=attrs.dilation[0],
            DILATION_W=attrs.dilation[1], FILTER_SIZE=_filters(kernel, plan.n), OVERLAPPING=rows,
            IMAGE_SIZE=kernel.inputs[0].strides[0], IMAGE_H=kernel.inputs[0].shape[1],
            OUTPUTS=1, PRODUCTS=1, SUM_ROWS=0, **flags,
        )  # fmt: skip
        pixels = f"(const {self.kind.ctype}*){f.pointer(0)}" if rows else "nullptr"
        f.template(
            "tma_conv", self.header, self.types, sizes, left, pixels, right, ring, staging, full, epilogue, out,
            self._pool(),
        )  # fmt: skip
        return f.finish(workgroups, self.threads)

    def _lines(self, kernel: Conv2d) -> TileMap:
        """Return the tensor map of the lines that a band reads."""
        x = kernel.inputs[0]
        n, h, w, c = x.shape
        window = (c, line_pitch(kernel) // c, _lines(kernel), 1)
        return TileMap((c, w, h, n), tuple(s * 2 for s in reversed(pixel_strides(x))), window, c * 2)

    def _parallelism(self, images: int, shares: int) -> int:
        """Return the most thread blocks that have work: one for each of the ``shares`` of an image."""
        return images * shares

    def _pool(self) -> str:
        """Return the template's argument for what pools the results."""
        return "NoPool{}"

    def _out(self) -> str:
        """Return the template's argument for the tensor map of the results."""
        return f"&{self.f.tile_map(~0, self._tiles())}" if self.plan.tma_store else "nullptr"

    def _tiles(self) -> TileMap:
        """Return the tensor map of 8 x 8 pixels of the result."""
        n, h, w, c = self.kernel.outputs[0].shape
        size = self.result_size
        pitch, row = row_pitch(self.kernel.outputs[0]) * size, subtile_columns(self.plan.n, size) * size
        return TileMap((c * size // 2, w, h, n), (pitch, pitch * w, pitch * w * h), (row // 2, BLOCK, BLOCK, 1), row)

    def _epilogue(self) -> tuple[dict[str, bool | int], str]:
        plan, members = self.plan, Members(self.f, "@NAME@_epilogue")
        epilogue, few = Epilogue(self.kernel, members, max_width=8), plan.n <= MAX_KEPT
        flags = dict(READ_AHEAD=False, SHARED=False, MERGED=False, KEEPS_SHARED=False, RESULT_STAGES=0, KEEPS=False)
        if plan.tma_store:
            flags |= {"KEEPS_SHARED": few, "RESULT_STAGES": 1}
            made = Functor(epilogue, members, 2)
            made.types()
            made.read_shared()
            made.compute(ahead=True, shared=True)
            return flags, made.finish()
        width = self._width(epilogue)
        made = Functor(epilogue, members, width)
        made.types()
        flags["READ_AHEAD"] = bool(epilogue.ahead) and plan.prefetch and width == 8
        flags["SHARED"] = self._can_share(epilogue, width)
        flags["KEEPS_SHARED"] = flags["SHARED"] and not flags["READ_AHEAD"] and few
        self._vector_methods(made, flags)
        if plan.n % 32:
            made.store_rest(min(width, 2))
        return flags, made.finish()
