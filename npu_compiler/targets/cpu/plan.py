"""Decisions about a loop nest: which dim the vector lanes run along, passes over the row, chunks for the threads."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from ... import affine, dtypes, expr
from ...expr import EXPENSIVE, Expr
from .nest import Access, Nest, Step

LANES = 16  # of the widest instruction set; costs and scratch sizes assume it
SCRATCH_LIMIT = 256 << 10  # bytes of temporaries per row; beyond it they are recomputed
CHUNK_NS = 6000.0  # work worth a trip to the chunk counter
MAX_CHUNKS = 128
SEQUENTIAL_SUM = 32  # float additions into one partial sum before it is carried
TILE_MIN = 8  # shorter dims are not worth a tile
TILE_BLOCK = 64  # positions of the tile dim that stay on one thread: a multiple of every vector length
BY_LANE = frozenset("tan asin acos atan sinh cosh asinh acosh atanh pow atan2 fmod remainder floordiv idiv".split())


@dataclass
class Pass:
    """One walk over the reduced dims: reductions to fold, temporaries to save, results to store."""

    folds: list[Step] = field(default_factory=list)
    saves: list[Step] = field(default_factory=list)
    stores: list[Step] = field(default_factory=list)


@dataclass
class Plan:
    """``lane`` None: a single point. ``wide``: lanes run over rows; else along a reduced dim. ``step`` 1: one by one."""

    nest: Nest
    lane: int | None
    wide: bool
    passes: list[Pass]
    row_stores: list[Step]
    saved: dict[int, str] = field(default_factory=dict)  # temporaries kept in scratch: stage number -> dtype
    scratch: dict[int, int] = field(default_factory=dict)  # their byte offsets
    scratch_bytes: int = 0
    unroll: int = 1
    one_by_one: bool = False
    tile: int | None = None  # a dim walked beside the lane dim in square tiles, along which ``tiled`` loads are contiguous
    tiled: list[Expr] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)  # rows that are flattened and split among the threads
    lane_blocks: int = 1
    block_size: int = 0
    chunks: int = 1
    per_chunk: int = 1

    @property
    def units(self) -> int:
        return self.nest.points(self.prefix) * self.lane_blocks * self.tile_blocks

    @property
    def tile_blocks(self) -> int:
        return 1 if self.tile is None else -(-self.nest.size[self.tile] // TILE_BLOCK)

    @property
    def inner_folds(self) -> list[int]:
        """Reduced dims that become scalar loops, outermost first."""
        return [d for d in self.nest.folds if d != self.lane]


def make_plan(nest: Nest) -> Plan:
    if not nest.reduced:
        _fold_single_points(nest)
    lane, one_by_one = _choose_lane(nest)
    transposed = _choose_tile(nest)
    if transposed is not None:
        lane = transposed[0]
    plan = Plan(nest, lane, lane is None or lane not in nest.reduced, [], [], one_by_one=one_by_one)
    if transposed is not None:
        _, plan.tile, plan.tiled = transposed
    _make_passes(plan)
    _unroll(plan)
    _place_scratch(plan)
    _split_work(plan)
    return plan


def _fold_single_points(nest: Nest) -> None:
    """Without reduced dims a reduction is its argument, and temporaries are plain subexpressions."""
    made: dict[Expr, Expr] = {}
    for s in nest.steps:
        s.value = expr.rewrite(s.value, made.get)
        if s.target is not None:
            s.target = expr.rewrite(s.target, made.get)
        elif s.reduce in ("argmax", "argmin"):
            made[expr.stage(s.number, "int64")] = expr.const(0, "int64")
        else:
            made[expr.stage(s.number, s.value.dtype)] = s.value
        s.per_row = True
    nest.steps = [s for s in nest.steps if s.kind == "store"]


# -- lanes --------------------------------------------------------------------------------------------------------
def _choose_lane(nest: Nest) -> tuple[int | None, bool]:
    """The dim for the lanes with the lowest estimated cost per element, and whether it must run one by one."""
    if not nest.order:
        return None, False
    candidates = list(nest.order)
    if any(s.reduce in ("argmax", "argmin") for s in nest.steps) and nest.folds:
        candidates = [*nest.rows, nest.folds[-1]]  # in one lane, positions must come in order
    if nest.serial:
        free = [d for d in candidates if d in nest.private]
        if not free:
            return nest.order[-1], True
        candidates = free
    if not any(s.kind == "reduce" for s in nest.steps) and nest.rows:
        candidates = [d for d in candidates if d not in nest.reduced] or candidates
    return min(candidates, key=lambda d: (_lane_cost(nest, d), -nest.order.index(d))), False


def accesses(nest: Nest) -> list[tuple[Expr, bool]]:
    """Every distinct load, and every store target, with whether it is done once per row only."""
    seen: dict[Expr, bool] = {}
    for s in nest.steps:
        for e in (s.value, *([s.target] if s.target is not None else [])):
            for x in expr.walk(e):
                if x.op == "load":
                    seen[x] = seen.get(x, True) and s.per_row
    return list(seen.items())


def _lane_cost(nest: Nest, dim: int) -> float:
    size = nest.size[dim]
    vector = sum(expr.cost(s.value) for s in nest.steps) + 1.0
    for x, _ in accesses(nest):
        if any(any(y.op == "index" and y.value == dim for y in expr.walk(t)) for t in (*affine.affine(x.args[0]).opaque(), *x.args[1:])):
            vector += LANES
            continue
        stride = affine.affine(x.args[0]).coefficient(dim)
        vector += 0.2 if stride == 0 else 1 if stride == 1 else LANES
    cost = vector * math.ceil(size / LANES) / size
    if dim in nest.reduced:
        across = 8 * sum(s.kind == "reduce" for s in nest.steps)
        cost += across / nest.points(nest.folds)
    return cost


def _choose_tile(nest: Nest) -> tuple[int, int, list[Expr]] | None:
    """(lane dim, tile dim, loads) where stores are contiguous along one dim and some loads along another."""
    if nest.reduced or nest.serial:
        return None
    found = accesses(nest)
    stores = [affine.affine(x.args[0]) for x, _ in found if x.value.operand < 0]
    lane = next((d for d in nest.order if nest.size[d] >= TILE_MIN and all(f.coefficient(d) == 1 for f in stores)), None)
    if lane is None:
        return None
    groups: dict[int, list[Expr]] = {}
    for x, _ in found:
        form, access = affine.affine(x.args[0]), x.value
        if access.operand < 0 or access.guarded or access.checks or form.opaque() or form.coefficient(lane) in (0, 1):
            continue
        if dtypes.DTYPES[x.dtype].size <= 4:
            for d in nest.order:
                if d != lane and form.coefficient(d) == 1 and nest.size[d] >= TILE_MIN:
                    groups.setdefault(d, []).append(x)
    if not groups:
        return None
    tile = max(groups, key=lambda d: len(groups[d]))
    return lane, tile, groups[tile]


# -- passes -------------------------------------------------------------------------------------------------------
def _make_passes(plan: Plan) -> None:
    nest = plan.nest
    ready: dict[int, int] = {}  # stage -> the first pass that can use it
    temps: dict[int, Step] = {}
    made: dict[int, Expr] = {}  # temporaries in terms of reductions only

    def first_pass(e: Expr | None) -> int:
        used = [x.value for x in expr.walk(e) if x.op == "stage"] if e is not None else []
        return max((ready[n] for n in used), default=0)

    def pass_number(n: int) -> Pass:
        while len(plan.passes) <= n:
            plan.passes.append(Pass())
        return plan.passes[n]

    if not nest.reduced:
        plan.row_stores = nest.steps
        return
    inputs = {op.buffer.id for op in nest.inputs}
    late: list[Step] = []
    for s in nest.steps:
        at = max(first_pass(s.value), first_pass(s.target))
        if s.kind == "reduce":
            pass_number(at).folds.append(s)
            ready[s.number] = at + 1
        elif s.kind == "temp":
            ready[s.number] = at
            temps[s.number] = s
        elif s.per_row:
            plan.row_stores.append(s)
        elif nest.outputs[s.output].buffer.id in inputs:
            late.append(s)  # an input may share the memory: all passes read before it is written
        else:
            pass_number(at).stores.append(s)
    if late:
        last = max(len(plan.passes) - 1, *(max(first_pass(s.value), first_pass(s.target)) for s in late))
        pass_number(last).stores += late
    _save_or_recompute(plan, temps, ready, made)


def _save_or_recompute(plan: Plan, temps: dict[int, Step], ready: dict[int, int], made: dict[int, Expr]) -> None:
    """Decide which temporaries go through scratch; replace the others, and uses in the pass that makes them, by value."""
    nest = plan.nest
    needed: dict[int, int] = {}  # temp -> last pass that reads it
    for number, p in enumerate(plan.passes):
        waiting = [s.value for s in (*p.folds, *p.stores)] + [s.target for s in p.stores if s.target is not None]
        for e in waiting:
            for x in expr.walk(e):
                if x.op == "stage" and x.value in temps:
                    needed[x.value] = number
                    waiting.append(temps[x.value].value)
    width = nest.points(nest.folds) * (LANES if plan.wide else 1)
    budget = SCRATCH_LIMIT
    for n, s in temps.items():
        bytes_needed = width * _scratch_item(s.value.dtype)
        if needed.get(n, 0) > ready[n] and expr.cost(s.value) >= 6 and bytes_needed <= budget:
            plan.saved[n] = s.value.dtype
            budget -= bytes_needed
            plan.passes[ready[n]].saves.append(s)

    def resolve(e: Expr, at: int) -> Expr:
        def step(x: Expr) -> Expr | None:
            if x.op != "stage" or x.value not in temps or (x.value in plan.saved and ready[x.value] < at):
                return None
            return resolve(temps[x.value].value, at)

        return expr.rewrite(e, step)

    for number, p in enumerate(plan.passes):
        for s in (*p.folds, *p.saves, *p.stores):
            s.value = resolve(s.value, number)
            if s.target is not None:
                s.target = resolve(s.target, number)
    for s in plan.row_stores:
        s.value = resolve(s.value, len(plan.passes))


def _scratch_item(dtype: str) -> int:
    return 8 if dtype in ("float64", "int64") else 4


def _unroll(plan: Plan) -> None:
    """Vectors side by side: enough to hide latency in light bodies, one in heavy ones."""
    nest = plan.nest
    cost = max((sum(expr.cost(s.value) for s in (*p.folds, *p.saves, *p.stores)) for p in plan.passes), default=100)
    if plan.lane is None or plan.one_by_one or cost > 24:
        return
    vectors = nest.size[plan.lane] // LANES
    plan.unroll = 4 if vectors >= 4 else 2 if vectors >= 2 else 1
    if any(_scratch_item(s.value.dtype) == 8 for p in plan.passes for s in p.folds):
        plan.unroll = min(plan.unroll, 2)


def _place_scratch(plan: Plan) -> None:
    nest, at = plan.nest, 0
    for n, dtype in plan.saved.items():
        plan.scratch[n] = at
        points = nest.points(nest.folds) * (LANES * plan.unroll if plan.wide else 1) + LANES
        at += -(-points * _scratch_item(dtype) // 64) * 64
    plan.scratch_bytes = at


# -- threads ------------------------------------------------------------------------------------------------------
def estimate_ns(plan: Plan) -> float:
    """Rough time of the whole nest on one thread."""
    nest = plan.nest
    point = row = 0.0
    for s in nest.steps:
        ops = [x for x in expr.walk(s.value) if x.op in EXPENSIVE]
        work = 0.016 * expr.cost(s.value) + sum(6.0 for x in ops if x.op in BY_LANE or x.dtype == "float64")
        row, point = (row + work, point) if s.per_row else (row, point + work)
    for x, per_row in accesses(nest):
        access: Access = x.value
        operand = nest.inputs[access.operand] if access.operand >= 0 else nest.outputs[~access.operand]
        unit = plan.lane is None or affine.affine(x.args[0]).coefficient(plan.lane) in (0, 1) or x in plan.tiled
        work = dtypes.DTYPES[operand.dtype].size / 40 if unit and not access.checks else 0.7
        row, point = (row + work, point) if per_row else (row, point + work)
    if nest.serial and plan.one_by_one:
        point = row = 4.0
    if not plan.wide:
        row += 8.0
    rows = nest.points(nest.rows)
    return rows * (row + point * nest.points(nest.folds) if nest.reduced else row + point)


def _split_work(plan: Plan) -> None:
    nest = plan.nest
    rows = [d for d in nest.rows if d not in (plan.lane, plan.tile)]
    if nest.serial:
        return
    wanted = max(1, min(MAX_CHUNKS, int(estimate_ns(plan) / CHUNK_NS)))
    count = nest.points(rows) * plan.tile_blocks
    if wanted > 1 and plan.wide and plan.lane is not None and count < 2 * wanted:
        size = nest.size[plan.lane]
        block = -(-size // -(-2 * wanted // count))
        plan.block_size = min(size, -(-block // (4 * LANES)) * 4 * LANES)
        plan.lane_blocks = -(-size // plan.block_size)
    target = count if plan.lane_blocks > 1 else min(count, 8 * wanted if wanted > 1 else 1)
    while nest.points(plan.prefix) * plan.tile_blocks < target and len(plan.prefix) < len(rows):
        plan.prefix.append(rows[len(plan.prefix)])
    plan.per_chunk = -(-plan.units // wanted)
    plan.chunks = -(-plan.units // plan.per_chunk)


def use_counts(exprs: list[Expr]) -> Counter[Expr]:
    """How often each subexpression appears as an argument or a root."""
    counts: Counter[Expr] = Counter(exprs)
    seen: set[Expr] = set()
    for e in exprs:
        for x in expr.walk(e):
            if x not in seen:
                seen.add(x)
                counts.update(x.args)
    return counts
