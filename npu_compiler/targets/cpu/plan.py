"""The loop plan of a nest: the dim of the vector lanes, passes over the row, chunks for the threads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...graph import affine, expr
from ...graph.expr import Expr
from ...graph.scalar_ops import EXPENSIVE
from ...support import dtypes
from ..codegen.nest import Access, Nest, Step, accesses, fold_single_points
from ..codegen.row_passes import SCRATCH_LIMIT, Row, make_row, scratch_item
from .devices import CPUCosts
from .lanes import (
    HOISTED,
    LANES,
    PAGE,
    choose_lane,
    choose_tile,
    follows_no_stride,
    goes_along_tile,
    interleaved_dim,
    segments,
    shared_work,
)

MAX_CHUNKS = 128
SERIAL_CHUNKS = 4  # of columns, each of which all rows are visited for: narrow columns have no neighbours in memory
LIGHT = 24  # the most scalar operations of a body that is unrolled
# Float additions into one partial sum before it is flushed: fewer if all lanes are added up at the end of the row.
SEQUENTIAL_ALONG, SEQUENTIAL_ACROSS = 8, 16
MASKED = 8  # iterations of such a loop from which guards are masks rather than parts of the lane dim
TILE_BLOCK = 64  # positions of the tile dim per thread: a multiple of every vector length
ROWS_AT_ONCE = 8  # reduced rows of a large operand that are read together: each is a stream for the prefetchers
NEIGHBOURS = 1024  # the fewest bytes of a row for which that is faster than all rows for each vector
LARGE = 1 << 20  # bytes that the L2 cache of a core does not hold
# Functions that are computed lane by lane, of float64 and of integers.
BY_LANE_DOUBLE = frozenset("asinh acosh erfc".split())
BY_LANE_INTEGER = frozenset("idiv fmod remainder floordiv pow".split())


@dataclass
class Plan:
    """The loop structure of a nest.

    ``lane``: the dim of the vector lanes; None: the nest is a single point, or its points must be computed one by one,
    in order. ``across_rows``: the lanes are neighbouring rows; otherwise they run along the row.
    """

    nest: Nest
    lane: int | None
    across_rows: bool
    row: Row
    unroll: list[int] = field(default_factory=list)  # vectors per iteration, for each pass
    scratch: dict[int, int] = field(default_factory=dict)  # byte offset of each saved stage, or of its accumulators
    scratch_bytes: int = 0
    # A dim that forms square tiles with the lane dim: the ``tiled`` loads are contiguous along it.
    tile: int | None = None
    tiled: list[Expr] = field(default_factory=list)
    tiles_along: bool = False  # whether the loop over tiles that is inside runs along the tile dim, not the lane dim
    # Reduced rows that all lanes of a block pass before the next ones, while accumulators are in scratch memory. 0: the
    # accumulators of a vector stay in registers until it has passed all rows.
    rows_at_once: int = 0
    inner: int | None = None  # a row dim whose loop is inside the lane loop, because much does not depend on it
    interleaved: int | None = None  # a short dim, innermost in memory, whose stores are interleaved in registers
    masked: float = math.inf  # how many times as long a vector takes with masks
    prefix: list[int] = field(default_factory=list)  # row dims that are flattened and divided among the threads
    lane_blocks: int = 1
    block_size: int = 0
    chunks: int = 1
    per_chunk: int = 1

    @property
    def iterations(self) -> int:
        """The iterations of the parallel loop, which threads share: rows, or blocks of the lane or tile dim."""
        return self.nest.points(self.prefix) * self.lane_blocks * self.tile_blocks

    @property
    def tile_blocks(self) -> int:
        """The number of blocks into which the tile dim is divided among threads."""
        return 1 if self.tile is None or self.tiles_along else -(-self.nest.size[self.tile] // TILE_BLOCK)

    @property
    def position_kind(self) -> str:
        """The vector kind that holds positions in a row."""
        return "vi32" if self.nest.points(self.nest.reduction_dims) < 2**31 else "vi64"

    def lane_steps(self, count: int) -> int:
        """Return the iterations of a lane loop along the row that is unrolled ``count`` times."""
        return 1 if self.lane is None else -(-self.nest.size[self.lane] // (LANES * count))

    @property
    def sequential(self) -> int:
        """The number of float additions into one partial sum before it is flushed."""
        return SEQUENTIAL_ACROSS if self.across_rows else SEQUENTIAL_ALONG

    @property
    def inner_reductions(self) -> list[int]:
        """Reduced dims that become scalar loops, outermost first."""
        return [d for d in self.nest.reduction_dims if d != self.lane]


def make_plan(nest: Nest, costs: CPUCosts) -> Plan:
    """Choose the loop structure of ``nest`` by estimated cost."""
    if not nest.reduced:
        fold_single_points(nest)
    _order_rows(nest)
    lane = choose_lane(nest)
    transposed = choose_tile(nest)
    if transposed is not None:
        lane = transposed[0]
    across_rows = lane is None or lane not in nest.reduced
    row = make_row(nest, LANES if across_rows else 1)
    plan = Plan(nest, lane, across_rows, row)
    if transposed is not None:
        _, plan.tile, plan.tiled = transposed
        plan.tiles_along = goes_along_tile(nest, *transposed[:2], costs.lanes)
    else:
        plan.masked = 1.5 if costs.lanes == LANES else math.inf
        plan.interleaved = interleaved_dim(nest, lane)
        plan.inner = _choose_inner(plan)
    plan.unroll = [_vectors_for(plan, p.steps) for p in row.passes]
    if across_rows:
        plan.unroll = [min(plan.unroll, default=1)] * len(row.passes)
    _place_scratch(plan)
    if across_rows and plan.scratch_bytes > SCRATCH_LIMIT:
        plan.unroll = [1] * len(row.passes)
        _place_scratch(plan)
    far = _far_element(plan)
    _split_work(plan, costs, far)
    if far:
        _place_accumulators(plan, far)
    return plan


# -- loops over rows ----------------------------------------------------------------------------------------------
def _order_rows(nest: Nest) -> None:
    """Order the loops over rows as the results lie in memory."""
    if nest.serial:
        return
    targets = [affine.affine(s.target.args[0]) for s in nest.steps if s.target is not None]

    def steps(d: int) -> int:
        return sum(abs(t.coefficient(d)) for t in targets)

    nest.order = [*sorted(nest.rows, key=steps, reverse=True), *nest.reduction_dims]


def _choose_inner(plan: Plan) -> int | None:
    """Return a row dim on which much work of a lane does not depend, or None. Of several, it is the innermost one,
    whose elements are the nearest in memory, unless another one saves much more."""
    if plan.lane is None or plan.interleaved is not None:
        return None
    saved = shared_work(plan.nest, plan.lane)
    enough = max(HOISTED, max(saved.values(), default=0) - HOISTED)
    return next((d for d, n in saved.items() if n >= enough), None)


# -- lanes --------------------------------------------------------------------------------------------------------
def parts_of_lanes(plan: Plan, exprs: list[Expr], ranges: affine.Ranges) -> list[tuple[int, int]]:
    """Return the ranges of the lane dim that have loops of their own: its :func:`segments`, but the whole dim if only
    guards differ between them and masks take less time than more vectors."""
    assert plan.lane is not None
    size, found = plan.nest.size[plan.lane], segments(exprs, plan.lane, ranges)
    shared = plan.inner is not None and plan.nest.size[plan.inner] >= MASKED
    factor = 1.0 if shared else plan.masked
    fewer = factor * -(-size // LANES) < sum(-(-(high - low) // LANES) for low, high in found)
    plain = fewer and not any(follows_no_stride(x, plan.lane) for x, _ in accesses(plan.nest))
    return [(0, size)] if plain else found


# -- vectors and scratch ------------------------------------------------------------------------------------------
def _vectors_for(plan: Plan, steps: list[Step]) -> int:
    """Return the unroll factor: enough vectors to hide latency in light bodies, one in heavy bodies. Where lanes are
    neighbours and rows are reduced, it also counts how many lines of each row are read at once."""
    heavy = sum(expr.cost(s.value) for s in steps) > LIGHT
    if plan.lane is None or (heavy and not (plan.across_rows and plan.nest.reduced)):
        return 1
    max_unroll = 2 if any(scratch_item(s.value.dtype) == 8 for s in steps if s.kind == "reduce") else 4
    vectors = plan.nest.size[plan.lane] // LANES
    return min(max_unroll, 4 if vectors >= 4 else 2 if vectors >= 2 else 1)


def _place_scratch(plan: Plan) -> None:
    at = 0
    for n, dtype in plan.row.saved.items():
        plan.scratch[n] = at
        lanes = LANES * plan.unroll[0] if plan.across_rows else 1
        points = plan.nest.points(plan.nest.reduction_dims) * lanes + LANES
        at += -(-points * scratch_item(dtype) // 64) * 64
    plan.scratch_bytes = at


def _far_element(plan: Plan) -> int:
    """Return the bytes of an element of rows that are reduced, if they take more memory than L2 holds and lanes are
    neighbours in them: visiting all rows for each vector would read a few lines of every page. 0: there are none."""
    nest, lane, passes = plan.nest, plan.lane, plan.row.passes
    if not plan.across_rows or lane is None or len(passes) != 1 or len(nest.reduction_dims) != 1:
        return 0
    (d,) = nest.reduction_dims
    plain = all(s.reduce not in ("argmax", "argmin") for s in passes[0].reductions)
    if not plain or passes[0].saves or passes[0].stores or nest.size[d] <= SEQUENTIAL_ACROSS:
        return 0
    for x, _ in accesses(nest):
        form, size = affine.affine(x.args[0]), dtypes.DTYPES[x.dtype].size
        near = form.coefficient(lane) == 1 and form.coefficient(d) != 0 and not form.opaque() and not x.value.checks
        if near and size * nest.points([e for e in nest.order if form.coefficient(e)]) > LARGE:
            return size
    return 0


def _place_accumulators(plan: Plan, element: int) -> None:
    """Let a few rows at once pass all lanes of a block, if these have many bytes and scratch memory holds their
    accumulators. ``element``: the bytes of one."""
    assert plan.lane is not None
    lanes = plan.block_size if plan.lane_blocks > 1 else plan.nest.size[plan.lane]
    reductions = plan.row.passes[0].reductions
    size = -(-lanes // LANES) * LANES * 8
    if lanes * element >= NEIGHBOURS and size * len(reductions) <= SCRATCH_LIMIT:
        plan.rows_at_once = ROWS_AT_ONCE
        plan.unroll = [min(2, plan.unroll[0])]
        plan.scratch = {s.number: n * size for n, s in enumerate(reductions)}
        plan.scratch_bytes = size * len(reductions)


# -- threads ------------------------------------------------------------------------------------------------------
def estimate_ns(plan: Plan, costs: CPUCosts) -> float:
    """Estimate the time of the whole nest on one thread, in nanoseconds."""
    nest = plan.nest
    point = row = 0.0
    for s in nest.steps:
        ops = [x for x in expr.walk(s.value) if x.op in EXPENSIVE]
        slow = sum(costs.slow_op for x in ops if _by_lane(x))
        work = costs.op * expr.cost(s.value) + slow
        row, point = (row + work, point) if s.per_row else (row, point + work)
    for x, per_row in accesses(nest):
        access: Access = x.value
        operand = nest.inputs[access.operand] if access.operand >= 0 else nest.outputs[~access.operand]
        unit = plan.lane is None or affine.affine(x.args[0]).coefficient(plan.lane) in (0, 1) or x in plan.tiled
        work = dtypes.DTYPES[operand.dtype].size / costs.bytes_per_ns if unit and not access.checks else costs.gather
        row, point = (row + work, point) if per_row else (row, point + work)
    if not plan.across_rows:
        row += costs.row
    rows = nest.points(nest.rows)
    return rows * (row + point * nest.points(nest.reduction_dims) if nest.reduced else row + point)


def _by_lane(x: Expr) -> bool:
    """Whether a function computes its lanes one by one."""
    if dtypes.is_float(x.dtype):
        return x.dtype == "float64" and x.op in BY_LANE_DOUBLE
    return x.op in BY_LANE_INTEGER


def _shared_evenly(chunks: int) -> int:
    """Return the next number of chunks that 2, 4, 8 and 16 threads share evenly. Of 3, one of two threads has two."""
    return -(-chunks // 16) * 16 if chunks > 16 else 1 << max(0, chunks - 1).bit_length()


def _split_work(plan: Plan, costs: CPUCosts, far: int) -> None:
    """Divide the nest into iterations of the parallel loop, and these into chunks. ``far``: the bytes of an element in
    rows that are far apart, or 0."""
    nest = plan.nest
    rows = [d for d in nest.rows if d not in (plan.lane, plan.tile, plan.interleaved, plan.inner)]
    if nest.serial:  # the other dims are inner loops, in order
        rows = [d for d in rows if d in nest.parallel]
        if not rows and plan.lane is None:
            return
    most = SERIAL_CHUNKS if nest.serial else MAX_CHUNKS
    wanted = _shared_evenly(min(most, int(estimate_ns(plan, costs) / costs.chunk)))
    count = nest.points(rows) * plan.tile_blocks
    if wanted > 1 and plan.across_rows and plan.lane is not None and count < 2 * wanted:
        size = nest.size[plan.lane]
        block = -(-size // -(-2 * wanted // count))
        if far:
            block = max(block, min(PAGE // far, -(-size // SERIAL_CHUNKS)))
        plan.block_size = min(size, -(-block // (4 * LANES)) * 4 * LANES)
        plan.lane_blocks = -(-size // plan.block_size)
    target = count if plan.lane_blocks > 1 else min(count, 8 * wanted if wanted > 1 else 1)
    while nest.points(plan.prefix) * plan.tile_blocks < target and len(plan.prefix) < len(rows):
        plan.prefix.append(rows[len(plan.prefix)])
    plan.per_chunk = -(-plan.iterations // wanted)
    plan.chunks = -(-plan.iterations // plan.per_chunk)
