"""Sign bits. Zeros have one; NaN counts as positive, because its bit depends on the machine that made it."""

from __future__ import annotations

import math

from ..graph.expr import Expr, call, fn, where
from ..support import dtypes as dt
from .arithmetic import numbers, tensors
from .common import binary, names, unary
from .registry import ALL
from .samples import BINARY, UNARY, S, t

ZEROS = t(6, values=(0.0, -0.0, math.inf, -math.inf, -1e-30, 3))


def is_negative(x: Expr) -> Expr:
    """Whether the sign bit of ``x`` is set."""
    if x.dtype == "bool":
        return call("and", x, call("not", x))
    negative = call("lt", x, 0)
    return call("or", negative, call("lt", 1 / x, 0)) if dt.is_float(x.dtype) else negative


unary(names("signbit"), is_negative, (*UNARY, S(ZEROS)), ("float32", "float16", "bfloat16", "int64", "bool"))


def copysign(self: Expr, other: Expr) -> Expr:
    """Return the magnitude of ``self`` with the sign bit of ``other``."""
    magnitude = fn("abs")(self)
    return where(is_negative(other), -magnitude, magnitude)


PAIRS = (*tensors(BINARY), S(t(6), ZEROS), S(ZEROS, t(6)))
NUMBERS = (*numbers(BINARY), S(t(2, 3), -0.0), S(t(3, 4), -2.5))
binary(names("copysign", "Tensor"), copysign, PAIRS, ALL, floating=True)
binary(names("copysign", "Scalar"), copysign, NUMBERS, ALL, floating=True)
