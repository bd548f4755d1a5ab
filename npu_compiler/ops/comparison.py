"""Comparison, logic, bits, extremes, clamping and selection: elementwise, with PyTorch's promotion rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..graph.expr import Expr, call, const, fn, maximum, minimum, where
from ..graph.graph import Value, result_type
from ..support import dtypes as dt
from .arithmetic import EVERY, MIXED, NUMBERS, SPECIAL, TENSORS, is_float, numbers, tensors, truth
from .common import binary, names, unary
from .registry import FLOATS, INTS, Scalar, lowers
from .samples import BINARY, S, t

isnan = fn("isnan")


# -- comparison and logic ---------------------------------------------------------------------------------------------
COMPARED = (
    *BINARY,
    *MIXED,
    *SPECIAL,
    S(t(2, 3, dtype="int64"), 0.5),
    S(t(3, values=(0.1, 0.2, 0.3)), 0.1),
    S(t(3, dtype="bool"), 1),
)
INTEGERS = (
    S(t(3, 5), t(3, 5)),
    S(t(2, 3, 4), t(4)),
    S(t(1, 2, layout="transposed"), t(3, 1)),
    S(t(3), t()),
    S(t(2, 3, dtype="bool"), t(3)),
    S(t(0), t(1)),
)
SHIFTS = (
    S(t(3, 5, low=-9, high=9), t(3, 5, low=0, high=5)),
    S(t(2, 3, 4), t(4, low=0, high=3)),
    S(t(1, 3, layout="transposed"), t(2, 1, low=1, high=70)),
)


def _comparison(op: str) -> Callable[..., Value]:
    def compare(self: Value, other: Value | Scalar) -> Value:
        """Elementwise comparison; the result is bool."""
        common = result_type([self, other])
        if isinstance(other, float) and dt.opmath(common) != common:  # ATen rounds the number to the half type first
            other = float(np.asarray(other).astype(dt.numpy_dtype(common)))
        return self.graph.pointwise(fn(op), self, other)

    return compare


for _name, _alias in {
    "eq": [],
    "ne": ["not_equal"],
    "lt": ["less"],
    "le": ["less_equal"],
    "gt": ["greater"],
    "ge": ["greater_equal"],
}.items():
    lowers(*names(_name, "Tensor", aliases=_alias), samples=tensors(COMPARED), dtypes=EVERY)(_comparison(_name))
    lowers(*names(_name, "Scalar", aliases=_alias), samples=numbers(COMPARED), dtypes=EVERY)(_comparison(_name))


def _logical(op: str) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: call(op, truth(a), truth(b))


unary(names("logical_not"), lambda x: ~truth(x), dtypes=EVERY)
unary(names("bitwise_not"), "not", dtypes=INTS)
for _name in ("and", "or", "xor"):
    binary(names(f"logical_{_name}"), _logical(_name), TENSORS, EVERY)
    binary(names(f"bitwise_{_name}", "Tensor", aliases=[f"__{_name}__"]), _name, INTEGERS, INTS)
    binary(
        names(f"bitwise_{_name}", "Scalar", aliases=[f"__{_name}__"]),
        _name,
        (S(t(3, 5), 3), S(t(2, 3, layout="transposed"), -2), S(t(), 1), S(t(2), True)),
        INTS,
    )
    binary(
        names(f"bitwise_{_name}", "Scalar_Tensor"),
        _name,
        (S(3, t(3, 5)), S(-2, t(2, 3, layout="transposed")), S(True, t())),
        INTS,
    )
for _name, _op, _dunder in (("bitwise_left_shift", "shl", "__lshift__"), ("bitwise_right_shift", "shr", "__rshift__")):
    binary([f"aten.{_name}.Tensor", f"aten.{_dunder}.Tensor"], _op, SHIFTS, INTS[:2])
    binary(
        [f"aten.{_name}.Tensor_Scalar", f"aten.{_dunder}.Scalar"],
        _op,
        (S(t(3, 5), 2), S(t(2, 3, layout="transposed"), 0), S(t(), 3)),
        INTS[:2],
    )
    binary(
        [f"aten.{_name}.Scalar_Tensor"],
        _op,
        (S(5, t(3, 5, low=0, high=5)), S(-9, t(2, 3, low=0, high=5, layout="transposed")), S(1, t(low=0))),
        INTS[:2],
    )


# -- extremes and selection -------------------------------------------------------------------------------------------
def _without_nan(extreme: Any) -> Any:
    return lambda a, b: where(isnan(a), b, where(isnan(b), a, extreme(a, b))) if is_float(a) else extreme(a, b)


binary([*names("maximum"), "aten.max.other"], "maximum", TENSORS, EVERY)
binary([*names("minimum"), "aten.min.other"], "minimum", TENSORS, EVERY)
binary(names("fmax"), _without_nan(maximum), TENSORS, EVERY)
binary(names("fmin"), _without_nan(minimum), TENSORS, EVERY)

CLAMP = (
    S(t(3, 5), -1, 1), S(t(3, 5), 0.25), S(t(2, 3, layout="transposed"), None, 0.5), S(t(), -0.5, 0.5),
    S(t(0, 3), 0), S(t(3), 2, -2),
    S(t(3, values=(math.nan, -math.inf, math.inf)), -1.0, 1.0),
)  # fmt: skip
CLAMP_TENSOR = (
    S(t(3, 5), t(5, high=0), t(3, 1, low=0)),
    S(t(2, 3), t(3)),
    S(t(2, 3, layout="transposed"), t(), t()),
    S(t(2, 3, dtype="int64"), t(3), t(3)),
)


@lowers("aten.clamp.Tensor", "aten.clip.Tensor", samples=CLAMP_TENSOR, dtypes=NUMBERS)
@lowers("aten.clamp.default", "aten.clip.default", samples=CLAMP, dtypes=FLOATS)
def clamp(self: Value, min: Value | Scalar | None = None, max: Value | Scalar | None = None) -> Value:
    """min(max(self, min), max), either bound absent; bounds are numbers or tensors and take part in promotion."""
    bounds = [(f, b) for f, b in ((maximum, min), (minimum, max)) if b is not None]

    def f(x: Expr, *given: Expr) -> Expr:
        for (extreme, _), b in zip(bounds, given, strict=True):
            x = extreme(x, b)
        return x

    return self.graph.pointwise(f, self, *(b for _, b in bounds))


@lowers("aten.clamp_min.Tensor", samples=[S(s.args[0], s.args[1]) for s in CLAMP_TENSOR], dtypes=NUMBERS)
@lowers(
    "aten.clamp_min.default", samples=(S(t(3, 5), 0), S(t(2, 3, layout="transposed"), 0.5), S(t(), -1)), dtypes=NUMBERS
)
def clamp_min(self: Value, min: Value | Scalar) -> Value:
    """The larger of self and min; NaN propagates."""
    return self.graph.pointwise(maximum, self, min)


@lowers("aten.clamp_max.Tensor", samples=[S(s.args[0], s.args[1]) for s in CLAMP_TENSOR], dtypes=NUMBERS)
@lowers(
    "aten.clamp_max.default", samples=(S(t(3, 5), 0), S(t(2, 3, layout="transposed"), 0.5), S(t(), -1)), dtypes=NUMBERS
)
def clamp_max(self: Value, max: Value | Scalar) -> Value:
    """The smaller of self and max; NaN propagates."""
    return self.graph.pointwise(minimum, self, max)


def select(condition: Value, a: Value | Scalar, b: Value | Scalar, dtype: str) -> Value:
    """``a`` where ``condition`` else ``b``, computed in (the opmath of) ``dtype``; exact for either."""
    wide = dt.opmath(dtype)

    def f(c: Expr, x: Any, y: Any) -> Expr:
        return where(truth(c), *(v.cast(wide) if isinstance(v, Expr) else const(v, wide) for v in (x, y)))

    return condition.graph.pointwise(f, condition, a, b, promote=False, opmath=False)


COND = t(3, 4, dtype="bool")


def _where(condition: Value, self: Value | Scalar, other: Value | Scalar) -> Value:
    """Elements of self where condition holds, else of other."""
    return select(condition, self, other, result_type([self, other]))


lowers(
    "aten.where.self",
    samples=(
        S(COND, t(3, 4), t(3, 4)),
        S(COND, t(4), t(3, 1)),
        S(t(dtype="bool"), t(2, 3, layout="transposed"), t()),
        S(COND, t(3, 4, dtype="int64"), t(4)),
        S(t(0, 3, dtype="bool"), t(3), t(3)),
    ),
    dtypes=EVERY,
)(_where)
lowers(
    "aten.where.ScalarOther",
    samples=(S(COND, t(3, 4), 0), S(COND, t(4), -1.5), S(t(4, dtype="bool"), t(2, 4), -math.inf)),
    dtypes=EVERY,
)(_where)
lowers(
    "aten.where.ScalarSelf",
    samples=(S(COND, 0, t(3, 4)), S(COND, -1.5, t(4)), S(t(4, dtype="bool"), math.inf, t(2, 4))),
    dtypes=EVERY,
)(_where)
lowers(
    "aten.where.Scalar", samples=(S(COND, 1, 0), S(COND, -1.5, 2), S(t(dtype="bool"), True, False)), dtypes=("float32",)
)(_where)


@lowers(
    "aten.masked_fill.Scalar",
    samples=(
        S(t(3, 4), COND, 0),
        S(t(2, 3, 4), COND, -1),
        S(t(4), COND, 1),
        S(t(2, 3, layout="transposed"), t(dtype="bool"), 2),
    ),
    dtypes=EVERY,
)
@lowers(
    "aten.masked_fill.Tensor",
    samples=(S(t(3, 4), COND, t()), S(t(2, 3, 4), COND, t()), S(t(4), COND, t())),
    dtypes=EVERY,
)
def masked_fill(self: Value, mask: Value, value: Value | Scalar) -> Value:
    """value where mask holds, in self's dtype."""
    return select(mask, value, self, self.dtype)
