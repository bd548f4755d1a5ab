"""Products and convolutions with few results of long sums: workgroups share the sums of a tile (split-K)."""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.anchors import Conv2d, Gemm
from ....schedule.kernel import Kernel, LoopBody, Loops, Operand, Stage
from ....schedule.schedule import Schedule
from ..kernels.gemm import WGMMA_ROWS, product_of, uses_matrix_unit
from ..kernels.gemv import is_gemv
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite

MIN_TERMS = 256  # of a part of a sum
MAX_SPLITS, MAX_SIMPLE_SPLITS = 16, 64
TILE, SIMPLE_TILE = (64, 128), (64, 64)
RESIDENT = 4  # workgroups of a compute unit that hide the latency of float arithmetic


def split_k(schedule: Schedule, dialect: Dialect) -> None:
    """Split sums along K if the tiles alone would leave most compute units idle. A second kernel adds the parts of each
    result, in order, and applies the epilogue."""
    products = [k for k in schedule.kernels if isinstance(k, Gemm | Conv2d)]
    schedule.rewrite({k: _split(schedule, k, splits) for k in products if (splits := _splits(k, dialect)) > 1})


REWRITE = DialectRewrite("split_k", "workgroups share long sums with few results (split-K)", split_k)


def _splits(k: Gemm | Conv2d, dialect: Dialect) -> int:
    if (isinstance(k, Gemm) and is_gemv(k)) or dialect.special_for(k) is not None:
        return 1
    p = product_of(k)
    matrix = uses_matrix_unit(k, dialect)
    if (matrix and p.m <= WGMMA_ROWS) or p.batch > 1 or 0 in (p.m, p.n):
        return 1
    rows, columns = TILE if matrix else SIMPLE_TILE
    tiles = -(-p.m // rows) * -(-p.n // columns)
    if dialect.device.compute_units < 2 * tiles:
        return 1
    if not matrix:
        return min(RESIDENT * dialect.device.compute_units // tiles, p.k // MIN_TERMS, MAX_SIMPLE_SPLITS)
    return min(dialect.device.compute_units // tiles, p.k // MIN_TERMS, MAX_SPLITS)


def _split(schedule: Schedule, k: Gemm | Conv2d, splits: int) -> tuple[Kernel, Kernel]:
    p, (out,) = product_of(k), k.outputs
    total = next((x.dtype for x in expr.walk(k.epilogue) if x.op == "acc"), "float32")
    parts = schedule.memory(total, (splits, p.m, p.n), "parts")
    first = replace(k, inputs=k.inputs[: k.rhs + 1], outputs=(parts,), splits=splits, epilogue=expr.acc(total))
    first = replace(first, dual=False, n=p.n) if isinstance(first, Gemm) else replace(first, image=out.shape)
    return first, _sum_of_parts(k, parts, p.products)


def _sum_of_parts(k: Gemm | Conv2d, parts: Operand, lanes: int) -> Loops:
    out, rank = k.outputs[0], len(k.outputs[0].shape)
    row: Expr = expr.const(0, "int64")
    for d, n in enumerate(out.shape[:-1]):
        row = row * n + expr.index(d)
    stages, sums = [], {}
    for lane in range(lanes):
        column = expr.index(rank - 1) * lanes + lane
        sums[lane] = expr.stage(lane, parts.dtype)
        stages.append(Stage("reduce", expr.load(0, parts.dtype, (expr.index(rank), row, column)), reduce="sum"))
    shift = k.rhs
    value = expr.rewrite(k.epilogue, lambda x: sums[x.value].cast(x.dtype) if x.op == "acc" else None)
    value = expr.substitute(value, loads=lambda x: expr.load(x.value - shift, x.dtype, x.args))
    index = expr.identity_index(out.shape)
    stages.append(Stage("store", value.cast(out.dtype), output=0, index=index, per_row=True))
    body = LoopBody((*out.shape, parts.shape[0]), (rank,), tuple(stages))
    inputs = (parts, *k.inputs[k.rhs + 1 :])
    return Loops(label=f"{k.label}_sum", number=k.number, inputs=inputs, outputs=(out,), body=body, sources=k.sources)
