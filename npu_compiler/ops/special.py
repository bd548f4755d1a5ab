"""Special functions, computed in float64 and rounded once. Targets without float64 leave them to the host.

Polynomials in ``t`` interpolate a function in Chebyshev's points of -1 <= t <= 1, with relative errors below 1e-8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..graph.expr import Expr, call, fn, minimum, where
from ..support.errors import Reason, Unsupported
from .common import names, unary
from .registry import FLOATS, pointwise
from .samples import POSITIVE, UNARY, S, t

exp, log, log1p, sqrt, erf = fn("exp"), fn("log"), fn("log1p"), fn("sqrt"), fn("erf")
sin, tan, absolute, nearest = fn("sin"), fn("tan"), fn("abs"), fn("round")
INF, NAN, PI = math.inf, math.nan, math.pi


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Return the sum of ``coefficients[i] * x ** i``."""
    total = x * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        total = total * x + c
    return total


def _between_integers(x: Expr) -> Expr:
    """Return ``x`` minus the nearest integer."""
    return x - nearest(x)


# -- gamma ------------------------------------------------------------------------------------------------------------
# The asymptotic series hold from 10 on. Smaller arguments are moved there by the recurrence gamma(x + 1) = x gamma(x).
_STEPS = 10
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)  # B2, B4, ...


def _moved(x: Expr) -> tuple[Expr, Expr]:
    """Return whether ``x`` is below 10, and an argument from 10 on."""
    small = x < _STEPS
    return small, where(small, x + _STEPS, x)


def lgamma(x: Expr) -> Expr:
    """log|gamma(x)|; below 1/2 by the reflection gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    left = x < 0.5
    y = where(left, 1 - x, x)
    small, z = _moved(y)
    product = y
    for i in range(1, _STEPS):
        product = product * (y + i)
    product = where(small, product, 1.0)
    series = polynomial(1 / (z * z), [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]) / z
    stirling = (z - 0.5) * log(z) - z + 0.5 * math.log(2 * PI) + series
    factor = log(where(left, product / absolute(sin(PI * _between_integers(x))), product))
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
    square = 1 / (z * z)
    series = square * polynomial(square, [b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)])
    right = log(z) - 0.5 / z - series - where(small, slope / product, 0.0)
    turn = _between_integers(x)
    reflected = where(call("eq", turn, 0), NAN, right - PI / tan(PI * turn))
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
    height = sin(PI * _between_integers(x))
    return where(left, PI * PI / (height * height) - right, right)


GAMMA = (
    *UNARY,
    *POSITIVE,
    S(t(40, low=-6.9, high=9)),
    S(t(24, values=[i / 4 for i in range(1, 25)])),
    S(t(9, values=(1e-20, -1e-20, 0.999, 1.001, 1.999, 2.001, 900, 1e8, 3e30))),
)
POLES = S(t(7, values=(0.0, -1, -2, -100, INF, -INF, NAN)))
unary(names("lgamma", aliases=["special_gammaln"]), lgamma, (*GAMMA, POLES), floating=True, double=True)
unary(
    names("digamma", aliases=["special_digamma", "special_psi"]),
    digamma,
    (*GAMMA, POLES, S(t(2, values=(0.0, -0.0)))),
    FLOATS,
    floating=True,
    double=True,
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
    double=True,
)
def polygamma(n: int, self: Expr) -> Expr:
    """The derivative of order ``n`` of digamma, 0 or 1."""
    if n not in (0, 1):
        raise Unsupported(Reason("arguments", f"polygamma of order {n}", "orders 0 and 1 are native"))
    return trigamma(self) if n else digamma(self)


# -- the error function and its relatives -----------------------------------------------------------------------------
_ERFCX = (
    1.25300805827, -0.135621106045, -0.047562294344, 0.129645154888, -0.119273663871, 0.0683080812479, -0.0237705084069,
    0.00252904755485, 0.00188864794266, -0.000778654898617, -0.000105010076608, 0.000122777987833, 4.63892630917e-06,
    -1.74116967908e-05, -3.3989488253e-07, 1.69451425228e-06, 5.50027461007e-08,
)  # fmt: skip


def _erfcx(a: Expr) -> Expr:
    """exp(a^2) erfc(a) for a >= 0."""
    return polynomial(1 - 6 / (a + 3), _ERFCX) / (1 + 2 * a)


def erfc(x: Expr) -> Expr:
    """1 - erf(x), with small results to the last digit."""
    tail = exp(-(x * x)) * _erfcx(absolute(x))
    return where(x < 0, 2 - tail, tail)


def erfcx(x: Expr) -> Expr:
    """exp(x^2) erfc(x)."""
    right = _erfcx(absolute(x))
    return where(x < 0, 2 * exp(x * x) - right, right)


def log_ndtr(x: Expr) -> Expr:
    """The logarithm of the normal distribution function."""
    a = absolute(x) * math.sqrt(0.5)
    right = _erfcx(a)
    left = log(right * 0.5) - a * a
    half = 0.5 * exp(-(a * a)) * right
    return where(x < -1, left, log1p(-where(x < 0, 1 - half, half)))


def erfinv(x: Expr) -> Expr:
    """The inverse of erf: Winitzki's approximation, and two steps of Halley's method."""
    a = 0.147
    left = log1p(-(x * x))
    centre = left * 0.5 + 2 / (PI * a)
    y = sqrt(-left / a / (sqrt(centre * centre - left / a) + centre))
    for _ in range(2):
        u = (erf(y) - absolute(x)) * exp(y * y) * (math.sqrt(PI) / 2)
        y = y - u / (1 + y * u)
    y = where(call("eq", absolute(x), 1), INF, y)
    return where(x < 0, -y, y)


def ndtri(p: Expr) -> Expr:
    """The inverse of the normal distribution function: a rational approximation, and a step of Halley's method."""
    upper = p > 0.5
    y = where(upper, 1 - p, p)
    r = sqrt(-2 * log(y))
    z = r - polynomial(r, (2.515517, 0.802853, 0.010328)) / polynomial(r, (1.0, 1.432788, 0.189269, 0.001308))
    u = math.sqrt(PI / 2) * _erfcx(absolute(z) * math.sqrt(0.5)) - y * math.sqrt(2 * PI) * exp(0.5 * z * z)
    z = where(call("eq", y, 0), INF, z + 2 * u / (2 - u * z))
    return where(upper, z, -z)


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
for _name, _f, _samples in (
    ("erfc", erfc, (*UNARY, *WIDE)),
    ("special_erfcx", erfcx, (*UNARY, *WIDE)),
    ("special_log_ndtr", log_ndtr, (*UNARY, *WIDE)),
    ("erfinv", erfinv, INSIDE),
    ("special_ndtri", ndtri, PROBABILITIES),
):
    _aliases = [f"special_{_name}"] if _name in ("erfc", "erfinv") else []
    unary(names(_name, aliases=_aliases), _f, _samples, FLOATS, floating=True, double=True)


