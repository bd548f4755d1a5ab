"""Tile sizes of products whose operands TMA loads, chosen by a cost model with the constants of the device
(``devices.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...schedule.anchors import Conv2d, Gemm
from ...support import dtypes
from ..simt.kernels.gemm import Product, product_of
from ..simt.kernels.operand_types import in_units, operand_type
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.function import blocks
from .devices import CUDADevice

WIDTHS = 64, 128, 192, 256  # columns of a tile
ONE_TILE = 32, 48, 56, 96, 144  # further widths, if each thread block has one tile
GROUP_EXTRA = 1280  # bytes of shared memory of a thread block in addition to its ring
PIECE = 64  # rows of results in one TMA store
N_MAJOR_COLUMNS = 64  # neighbouring columns of a right operand [K, N] in one TMA load
PAD = 16  # floats after a row of partial sums, to avoid bank conflicts
MAX_STAGES = 8
DECODED_STEP = 64  # elements of a stage along K of weights that are decoded
DECODED_WARPS = 16  # of a thread block
WARPGROUP = 128  # threads
LONG_SUM = 2048  # more terms of 8-bit floats are added up in float32, MAX_TERMS at a time: at an error of 7e-4 of the
MAX_TERMS = 512  # result for 1536 terms and 2.5e-3 for 8960, the former is small beside a rounding to bfloat16
MOST_REGISTERS = 232  # of a thread with sums of two tiles or two kinds, if a warpgroup issues the loads


@dataclass(frozen=True)
class Plan:
    """Tiles of ``m`` x ``n`` results, whose operands are loaded into a ring buffer of ``stages``. ``splits``: thread
    blocks of a cluster that share a tile (split-K). ``blocks_per_sm``: thread blocks that are resident on an SM.
    ``prefetch``: threads read residuals before the main loop. ``tma_store``: TMA loads residuals and stores results.
    ``promoted``: after so many stages, sums are added up in float32; 0: never. ``overlap``: threads store the results
    of a tile while they multiply the next one."""

    m: int
    n: int
    stages: int
    splits: int = 1
    blocks_per_sm: int = 1
    prefetch: bool = True
    tma_store: bool = False
    promoted: int = 0
    overlap: bool = False

    @property
    def load_warpgroup(self) -> bool:
        """Whether a whole warpgroup issues the loads, so that the others can have its registers."""
        return self.overlap or self.promoted > 0

    def store_parts(self, products: int) -> int:
        """Return the parts in which threads store a tile: the fewest stages that hide them."""
        return self.n // (16 * products)


def piece_columns(n: int, size: int) -> int:
    """Return the columns of results in one TMA store: 128 bytes, or 64 columns if those do not divide ``n``, the width
    of a tile. ``size``: bytes of a result."""
    return 128 // size if n % (128 // size) == 0 else 64


def result_stages(m: int, n: int, step: int, size: int, outputs: int = 1) -> int:
    """Return the number of stages of the ring, of [m + n, step] two-byte units each, that hold the results of a tile,
    of ``size`` bytes each; 0 if a stage does not hold one piece."""
    columns = piece_columns(n, size)
    per_stage = (m + n) * step * 2 // (m * columns * size) // outputs
    return blocks(n // columns, per_stage) if per_stage else 0


def split_floats(m: int, n: int) -> int:
    """Return the floats of shared memory for the partial sums of the thread blocks of a cluster."""
    return m * (n + PAD)


def column_scale_floats(m: int, n: int) -> int:
    """Return the floats of shared memory for the scales of the columns of two tiles, for each warpgroup."""
    return 2 * m // 64 * n


def device_of(dialect: Dialect) -> CUDADevice:
    """Return the device of ``dialect``, which must have TMA."""
    assert isinstance(dialect.device, CUDADevice) and dialect.device.tma is not None
    return dialect.device


def choose(kernel: Gemm | Conv2d, step: int, tiles: bool, dialect: Dialect) -> Plan:
    """Return the fastest plan of a product according to :func:`cost`. ``step``: units of a stage along K. ``tiles``:
    whether TMA can store the results."""
    product, kind, device = in_units(kernel), operand_type(kernel), device_of(dialect)
    assert product is not None and kind is not None
    p, out = product_of(product), kernel.outputs[0]
    residual = len(kernel.inputs) > kernel.rhs + 1 and _has_residual(kernel)
    touched = [kernel.inputs[0], kernel.weight, out, *[out] * residual]
    units = sum(math.prod(o.shape) * dtypes.DTYPES[o.dtype].size for o in touched) // 2
    size = dtypes.DTYPES[out.dtype].size if tiles else 0
    columns = N_MAJOR_COLUMNS if kernel.n_major else kind.columns
    return min(
        candidates(p, step, residual, size, device, min(len(kernel.outputs), 2), columns, bool(kind.format)),
        key=lambda plan: (cost(p, plan, step, residual, units, device, size), plan.prefetch and plan.n > 64),
    )


class Codes(NamedTuple):
    """Weights that warps decode: ``nbytes`` of them, ``column`` bytes of shared memory for a column in a stage, the
    ``copiers`` that copy these there, the warps of a ``team``, which decodes a stage, and the ``cost`` of a column in a
    stage in microseconds."""

    nbytes: int
    column: int
    copiers: int
    team: int
    cost: float

    def slots(self, stages: int) -> int:
        """Return the slots for the codes of as many stages."""
        return blocks(stages, self.copiers) * self.copiers


def decoders(plan: Plan, codes: Codes) -> int:
    """Return the warps that decode weights: as many teams as fit, each with a stage of its own."""
    warps = DECODED_WARPS - plan.m // 64 * 4 - codes.copiers - 1
    return min(warps // codes.team, plan.stages) * codes.team


def choose_decoded(kernel: Gemm, codes: Codes, dialect: Dialect) -> Plan | None:
    """Return the fastest plan of a product whose right operand warps decode, or None."""
    p, out, device = product_of(kernel), kernel.outputs[0], device_of(dialect)
    residual = len(kernel.inputs) > kernel.rhs + 1 and _has_residual(kernel)
    size = dtypes.DTYPES[out.dtype].size
    touched = math.prod(out.shape) * size * (1 + residual) + math.prod(kernel.inputs[0].shape) * 2 + codes.nbytes

    def fits(plan: Plan) -> bool:
        registers = device.registers // (DECODED_WARPS * SUBGROUP)
        return plan.blocks_per_sm == 1 and plan.n // 2 + 40 + plan.prefetch * plan.n // 4 <= registers

    found = candidates(p, DECODED_STEP, residual, 0, device, min(len(kernel.outputs), 2), codes=codes)
    plans = filter(fits, found)
    times = ((cost(p, x, DECODED_STEP, residual, touched // 2, device, codes=codes), x) for x in plans)
    return min(times, key=lambda t: t[0], default=(0.0, None))[1]


def _has_residual(kernel: Gemm | Conv2d) -> bool:
    """Whether the epilogue reads one element for every result."""
    read = kernel.inputs[kernel.rhs + 1 : len(kernel.inputs) - (kernel.row_scale is not None)]
    return any(len(o.shape) > 1 and o.shape[:2] == kernel.outputs[0].shape[:2] for o in read)


def candidates(
    p: Product, step: int, residual: bool, size: int, device: CUDADevice, outputs: int = 1, columns: int = 8,
    scaled: bool = False, codes: Codes | None = None,
) -> Iterator[Plan]:  # fmt: skip
    """Yield the plans that fit the device. ``step``: units of a stage along K. ``residual``: whether the epilogue reads
    one. ``size``: bytes of a result; 0: TMA cannot store them. ``outputs``: their number. ``columns``: widths are
    multiples of it. ``scaled``: columns have scales. ``codes``: of the right operand, if warps decode it."""
    for m in (64, 128):
        for n in _widths(p, m, device.units, columns):
            for splits in (1, *(size for size, blocks_at_once in device.clusters if blocks_at_once)):
                for blocks_per_sm in (1, 2, 3, 4) if splits == 1 else (1,):
                    room = device.shared_per_unit // blocks_per_sm - GROUP_EXTRA
                    room -= split_floats(m, n) * 4 if splits > 1 else 0
                    room -= column_scale_floats(m, n) * 4 if scaled else 0
                    stage = (m + n) * step * 2
                    if codes:
                        room -= codes.column * n * (codes.copiers - 1)
                        stage += codes.column * n
                    stages = min(room // stage, MAX_STAGES)
                    fits = splits == 1 or blocks(p.k, step) >= 2 * splits
                    tma_store = size > 0 and splits == 1 and n % 64 == 0 and p.n % n == 0
                    results = result_stages(m, n, step, size, outputs) if tma_store else 0
                    if outputs > 1 or step < 64:
                        tma_store = tma_store and 0 < results < stages - 1
                    fits = fits and (not tma_store or stages > results + 1)
                    prefetch = residual and n <= 128 and splits == 1 and not tma_store
                    fits = fits and (blocks_per_sm < 4 or not prefetch)  # two blocks with more rows measured faster
                    promoted = MAX_TERMS // (2 * step) if scaled and 2 * p.k // splits > LONG_SUM else 0
                    one = (m, splits, blocks_per_sm) == (128, 1, 1) and n + 40 <= MOST_REGISTERS
                    plan = Plan(m, n, stages, splits, blocks_per_sm, prefetch, tma_store, promoted)
                    if promoted:
                        fits = fits and one and not prefetch
                    elif registers(m, n, blocks_per_sm, prefetch) > device.registers:
                        fits = False
                    many = blocks(p.m, m) * blocks(p.n, n) * p.batch > device.units
                    long = blocks(p.k, step) >= plan.store_parts(p.products)
                    plain = not (residual or promoted or tma_store or codes) and outputs == 1
                    if stages > 2 and fits:
                        yield replace(plan, overlap=one and many and long and plain)


def _widths(p: Product, m: int, units: int, columns: int) -> list[int]:
    """Return the possible columns of a tile of ``m`` rows. A narrow product with more tiles than SMs uses the smallest
    of ``WIDTHS``."""
    fit = [n for n in (*WIDTHS, *ONE_TILE) if n % (columns * p.products) == 0 and n < p.n + 32] or [32 * p.products]
    few = [n for n in fit if n not in ONE_TILE or blocks(p.m, m) * blocks(p.n, n) * p.batch <= units]
    return few or [WIDTHS[0]]


def registers(m: int, n: int, blocks_per_sm: int, prefetch: bool) -> int:
    """Return the registers that the thread blocks on an SM need. Each quarter of an SM holds whole warps."""
    warps = (m // 64 * 128 // SUBGROUP + 1) * blocks_per_sm
    return (n // 2 + (n // 4 if prefetch else 0) + 40) * blocks(warps, 4) * 4 * SUBGROUP


def cost(
    p: Product, plan: Plan, step: int, residual: bool, units: int, device: CUDADevice, size: int = 2,
    codes: Codes | None = None,
) -> float:  # fmt: skip
    """Return the estimated time in microseconds of a product that accesses at least ``units`` units of two bytes.
    ``size``: bytes of a result. ``codes``: of the right operand, if warps decode it."""
    steps = blocks(blocks(p.k, step), plan.splits)
    thread_blocks = blocks(p.m, plan.m) * blocks(p.n, plan.n) * p.batch * plan.splits
    c = device.tma
    assert c is not None
    at_once = dict(device.clusters)[plan.splits] if plan.splits > 1 else device.units * plan.blocks_per_sm
    results = plan.m * plan.n
    # with few rows, the bandwidth is limited by the bytes in flight: those of the rings
    column = codes.column if codes else step * 2  # bytes in a stage
    streamed = min(thread_blocks, at_once) * plan.stages * plan.n * column / blocks(p.m, plan.m) / c.latency
    rate = min(c.bandwidth, streamed) if p.m <= 2 * plan.m else c.bandwidth
    narrow = c.narrow if plan.n <= 64 else 1 + 0.4 * (c.narrow - 1) if plan.n < 128 else 1.0
    multiply = steps * step / 64 * plan.m * max(plan.n, 64) * c.multiply * narrow
    load = steps * step / 64 * (plan.m + plan.n) * c.load
    late = 1 if plan.prefetch else 3
    one, other, tile = c.result, c.residual * late, c.tile
    if plan.tma_store:
        one, other, tile = c.tma_result, c.tma_residual, c.tma_tile
    if plan.tma_store and size == 1:
        one, other, tile = c.byte_result, c.byte_residual, 0.0
    store = results / plan.splits * (one + (other if residual else 0)) / p.products
    store += c.byte_tile if plan.tma_store and size == 1 else 0.0
    together = min(plan.blocks_per_sm, blocks(thread_blocks, device.units))
    loop = max(multiply, load, steps * plan.n * codes.cost if codes else 0.0)
    alone = loop + store + tile
    work = blocks(thread_blocks, at_once) * max(alone, together * max(loop, store))
    if plan.tma_store and size == 1:
        work = blocks(thread_blocks, at_once) * (together * max(loop, store) + c.byte_serial * min(loop, store))
    elif plan.tma_store and thread_blocks <= at_once:
        work += results * c.tma_last
    elif plan.overlap:
        work = blocks(thread_blocks, at_once) * (max(loop, store) + tile / 4) + store + tile
    if plan.splits > 1:
        work += results * c.part + dict(c.cluster)[plan.splits]
    return max(work, 2 * units / rate + c.start) + 0.05 * work + c.launch
