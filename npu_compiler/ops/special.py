"""Special functions. Those related to the gamma function are computed in float64 and rounded once; targets without
float64 leave them to the host. The others are computed in float32.

Coefficients are minimax fits of ``tools/fit_special.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ..graph.expr import Expr, call, fn, where
from ..support.errors import Reason, Unsupported
from .common import names, unary
from .registry import FLOATS, pointwise
from .samples import POSITIVE, UNARY, S, t

exp, log, log1p, sqrt, erf = fn("exp"), fn("log"), fn("log1p"), fn("sqrt"), fn("erf")
absolute, nearest = fn("abs"), fn("round")
INF, NAN, PI = math.inf, math.nan, math.pi


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Return the sum of ``coefficients[i] * x ** i``."""
    total = x * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        total = total * x + c
    return total


# -- gamma ------------------------------------------------------------------------------------------------------------
# The asymptotic series hold from 10 on. Smaller arguments are moved there by the recurrence gamma(x + 1) = x gamma(x).
_STEPS = 10
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)  # B2, B4, ...
# sin(pi r) / r and pi r / tan(pi r) by r^2, up to a half.
SINE = (
    3.141592653589793, -5.167712780049969, 2.550164039877294, -0.5992645293187383, 0.08214588656989338,
    -0.007370430478767571, 0.0004662996887906385, -2.1903185448356633e-05, 7.694727459064216e-07,
)  # fmt: skip
COTANGENT = (
    1.0000000000000007, -3.289868133697373, -2.1646464671954537, -2.034686146055194, -2.0081535886197512,
    -2.0020234069766563, -1.9998164759476862, -2.0091422878604783, -1.9165693599378963, -2.5391809896139494,
    0.4073794813201321, -9.183406880052203, 11.259806721280418, -14.43257051843913,
)  # fmt: skip


def _moved(x: Expr) -> tuple[Expr, Expr]:
    """Return whether ``x`` is below 10, and an argument from 10 on."""
    small = x < _STEPS
    return small, where(small, x + _STEPS, x)


def _between_integers(x: Expr) -> Expr:
    """Return ``x`` minus the nearest integer."""
    return x - nearest(x)


def _sine(x: Expr) -> Expr:
    """sin(pi x)."""
    r = _between_integers(x)
    return r * polynomial(r * r, SINE)