# -- Bessel functions -------------------------------------------------------------------------------------------------
# Up to 8: exp(-x) I(x) / x^order, by t = x / 4 - 1. From 8 on: exp(-x) I(x) sqrt(x), by t = 16 / x - 1.
_I0_NEAR = (
    0.207001921224, -0.113004326897, 0.0945156285433, -0.0890434404251, 0.0873434158852, -0.084963405181,
    0.0792752334371, -0.0695409056516, 0.0567769420105, -0.0429878706227, 0.0301785086493, -0.0196748993167,
    0.0119576678629, -0.00681242800606, 0.00362335634645, -0.00177818383324, 0.000845816307286, -0.000419504864276,
    0.000173835415851, -4.10494403407e-05, 1.75290330295e-05, -1.80948330941e-05, 6.03621332488e-06,
)  # fmt: skip
_I0_FAR = (
    0.402176509444, 0.0033605519826, 0.00013621612189, 1.11431108769e-05, 1.48331209908e-06, 2.96428105421e-07,
    9.08143421716e-08, 4.3601874127e-08, 1.84589861101e-08, -1.91581172018e-09, -6.77438090378e-09, -2.23176332175e-09,
)  # fmt: skip
_I1_NEAR = (
    0.0446877098756, -0.0611243380308, 0.0680575999098, -0.0684826061083, 0.0637674036845, -0.055280041758,
    0.0446745733713, -0.0336713252643, 0.0236860079887, -0.0155715098231, 0.0095840216298, -0.00553375749297,
    0.00300552199461, -0.00154096975551, 0.000745134432329, -0.000337644021132, 0.000147371410747, -6.52705338771e-05,
    2.53790971487e-05, -6.55219262846e-06, 2.52229744596e-06, -2.07918863569e-06, 6.60138680228e-07,
)  # fmt: skip
_I1_FAR = (
    0.389398459027, -0.00974957719212, -0.000219235810472, -1.50386281301e-05, -1.83438721409e-06, -3.47408518552e-07,
    -1.02027413709e-07, -4.76022434525e-08, -2.05380616903e-08, 1.4334697564e-09, 7.24317330184e-09, 2.50263926205e-09,
)  # fmt: skip


def i0e(x: Expr) -> Expr:
    """exp(-|x|) I0(x)."""
    a = absolute(x)
    return where(a <= 8, polynomial(minimum(a, 8) / 4 - 1, _I0_NEAR), polynomial(16 / a - 1, _I0_FAR) / sqrt(a))


def i1e(x: Expr) -> Expr:
    """exp(-|x|) I1(x)."""
    a = absolute(x)
    y = where(a <= 8, a * polynomial(minimum(a, 8) / 4 - 1, _I1_NEAR), polynomial(16 / a - 1, _I1_FAR) / sqrt(a))
    return where(x < 0, -y, y)


BESSEL = (*UNARY, S(t(60, low=-30, high=30)), S(t(9, values=(0.0, 8, -8, 7.999, 88, -88, 200, -200, NAN))))
for _name, _f in (
    ("i0", lambda x: exp(absolute(x)) * i0e(x)),
    ("special_i0e", i0e),
    ("special_i1", lambda x: exp(absolute(x)) * i1e(x)),
    ("special_i1e", i1e),
):
    _aliases = ["special_i0"] if _name == "i0" else []
    unary(names(_name, aliases=_aliases), _f, BESSEL, FLOATS, floating=True, double=True)


# -- lengths ----------------------------------------------------------------------------------------------------------
@pointwise(
    "aten.hypot.default",
    samples=(
        S(t(3, 5), t(3, 5)),
        S(t(2, 1, 4, layout="transposed"), t(3, 1)),
        S(t(0, 3), t(3)),
        S(t(6, values=(INF, NAN, 3e30, 1e-30, 0.0, -INF)), t(6, values=(NAN, INF, 4e30, 1e-30, -0.0, 1.0))),
    ),
    double=True,
)
def hypot(self: Expr, other: Expr) -> Expr:
    """sqrt(self^2 + other^2) without overflow."""
    infinite = call("or", call("isinf", self), call("isinf", other))
    return where(infinite, INF, sqrt(self * self + other * other))
