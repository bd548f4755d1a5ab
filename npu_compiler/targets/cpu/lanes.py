"""Along which dim of a nest the vector lanes run, and which dim forms square tiles with it, by estimated cost."""

from __future__ import annotations

import math

from ...graph import affine, expr
from ...graph.expr import Expr
from ...support import dtypes
from ..codegen.nest import Nest, accesses
from .devices import CONFIG

LANES = CONFIG.vector_lanes  # of the widest instruction set; costs and scratch sizes assume it
TILE_MIN = 8  # shorter dims are not tiled
NEAR = 4  # the largest stride of stores in elements that fill neighbouring cache lines
LINE, PAGE = 64, 4096  # bytes
SETS = 1024  # bytes: lines that are a multiple of it apart share 4 of the 64 sets of an L1 cache, or fewer
INTERLEAVED = 3.0  # the cost of a vector of a store that is interleaved with those of a few neighbouring results
NEAR_GATHER = 6.0  # the cost of a vector of elements that may be neighbours: a load, a permutation and a test
MAX_SEGMENTS = 6  # into which the lane dim is divided
HOISTED = 12  # scalar operations for which a row dim becomes a loop inside the lane loop
NEAR_LINES = 1024  # the most lines that such a loop writes for a saved load: they stay in the cache until they are full
PIECEWISE = frozenset("where abs minimum maximum floordiv remainder".split())
LONGER = 8  # how many times as long as the tile dim the lane dim must be for tiles to follow one another along it


# -- lanes --------------------------------------------------------------------------------------------------------
def choose_lane(nest: Nest) -> int | None:
    """Return the dim with the lowest estimated cost per element; None if points must be computed one by one."""
    if not nest.order:
        return None
    candidates = list(nest.order)
    if any(s.reduce in ("argmax", "argmin") for s in nest.steps) and nest.reduction_dims:
        candidates = [*nest.rows, nest.reduction_dims[-1]]  # each lane must visit positions in order
    if nest.serial:
        candidates = [d for d in candidates if d in nest.parallel]
        if not candidates:
            return None
    if not any(s.kind == "reduce" for s in nest.steps) and nest.rows:
        candidates = [d for d in candidates if d not in nest.reduced] or candidates
    return min(candidates, key=lambda d: (_lane_cost(nest, d), -nest.order.index(d)))


def _lane_cost(nest: Nest, dim: int) -> float:
    """Estimate the work per element. What is done once per row counts as part of a vector of rows, or as one vector."""
    size, found = nest.size[dim], accesses(nest)
    parts = [(0, size)]
    if any(follows_no_stride(x, dim) for x, _ in found):  # in parts of the dim they may be affine
        parts = segments([x for x, _ in found], dim, nest.ranges)
    points = nest.points(nest.reduction_dims)
    interleaved = interleaved_dim(nest, dim) is not None
    cost = 0.0
    for low, high in parts:
        ranges = {**nest.ranges, dim: (low, high - 1)}
        vectors = math.ceil((high - low) / LANES) / size
        work: list[tuple[float, bool]] = [(expr.cost(s.value), s.per_row) for s in nest.steps]
        for x, per_row in found:
            stored = interleaved and x.value.operand < 0 and high - low >= LANES
            access = affine.simplify(x, ranges) if len(parts) > 1 else x
            work.append((INTERLEAVED if stored else _access_cost(access, dim), per_row))
        cost += (1.0 + sum(n for n, per_row in work if not per_row)) * vectors
        cost += sum(n for n, per_row in work if per_row) * (vectors if dim not in nest.reduced else 1.0) / points
    if all(affine.affine(x.args[0]).coefficient(dim) == 1 for x, _ in found if x.value.operand < 0):
        shared = [n - n / nest.size[d] for d, n in shared_work(nest, dim).items() if n >= HOISTED]
        cost -= max(shared, default=0.0) * math.ceil(size / LANES) / size  # a loop inside the lane loop needs it once
    if dim in nest.reduced:
        cost += 8 * sum(s.kind == "reduce" for s in nest.steps) / points
    return cost


def follows_no_stride(x: Expr, dim: int) -> bool:
    """Whether the address of a load or store is not affine in an index."""
    terms = (*affine.affine(x.args[0]).opaque(), *x.args[1:])
    return any(y.op == "index" and y.value == dim for t in terms for y in expr.walk(t))


def _access_cost(x: Expr, dim: int) -> float:
    if follows_no_stride(x, dim):
        return NEAR_GATHER if _may_be_near(x, dim) else LANES
    stride = affine.affine(x.args[0]).coefficient(dim)
    if stride == 2 and x.value.operand >= 0:  # neighbours are loaded, and a permutation takes every second one
        return 4.0
    size = dtypes.DTYPES[x.dtype].size
    return 0.2 if stride == 0 else 1 if abs(stride) == 1 else _strided_cost(abs(stride) * size)


def _may_be_near(x: Expr, dim: int) -> bool:
    """Whether positions that are not affine in an index may be those of neighbours, as in an image that is enlarged.
    Doubles are not counted: they fill two registers, each with two permutations."""
    if x.value.operand < 0 or dtypes.DTYPES[x.dtype].size > 4:
        return False
    form = affine.affine(x.args[0])
    steps = [(t, form.terms[t]) for t in form.opaque()]
    steps += [(t, step) for t, (_, step) in zip(x.args[1:], x.value.checks, strict=True)]
    return all(abs(n) == 1 for t, n in steps if any(y.op == "index" and y.value == dim for y in expr.walk(t)))


