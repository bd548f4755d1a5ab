"""Fits and checks the polynomials of special functions in npu_compiler/ops/special.py.

    python tools/fit_special.py            print every polynomial, with its relative error
    python tools/fit_special.py --check    exit 1 if special.py holds other coefficients than these

Method: that of ``fit_math.py``, with all coefficients rounded to float32 at once.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache

import numpy as np
from fit_math import Fit, Real, solve
from mpmath import mp, mpf

from npu_compiler.ops import special

ERFC_START, ERFC_END = (1 - 6 / (a + special.ERFC_SHIFT) for a in (0, special.ERFC_ZERO))  # of erfc_tail
BOUND = 2**-23  # a unit in the last place, mostly from rounding the first coefficients
DOUBLE_BOUND = 2**-50  # where results are small differences
SHORT_BOUND = 2**-16  # for results of 16 bits
SHORT = special.ERFINV_SHORT_CENTRE
NEAR, FAR, FARTHEST = special.ERFINV_CENTRES  # where the value, the first coefficient, is almost a float


def relative(
    name: str, target: Real, low: float, high: float, terms: int, more: int = 0, bits: int = 24, bound: float = BOUND
) -> Fit:
    """Return the fit of ``target`` with the least error relative to the target plus ``more``."""
    known = cache(target)
    return Fit(name, known, lambda z: 1 / (known(z) + more), mpf(low), mpf(high), terms, bound, bits, careful=0)


def erfcx(t: mpf, shift: float = 3) -> mpf:
    """exp(a^2) erfc(a) (1 + 2 a) - 1 with t = 1 - 6 / (a + shift)."""
    if t == 1:
        return 2 / mp.sqrt(mp.pi) - 1
    a = 6 / (1 - t) - shift
    scaled = (
        mp.exp(a * a) * mp.erfc(a) if a < 20 else (1 - 1 / (2 * a * a) + mpf(3) / (4 * a**4)) / (a * mp.sqrt(mp.pi))
    )
    return scaled * (1 + 2 * a) - 1


def erfc_tail(t: mpf) -> mpf:
    """The same with the shift of these coefficients."""
    return erfcx(t, special.ERFC_SHIFT)


def erf_ratio(z: mpf) -> mpf:
    """erf(x) / x - 1 with z = x^2."""
    return (mp.erf(mp.sqrt(z)) / mp.sqrt(z) if z else 2 / mp.sqrt(mp.pi)) - 1


def erfinv_ratio(w: mpf) -> mpf:
    """erfinv(x) / x with w = -log(1 - x^2)."""
    if w < mpf("1e-30"):
        return mp.sqrt(mp.pi) / 2
    x = mp.sqrt(-mp.expm1(-w))
    if w < 1:
        return mp.erfinv(x) / x
    wanted = -w - mp.log1p(x)  # log(1 - x), which x rounds away
    return mp.findroot(lambda y: mp.log(mp.erfc(y)) - wanted, 0.95 * mp.sqrt(w)) / x


def bessel_near(order: int) -> Real:
    """z -> I(4 sqrt(z)) / sqrt(z)^order."""
    return lambda z: mpf(2) if order and z == 0 else mp.besseli(order, 4 * mp.sqrt(z)) / mp.sqrt(z) ** order


def bessel_far(order: int) -> Real:
    """t -> exp(-x) I(x) sqrt(x) with t = 16 / x - 1."""

    def scaled(t: mpf) -> mpf:
        if t + 1 < mpf("1e-12"):
            return 1 / mp.sqrt(2 * mp.pi)
        x = 16 / (1 + t)
        return mp.besseli(order, x) * mp.exp(-x) * mp.sqrt(x)

    return scaled


def sine(z: mpf) -> mpf:
    """sin(pi r) / r with z = r^2."""
    return mp.pi * mp.sincpi(mp.sqrt(z))


def cotangent(z: mpf) -> mpf:
    """pi r / tan(pi r) with z = r^2."""
    return mp.cospi(mp.sqrt(z)) / mp.sincpi(mp.sqrt(z))


FITS = (
    relative("SINE", sine, 0, 0.25, 9, bits=53, bound=DOUBLE_BOUND),
    relative("COTANGENT", cotangent, 0, 0.25, 14, more=1, bits=53, bound=DOUBLE_BOUND),
    relative("ERFCX", erfcx, -1, 1, 14, more=1),
    relative("ERFC_TAIL", erfc_tail, -1, ERFC_END, 10, more=1),
    relative("ERFC_SHORT", erfc_tail, ERFC_START, ERFC_END, 7, more=1, bound=SHORT_BOUND),
    relative("ERF_NEAR", erf_ratio, 0, 0.25, 5, more=1),
    relative("ERFINV_SHORT", lambda t: erfinv_ratio(t + SHORT), -SHORT, 17 - SHORT, 11, bound=SHORT_BOUND),
    relative("ERFINV_NEAR", lambda t: erfinv_ratio(t + NEAR), -NEAR, 5.001 - NEAR, 10),
    relative("ERFINV_FAR", lambda t: erfinv_ratio((t + FAR) ** 2), 2.236 - FAR, 4.001 - FAR, 11),
    relative("ERFINV_FARTHEST", lambda t: erfinv_ratio((t + FARTHEST) ** 2), 3.999 - FARTHEST, 10.3 - FARTHEST, 9),
    *(relative(f"I{n}_NEAR", bessel_near(n), 0, 4, 11) for n in (0, 1)),
    *(relative(f"I{n}_FAR", bessel_far(n), -1, 1, 6) for n in (0, 1)),
)


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with special.py instead of printing")
    check, status = parser.parse_args().check, 0
    for fit in FITS:
        coefficients, error = solve(fit)
        held = [float(np.float32(c)) if fit.bits == 24 else c for c in getattr(special, fit.name, ())]
        ok = error <= fit.bound and (not check or held == coefficients)
        status |= not ok
        values = ", ".join(f"{c:.9g}" if fit.bits == 24 else repr(c) for c in coefficients)
        print(f"{fit.name}: {'ok' if ok else 'DIFFERS'}" if check else f"{fit.name} = ({values})  # {error:.2g}")
    return status


if __name__ == "__main__":
    sys.exit(main())
