"""Elementwise arithmetic, comparison, logic and rounding, with PyTorch's promotion rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from ..graph.expr import Expr, behind_if_zero, call, const, fn, load, maximum, minimum, where
from ..graph.graph import Value, result_type
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .access import identity
from .common import binary, names, scaled, unary
from .registry import ALL, FLOATS, INTS, REGISTRY, Scalar, lowers, pointwise
from .samples import BINARY, POSITIVE, UNARY, UNIT, S, Sample, t

exp, log, log1p, sqrt = fn("exp"), fn("log"), fn("log1p"), fn("sqrt")
absolute, isnan, isinf, trunc = fn("abs"), fn("isnan"), fn("isinf"), fn("trunc")

EVERY = (*FLOATS, *INTS)
NUMBERS = (*FLOATS, "int64", "int32")
MIXED = (
    S(t(3, 4), t(3, 4, dtype="int64")),
    S(t(3, 1, dtype="int32"), t(4)),
    S(t(2, 3, dtype="bool"), t(2, 3)),
    S(t(2, 3, dtype="uint8", high=9), t(3, dtype="int8")),
    S(t(2, 3, dtype="int64"), t(dtype="float32")),
    S(t(3, 4, layout="transposed"), 1.5),
)
SPECIAL = (S(t(5, values=(math.nan, 1, math.inf, -math.inf, 2)), t(5, values=(1, math.nan, 3, 4, math.inf))),)
NONZERO = (
    S(t(3, 5, low=-9, high=9), t(3, 5, low=1, high=5)),
    S(t(2, 3, 4, low=-9, high=9), t(4, low=-5, high=-1)),
    S(t(2, 1, 4, low=-30, high=30, layout="transposed"), t(3, 1, low=2, high=4)),
    S(t(3, 4, low=-9, high=9), t(low=1, high=3)),
    S(t(3, 5, low=-9, high=9), 2),
    S(t(3, 5, low=-9, high=9), -3),
    S(t(3, 5, low=-9, high=9), 1.5),
    S(t(0, 3), t(3, low=1, high=3)),
)


def tensors(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the samples whose second argument is a tensor, as .Tensor overloads want it."""
    return tuple(s for s in samples if not isinstance(s.args[1], int | float))