def _strided_cost(nbytes: int) -> float:
    """Return the cost of a strided vector: elements share cache lines, or each has its own line, or its own page."""
    return LANES * (0.5 if nbytes < 16 else 1 if nbytes < PAGE else 3)


def interleaved_dim(nest: Nest, lane: int | None) -> int | None:
    """Return a dim of 2 to 4 positions that is innermost in stores, with the lane dim just outside it, or None."""
    if nest.reduced or nest.serial or lane is None:
        return None
    targets = [s.target for s in nest.steps if s.target is not None]
    for d in nest.rows:
        n = nest.size[d]
        if d == lane or n > 4 or any(t.args[1:] for t in targets):
            continue
        forms = [affine.affine(t.args[0]) for t in targets]
        if all(f.coefficient(d) == 1 and f.coefficient(lane) == n and not f.opaque() for f in forms):
            return d
    return None


def shared_work(nest: Nest, lane: int) -> dict[int, float]:
    """Return the work of a lane that does not depend on a row dim, for each of them, the innermost one first. Only
    nests without reductions have such loops. Of the parts of the lane dim, the longest counts."""
    if nest.reduced or nest.serial:
        return {}
    dims: dict[Expr, frozenset[int]] = {}

    def depends(x: Expr) -> frozenset[int]:
        if x not in dims:
            own = frozenset((x.value,)) if x.op == "index" else frozenset[int]()
            dims[x] = own.union(*map(depends, x.args))
        return dims[x]

    values = [s.value for s in nest.steps]
    low, high = max(segments(values, lane, nest.ranges), key=lambda part: part[1] - part[0])
    ranges = {**nest.ranges, lane: (low, high - 1)}
    parts = {x for e in values for x in expr.walk(affine.simplify(e, ranges))}
    work = [(depends(x), expr.own_cost(x)) for x in parts]
    loads = [(depends(x), _access_cost(x, lane)) for x in parts if x.op == "load"]

    def shared(d: int) -> float:
        counted = work + loads if nest.size[d] <= NEAR_LINES else work
        return sum(n for found, n in counted if lane in found and d not in found)

    return {d: shared(d) for d in reversed(nest.rows) if d != lane}


def segments(exprs: list[Expr], lane: int, ranges: affine.Ranges) -> list[tuple[int, int]]:
    """Return ranges of the lane dim in which no guard changes and every address is affine."""
    size = ranges[lane][1] + 1
    found = _intervals([e for e in exprs if any(x.op in PIECEWISE for x in expr.walk(e))], lane, 0, size, ranges)
    return found if len(found) <= MAX_SEGMENTS else [(0, size)]


def _intervals(exprs: list[Expr], lane: int, low: int, high: int, ranges: affine.Ranges) -> list[tuple[int, int]]:
    """Split a range further: deciding one guard may expose breakpoints of others."""
    points = affine.breakpoints(exprs, lane, low, high)
    if not points or len(points) >= MAX_SEGMENTS:
        return [(low, high)]
    intervals = []
    for a, b in zip([low, *points], [*points, high], strict=True):
        known = [affine.simplify(e, {**ranges, lane: (a, b - 1)}) for e in exprs]
        intervals += _intervals(known, lane, a, b, ranges)
    return intervals


# -- tiles --------------------------------------------------------------------------------------------------------
def choose_tile(nest: Nest) -> tuple[int, int, list[Expr]] | None:
    """Return (lane dim, tile dim, loads) if stores are contiguous along one dim, or nearly, and some loads along
    another, of which they may read every second element."""
    if nest.reduced or nest.serial:
        return None
    found = accesses(nest)
    stores = [affine.affine(x.args[0]) for x, _ in found if x.value.operand < 0]
    near = [d for d in nest.order if nest.size[d] >= TILE_MIN and all(0 < f.coefficient(d) <= NEAR for f in stores)]
    if not near:
        return None
    lane = min(near, key=lambda d: max(f.coefficient(d) for f in stores))
    groups: dict[int, list[Expr]] = {}
    for x, _ in found:
        form, access = affine.affine(x.args[0]), x.value
        if access.operand < 0 or access.guarded or access.checks or form.opaque() or form.coefficient(lane) in (0, 1):
            continue
        for d in nest.order:
            if d != lane and form.coefficient(d) in (1, 2) and nest.size[d] >= TILE_MIN:
                groups.setdefault(d, []).append(x)
    if not groups:
        return None
    tile = max(groups, key=lambda d: len(groups[d]))
    return lane, tile, groups[tile]


def goes_along_tile(nest: Nest, lane: int, tile: int, lanes: int) -> bool:
    """Whether the loop over tiles that is inside follows the loads rather than the stores. A thread then reads a few
    long rows, and writes cache lines that are far apart. Lines of which a tile takes only a part would be moved twice,
    and lines of results that are a multiple of ``SETS`` bytes apart compete for a few sets of the L1 cache. ``lanes``:
    those of a vector register."""
    size = min(dtypes.DTYPES[op.dtype].size for op in nest.outputs)
    targets = [s.target for s in nest.steps if s.target is not None]
    apart = [affine.affine(t.args[0]).coefficient(tile) * dtypes.DTYPES[t.dtype].size for t in targets]
    compete = any(stride and stride % SETS == 0 for stride in apart)
    return lanes * size >= LINE and nest.size[lane] < LONGER * nest.size[tile] and not compete
