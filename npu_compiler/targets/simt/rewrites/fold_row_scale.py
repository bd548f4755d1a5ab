"""A factor of each row of a product, such as the scale of its quantised rows, is applied before the epilogue.

The epilogue would load it for every vector of results; the kernel loads it once for each of its rows.
"""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.anchors import Gemm
from ....schedule.kernel import Operand
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite


def fold_row_scale(schedule: Schedule, dialect: Dialect) -> None:
    """Rewrite the products whose epilogue multiplies every accumulator by a factor of the row that depends on one
    input, if their kernel scales rows."""
    products = [k for k in schedule.kernels if isinstance(k, Gemm) and k.row_scale is None]
    schedule.rewrite({k: (new,) for k in products if (new := _folded(k, dialect)) is not None})


REWRITE = DialectRewrite(
    "fold_row_scale",
    "a factor of each row of a product is applied before its epilogue",
    fold_row_scale,
)


def _folded(k: Gemm, dialect: Dialect) -> Gemm | None:
    special = dialect.special_for(k)
    if special is None or special.column_tiles is None or k.extra_stages or k.batch > 1:
        return None
    scaled = _scaled(k)
    factor = scaled[0].args[1] if scaled else None
    load = _row_load(k, factor, scaled) if factor is not None else None
    if factor is None or load is None:
        return None
    number, rows = load.value, k.m
    sums = Operand(k.inputs[number].buffer, (1, rows), (rows, 1), k.inputs[number].offset)

    def without(e: Expr) -> Expr | None:
        if e in scaled:
            return e.args[0]
        return expr.load(e.value - 1, e.dtype, e.args) if e.op == "load" and e.value > number else None

    return replace(
        k,
        inputs=(*k.inputs[:number], *k.inputs[number + 1 :], sums),
        epilogue=expr.rewrite(k.epilogue, without),
        row_scale=expr.substitute(factor, loads=lambda x: expr.stage(0, x.dtype)),
    )


def _scaled(k: Gemm) -> list[Expr]:
    """Return the products of the accumulators with one factor, through which alone the epilogue reads them, or none."""
    found = [x for x in expr.walk(k.epilogue) if any(a.op == "acc" for a in x.args)]
    accumulators = [x.args[0] for x in found]
    once = k.epilogue.op != "acc" and len(set(accumulators)) == len(found)
    fits = once and all(x.op == "mul" and x.args[0].op == "acc" and x.args[1] is found[0].args[1] for x in found)
    return found if fits else []


def _row_load(k: Gemm, factor: Expr, scaled: list[Expr]) -> Expr | None:
    """Return the only load of ``factor``: an element for each row, of an input that only ``scaled`` read; or None."""
    out = k.outputs[0]
    leaves = [x for x in expr.walk(factor) if x.op in ("load", "acc", "index", "stage") and x.args]
    row = (*expr.identity_index(out.shape[:-1]), expr.const(0, "int64"))
    if len(leaves) != 1 or leaves[0].op != "load" or leaves[0].args != row:
        return None
    (load,), o = leaves, k.inputs[leaves[0].value]
    users = [x for x in expr.walk(k.epilogue) if load in x.args or (x.op == "load" and x.value == load.value)]
    inside = {*expr.walk(factor), *scaled}
    alone = all(x in inside for x in users)
    whole = o.contiguous and o.dtype == "float32" and o.shape == (*out.shape[:-1], 1)
    return load if alone and whole and load.value > k.rhs else None
