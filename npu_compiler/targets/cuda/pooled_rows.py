"""Convolutions of images whose results go through a maximum pool in the same kernel, line by line
(``kernels/pooled_rows.h``): the first layers of a ResNet."""

from __future__ import annotations

import math

from ...schedule.anchors import Conv2d, PooledConv2d
from ...support import dtypes
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, blocks
from . import pooled_conv
from .devices import CUDADevice
from .tile_selection import GROUP_EXTRA, WARPGROUP, Plan, device_of
from .tma_conv import ALIGNED, TmaConv, in_lines, is_rows, line_pitch
from .tma_epilogue import residual_of, supports_tma_store

PIXELS = 32, 48, 64, 96, 112, 128  # of a line: columns of wgmma whose other operand is in registers (wgmma.h)
POOLED = 4, 2, 1  # pooled lines of a band, best first
STAGES, WARPGROUPS = 2, 2


def supports_pooled_rows(kernel: PooledConv2d, dialect: Dialect) -> bool:
    """Whether :func:`emit_pooled_rows` supports ``kernel``: an image with lines that wgmma takes, 64 filters, the
    pool's window, and enough images for all warpgroups."""
    conv, device = in_lines(kernel.conv), device_of(dialect)
    if conv is None or not is_rows(conv):
        return False
    if not pooled_conv.is_max_pool(kernel.pool) or not kernel.pool.outputs[0].contiguous:
        return False
    _, _, ow, k = conv.outputs[0].shape
    if k != pooled_conv.COLUMNS or ow not in PIXELS or not supports_tma_store(conv):
        return False
    if residual_of(conv) != -1 or not _lines_of_band(conv, device):
        return False
    return _bands(conv, device) >= pooled_conv.MIN_OCCUPANCY * device.compute_units * WARPGROUPS


def emit_pooled_rows(kernel: PooledConv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_pooled_rows`."""
    return PooledRows(kernel, dialect).emit()


def _lines_of_band(conv: Conv2d, device: CUDADevice) -> int:
    """Return the pooled lines of a band: the most that fit shared memory; 0: none."""
    room = device.shared_per_sm - GROUP_EXTRA - _staged(conv) * 2
    pooled = conv.outputs[0].shape[1] // 2
    return next((n for n in POOLED if pooled % n == 0 and WARPGROUPS * STAGES * _stage(conv, n) * 2 <= room), 0)


def _bands(conv: Conv2d, device: CUDADevice) -> int:
    """Return the number of bands of all images."""
    return conv.outputs[0].shape[0] * conv.outputs[0].shape[1] // 2 // _lines_of_band(conv, device)


def _lines(conv: Conv2d, pooled: int) -> int:
    """Return the lines of the image that ``pooled`` pooled lines read."""
    return 2 * pooled * conv.stride[0] + (conv.kernel_size[0] - 1) * conv.dilation[0] + 1


def _stage(conv: Conv2d, pooled: int) -> int:
    """Return the elements of a stage, which begins where shared memory has the alignment of an operand."""
    return blocks(_lines(conv, pooled) * line_pitch(conv), ALIGNED) * ALIGNED


def _staged(conv: Conv2d) -> int:
    """Return the b16 elements of the pooled lines that warpgroups write: two each."""
    size = dtypes.DTYPES[conv.outputs[0].dtype].size
    return WARPGROUPS * 2 * conv.outputs[0].shape[2] // 2 * pooled_conv.COLUMNS * size // 2


class PooledRows(TmaConv):
    """The function of a :class:`PooledConv2d` that computes line by line."""

    header = "pooled_rows.h"

    def __init__(self, kernel: PooledConv2d, dialect: Dialect):
        plan = Plan(WARPGROUPS * 64, pooled_conv.COLUMNS, STAGES, prefetch=False, tma_store=True)
        super().__init__(kernel.conv, dialect, plan)
        self.f = Function(kernel, dialect, explicit_wait=True)
        self.threads = plan.m * 2 + WARPGROUP  # of the last warpgroup, a warp fills the ring of each other one

    def emit(self) -> Emission:
        f, plan, conv = self.f, self.plan, in_lines(self.kernel)
        assert conv is not None
        f.resident, device = 1, device_of(self.dialect)
        pooled = _lines_of_band(conv, device)
        (images, oh, ow, _), x = conv.outputs[0].shape, conv.inputs[0]
        bands = oh // 2 // pooled
        f.prefetch_constants(conv.rhs + 1)
        ring = f.array(self.kind.ctype, "ring", WARPGROUPS * STAGES * _stage(conv, pooled))
        staging = f.array(self.kind.ctype, "staging", _staged(conv))
        full = f.array("int64_t", "full", 2 * WARPGROUPS * STAGES)
        flags, epilogue = self._epilogue()
        workgroups = min(device.compute_units, blocks(images * bands, WARPGROUPS))
        sizes = dict(
            TILE_M=plan.m, TILE_N=plan.n, STAGES=STAGES, IMAGES=images, OH=oh, OW=ow, POOLED=pooled, BANDS=bands,
            RANGES=workgroups * WARPGROUPS, LINES=_lines(conv, pooled), LINES_SIZE=_stage(conv, pooled),
            PITCH=line_pitch(conv), TAPS=math.prod(conv.kernel_size), CHANNELS=conv.channels[0],
            STRIDE_H=conv.stride[0], DILATION_H=conv.dilation[0], IMAGE_SIZE=x.strides[0], IMAGE_H=x.shape[1],
            OUTPUTS=1, SUM_ROWS=0, **flags,
        )  # fmt: skip
        operands = (f"(const {self.kind.ctype}*){f.pointer(n)}" for n in (0, conv.rhs))
        f.template(
            "pooled_rows", self.header, self.types, sizes, *operands, ring, staging, full, epilogue, f.pointer(~0)
        )
        return f.finish(workgroups, self.threads)
