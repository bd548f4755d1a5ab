"""The table of scalar operations: arity, meaning in numpy, dtypes that they take, and which are expensive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..support import dtypes


@dataclass(frozen=True)
class ScalarOp:
    """A scalar operation.

    ``numpy`` computes it on arrays. ``result``: the result's dtype: 'same' (as the arguments), 'bool', 'arg1' (as the
    second argument, for ``where``) or 'cast' (the expression states it). ``infix``: its sign in C and Python, or ''.
    """

    arity: int
    numpy: Callable[..., Any]
    result: str = "same"
    infix: str = ""


def _erf(x: Any) -> Any:
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def _sigmoid(x: Any) -> Any:
    """The logistic function. The argument of ``exp`` is never positive, so it cannot overflow."""
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def _idiv(a: Any, b: Any) -> Any:
    """Division that rounds towards zero, exact for 64-bit integers: the floor, plus one where a negative quotient was
    rounded down."""
    q = np.floor_divide(a, b)
    return q + ((q < 0) & (q * b != a))


SCALAR_OPS: dict[str, ScalarOp] = {
    "add": ScalarOp(2, np.add, infix="+"),
    "sub": ScalarOp(2, np.subtract, infix="-"),
    "mul": ScalarOp(2, np.multiply, infix="*"),
    "div": ScalarOp(2, np.true_divide, infix="/"),
    "idiv": ScalarOp(2, _idiv),  # integers, towards zero
    "floordiv": ScalarOp(2, np.floor_divide),
    "remainder": ScalarOp(2, np.remainder),  # sign of the divisor
    "fmod": ScalarOp(2, np.fmod),  # sign of the dividend
    "pow": ScalarOp(2, np.power),
    "atan2": ScalarOp(2, np.arctan2),
    "maximum": ScalarOp(2, np.maximum),  # NaN propagates
    "minimum": ScalarOp(2, np.minimum),
    "neg": ScalarOp(1, np.negative),
    "abs": ScalarOp(1, np.abs),
    "sign": ScalarOp(1, np.sign),
    "sqrt": ScalarOp(1, np.sqrt),
    "rsqrt": ScalarOp(1, lambda x: 1 / np.sqrt(x)),
    "exp": ScalarOp(1, np.exp),
    "exp2": ScalarOp(1, np.exp2),
    "expm1": ScalarOp(1, np.expm1),
    "log": ScalarOp(1, np.log),
    "log2": ScalarOp(1, np.log2),
    "log2_rough": ScalarOp(1, np.log2),  # error at most 2^-20 times the larger of 1 and the result
    "log10": ScalarOp(1, np.log10),
    "log1p": ScalarOp(1, np.log1p),
    "sin": ScalarOp(1, np.sin),
    "cos": ScalarOp(1, np.cos),
    "tan": ScalarOp(1, np.tan),
    "asin": ScalarOp(1, np.arcsin),
    "acos": ScalarOp(1, np.arccos),
    "atan": ScalarOp(1, np.arctan),
    "sinh": ScalarOp(1, np.sinh),
    "cosh": ScalarOp(1, np.cosh),
    "tanh": ScalarOp(1, np.tanh),
    "asinh": ScalarOp(1, np.arcsinh),
    "acosh": ScalarOp(1, np.arccosh),
    "atanh": ScalarOp(1, np.arctanh),
    "erf": ScalarOp(1, _erf),
    "sigmoid": ScalarOp(1, _sigmoid),
    "floor": ScalarOp(1, np.floor),
    "ceil": ScalarOp(1, np.ceil),
    "round": ScalarOp(1, np.rint),  # half to even
    "trunc": ScalarOp(1, np.trunc),
    "lt": ScalarOp(2, np.less, "bool", "<"),
    "le": ScalarOp(2, np.less_equal, "bool", "<="),
    "gt": ScalarOp(2, np.greater, "bool", ">"),
    "ge": ScalarOp(2, np.greater_equal, "bool", ">="),
    "eq": ScalarOp(2, np.equal, "bool", "=="),
    "ne": ScalarOp(2, np.not_equal, "bool", "!="),
    "isnan": ScalarOp(1, np.isnan, "bool"),
    "isinf": ScalarOp(1, np.isinf, "bool"),
    "and": ScalarOp(2, np.bitwise_and, infix="&"),
    "or": ScalarOp(2, np.bitwise_or, infix="|"),
    "xor": ScalarOp(2, np.bitwise_xor, infix="^"),
    "not": ScalarOp(1, np.invert),
    "shl": ScalarOp(2, np.left_shift, infix="<<"),
    "shr": ScalarOp(2, np.right_shift, infix=">>"),
    "where": ScalarOp(3, np.where, "arg1"),
    "cast": ScalarOp(1, lambda x: x, "cast"),
}

_TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log2 log2_rough log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh "
    "erf sigmoid".split()
)
_FLOAT_ONLY = _TRANSCENDENTAL | {"div", "sqrt", "rsqrt"}
_NO_FLOAT = frozenset("idiv and or xor not shl shr".split())
_NO_BOOL = frozenset("sub neg idiv floordiv remainder fmod pow sign shl shr".split())


@cache
def takes(op: str, dtype: str) -> bool:
    """Whether the scalar op has a meaning for arguments of ``dtype``."""
    kind = dtypes.DTYPES[dtype].kind
    excluded = {"float": _NO_FLOAT, "bool": _FLOAT_ONLY | _NO_BOOL}.get(kind, _FLOAT_ONLY)
    return op not in excluded


EXPENSIVE = _TRANSCENDENTAL | {"pow", "fmod", "remainder", "floordiv", "idiv"}
