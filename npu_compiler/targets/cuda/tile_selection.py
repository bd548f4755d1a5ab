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
from ..simt.kernels.operand_types import LIMBS, TF32, as_b16, operand_type
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.function import blocks
from .devices import CUDADevice, TMACosts

WIDTHS = 64, 128, 192, 256  # columns of a tile
ONE_TILE = 32, 48, 56, 96, 144  # further widths, if each thread block has one tile
GROUP_EXTRA = 1280  # bytes of shared memory of a thread block in addition to its ring
SUBTILE = 64  # rows of results in one TMA store
N_MAJOR_COLUMNS = 64  # neighbouring columns of a right operand [K, N] in one TMA load
PAD = 16  # floats after a row of partial sums, to avoid bank conflicts
MAX_STAGES = 8
STEP = 64  # b16 elements of a stage along K: 128 bytes
DECODED_STEP = STEP  # of weights that are decoded
DECODED_WARPS = 16  # of a thread block
WARPGROUP = 128  # threads
WARPS = WARPGROUP // SUBGROUP
LONG_SUM = 2048  # more terms of 8-bit floats are added up in float32, MAX_TERMS at a time: at an error of 7e-4 of the
MAX_TERMS = 512  # result for 1536 terms and 2.5e-3 for 8960, the former is small beside a rounding to bfloat16
MOST_REGISTERS = 232  # of a thread with sums of two tiles or two kinds, if a warpgroup issues the loads
HALF = 32  # columns of half a tile that is narrower than a head
LOOPS = 1.2  # microseconds of a kernel that reads the heads of a small product
ROUNDED = 32  # registers of the left operands of a stage that are rounded
SPLIT = 8  # more registers if floats are split
LIMB_PRODUCTS = 3  # times as many products as of TF32, if their limbs are multiplied
HELD = 32  # registers of the operands of a pair of vectors of a head


