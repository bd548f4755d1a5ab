"""Convolutions of few channels whose results go through a maximum pool in the same kernel (``kernels/max_pool.h``)."""

from __future__ import annotations

from ...graph import expr
from ...schedule.anchors import Conv2d, PooledConv2d
from ...schedule.kernel import Loops
from ...support import dtypes
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, blocks
from .devices import CUDADevice
from .tile_selection import Plan, device_of
from .tma_conv import BLOCK, TmaConv, columns, in_lines, plan_fits
from .tma_epilogue import residual_of, supports_tma_store

WINDOW, STRIDE, PADDING = 3, 2, 1
COLUMNS = 64  # channels of the result
MIN_OCCUPANCY = 0.7  # of the thread blocks that are resident at once: a block computes whole images
PLANS = ((128, 2, 2), (128, 1, 2), (128, 2, 1))  # (rows of the warpgroups, stages, thread blocks on an SM), best first


def supports_pooled_conv(kernel: PooledConv2d, dialect: Dialect) -> bool:
    """Whether :func:`emit_pooled_conv` supports ``kernel``: the pool has its window, warpgroups share every line
    evenly, and there are enough images."""
    conv, device = in_lines(kernel.conv), device_of(dialect)
    if conv is None or not is_max_pool(kernel.pool) or not kernel.pool.outputs[0].contiguous:
        return False
    images, oh, ow, k = conv.outputs[0].shape
    if k != COLUMNS or not supports_tma_store(conv) or residual_of(conv) != -1:
        return False
    plan = _plan(conv, device)
    if plan is None or oh % BLOCK or ow % (plan.m // 64 * BLOCK):
        return False
    at_once = device.compute_units * plan.blocks_per_sm
    return images >= MIN_OCCUPANCY * blocks(images, at_once) * at_once


def emit_pooled_conv(kernel: PooledConv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_pooled_conv`."""
    conv = in_lines(kernel.conv)
    plan = _plan(conv, device_of(dialect)) if conv is not None else None
    assert plan is not None
    return PooledTmaConv(kernel, dialect, plan).emit()


def is_max_pool(pool: Loops) -> bool:
    """Whether ``pool`` computes maxima of windows of ``WINDOW`` x ``WINDOW`` pixels, ``STRIDE`` apart."""
    o, body = pool.inputs[0], pool.body
    if len(o.shape) != 4 or body.domain[4:] != (WINDOW, WINDOW) or len(body.stages) != 2:
        return False
    images, h, w, c = o.shape
    if body.domain[:4] != (images, h // STRIDE, w // STRIDE, c) or h % STRIDE or w % STRIDE:
        return False
    y, x = (expr.index(d) * STRIDE + expr.index(d + 3) - PADDING for d in (1, 2))
    inside = ((y >= 0) & (y < h)) & ((x >= 0) & (x < w))
    pixel = expr.load(0, o.dtype, (expr.index(0), y, x, expr.index(3)))
    reduced, stored = body.stages
    windows = reduced.expr == expr.where(inside, pixel, expr.const(dtypes.extremes(o.dtype)[0], o.dtype))
    return windows and reduced.reduce == "max" and stored.expr == expr.stage(0, o.dtype)


def _results(conv: Conv2d, plan: Plan) -> tuple[int, int, int]:
    """Return the b16 elements that hold a step's results, and the words of the edge and of the line above."""
    size = dtypes.DTYPES[conv.outputs[0].dtype].size
    words = plan.n * size // 4
    return plan.m * plan.n * size // 2, 2 * BLOCK * words, conv.outputs[0].shape[2] // STRIDE * 2 * words


def _plan(conv: Conv2d, device: CUDADevice) -> Plan | None:
    """Return the first plan that fits an SM, or None."""
    n = columns(conv)
    for m, stages, blocks_per_sm in PLANS:
        plan = Plan(m, n, stages, 1, blocks_per_sm, n <= 128, True)
        subtiles, edge, above = _results(conv, plan)
        if plan_fits(conv, plan, subtiles * 2 + (edge + above) * 4, device):
            return plan
    return None


class PooledTmaConv(TmaConv):
    """The function of a :class:`PooledConv2d`."""

    header = "max_pool.h"

    def __init__(self, kernel: PooledConv2d, dialect: Dialect, plan: Plan):
        super().__init__(kernel.conv, dialect, plan)
        self.f = Function(kernel, dialect, explicit_wait=True)

    def _parallelism(self, images: int, shares: int) -> int:
        return images

    def _out(self) -> str:
        return "nullptr"

    def _pool(self) -> str:
        _, edge, above = _results(self.kernel, self.plan)
        arrays = f"(uint*){self.f.array('int', 'edge', edge)}, (uint*){self.f.array('int', 'above', above)}"
        return f"MaxPool<@NAME@_sizes>{{staging, {arrays}, {self.f.pointer(~0)}}}"