def lgamma(x: Expr) -> Expr:
    """log|gamma(x)|; below 1/2 by the reflection gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    left = x < 0.5
    y = where(left, 1 - x, x)
    small, z = _moved(y)
    product = y
    for i in range(1, _STEPS):
        product = product * (y + i)
    product = where(small, product, 1.0)
    inverse = 1 / z
    series = polynomial(inverse * inverse, [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]) * inverse
    stirling = (z - 0.5) * log(z) - z + 0.5 * math.log(2 * PI) + series
    factor = log(where(left, product / absolute(_sine(x)), product))
    result = where(left, math.log(PI) - stirling + factor, stirling - factor)
    result = where(call("or", call("eq", x, 1), call("eq", x, 2)), 0.0, result)  # the terms leave a rounding error
    return where(call("eq", absolute(x), INF), INF, result)


def digamma(x: Expr) -> Expr:
    """The derivative of log gamma(x); NaN at negative integers, an infinity of the sign of -x at zero."""
    left = x < 0
    y = where(left, 1 - x, x)
    small, z = _moved(y)
    product, slope = y, y * 0 + 1
    for i in range(1, _STEPS):
        product, slope = product * (y + i), slope * (y + i) + product
    inverse = 1 / z
    square = inverse * inverse
    series = square * polynomial(square, [b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)])
    right = log(z) - 0.5 * inverse - series - where(small, slope / product, 0.0)
    turn = _between_integers(x)
    reflected = where(call("eq", turn, 0), NAN, right - polynomial(turn * turn, COTANGENT) / turn)
    return where(call("eq", x, 0), -1 / x, where(left, reflected, right))


def trigamma(x: Expr) -> Expr:
    """The derivative of ``digamma``; infinite at 0, -1, ..."""
    left = x < 0.5
    y = where(left, 1 - x, x)
    small, z = _moved(y)
    terms = 1 / (y * y)
    for i in range(1, _STEPS):
        terms = terms + 1 / ((y + i) * (y + i))
    square = 1 / (z * z)
    series = square / z * polynomial(square, _BERNOULLI)
    right = 1 / z + 0.5 * square + series + where(small, terms, 0.0)
    height = _sine(x)
    return where(left, PI * PI / (height * height) - right, right)


GAMMA = (
    *UNARY,
    *POSITIVE,
    S(t(40, low=-6.9, high=9)),
    S(t(24, values=[i / 4 for i in range(1, 25)])),
    S(t(9, values=(1e-20, -1e-20, 0.999, 1.001, 1.999, 2.001, 900, 1e8, 3e30))),
)
POLES = S(t(7, values=(0.0, -1, -2, -100, INF, -INF, NAN)))
unary(names("lgamma", aliases=["special_gammaln"]), lgamma, (*GAMMA, POLES), floating=True, arithmetic="float64")
unary(
    names("digamma", aliases=["special_digamma", "special_psi"]),
    digamma,
    (*GAMMA, POLES, S(t(2, values=(0.0, -0.0)))),
    FLOATS,
    floating=True,
    arithmetic="float64",
)


@pointwise(
    *names("polygamma", aliases=["special_polygamma"]),
    samples=(
        *(S(0, *s.args) for s in GAMMA[:3]),
        *(S(1, *s.args) for s in POSITIVE),
        S(1, t(16, values=[i + 0.25 for i in range(-8, 8)])),  # PyTorch's poles are finite
        S(1, t(4, values=(0.0, INF, -INF, NAN))),
    ),
    floating=True,
    arithmetic="float64",
)
def polygamma(n: int, self: Expr) -> Expr:
    """The derivative of order ``n`` of digamma, 0 or 1."""
    if n not in (0, 1):
        raise Unsupported(Reason("arguments", f"polygamma of order {n}", "orders 0 and 1 are native"))
    return trigamma(self) if n else digamma(self)


# -- the error function and its relatives -----------------------------------------------------------------------------
# erf(x) / x - 1 by x^2, for |x| up to 0.5.
ERF_NEAR = (0.128379166, -0.376126081, 0.112828225, -0.0267571844, 0.00471799076)
# exp(a^2) erfc(a) (1 + 2 a) - 1 by 1 - 6 / (a + 3).
ERFCX = (
    0.253008068, -0.135621309, -0.0475625917, 0.129650727, -0.119270012, 0.0682654604, -0.0237870514, 0.00266861753,
    0.00192248716, -0.000999872922, -0.000136572839, 0.000289212767, 1.5275371e-05, -6.32425581e-05,
)  # fmt: skip
# The same for a from 0.5 to where erfc(a) is zero, by 1 - 6 / (a + shift), and from 0 on to 16 bits.
ERFC_SHIFT, ERFC_ZERO = 2.5, 10.2
ERFC_TAIL = (
    0.242349252, -0.120007858, -0.0248992145, 0.0567460433, -0.0366265662, 0.0125932852, -0.00120105385,
    -0.000911351701, 0.000281774061, 0.000103375562,
)  # fmt: skip
ERFC_SHORT = (0.242350027, -0.119906746, -0.0249041561, 0.0556282289, -0.0373932421, 0.0150953149, 0.00213329378)
# erfinv(x) / x by w = -log(1 - x^2) up to 5, then by sqrt(w) up to 4, and by sqrt(w), each minus a centre.
ERFINV_CENTRES = (2.487548828125, 2.99755859375, 6.991943359375)
ERFINV_NEAR = (
    1.49833775, 0.246743724, -0.00413038954, -0.00126362417, 0.000218645466, -4.70302575e-06, -3.50326764e-06,
    4.63777667e-07, 2.42209452e-08, -8.78863116e-09,
)  # fmt: skip
ERFINV_FAR = (
    2.83053136, 1.00162899, 0.00950157084, -0.00769840879, 0.00573044969, -0.00358962384, 0.00148058403,
    -0.000112277623, -0.00028648178, 0.000159459829, -2.63854272e-05,
)  # fmt: skip
ERFINV_FARTHEST = (
    6.86089373, 1.00860465, -0.000513294362, 5.08918401e-06, 6.40824419e-06, -1.28645536e-06, 2.51310155e-07,
    -9.69231735e-08, 1.53597881e-08,
)  # fmt: skip
# The same by w up to 17, minus a centre, to 16 bits.
ERFINV_SHORT_CENTRE = 8.5
ERFINV_SHORT = (
    2.74839187, 0.17150037, -0.00470724562, 0.000221157534, -8.75234946e-06, 3.80664915e-07, 5.13855269e-08,
    -3.10947001e-08, 2.78255419e-09, 1.21453667e-10, -1.65919587e-11,
)  # fmt: skip
_NEAR, _FAR, _FARTHEST = ERFINV_CENTRES
_ZERO, _INFINITE = 15.0, 9.4  # exp(-a^2 / 2) is zero from there on, twice exp(a^2) is infinite
_TO_256THS = 1.5 * 2**15  # the sum of it and a smaller float32 is rounded to 2^-8


def _erfcx(a: Expr) -> Expr:
    """exp(a^2) erfc(a) for a >= 0."""
    return (1 + polynomial(1 - 6 / (a + 3), ERFCX)) / (1 + 2 * a)


def _at_most(a: Expr, most: float) -> Expr:
    return where(a > most, most, a)


def _exp_of_square(a: Expr, factor: float) -> Expr:
    """exp(factor a^2) for 0 <= a <= 15. ``a`` is the sum of two numbers: the square of ``head`` is exact, and what is
    left of that of ``a`` is at most 0.06, so that four terms of its exponential are enough."""
    head = (a + _TO_256THS) - _TO_256THS
    rest = factor * ((a - head) * (a + head))
    whole = exp(factor * (head * head))
    return whole + whole * (rest * polynomial(rest, (1, 1 / 2, 1 / 6, 1 / 24)))


def _erfc_tail(a: Expr, exp_of_square: Expr, coefficients: Sequence[float]) -> Expr:
    """erfc(a) for 0 <= a <= ``ERFC_ZERO`` from exp(-a^2). One division: GPUs take ten instructions for one."""
    shifted, divisor = a + ERFC_SHIFT, 1 + 2 * a
    both = 1 / (shifted * divisor)
    rough = shifted * both
    quotient = rough + rough * (1 - divisor * rough)  # 1 / divisor
    return exp_of_square * (quotient + quotient * polynomial(1 - 6 * (divisor * both), coefficients))


def erfc(x: Expr) -> Expr:
    """1 - erf(x), with small results to the last digit."""
    a = _at_most(absolute(x), ERFC_ZERO)
    tail = _erfc_tail(a, _exp_of_square(a, -1), ERFC_TAIL)
    near = 1 - (x + x * polynomial(x * x, ERF_NEAR))
    return where(a < 0.5, near, where(x < 0, 2 - tail, tail))


def erfc_short(x: Expr) -> Expr:
    """erfc of a number of 16 bits, whose square is exact in float32."""
    a = _at_most(absolute(x), ERFC_ZERO)
    tail = _erfc_tail(a, exp(-(a * a)), ERFC_SHORT)
    return where(x < 0, 2 - tail, tail)


def erfcx(x: Expr) -> Expr:
    """exp(x^2) erfc(x)."""
    a = absolute(x)
    right = _erfcx(a)
    return where(x < 0, 2 * _exp_of_square(_at_most(a, _INFINITE), 1) - right, right)


def log_ndtr(x: Expr) -> Expr:
    """The logarithm of the normal distribution function."""
    a = absolute(x)
    right = _erfcx(a * math.sqrt(0.5))
    left = log(right * 0.5) - x * x * 0.5
    half = 0.5 * _exp_of_square(_at_most(a, _ZERO), -0.5) * right
    return where(x < -1, left, log1p(-where(x < 0, 1 - half, half)))


def _erfinv_arguments(x: Expr) -> tuple[Expr, Expr]:
    """Return |x| and -log(1 - x^2)."""
    a = absolute(x)
    return a, -log((1 - a) * (1 + a))


def _erfinv_ratio(w: Expr, far: Expr) -> Expr:
    """erfinv(x) / x by w = -log(1 - x^2). ``far``: the result for w > 5."""
    return where(w > 5, far, polynomial(w - _NEAR, ERFINV_NEAR))


def erfinv(x: Expr) -> Expr:
    """The inverse of erf. Source: M. Giles, "Approximating the erfinv function", 2010."""
    a, w = _erfinv_arguments(x)
    return where(call("eq", a, 1), x * INF, x * _erfinv_ratio(w, polynomial(sqrt(w) - _FAR, ERFINV_FAR)))


def erfinv_short(x: Expr) -> Expr:
    """erfinv for a result of 16 bits."""
    a = absolute(x)
    w = call("log2_rough", (1 - a) * (1 + a)) * -math.log(2) - ERFINV_SHORT_CENTRE
    return x * where(w > 30, INF, polynomial(w, ERFINV_SHORT))  # |x| = 1


def ndtri(p: Expr) -> Expr:
    """The inverse of the normal distribution function, sqrt(2) erfinv(2 p - 1)."""
    y = where(p > 0.5, 1 - p, p)
    w = -log(4 * y * (1 - y))
    s = sqrt(w)
    far = where(s > 4, polynomial(s - _FARTHEST, ERFINV_FARTHEST), polynomial(s - _FAR, ERFINV_FAR))
    z = (math.sqrt(2) * (1 - 2 * y)) * _erfinv_ratio(w, far)
    z = where(call("eq", y, 0), INF, z)
    return where(p > 0.5, z, -z)


WIDE = (S(t(60, low=-9, high=9)), S(t(9, values=(INF, -INF, NAN, 0.0, -0.0, 1e-20, 14.0, -14.0, 1e30))))
INSIDE = (
    S(t(3, 5, low=-0.99, high=0.99)),
    S(t(41, low=-1, high=1)),
    S(t(12, values=(0.0, 1e-20, -1e-8, 0.5, -0.9999, 0.999999, 0.9999999, 1, -1, 1.5, INF, NAN))),
)
PROBABILITIES = (
    S(t(3, 5, low=0.01, high=0.99)),
    S(t(41, low=0, high=1, layout="strided")),
    S(t(12, values=(0.0, 1e-37, 1e-20, 1e-4, 0.5, 0.4999, 0.9999, 0.9999999, 1, -0.1, 1.5, NAN))),
)
for _name, _f, _short, _samples in (
    ("erfc", erfc, erfc_short, (*UNARY, *WIDE)),
    ("special_erfcx", erfcx, None, (*UNARY, *WIDE)),
    ("special_log_ndtr", log_ndtr, None, (*UNARY, *WIDE)),
    ("erfinv", erfinv, erfinv_short, INSIDE),
    ("special_ndtri", ndtri, None, PROBABILITIES),
):
    _aliases = [f"special_{_name}"] if _name in ("erfc", "erfinv") else []
    unary(names(_name, aliases=_aliases), _f, _samples, FLOATS, floating=True, arithmetic="float32", short=_short)


# -- Bessel functions -------------------------------------------------------------------------------------------------
# Up to 8: I(x) / (x / 4)^order by (x / 4)^2, a sum of positive terms. From 8 on: exp(-x) I(x) sqrt(x) by 16 / x - 1.
I0_NEAR = (
    1.0, 4.0, 4.00000048, 1.77777445, 0.444454044, 0.0710959211, 0.00791548844, 0.000636766024, 4.32484667e-05,
    1.36843607e-06, 1.49163924e-07,
)  # fmt: skip
I0_FAR = (
    0.402176499, 0.00336055807, 0.000136156537, 1.11028867e-05, 1.63861819e-06, 3.69989607e-07,
)  # fmt: skip
I1_NEAR = (
    2.0, 4.0, 2.66666675, 0.888888001, 0.177780047, 0.0237004124, 0.0022603781, 0.000159677889, 9.49246987e-06,
    2.89398145e-07, 2.62447166e-08,
)  # fmt: skip
I1_FAR = (
    0.389398456, -0.00974958483, -0.000219168767, -1.49908801e-05, -2.00910699e-06, -4.31419437e-07,
)  # fmt: skip


def _bessel(x: Expr, near: Sequence[float], far: Sequence[float], odd: bool, scaled: bool) -> Expr:
    """I(x) of order 0, or 1 if ``odd``; times exp(-|x|) if ``scaled``."""
    a = absolute(x)
    quarter = where(a > 8, 8.0, a) * 0.25
    inner = polynomial(quarter * quarter, near)
    outer = polynomial(16 / a - 1, far) / sqrt(a)
    if odd:
        inner = inner * quarter
    if scaled:
        inner = inner * exp(-a)
    else:  # exp(a) overflows before the result
        outer = exp(a - 8) * (math.exp(8) * outer)
    y = where(a > 8, outer, inner)
    return where(x < 0, -y, y) if odd else y


BESSEL = (*UNARY, S(t(60, low=-30, high=30)), S(t(9, values=(0.0, 8, -8, 7.999, 88, -88, 200, -200, NAN))))
for _name, _coefficients, _odd, _scaled in (
    ("i0", (I0_NEAR, I0_FAR), False, False),
    ("special_i0e", (I0_NEAR, I0_FAR), False, True),
    ("special_i1", (I1_NEAR, I1_FAR), True, False),
    ("special_i1e", (I1_NEAR, I1_FAR), True, True),
):
    _f = partial(_bessel, near=_coefficients[0], far=_coefficients[1], odd=_odd, scaled=_scaled)
    _aliases = ["special_i0"] if _name == "i0" else []
    unary(names(_name, aliases=_aliases), _f, BESSEL, FLOATS, floating=True, arithmetic="float32")


# -- lengths ----------------------------------------------------------------------------------------------------------
@pointwise(
    "aten.hypot.default",
    samples=(
        S(t(3, 5), t(3, 5)),
        S(t(2, 1, 4, layout="transposed"), t(3, 1)),
        S(t(0, 3), t(3)),
        S(t(6, values=(INF, NAN, 3e30, 1e-30, 0.0, -INF)), t(6, values=(NAN, INF, 4e30, 1e-30, -0.0, 1.0))),
    ),
    arithmetic="float32",
)
def hypot(self: Expr, other: Expr) -> Expr:
    """sqrt(self^2 + other^2) without overflow."""
    a, b = absolute(self), absolute(other)
    large, small = where(a > b, a, b), where(a > b, b, a)
    ratio = where(call("eq", small, 0), 0.0, small / large)
    infinite = call("or", call("isinf", self), call("isinf", other))
    return where(infinite, INF, large * sqrt(ratio * ratio + 1))
