"""Roundings that a store does anyway: casts to half types, and quantisation to bytes."""

from __future__ import annotations

from ...graph import expr
from ...graph.expr import Expr
from ...support import dtypes


def unrounded(e: Expr) -> Expr:
    """Return a value to be stored without its cast from float32 to a half type, because the store rounds."""
    return e.args[0] if e.op == "cast" and dtypes.opmath(e.dtype) != e.dtype and e.args[0].dtype == "float32" else e


def is_bfloat16(e: Expr) -> bool:
    """Whether a float32 value is certainly a bfloat16 number, so that a store needs not round it."""
    if e.op == "load":
        return e.dtype == "bfloat16"
    if e.op in ("cast", "abs", "neg"):
        return dtypes.is_float(e.dtype) and is_bfloat16(e.args[0])
    return e.op == "where" and all(map(is_bfloat16, e.args[1:]))


def rounded_clamp(e: Expr) -> tuple[Expr, int, int, int] | None:
    """Return (x, zero, low, high) of ``min(max(round(x) + zero, low), high)`` in float32 with whole numbers of up to 16
    bits, else None."""
    if e.dtype != "float32" or e.op != "minimum" or e.args[0].op != "maximum":
        return None
    (x, low), high = e.args[0].args, e.args[1]
    zero = expr.const(0.0, "float32")
    if x.op == "add" and x.args[0].op == "round":
        x, zero = x.args
    whole = [v for v in (zero, low, high) if v.op == "const" and abs(v.value) < 1 << 16 and v.value == int(v.value)]
    if x.op != "round" or len(whole) < 3:
        return None
    return x.args[0], int(zero.value), int(low.value), int(high.value)