@dataclass(frozen=True)
class Plan:
    """Tiles of ``m`` x ``n`` results, whose operands are loaded into a ring buffer of ``stages``. ``splits``: thread
    blocks of a cluster that share a tile (split-K). ``blocks_per_sm``: thread blocks that are resident on an SM.
    ``prefetch``: threads read residuals before the main loop. ``tma_store``: TMA loads residuals and stores results.
    ``promoted``: after so many stages, sums are added up in float32; 0: never. ``overlap``: threads store the results
    of a tile while they multiply the next one. ``heads``: they store pairs of columns of a head together. ``rounded``:
    left operands are rounded in registers. ``limbs``: floats are split, see ``kernels/float_limbs.h``."""

    m: int
    n: int
    stages: int
    splits: int = 1
    blocks_per_sm: int = 1
    prefetch: bool = True
    tma_store: bool = False
    promoted: int = 0
    overlap: bool = False
    heads: bool = False
    rounded: bool = False
    limbs: bool = False

    @property
    def load_warpgroup(self) -> bool:
        """Whether a whole warpgroup issues the loads, so that the others can have its registers, or so that its other
        warps can split floats."""
        large = self.m > 64 and (self.heads or (self.rounded and self.n > 192))
        return self.overlap or self.promoted > 0 or large

    @property
    def loaders(self) -> int:
        """The warps of which one issues the loads."""
        return WARPS * (1 + (self.split_team > 1)) if self.load_warpgroup else 1

    @property
    def splitters(self) -> int:
        """The warps that split floats."""
        return self.loaders - 1 if self.limbs else 0

    @property
    def split_team(self) -> int:
        """The warps that split floats of the same stage."""
        return 2 if self.limbs and self.n > 64 else 1

    @property
    def moved(self) -> tuple[int, int]:
        """The registers of a thread of the warpgroups that multiply, and of others; (0, 0): all have as many."""
        if not self.load_warpgroup or self.m == 64:
            return 0, 0
        if not self.limbs:
            return MOST_REGISTERS, 40
        return (176, 80) if self.split_team > 1 else (216, 72)

    @property
    def vector_pairs(self) -> int:
        """The pairs of vectors of heads that a thread stores."""
        return blocks(self.m // self.splits * self.n, 16 * 2 * self.m)

    def store_parts(self, products: int) -> int:
        """Return the parts in which threads store a tile: the fewest stages that hide them."""
        return self.n // (16 * products)


def subtile_columns(n: int, size: int) -> int:
    """Return the columns of results in one TMA store: 128 bytes, or 64 columns if those do not divide ``n``, the width
    of a tile. ``size``: bytes of a result."""
    return 128 // size if n % (128 // size) == 0 else 64


def stage_elements(m: int, n: int, step: int, limbs: bool) -> int:
    """Return the b16 elements of a stage. Limbs are stored in place of floats, the third ones behind them."""
    return (m + n) * step + (n * step // 2 if limbs else 0)


def result_stages(m: int, n: int, step: int, size: int, outputs: int = 1) -> int:
    """Return the number of stages of the ring, of [m + n, step] b16 elements each, that hold the results of a tile,
    of ``size`` bytes each; 0 if a stage does not hold one subtile."""
    columns = subtile_columns(n, size)
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


@dataclass(frozen=True)
class Problem:
    """A product for which tiles are chosen.

    ``product``: its sizes. ``step``: b16 elements of a stage along K. ``residual``: whether the epilogue reads
    one. ``size``: bytes of a result; 0: TMA cannot store them. ``outputs``: their number. ``columns``: widths are
    multiples of it. ``scaled``: columns have scales. ``codes``: of the right operand, if warps decode it. ``nbytes``:
    of memory that it accesses at least. ``head``: columns of a head if threads store pairs of its columns, HEAD / 2
    apart, together; else 0. ``rounded``: whether left operands are rounded in registers. ``limbs``: whether operands
    are split.
    """

    product: Product
    step: int
    residual: bool = False
    size: int = 0
    outputs: int = 1
    columns: int = 8
    scaled: bool = False
    codes: Codes | None = None
    nbytes: int = 0
    head: int = 0
    rounded: bool = False
    limbs: bool = False


def choose(kernel: Gemm | Conv2d, step: int, tiles: bool, dialect: Dialect) -> Plan:
    """Return the fastest plan of a product according to :func:`cost`. ``step``: b16 elements of a stage along K.
    ``tiles``: whether TMA can store the results."""
    plan = _fastest(_problem(kernel, step, tiles), device_of(dialect))
    assert plan is not None
    return plan


def choose_for_heads(kernel: Gemm, step: int, tiles: bool, head: int, dialect: Dialect) -> Plan | None:
    """Return the fastest plan of a product whose threads store heads of ``head`` columns: see :func:`_for_heads`.
    ``tiles``: whether TMA can store the results if they do not."""
    return _for_heads(_problem(kernel, step, tiles), head, device_of(dialect))


def _for_heads(problem: Problem, head: int, device: CUDADevice) -> Plan | None:
    """Return the fastest plan of a product whose threads store heads, with the splits of the fastest plan of all, so
    that sums are the same; None if it is slower than that plan and a kernel that reads the results."""
    heads, usual, costs = replace(problem, size=0, head=head), _fastest(problem, device), device.tma
    plan = _fastest(heads, device, usual.splits) if usual is not None else None
    if plan is None or usual is None or costs is None:
        return None
    moved = 2 * problem.product.m * problem.product.n * 2  # bytes of 16-bit results that are written and read again
    apart = cost(problem, usual, device) + LOOPS + moved / costs.bandwidth
    return plan if cost(heads, plan, device) <= apart else None


def _fastest(problem: Problem, device: CUDADevice, splits: int = 0) -> Plan | None:
    """Return the fastest plan, with so many ``splits`` if given; None if none fits the device."""
    return min(
        (plan for plan in candidates(problem, device) if splits in (0, plan.splits)),
        key=lambda plan: (cost(problem, plan, device), plan.prefetch and plan.n > 64), default=None,
    )  # fmt: skip


def _problem(kernel: Gemm | Conv2d, step: int, tiles: bool) -> Problem:
    product, kind = as_b16(kernel), operand_type(kernel)
    assert product is not None and kind is not None
    out, residual = kernel.outputs[0], _has_residual(kernel)
    touched = [kernel.inputs[0], kernel.weight, out, *[out] * residual]
    return Problem(
        padded_product(product, step), step, residual, dtypes.DTYPES[out.dtype].size if tiles else 0,
        min(len(kernel.outputs), 2), N_MAJOR_COLUMNS if kernel.n_major else kind.columns, kind.stored,
        nbytes=sum(math.prod(o.shape) * dtypes.DTYPES[o.dtype].size for o in touched), rounded=kind is TF32,
        limbs=kind is LIMBS,
    )  # fmt: skip


def padded_product(kernel: Gemm | Conv2d, step: int) -> Product:
    """Return the sizes of a product of b16 elements, for a convolution with whole stages of ``step`` elements for each
    tap."""
    product = product_of(kernel)
    if isinstance(kernel, Gemm):
        return product
    return replace(product, k=math.prod(kernel.kernel_size) * blocks(kernel.channels[0], step) * step)


def decoders(plan: Plan, codes: Codes) -> int:
    """Return the warps that decode weights: as many teams as fit, each with a stage of its own."""
    warps = DECODED_WARPS - plan.m // 64 * 4 - codes.copiers - 1
    return min(warps // codes.team, plan.stages) * codes.team


def choose_decoded(kernel: Gemm, codes: Codes, dialect: Dialect, head: int = 0) -> Plan | None:
    """Return the fastest plan of a product whose right operand warps decode, or None. ``head``: the columns of a head
    if threads store heads (:func:`_for_heads`), else 0."""
    out, device, residual = kernel.outputs[0], device_of(dialect), _has_residual(kernel)
    size = dtypes.DTYPES[out.dtype].size
    touched = math.prod(out.shape) * size * (1 + residual) + math.prod(kernel.inputs[0].shape) * 2 + codes.nbytes
    problem = Problem(
        product_of(kernel), DECODED_STEP, residual, outputs=min(len(kernel.outputs), 2), codes=codes, nbytes=touched
    )
    return _for_heads(problem, head, device) if head else _fastest(problem, device)


def _has_residual(kernel: Gemm | Conv2d) -> bool:
    """Whether the epilogue reads one element for every result."""
    read = kernel.inputs[kernel.rhs + 1 : len(kernel.inputs) - (kernel.row_scale is not None)]
    return any(len(o.shape) > 1 and o.shape[:2] == kernel.outputs[0].shape[:2] for o in read)


def candidates(problem: Problem, device: CUDADevice) -> Iterator[Plan]:
    """Yield the plans that fit the device."""
    splits = [(1, n) for n in (1, 2, 3, 4)] + [(size, 1) for size, at_once in device.clusters if at_once]
    for m in (64, 128):
        for n in _widths(problem.product, m, device.compute_units, problem.columns, problem.head):
            for split, blocks_per_sm in splits:
                plan = _plan(problem, device, m, n, split, blocks_per_sm)
                if plan is not None and (problem.codes is None or _has_decoders(plan, device)):
                    yield plan


def _has_decoders(plan: Plan, device: CUDADevice) -> bool:
    """Whether there are registers for the warps that decode weights."""
    few = thread_registers(plan) <= device.registers // (DECODED_WARPS * SUBGROUP)
    return plan.blocks_per_sm == 1 and not plan.load_warpgroup and few


def _plan(problem: Problem, device: CUDADevice, m: int, n: int, splits: int, blocks_per_sm: int) -> Plan | None:
    """Return the plan with these sizes, or None if it does not fit, or if another one is always faster."""
    p, step = problem.product, problem.step
    stages = _stages(problem, device, m, n, splits, blocks_per_sm)
    tma_store = problem.size > 0 and splits == 1 and n % 64 == 0 and p.n % n == 0
    results = result_stages(m, n, step, problem.size, problem.outputs) if tma_store else 0
    if problem.outputs > 1 or step < 64:
        tma_store = tma_store and 0 < results < stages - 1
    prefetch = problem.residual and n <= 128 and splits == 1 and not tma_store and not problem.limbs
    promoted = MAX_TERMS // (2 * step) if problem.scaled and 2 * p.k // splits > LONG_SUM else int(problem.limbs)
    one = (m, splits, blocks_per_sm) == (128, 1, 1)
    twice = one and n + 40 <= MOST_REGISTERS  # a thread can have the sums of two tiles
    if stages <= 2 or (splits > 1 and blocks(p.k, step) < 2 * splits):
        return None
    if tma_store and stages <= results + 1:
        return None
    if blocks_per_sm == 4 and prefetch:  # two blocks with more rows measured faster
        return None
    if promoted and (prefetch or not (twice or problem.limbs)):
        return None
    heads, rounded, limbs = problem.head > 0, problem.rounded, problem.limbs
    plan = Plan(m, n, stages, splits, blocks_per_sm, prefetch, tma_store, promoted, False, heads, rounded, limbs)
    if limbs and not _has_splitters(plan, device):
        return None
    if plan.load_warpgroup and not ((one or limbs) and thread_registers(plan) <= MOST_REGISTERS):
        return None
    if not plan.load_warpgroup and registers(plan) > device.registers:
        return None
    many = blocks(p.m, m) * blocks(p.n, n) * p.batch > device.compute_units
    long = blocks(p.k, step) >= plan.store_parts(p.products)
    special = problem.residual or promoted or tma_store or problem.codes or heads or rounded or problem.outputs > 1
    return replace(plan, overlap=twice and many and long and not special)


def _has_splitters(plan: Plan, device: CUDADevice) -> bool:
    """Whether there are registers for the warps that split floats."""
    threads = (plan.m * 2 + plan.loaders * SUBGROUP) * plan.blocks_per_sm
    most = plan.moved[0] if plan.blocks_per_sm == 1 else 0
    return thread_registers(plan) <= max(most, device.registers // threads)


def _stages(problem: Problem, device: CUDADevice, m: int, n: int, splits: int, blocks_per_sm: int) -> int:
    """Return the stages for which each of ``blocks_per_sm`` thread blocks has shared memory."""
    room = device.shared_per_sm // blocks_per_sm - GROUP_EXTRA
    room -= split_floats(m, n) * 4 if splits > 1 else 0
    room -= column_scale_floats(m, n) * 4 if problem.scaled else 0
    stage = stage_elements(m, n, problem.step, problem.limbs) * 2
    if problem.codes:
        room -= problem.codes.column * n * (problem.codes.copiers - 1)
        stage += problem.codes.column * n
    return min(room // stage, MAX_STAGES)


def _widths(p: Product, m: int, sms: int, columns: int, head: int) -> list[int]:
    """Return the possible columns of a tile of ``m`` rows. A narrow product with more tiles than SMs uses the smallest
    of ``WIDTHS``. A tile consists of whole heads, or of two halves of ``HALF`` columns of one."""
    if head:
        return [n for n in WIDTHS if (n == 2 * HALF or n % head == 0) and n <= p.n]
    fit = [n for n in (*WIDTHS, *ONE_TILE) if n % (columns * p.products) == 0 and n < p.n + 32] or [32 * p.products]
    few = [n for n in fit if n not in ONE_TILE or blocks(p.m, m) * blocks(p.n, n) * p.batch <= sms]
    return few or [WIDTHS[0]]


def thread_registers(plan: Plan) -> int:
    """Return the registers of a thread: its sums, the operands that it reads early or rounds, and 40 for everything
    else."""
    held = plan.n // 4 if plan.prefetch else 0
    if plan.heads:
        held = HELD * (plan.vector_pairs if plan.splits > 1 else 2)
    return (plan.n if plan.promoted else plan.n // 2) + held + ROUNDED * plan.rounded + SPLIT * plan.limbs + 40


def registers(plan: Plan) -> int:
    """Return the registers that the thread blocks on an SM need. Each quarter of an SM holds whole warps."""
    warps = (plan.m // 64 * 128 // SUBGROUP + 1) * plan.blocks_per_sm
    return thread_registers(plan) * blocks(warps, 4) * 4 * SUBGROUP


def cost(problem: Problem, plan: Plan, device: CUDADevice) -> float:
    """Return the estimated time of a product in microseconds."""
    p, c = problem.product, device.tma
    assert c is not None
    thread_blocks = blocks(p.m, plan.m) * blocks(p.n, plan.n) * p.batch * plan.splits
    at_once = dict(device.clusters)[plan.splits] if plan.splits > 1 else device.compute_units * plan.blocks_per_sm
    loop, store, tile = _loop_cost(problem, plan, c), *_store_cost(problem, plan, c)
    together = min(plan.blocks_per_sm, blocks(thread_blocks, device.compute_units))
    waves, results = blocks(thread_blocks, at_once), plan.m * plan.n
    work = waves * max(loop + store + tile, together * max(loop, store))
    if plan.tma_store and problem.size == 1:
        work = waves * (together * max(loop, store) + c.byte_serial * min(loop, store))
    elif plan.tma_store and thread_blocks <= at_once:
        work += results * c.tma_last
    elif plan.overlap:
        work = waves * (max(loop, store) + tile / 4) + store + tile
    if plan.splits > 1:
        work += results * c.part + dict(c.cluster)[plan.splits]
    # with few rows, the bandwidth is limited by the bytes in flight: those of the rings
    column = problem.codes.column if problem.codes else problem.step * 2  # bytes in a stage
    streamed = min(thread_blocks, at_once) * plan.stages * plan.n * column / blocks(p.m, plan.m) / c.latency
    rate = min(c.bandwidth, streamed) if p.m <= 2 * plan.m else c.bandwidth
    return max(work, problem.nbytes / rate + c.start) + 0.05 * work + c.launch


def _loop_cost(problem: Problem, plan: Plan, c: TMACosts) -> float:
    """Return the microseconds of a tile's main loop."""
    steps = blocks(blocks(problem.product.k, problem.step), plan.splits)
    narrow = c.narrow if plan.n <= 64 else 1 + 0.4 * (c.narrow - 1) if plan.n < 128 else 1.0
    multiply = steps * problem.step / 64 * plan.m * max(plan.n, 64) * c.multiply * narrow
    if problem.limbs:
        multiply = steps * (LIMB_PRODUCTS * plan.m * plan.n * c.multiply + c.split)
    load = steps * problem.step / 64 * (plan.m + plan.n) * c.load
    return max(multiply, load, steps * plan.n * problem.codes.cost if problem.codes else 0.0)


def _store_cost(problem: Problem, plan: Plan, c: TMACosts) -> tuple[float, float]:
    """Return the microseconds of storing a tile's results, and those of a tile whatever its size."""
    late = 1 if plan.prefetch else 3
    one, residual, tile, fixed = c.result, c.residual * late, c.tile, 0.0
    if plan.tma_store and problem.size == 1:
        one, residual, tile, fixed = c.byte_result, c.byte_residual, 0.0, c.byte_tile
    elif plan.tma_store:
        one, residual, tile = c.tma_result, c.tma_residual, c.tma_tile
    each = one + (residual if problem.residual else 0)
    return plan.m * plan.n / plan.splits * each / problem.product.products + fixed, tile
