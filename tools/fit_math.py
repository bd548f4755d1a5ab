"""Fits and checks the polynomial coefficients of elementary.h, arcsine.h and double*.h in targets/cpu/kernels.

    python tools/fit_math.py            print every polynomial as C++, with its error
    python tools/fit_math.py --check    exit 1 if the headers hold other coefficients than these

Method: minimax by the Remez exchange (E. Remez, 1934) in 60-digit arithmetic. A polynomial sum c[i] z^i stands for a
factor of the function, so the error is weighted by what it does to the final result, relative to that result.
Coefficients must be representable, and rounding them all at once would spoil the last bits: they are rounded one at a
time, the most influential (lowest order) first, and the others are fitted again around the rounded ones. For results in
double this is done for the first coefficients only: evaluating the polynomial rounds as much as the others lose.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from mpmath import mp, mpf

mp.dps = 60
Real = Callable[[mpf], mpf]
KERNELS = Path(__file__).parent.parent / "npu_compiler/targets/cpu/kernels"
HEADERS = (
    "elementary.h",
    "elementary_avx512.h",
    "elementary_portable.h",
    "arcsine.h",
    "double.h",
    "double_trigonometry.h",
)


@dataclass(frozen=True)
class Fit:
    """A polynomial with ``terms`` coefficients for ``target`` on [low, high], minimising |weight * error|.

    ``bits`` is 24 (float) or 53 (double); ``bound`` is the weighted error it has to meet. ``careful``: coefficients
    that are rounded one at a time; None: all.
    """

    name: str
    target: Real
    weight: Real
    low: mpf
    high: mpf
    terms: int
    bound: float
    bits: int = 24
    careful: int | None = None


def _exp_tail(r: mpf) -> mpf:
    """(exp(r) - 1 - r - r^2/2) / r^3, by its series near 0 where the quotient cancels."""
    if abs(r) < mpf("1e-8"):
        return mpf(1) / 6 + r / 24 + r * r / 120
    return (mp.expm1(r) - r - r * r / 2) / r**3


def _log_tail(f: mpf) -> mpf:
    """(log(1+f) - f + f^2/2) / f^3, by its series near 0 where the quotient cancels."""
    if abs(f) < mpf("1e-8"):
        return mpf(1) / 3 - f / 4 + f * f / 5
    return (mp.log1p(f) - f + f * f / 2) / f**3


def _log_square_tail(r: mpf) -> mpf:
    """(log(1+r) - r) / r^2."""
    return mpf(-1) / 2 + r / 3 - r * r / 4 if abs(r) < mpf("1e-8") else (mp.log1p(r) - r) / r**2


def _odd_tail(function: Real, third: mpf, fifth: mpf) -> Real:
    """z -> (function(x) - x) / x^3 with z = x^2; ``third`` and ``fifth`` are the first series coefficients."""

    def tail(z: mpf) -> mpf:
        if z < mpf("1e-16"):
            return third + fifth * z
        x = mp.sqrt(z)
        return (function(x) - x) / x**3

    return tail


def _relative_cubic(function: Real) -> Real:
    """Weight of an error in the tail of an odd function: x^3 error / function(x)."""
    return lambda z: z if z < mpf("1e-16") else mp.sqrt(z) ** 3 / function(mp.sqrt(z))


def _erf_factor(z: mpf) -> mpf:
    """erf(x) / x - 1 with z = x^2."""
    return 2 / mp.sqrt(mp.pi) - 1 if z < mpf("1e-40") else mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1


def _log_ratio_tail(z: mpf) -> mpf:
    """(log((1+s) / (1-s)) - 2 s) / s^3 with z = s^2."""
    return mpf(2) / 3 + 2 * z / 5 if z < mpf("1e-16") else 2 * (mp.atanh(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3


def _log_ratio_rest(z: mpf) -> mpf:
    """((log((1+s) / (1-s)) - 2 s) / s^3 - 2/3) / s^2 with z = s^2."""
    return mpf(2) / 5 + 2 * z / 7 + 2 * z * z / 9 if z < mpf("1e-12") else (_log_ratio_tail(z) - mpf(2) / 3) / z


def _cos_tail(z: mpf) -> mpf:
    """(cos(x) - 1 + x^2/2) / x^4 with z = x^2."""
    return mpf(1) / 24 - z / 720 if z < mpf("1e-12") else (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2


_HALF_LN2 = mp.log(2) / 2
_LOG_RATIO_END = (mp.sqrt(2) - 1) / (mp.sqrt(2) + 1) * mpf("1.0001")
_PI_4 = mp.pi / 4 * mpf("1.0001")
_TANH_SPLIT = mpf("0.3")
_ERF_SPLIT = mpf("0.75")
_ERF_END = mpf(4)

LOGARITHMS = {"LOG": mp.e, "LOG2": mpf(2), "LOG10": mpf(10)}
_LOG_REACH = mpf(1) / 32  # of the remainders that LOG_INVERSE leaves

FITS = (
    # exp(r) = 1 + r + r^2/2 + r^3 P(r)
    Fit("EXP_TAIL", _exp_tail, lambda r: r**3 / mp.exp(r),
        -_HALF_LN2 * mpf("1.001"), _HALF_LN2 * mpf("1.001"), 5, 2**-31),
    # 2^x = 1 + x P(x)
    Fit("EXP2_FACTOR", lambda x: mp.log(2) if abs(x) < mpf("1e-30") else mp.expm1(x * mp.log(2)) / x,
        lambda x: x / mpf(2) ** x, mpf("-0.5005"), mpf("0.5005"), 6, 2**-27),
    # log(1+f) = f - f^2/2 + f^3 P(f)
    Fit("LOG_TAIL", _log_tail, lambda f: f**3 / mp.log1p(f) if f else mpf(0),
        mp.sqrt(mpf(1) / 2) - 1, mp.sqrt(2) - 1, 10, 2**-29),
    # tanh(x) = x + x^3 P(x^2)
    Fit("TANH_TAIL", _odd_tail(mp.tanh, mpf(-1) / 3, mpf(2) / 15), _relative_cubic(mp.tanh),
        mpf(0), _TANH_SPLIT**2, 4, 2**-31),
    # erf(x) = x + x P(x^2)
    Fit("ERF_NEAR", _erf_factor, lambda z: 1 / (1 + _erf_factor(z)), mpf(0), _ERF_SPLIT**2, 6, 2**-28),
    # erf(x) = 1 - exp(-x P(x)), further out
    Fit("ERF_FAR", lambda x: -mp.log(mp.erfc(x)) / x, lambda x: x * mp.erfc(x) / mp.erf(x),
        _ERF_SPLIT, _ERF_END, 7, 2**-28),
    # asin(x) = x + x^3 P(x^2)
    Fit("ASIN_TAIL", _odd_tail(mp.asin, mpf(1) / 6, mpf(3) / 40), _relative_cubic(mp.asin),
        mpf(0), mpf(1) / 4, 5, 2**-27),
    # tan(x), sin(x) = x + x^3 P(x^2), cos(x) = 1 - x^2/2 + x^4 P(x^2)
    Fit("TAN_TAIL", _odd_tail(mp.tan, mpf(1) / 3, mpf(2) / 15), _relative_cubic(mp.tan),
        mpf(0), _PI_4**2, 7, 2**-26),
    Fit("SIN_NEAR", _odd_tail(mp.sin, mpf(-1) / 6, mpf(1) / 120), _relative_cubic(mp.sin),
        mpf(0), _PI_4**2, 3, 2**-26),
    Fit("COS_NEAR", _cos_tail, lambda z: z * z / mp.cos(mp.sqrt(z)), mpf(0), _PI_4**2, 3, 2**-27),
    # log(1+r), log2(1+r), log10(1+r) = r / log(base) + r^2 P(r)
    *(
        Fit(f"{name}_NEAR", lambda r, base=base: _log_square_tail(r) / mp.log(base),
            lambda r: r**2 / mp.log1p(r) if r else mpf(0), -_LOG_REACH, _LOG_REACH, 4, 2**-28)
        for name, base in LOGARITHMS.items()
    ),
    # sin(x) = x + x^3 P(x^2), in double for a float result
    Fit("SIN_TAIL", _odd_tail(mp.sin, mpf(-1) / 6, mpf(1) / 120), _relative_cubic(mp.sin),
        mpf(0), (mp.pi / 2 * mpf("1.0001")) ** 2, 5, 2**-34, 53),
    # The same for results in double; log((1+s) / (1-s)) = 2 s + s^3 P(s^2), cos(x) = 1 - x^2/2 + x^4 P(x^2)
    Fit("EXP_TAIL_D", _exp_tail, lambda r: r**3 / mp.exp(r),
        -_HALF_LN2 * mpf("1.001"), _HALF_LN2 * mpf("1.001"), 10, 2**-59, 53, 2),
    Fit("LOG_TAIL_D", _log_ratio_tail, lambda z: _relative_cubic(mp.atanh)(z) / 2,
        mpf(0), _LOG_RATIO_END**2, 7, 2**-58, 53, 2),
    Fit("SIN_TAIL_D", _odd_tail(mp.sin, mpf(-1) / 6, mpf(1) / 120), _relative_cubic(mp.sin),
        mpf(0), _PI_4**2, 6, 2**-57, 53, 2),
    Fit("COS_TAIL_D", _cos_tail, lambda z: z * z / mp.cos(mp.sqrt(z)), mpf(0), _PI_4**2, 6, 2**-57, 53, 2),
    Fit("ATAN_TAIL_D", _odd_tail(mp.atan, mpf(-1) / 3, mpf(1) / 5), _relative_cubic(mp.atan),
        mpf(0), mpf(1), 21, 2**-55, 53, 2),
    Fit("ASIN_TAIL_D", _odd_tail(mp.asin, mpf(1) / 6, mpf(3) / 40), _relative_cubic(mp.asin),
        mpf(0), mpf(1) / 4, 13, 2**-57, 53, 2),
    # log((1+s) / (1-s)) = 2 s + s^3 (2/3 + s^2 P(s^2)), for powers
    Fit("POW_TAIL_D", _log_ratio_rest, lambda z: z * _relative_cubic(mp.atanh)(z) / 2,
        mpf(0), _LOG_RATIO_END**2, 7, 2**-64, 53, 2),
    # erf(x) = x + x P(x^2), and further out 1 - exp(-x P(x))
    Fit("ERF_NEAR_D", _erf_factor, lambda z: 1 / (1 + _erf_factor(z)), mpf(0), mpf(1), 13, 2**-56, 53, 4),
    Fit("ERF_FAR_D", lambda x: -mp.log(mp.erfc(x)) / x, lambda x: x * mp.erfc(x) / mp.erf(x),
        mpf(1), mpf(6), 18, 2**-57, 53, 0),
    # The same in double for results that are rounded to float
    Fit("EXP_TAIL_F", _exp_tail, lambda r: r**3 / mp.exp(r),
        -_HALF_LN2 * mpf("1.001"), _HALF_LN2 * mpf("1.001"), 5, 2**-31, 53, 0),
    Fit("LOG_TAIL_F", _log_ratio_tail, lambda z: _relative_cubic(mp.atanh)(z) / 2,
        mpf(0), _LOG_RATIO_END**2, 4, 2**-36, 53, 0),
    Fit("ATAN_TAIL_F", _odd_tail(mp.atan, mpf(-1) / 3, mpf(1) / 5), _relative_cubic(mp.atan),
        mpf(0), mpf(1), 10, 2**-30, 53, 0),
)  # fmt: skip


def _solve(fit: Fit, target: Real, first: int, points: list[mpf]) -> tuple[list[mpf], mpf]:
    """Coefficients first..terms-1 and the level at which the weighted error alternates over ``points``."""
    unknowns = fit.terms - first
    matrix, rhs = mp.matrix(unknowns + 1), mp.matrix(unknowns + 1, 1)
    for row, z in enumerate(points):
        weight = fit.weight(z)
        for column in range(unknowns):
            matrix[row, column] = weight * z ** (first + column)
        matrix[row, unknowns] = (-1) ** row
        rhs[row] = weight * target(z)
    solution = mp.lu_solve(matrix, rhs)
    return list(solution)[:unknowns], abs(solution[unknowns])


def _grid(fit: Fit, count: int) -> list[mpf]:
    """Chebyshev-spaced points without the ends, where a weight may be zero."""
    middle, half = (fit.low + fit.high) / 2, (fit.high - fit.low) / 2
    return [middle - half * mp.cos(mp.pi * (i + mpf(1) / 2) / count) for i in range(count)]


def _horner(coefficients: list[mpf], z: mpf) -> mpf:
    value = mpf(0)
    for c in reversed(coefficients):
        value = value * z + c
    return value


def _extrema(errors: list[mpf], count: int) -> list[int]:
    """Indices of ``count`` alternating extrema: the best of each run of equal sign, then the best neighbours."""
    found: list[int] = []
    for i, error in enumerate(errors):
        if found and (errors[found[-1]] > 0) == (error > 0):
            if abs(error) > abs(errors[found[-1]]):
                found[-1] = i
        else:
            found.append(i)
    while len(found) > count:
        found.pop(0 if abs(errors[found[0]]) < abs(errors[found[-1]]) else -1)
    return found


def remez(fit: Fit, fixed: list[mpf]) -> list[mpf]:
    """All coefficients, the first ``len(fixed)`` as given and the others minimax."""
    first = len(fixed)

    def target(z: mpf) -> mpf:
        return fit.target(z) - _horner(fixed, z)

    unknowns = fit.terms - first
    grid = _grid(fit, 30 * (fit.terms + 1))
    wanted, weights = [target(z) for z in grid], [fit.weight(z) for z in grid]
    # A point where the weight vanishes says nothing, so the first reference avoids the middle.
    points = [z + (fit.high - fit.low) / 1000 for z in _grid(fit, unknowns + 1)]
    tail: list[mpf] = []
    for _ in range(20):
        tail, level = _solve(fit, target, first, points)
        errors = [w * (y - z**first * _horner(tail, z)) for z, y, w in zip(grid, wanted, weights, strict=True)]
        peaks = _extrema(errors, unknowns + 1)
        if len(peaks) < unknowns + 1 or max(map(abs, errors)) < level * mpf("1.001"):
            break
        points = [grid[i] for i in peaks]
    return fixed + tail


def _rounded(value: mpf, bits: int) -> mpf:
    return mpf(float(np.float32(float(value)))) if bits == 24 else mpf(float(value))


def solve(fit: Fit) -> tuple[list[float], float]:
    """(representable coefficients, weighted error)."""
    fixed: list[mpf] = []
    while len(fixed) < (fit.terms if fit.careful is None else fit.careful):
        fixed.append(_rounded(remez(fit, fixed)[len(fixed)], fit.bits))
    if len(fixed) < fit.terms:
        fixed = [_rounded(c, fit.bits) for c in remez(fit, fixed)]
    grid = _grid(fit, 500)
    error = max(abs(fit.weight(z) * (fit.target(z) - _horner(fixed, z))) for z in grid)
    return [float(c) for c in fixed], float(error)


def almost_float(function: Real, middle: mpf, grid: mpf) -> mpf:
    """The number near ``middle``, a multiple of ``grid`` away, at which the function is closest to a float (S. Gal,
    "Computing elementary functions: a new approach", 1986)."""
    steps = (middle + i * grid for i in range(-2000, 2001))
    return min(steps, key=lambda c: abs(function(c) - _rounded(function(c), 24)))


def quotient(function: Real, slope: Real, centre: mpf) -> Real:
    """t -> (function(centre + t) - function(centre)) / t; ``slope`` is the derivative."""
    at, there = function(centre), slope(centre)
    return lambda t: there if abs(t) < mpf("1e-25") else (function(centre + t) - at) / t


def transposed(columns: list[list[mpf]]) -> list[list[float]]:
    """The rows of a table, as floats."""
    return [[float(_rounded(x, 24)) for x in row] for row in zip(*columns, strict=True)]


def heads_and_tails(exact: list[mpf], heads: list[mpf]) -> list[list[float]]:
    """A row of heads, which are floats, and one of what these lack."""
    return transposed([[head, x - head] for x, head in zip(exact, heads, strict=True)])


def interval_table(function: Real, slope: Real, intervals: list[tuple[mpf, mpf]]) -> list[list[float]]:
    """The rows of a table for intervals of a: their centres, the values there, and the coefficients of
    (function(a) - value) / (a - centre), of rising order. ``slope`` is the derivative.

    In an interval that begins at 0 the value is a itself, so only function(a) / a - 1 is approximated.
    """
    columns = []
    for low, high in intervals:
        centre = almost_float(function, (low + high) / 2, mpf(2) ** -20) if low else mpf(0)
        exact, first = quotient(function, slope, centre), not low
        falling = mp.chebyfit(lambda t, q=exact, first=first: q(t) - first, [low - centre, high - centre], 5)
        columns.append([centre, function(centre), *reversed(falling)])
    return transposed(columns)


def erf_table() -> list[list[float]]:
    """The rows of ERF_TABLE, for intervals that are 1/8 wide."""
    intervals = [(mpf(n) / 8, mpf(n + 1) / 8) for n in range(32)]
    return interval_table(mp.erf, lambda a: 2 * mp.exp(-(a**2)) / mp.sqrt(mp.pi), intervals)


def tanh_table() -> list[list[float]]:
    """The rows of TANH_TABLE, for numbers of one exponent and two more bits of the fraction: an interval is found by
    the last five of these bits. It begins at 0 for numbers below 1/8; no numbers are above 9.1."""
    intervals = []
    for n in range(32):
        exponent = (n // 4 + 5) % 8 - 4  # the biased one, 127 more, is n // 4 modulo 8
        low, high = (mpf(2) ** exponent * (1 + mpf(n % 4 + i) / 4) for i in range(2))
        intervals.append((mpf(0), mpf(1) / 8) if exponent == -4 else (low, mpf("9.1") if low == 8 else high))
    return interval_table(mp.tanh, lambda a: mp.sech(a) ** 2, intervals)


def exp_table() -> list[list[float]]:
    """The rows of EXP_TABLE: 2^(n/32) as head and tail."""
    exact = [mpf(2) ** (mpf(n) / 32) for n in range(32)]
    return heads_and_tails(exact, [_rounded(x, 24) for x in exact])


def log_inverses() -> list[float]:
    """An approximate reciprocal c of the arguments m in each interval of logarithms, with 7 bits, so that m c - 1 is
    (nearly) exact. Number n holds those whose fraction begins with the bits of n: m in [1, 1.5), then in [0.75, 1)."""
    steps = [128 if n < 16 else 64 for n in range(32)]
    middles = [(1 + (n + mpf(1) / 2) / 32) / (1 if n < 16 else 2) for n in range(32)]
    return [
        1.0 if n in (0, 31) else float(mp.nint(s / m) / s) for n, (m, s) in enumerate(zip(middles, steps, strict=True))
    ]


def log_table(base: mpf) -> list[list[float]]:
    """-log(c) / log(base) of :func:`log_inverses` as head, a multiple of 2^-15, and tail."""
    exact = [-mp.log(mpf(c)) / mp.log(base) for c in log_inverses()]
    return heads_and_tails(exact, [mp.nint(x * 2**15) / 2**15 for x in exact])


@cache
def atan_centres() -> list[mpf]:
    """Centres of the intervals of u in [0, 1] that are 1/16 wide, at which atan is almost a float."""
    middles = (mpf(n) / 16 + mpf(1) / 32 for n in range(1, 16))
    return [mpf(0), *(almost_float(mp.atan, m, mpf(2) ** -21) for m in middles)]


def atan_table() -> list[list[float]]:
    """The rows of ATAN_TABLE: the centres, and the coefficients of (atan(u) - atan(centre)) / (u - centre), of rising
    order; in the first interval, of atan(u) / u - 1 by u^2."""
    columns = []
    for n, centre in enumerate(atan_centres()):
        low, high = mpf(n) / 16, mpf(n + 1) / 16 * mpf("1.0001")
        if n:
            falling = mp.chebyfit(quotient(mp.atan, lambda c: 1 / (1 + c**2), centre), [low - centre, high - centre], 4)
        else:
            falling = [*mp.chebyfit(_odd_tail(mp.atan, mpf(-1) / 3, mpf(1) / 5), [low**2, high**2], 3), mpf(0)]
        columns.append([centre, *reversed(falling)])
    return transposed(columns)


def atan_base() -> list[list[float]]:
    """The rows of ATAN_BASE: atan(centre), then pi/2 - atan(centre), as head and tail."""
    bases = [mp.atan(c) for c in atan_centres()]
    exact = [*bases, *(mp.pi / 2 - x for x in bases)]
    return heads_and_tails(exact, [_rounded(x, 24) for x in exact])


TABLES: dict[str, Callable[[], list[list[float]]]] = {
    "EXP_TABLE": exp_table,
    "ERF_TABLE": erf_table,
    "TANH_TABLE": tanh_table,
    "LOG_INVERSE": lambda: [log_inverses()],
    **{f"{name}_TABLE": partial(log_table, base) for name, base in LOGARITHMS.items()},
    "ATAN_TABLE": atan_table,
    "ATAN_BASE": atan_base,
}


def table_declaration(name: str, rows: list[list[float]]) -> str:
    """The C++ text of a table in a header."""
    lines = [", ".join(re.sub(r"\.?0*p", "p", c.hex()) + "f" for c in row) for row in rows]
    size = f"[{len(rows)}][{len(rows[0])}]"
    return f"alignas(64) constexpr float {name}{size} = {{{', '.join(f'{{{x}}}' for x in lines)}}};"


def declaration(fit: Fit, coefficients: list[float]) -> str:
    """The C++ line that a header holds: exact, in hexadecimal."""
    scalar, suffix = ("float", "f") if fit.bits == 24 else ("double", "")
    values = ", ".join(re.sub(r"\.?0*p", "p", c.hex()) + suffix for c in coefficients)
    return f"constexpr {scalar} {fit.name}[] = {{{values}}};"


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the headers instead of printing")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    arguments = parser.parse_args()
    check, names = arguments.check, {*TABLES, *(fit.name for fit in FITS)}
    if unknown := set(arguments.names) - names:
        parser.error(f"no fit is called {', '.join(sorted(unknown))}; known: {', '.join(sorted(names))}")
    header = " ".join(" ".join((KERNELS / name).read_text() for name in HEADERS).split()) if check else ""
    status = 0
    for name in (t for t in TABLES if not arguments.names or t in arguments.names):
        line = table_declaration(name, TABLES[name]())
        status |= check and line not in header
        print(line if not check else f"{name}: {'ok' if line in header else 'DIFFERS'}")
    for fit in FITS:
        if arguments.names and fit.name not in arguments.names:
            continue
        coefficients, error = solve(fit)
        line = declaration(fit, coefficients)
        ok = error <= fit.bound and (not check or line in header)
        status |= not ok
        print(line if not check else f"{fit.name}: {'ok' if ok else 'DIFFERS, or misses its bound'}")
        print(f"  // weighted error 2^{np.log2(error):.2f}, bound 2^{np.log2(fit.bound):.1f}")
    return status


if __name__ == "__main__":
    sys.exit(main())
