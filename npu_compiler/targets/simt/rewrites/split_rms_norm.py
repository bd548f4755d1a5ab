"""A row norm between two products is computed in their epilogues.

If the factor ``r`` is constant along a row, ``(x * w * r) @ b`` equals ``r * ((x * w) @ b)``. The product that computes
x therefore also stores x * w and the per-row sums on which r depends, and the product after the norm multiplies its
rows by r.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.anchors import Gemm
from ....schedule.kernel import Kernel, Loops, Operand, Stage
from ....schedule.schedule import Schedule
from ..kernels.gemm import product_of
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite

TYPES = ("bfloat16",)  # x * w could overflow float16


class _Norm(NamedTuple):
    """``out = x * columns * rows``, where ``rows`` depend on ``stage 0``, the sum of ``summed`` over a row. ``x``: the
    number of the input."""

    x: int
    summed: Expr
    columns: list[Expr]
    rows: list[Expr]


def split_rms_norm(schedule: Schedule, dialect: Dialect) -> None:
    """Rewrite every norm between products whose kernels support it."""
    for norm in [k for k in schedule.kernels if isinstance(k, Loops)]:
        found = _row_norm(norm)
        if found is None or any(norm.outputs[0].buffer.id == b.id for _, b in schedule.outputs):
            continue
        x = norm.inputs[found.x]
        producer = next((k for k in schedule.kernels if any(o.buffer.id == x.buffer.id for o in k.outputs)), None)
        readers = [k for k in schedule.kernels if any(o.buffer.id == norm.outputs[0].buffer.id for o in k.inputs)]
        products = [k for k in readers if isinstance(k, Gemm) and _multiplies(k, norm.outputs[0], dialect)]
        if not isinstance(producer, Gemm) or not readers or len(products) < len(readers):
            continue
        tiles = _column_tiles(producer, dialect) if _makes(producer, x, schedule) else 0
        if tiles:
            _divide(schedule, norm, found, producer, products, tiles)


REWRITE = DialectRewrite(
    "split_rms_norm",
    "a row norm between two products is computed in their epilogues",
    split_rms_norm,
)


def _row_norm(k: Loops) -> _Norm | None:
    """Return the norm that ``k`` computes, if it is a row norm of a value that another kernel computed; else None."""
    body = k.body
    if len(k.outputs) != 1 or len(body.stages) != 2 or k.outputs[0].dtype not in TYPES:
        return None
    fold, store = body.stages
    rank, out = len(body.domain), k.outputs[0]
    whole = out.shape == body.domain and store.index == expr.identity_index(out.shape) and out.buffer.kind == "arena"
    if (fold.kind, fold.reduce, store.kind, body.axes) != ("reduce", "sum", "store", (rank - 1,)) or not whole:
        return None
    factors = _factors(store.expr)
    rows = [f for f in factors if any(y.op == "stage" for y in expr.walk(f))]
    columns = [f for f in factors if f not in rows]
    here = [f for f in columns if f.op == "load" and f.args == expr.identity_index(out.shape)]
    if len(here) != 1 or not rows or fold.expr.dtype != "float32":
        return None
    columns.remove(here[0])
    x = here[0].value
    lane = [y for f in columns for y in expr.walk(f) if y.op == "load"]
    last = expr.index(rank - 1)
    fixed = all(_is_row(k.inputs[y.value]) and [i for i in y.args if i.op != "const"] == [last] for y in lane)
    plain = not any(y.op in ("load", "index") for f in rows for y in expr.walk(f))
    own = all(y is here[0] for y in expr.walk(fold.expr) if y.op == "load")
    indexed = all(y is last for f in columns for y in expr.walk(f) if y.op == "index")
    return _Norm(x, fold.expr, columns, rows) if fixed and plain and own and indexed else None


def _is_row(o: Operand) -> bool:
    """Whether ``o`` is a weight with unit stride along its columns."""
    return o.buffer.constant and o.strides[-1] == 1


def _factors(e: Expr) -> list[Expr]:
    """Return the factors of a product, without the roundings between them."""
    if e.op == "cast" and e.dtype in (*TYPES, "float32"):
        return _factors(e.args[0])
    return [f for a in e.args for f in _factors(a)] if e.op == "mul" else [e]


def _multiplies(k: Gemm, left: Operand, dialect: Dialect) -> bool:
    """Whether only the left operand of product ``k`` is ``left``, and the product can scale its rows."""
    if k.row_scale is not None or k.prologue is not None or not _column_tiles(k, dialect):
        return False
    alone = all(o.buffer.id != left.buffer.id for o in k.inputs[1:])
    dense = k.batch == 1 and k.lda == k.k == left.shape[-1] and k.inputs[0].offset == 0
    return alone and dense and left.contiguous


def _makes(k: Gemm, x: Operand, schedule: Schedule) -> bool:
    """Whether ``x`` is the whole result of product ``k``, and of no other kernel."""
    producers = [o for other in schedule.kernels for o in other.outputs if o.buffer.id == x.buffer.id]
    single = len(producers) == 1 and k.outputs == (x,) and x.contiguous
    able = k.row_scale is None  # the sums of a row scale must be the last input
    return single and able and k.batch == 1 and product_of(k).products == 1


def _column_tiles(k: Kernel, dialect: Dialect) -> int:
    special = dialect.special_for(k)
    return special.column_tiles(k, dialect) if special is not None and special.column_tiles is not None else 0


def _divide(
    schedule: Schedule, norm: Loops, found: _Norm, producer: Gemm, readers: list[Gemm], tiles: int
) -> None:  # fmt: skip
    out, rows = norm.outputs[0], product_of(producer).m
    value = expr.drop_roundings(producer.epilogue.cast("float32"))
    inputs = list(producer.inputs)

    def moved(e: Expr) -> Expr:
        """Replace x by the value that the epilogue computes, and number other operands as the producer's inputs."""

        def at(load: Expr) -> Expr:
            if load.value == found.x:
                return value.cast(load.dtype)
            if norm.inputs[load.value] not in inputs[producer.rhs + 1 :]:
                inputs.append(norm.inputs[load.value])
            number = inputs.index(norm.inputs[load.value], producer.rhs + 1)
            return expr.load(number, load.dtype, load.args)

        return expr.drop_roundings(expr.substitute(e, loads=at))

    scaled = value
    for f in found.columns:
        scaled = scaled * moved(f).cast("float32")
    store = Stage("store", scaled.cast(out.dtype), output=1, index=expr.identity_index(out.shape))
    extra = (Stage("reduce", moved(found.summed), reduce="sum"), store)
    sums = schedule.memory("float32", (tiles, rows), "sums")
    outputs = (*producer.outputs, out, sums)
    new: dict[Kernel, Kernel] = {producer: replace(producer, inputs=tuple(inputs), outputs=outputs, extra_stages=extra)}
    scale = found.rows[0]
    for f in found.rows[1:]:
        scale = scale * f
    new |= {k: replace(k, inputs=(*k.inputs, sums), row_scale=scale) for k in readers}
    schedule.kernels = [new.get(k, k) for k in schedule.kernels if k is not norm]