def numbers(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the samples whose second argument is a number, for .Scalar overloads, and one with a negative number."""
    return (
        *(s for s in samples if isinstance(s.args[1], int | float)),
        S(t(2, 3, layout="transposed"), 3),
        S(t(), 2),
        S(t(0, 2), 1),
    )


def is_float(x: Expr) -> bool:
    """Whether ``x`` has a floating dtype."""
    return dt.is_float(x.dtype)


def truth(x: Expr) -> Expr:
    """Return ``x != 0`` as a bool."""
    return x if x.dtype == "bool" else call("ne", x, 0)


TENSORS = tensors(BINARY + MIXED + SPECIAL)
SIGNED = tuple(s for s in BINARY + MIXED if s.args[0].dtype != "bool")  # PyTorch refuses to subtract bools


# -- one argument -----------------------------------------------------------------------------------------------------
ACOSH = (S(t(3, 5, low=1, high=9)), S(t(2, 3, 4, low=1, high=2, layout="transposed")), S(t(7, low=1.5, high=100)))

for _name, _samples in {
    **{
        n: UNARY
        for n in (
            "exp",
            "exp2",
            "expm1",
            "sin",
            "cos",
            "tan",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "erf",
            "sigmoid",
        )
    },
    **{n: POSITIVE for n in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")},
    **{n: UNIT for n in ("asin", "acos", "atanh")},
    "acosh": ACOSH,
}.items():
    _aliases = {
        "sigmoid": ["special_expit"],
        **{n: [f"special_{n}"] for n in ("exp2", "expm1", "log1p", "erf")},
        **{n: [f"arc{n[1:]}"] for n in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    }.get(_name, [])
    unary(names(_name, aliases=_aliases), _name, _samples, (*ALL, "bool"), floating=True)

unary(names("reciprocal"), lambda x: 1 / x, (*UNARY, *POSITIVE), (*FLOATS, "int64"), floating=True)
unary(names("deg2rad"), lambda x: x * (math.pi / 180), dtypes=ALL, floating=True)
unary(names("rad2deg"), lambda x: x * (180 / math.pi), dtypes=ALL, floating=True)
unary(names("abs", aliases=["absolute"]), "abs", dtypes=(*ALL, "int32"))
unary(names("neg", aliases=["negative"]), "neg", dtypes=(*ALL, "int32"))
unary(names("square"), lambda x: x * x, dtypes=(*ALL, "int32"))
unary(
    names("sign", aliases=["sgn"]),  # NaN gives 0
    lambda x: (
        x
        if x.dtype == "bool"
        else where(x > 0, const(1, x.dtype), where(call("lt", x, 0), const(-1, x.dtype), const(0, x.dtype)))
    ),
    (
        *UNARY,
        S(
            t(3, values=(math.nan, math.inf, -0.0)),
        ),
    ),
    NUMBERS,
)


def _for_floats(f: Callable[..., Expr], other: Expr | None) -> Callable[[Expr], Expr]:
    """``f`` for floats; integers and bools give ``other``, or themselves."""
    return lambda x: f(x) if is_float(x) else x if other is None else other


HALVES = (*UNARY, S(t(7, values=(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5))), S(t(3, 5, low=-99, high=99)))
for _name, _op in {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "fix": "trunc", "round": "round"}.items():
    unary(names(_name), _for_floats(fn(_op), None), HALVES, ALL)
unary(names("frac"), lambda x: x - trunc(x), HALVES)

SPECIALS = (S(t(5, values=(math.nan, math.inf, -math.inf, 0, -1.5))), *UNARY[:3])
INF = math.inf
for _name, _f, _of_int in (
    ("isnan", isnan, False),
    ("isinf", isinf, False),
    ("isfinite", lambda x: absolute(x) < INF, True),
    ("isposinf", lambda x: call("eq", x, INF), False),
    ("isneginf", lambda x: call("eq", x, -INF), False),
):
    unary(names(_name), _for_floats(_f, const(_of_int, "bool")), SPECIALS, EVERY)


@lowers(
    "aten.nan_to_num.default", samples=(*SPECIALS, S(SPECIALS[0].args[0], 1.0), S(SPECIALS[0].args[0], None, 2.0, -3.0))
)
def nan_to_num(
    self: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    """NaN and infinities replaced, by 0 and the dtype's extremes unless given."""
    if not dt.is_float(self.dtype):
        return self
    top = float(ml_dtypes.finfo(dt.numpy_dtype(self.dtype)).max)  # type: ignore[no-untyped-call]
    high, low = top if posinf is None else posinf, -top if neginf is None else neginf

    def f(x: Expr) -> Expr:
        y = where(call("eq", x, INF), high, where(call("eq", x, -INF), low, x))
        return where(isnan(x), nan or 0.0, y)

    return self.graph.pointwise(f, self)


@pointwise(
    "aten.round.decimals",
    samples=(S(t(3, 5), decimals=1), S(t(4, low=-99, high=99), decimals=-1), S(t(2, 3), decimals=0)),
)
def round_decimals(self: Expr, *, decimals: int) -> Expr:
    """Round to that many decimals, half to even."""
    power = 10.0 ** abs(decimals)
    return fn("round")(self * power) / power if decimals >= 0 else fn("round")(self / power) * power


@pointwise(
    "aten.logit.default",
    "aten.special_logit.default",
    samples=(
        S(t(3, 5, low=0.01, high=0.99)),
        S(t(7, low=-0.2, high=1.2), 0.1),
        S(t(2, 3, low=0.1, high=0.9, layout="transposed"), None),
    ),
    floating=True,
)
def logit(self: Expr, eps: float | None = None) -> Expr:
    """log(x / (1 - x)), with x clamped to [eps, 1 - eps] if eps is given."""
    x = self if eps is None else minimum(maximum(self, eps), 1 - eps)
    return log(x / (1 - x))


# -- arithmetic of two ------------------------------------------------------------------------------------------------
ALPHA = (S(t(3, 5), t(5), alpha=2), S(t(3, 5), t(3, 1), alpha=-1), S(t(2, 3), 3, alpha=2))


SCALAR_ALPHA = (S(t(3, 5), 2), S(t(2, 3, layout="transposed"), 1.5), S(t(4), 3, 2), S(t(), -1), S(t(0, 3), 2.5))


@pointwise("aten.add.Scalar", samples=SCALAR_ALPHA, dtypes=EVERY)
@pointwise("aten.add.Tensor", samples=BINARY + MIXED + ALPHA + SPECIAL, dtypes=EVERY)
def add(self: Expr, other: Expr, *, alpha: Scalar = 1) -> Expr:
    """self + alpha * other; of bools: or."""
    if self.dtype == "bool":
        return self | other if alpha else self
    return self + scaled(other, alpha)


@pointwise("aten.sub.Scalar", "aten.subtract.Scalar", samples=SCALAR_ALPHA, dtypes=NUMBERS)
@pointwise("aten.sub.Tensor", "aten.subtract.Tensor", samples=SIGNED + ALPHA, dtypes=NUMBERS)
def sub(self: Expr, other: Expr, *, alpha: Scalar = 1) -> Expr:
    """self - alpha * other."""
    return self - scaled(other, alpha)


@pointwise("aten.rsub.Scalar", samples=SCALAR_ALPHA, dtypes=NUMBERS)
@pointwise("aten.rsub.Tensor", samples=tensors(SIGNED) + ALPHA[:2], dtypes=NUMBERS)
def rsub(self: Expr, other: Expr, *, alpha: Scalar = 1) -> Expr:
    """other - alpha * self."""
    return other - scaled(self, alpha)


def _mul(a: Expr, b: Expr) -> Expr:
    return a & b if a.dtype == "bool" else a * b


def _truncdiv(a: Expr, b: Expr) -> Expr:
    return trunc(a / b) if is_float(a) else call("idiv", a, b)


binary(names("mul", "Tensor", aliases=["multiply"]), _mul, BINARY + MIXED + SPECIAL, EVERY)
binary(names("mul", "Scalar", aliases=["multiply"]), _mul, SCALAR_ALPHA[:2] + SCALAR_ALPHA[3:], EVERY)
binary(
    names("div", "Tensor", aliases=["divide", "true_divide"]),
    "div",
    BINARY + MIXED + NONZERO,
    EVERY,
    floating=True,
)
binary(names("div", "Scalar", aliases=["divide", "true_divide"]), "div", numbers(NONZERO), EVERY, floating=True)


def divided(f: Callable[[Expr, Expr], Expr], a: Value | Scalar, b: Value | Scalar) -> Value:
    """Divide; an integer division by zero is reported as an error at run time."""
    graph = next(v.graph for v in (a, b) if isinstance(v, Value))
    dtype = result_type([a, b])
    if not dt.is_float(dtype):
        if not isinstance(b, Value):
            if b == 0:
                raise Unsupported(Reason("arguments", "integers divided by zero"))
        else:
            b = _nonzero(b.cast(dtype) if b.dtype == "bool" else b)
    return graph.pointwise(f, a, b)


def _nonzero(b: Value) -> Value:
    """Return ``b``; a zero reads past the end of a table, which every target reports as a division by zero."""
    divisor = load(0, b.dtype, identity(b.rank))
    table = b.graph.const(np.zeros(1, dt.numpy_dtype(b.dtype)))
    return b.graph.elementwise(b.shape, [b, table], divisor + load(1, b.dtype, [behind_if_zero(divisor)]))


def declare_division(name: str, overload: str, f: str, samples: Sequence[Sample]) -> None:
    """Declare ``name.overload`` as the scalar op ``f`` with integer divisors checked."""

    def op(self: Value | Scalar, other: Value | Scalar) -> Value:
        return divided(fn(f), self, other)

    op.__doc__ = f"Elementwise {name} of two tensors, or of a tensor and a number; integers by zero are an error."
    lowers(*names(name, overload), samples=samples, dtypes=NUMBERS)(op)


for _name in ("remainder", "fmod"):
    declare_division(_name, "Tensor", _name, tensors(NONZERO))
    declare_division(_name, "Scalar", _name, numbers(NONZERO))
declare_division("floor_divide", "default", "floordiv", tensors(NONZERO))
declare_division("floor_divide", "Scalar", "floordiv", numbers(NONZERO))
_NUMBER_FIRST = (
    S(7, t(3, 5, low=1, high=4)),
    S(-7, t(2, 3, low=1, high=4, layout="transposed")),
    S(2.5, t(4, low=-3, high=-1)),
)
declare_division("remainder", "Scalar_Tensor", "remainder", _NUMBER_FIRST)


@lowers(
    "aten.div.Scalar_mode",
    "aten.divide.Scalar_mode",
    samples=[S(*s.args, rounding_mode=m) for s in numbers(NONZERO) for m in ("floor", "trunc", None)],
    dtypes=NUMBERS,
)
@lowers(
    "aten.div.Tensor_mode",
    "aten.divide.Tensor_mode",
    samples=[S(*s.args, rounding_mode=m) for s in (*NONZERO, *_NUMBER_FIRST) for m in ("floor", "trunc", None)],
    dtypes=NUMBERS,
)
def div_mode(self: Value | Scalar, other: Value | Scalar, *, rounding_mode: str | None) -> Value:
    """Division rounded down, towards zero, or not at all."""
    if rounding_mode is None:
        true_division: Value = REGISTRY["aten.div.Tensor"].lower(self=self, other=other)
        return true_division
    return divided({"floor": fn("floordiv"), "trunc": _truncdiv}[rounding_mode], self, other)


POW_TENSOR = (
    S(t(3, 5, low=0.1, high=3), t(3, 5, low=0)),
    S(t(2, 3, 4, low=0.5, high=2), t(4, low=0, high=3)),
    S(t(1, 2, low=1, high=4, layout="transposed"), t(3, 1, dtype="int64", low=0, high=3)),
    S(t(4, dtype="int64", values=(-1, 1, 2, 3)), t(4, dtype="int64", values=(-3, -2, -1, 3))),
    S(t(3, low=0.1), t(low=0)),
)
POW_SCALAR = [
    *(S(t(3, 5, dtype="float32", low=0.1, high=3), e) for e in (-2, -1)),
    *(S(t(3, 5, low=0.1, high=3), e) for e in (-0.5, 0.5, 2.5, 2.0)),
    *(S(t(2, 3, layout="transposed"), e) for e in (0, 1, 2, 3, 4)),
    S(t(0, 2), 3),
    S(t(3, dtype="int32"), 2.0),
]
SCALAR_POW = (
    S(2, t(3, 5, low=0, high=3)),
    S(2.5, t(2, 3, layout="transposed")),
    S(1, t(4, low=0, high=4)),
    S(0.5, t()),
)


@pointwise("aten.pow.Tensor_Tensor", samples=POW_TENSOR, dtypes=ALL)
@pointwise("aten.pow.Tensor_Scalar", samples=POW_SCALAR, dtypes=ALL)
@pointwise("aten.pow.Scalar", samples=SCALAR_POW, dtypes=ALL)
def power(self: Expr, exponent: Expr) -> Expr:
    """self ** exponent: exact short cuts for common constant exponents; integers by ATen's rules."""
    if not is_float(self):
        return _integer_power(self, exponent)
    x = self
    short = {
        0: const(1, x.dtype),
        1: x,
        2: x * x,
        3: x * x * x,
        0.5: sqrt(x),
        -0.5: fn("rsqrt")(x),
        -1: 1 / x,
        -2: 1 / (x * x),
    }
    found = short.get(exponent.value) if exponent.op == "const" else None
    return call("pow", x, exponent) if found is None else found


def _integer_power(base: Expr, exponent: Expr) -> Expr:
    if base.dtype == "bool":
        return base | ~exponent
    if exponent.op == "const":
        if exponent.value < 0:
            raise Unsupported(Reason("arguments", "integers to a negative integer power", "cast to a floating dtype"))
        return base * base if exponent.value == 2 else call("pow", base, exponent)
    one, zero = const(1, base.dtype), const(0, base.dtype)
    odd = call("ne", exponent & 1, 0)
    inverse = where(
        call("eq", base, 1), one, where(call("eq", base, -1), where(odd, -one, one), zero)
    )  # 1 / base, truncated
    return where(call("lt", exponent, 0), inverse, call("pow", base, maximum(exponent, 0)))


@pointwise(
    "aten.lerp.Scalar",
    samples=(S(t(3, 5), t(3, 5), 0.3), S(t(2, 3, 4), t(4), 0.7), S(t(1, 2, layout="transposed"), t(3, 1), 2)),
)
@pointwise(
    "aten.lerp.Tensor",
    samples=(
        S(t(3, 5), t(3, 5), t(5, low=0, high=1)),
        S(t(2, 3, 4), t(4), t()),
        S(t(1, 2, layout="transposed"), t(3, 1), t(1)),
    ),
)
def lerp(self: Expr, end: Expr, weight: Expr) -> Expr:
    """self + weight * (end - self)."""
    step = end - self
    return where(absolute(weight) < 0.5, self + weight * step, end - step * (1 - weight))


THREE = (
    S(t(3, 5), t(3, 5), t(3, 5, low=1, high=4)),
    S(t(3, 1), t(4), t(3, 1, low=1, high=4), value=-2),
    S(t(2, 3, layout="transposed"), t(), t(3, low=1, high=4), value=3),
)


@pointwise("aten.addcmul.default", samples=(*THREE, S(t(2, dtype="float32"), t(2), t(2), value=0.5)), dtypes=ALL)
def addcmul(self: Expr, tensor1: Expr, tensor2: Expr, *, value: Scalar = 1) -> Expr:
    """self + value * tensor1 * tensor2."""
    return self + scaled(tensor1 * tensor2, value)


@pointwise("aten.addcdiv.default", samples=(*THREE, S(t(2), t(2), t(2, low=1), value=0.5)))
def addcdiv(self: Expr, tensor1: Expr, tensor2: Expr, *, value: Scalar = 1) -> Expr:
    """self + value * tensor1 / tensor2."""
    return self + scaled(tensor1 / tensor2, value)


# -- functions of two -------------------------------------------------------------------------------------------------
def _logaddexp(a: Expr, b: Expr) -> Expr:
    return where(isinf(a) & call("eq", a, b), a, maximum(a, b) + log1p(exp(-absolute(a - b))))


def _logaddexp2(a: Expr, b: Expr) -> Expr:
    return where(
        isinf(a) & call("eq", a, b), a, maximum(a, b) + log1p(fn("exp2")(-absolute(a - b))) * (1 / math.log(2))
    )


def _xlogy(a: Expr, b: Expr) -> Expr:
    return where(isnan(b), b, where(call("eq", a, 0), const(0, a.dtype), a * log(b)))


INFINITE = (
    S(t(4, values=(math.inf, -math.inf, math.inf, 0)), t(4, values=(math.inf, -math.inf, -math.inf, math.nan))),
)
XLOGY = (
    S(t(3, 5), t(3, 5, low=0, high=4)),
    S(t(2, 3, 4), t(4, low=0.5, high=4)),
    S(t(1, 2, layout="transposed"), t(3, 1, low=1)),
    S(t(2, values=(0, 0)), t(2, values=(0, math.nan))),
)
binary(names("logaddexp"), _logaddexp, TENSORS[:5] + INFINITE)
binary(names("logaddexp2"), _logaddexp2, TENSORS[:5] + INFINITE)
binary(names("atan2", aliases=["arctan2"]), "atan2", TENSORS, ALL, floating=True)
binary(["aten.xlogy.Tensor", "aten.special_xlogy.default"], _xlogy, XLOGY, (*FLOATS, "int64"), floating=True)
binary(
    ["aten.xlogy.Scalar_Other", "aten.special_xlogy.other_scalar"],
    _xlogy,
    (S(t(3, 5), 2), S(t(2, 3, layout="transposed"), 0.5), S(t(), 1)),
    floating=True,
)
binary(
    ["aten.xlogy.Scalar_Self", "aten.special_xlogy.self_scalar"],
    _xlogy,
    (S(2, t(3, 5, low=0)), S(0, t(2, 3, low=0, layout="transposed")), S(1.5, t(low=1))),
    floating=True,
)
