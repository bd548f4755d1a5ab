"""The elementary functions of kernels/math.h: accuracy in ulps and special values, on every instruction set here."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_compiler.support.errors import ToolchainError
from npu_compiler.targets.cpu import compilers, host, toolchain

from ...support.sweeps import FULL

Array = np.ndarray
ROOT = Path(toolchain.__file__).parents[3]
KERNELS = Path(toolchain.__file__).parent / "kernels"


def _exact_sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


# name -> (reference in float64, bound in ulps of the float32 result)
UNARY: dict[str, tuple[Callable[[Array], Array], float]] = {
    "exp": (np.exp, 0.76),
    "exp2": (np.exp2, 1.1),
    "expm1": (np.expm1, 0.76),
    "log": (np.log, 0.66),
    "log2": (np.log2, 0.72),
    "log10": (np.log10, 0.70),
    "log1p": (np.log1p, 0.68),
    "tanh": (np.tanh, 0.62),
    "sigmoid": (_exact_sigmoid, 2.3),
    "erf": (np.vectorize(math.erf, otypes=[np.float64]), 0.85),
    "erfc": (np.vectorize(math.erfc, otypes=[np.float64]), 0.51),
    "sin": (np.sin, 0.51),
    "cos": (np.cos, 0.51),
    "tan": (np.tan, 0.51),
    "asin": (np.arcsin, 0.7),
    "acos": (np.arccos, 0.7),
    "atan": (np.arctan, 0.51),
    "sinh": (np.sinh, 0.55),
    "cosh": (np.cosh, 0.51),
    "asinh": (np.arcsinh, 0.51),
    "acosh": (np.arccosh, 0.51),
    "atanh": (np.arctanh, 0.51),
    "sqrt": (np.sqrt, 0.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5),
    "reciprocal": (np.reciprocal, 0.5),
    "floor": (np.floor, 0),
    "ceil": (np.ceil, 0),
    "trunc": (np.trunc, 0),
    "round": (np.rint, 0),
    "abs": (np.abs, 0),
    "sign": (lambda x: np.where(np.isnan(x), 0, np.sign(x)) + 0.0, 0),  # 0 at NaN and -0.0, as in PyTorch
}
# Bounds of functions that have forms of their own with AVX-512: tables, and floats in place of doubles.
AVX512 = {"log": 0.76, "log2": 0.76, "log10": 0.76, "tanh": 0.92, "sin": 0.8, "cos": 0.8, "tan": 1.1, "atan": 1.08}
BINARY = ("pow", "atan2", "fmod", "remainder", "floordiv")
INTEGER = ("idiv", "fmod", "floordiv", "remainder", "pow")


def _source() -> str:
    lines = ['#include "math.h"', "using namespace npu;"]

    def add(name: str, ctype: str, arity: int, symbol: str) -> None:
        inputs = ", ".join(f"const {ctype}* p{i}" for i in range(arity))
        loads = ", ".join(f"ld(p{i} + k, Full{{}})" for i in range(arity))
        lines.append(
            f'extern "C" __attribute__((visibility("default"))) void {symbol}({inputs}, {ctype}* out, long n) {{\n'
            f"  for (long k = 0; k < n; k += VL) st(out + k, npu::{name}({loads}), Full{{}});\n}}"
        )

    for name in UNARY:
        for ctype in ("float", "double"):
            add(name, ctype, 1, f"{name}_{ctype}")
    for name in BINARY:
        for ctype in ("float", "double"):
            add(name, ctype, 2, f"{name}_{ctype}")
    for ctype in ("int32_t", "int64_t"):
        add("abs", ctype, 1, f"abs_{ctype}")
        add("sign", ctype, 1, f"sign_{ctype}")
        for name in INTEGER:
            add(name, ctype, 2, f"{name}_{ctype}")
    return "\n".join(lines)


CTYPES = {"f4": "float", "f8": "double", "i4": "int32_t", "i8": "int64_t"}


class Library:
    """Calls a compiled function on whole arrays; lengths need not be a multiple of the lane count."""

    def __init__(self, path: Path, avx512: bool):
        self._library, self.avx512 = ctypes.CDLL(str(path)), avx512

    def __call__(self, name: str, *arrays: Array) -> Array:
        dtype, count = arrays[0].dtype, arrays[0].size
        padded = [np.concatenate([a.ravel(), np.ones(-count % 16, dtype)]) for a in arrays]
        out = np.empty_like(padded[0])
        function = getattr(self._library, f"{name}_{CTYPES[dtype.str[1:]]}")
        function(*(ctypes.c_void_p(a.ctypes.data) for a in (*padded, out)), ctypes.c_long(out.size))
        return out[:count]


def _levels() -> list[str]:
    """CPU names to compile for: this one, and every lesser instruction set it can also run."""
    if host.host_cpu().arch != "x86_64":
        return ["native"]
    return ["native", *(["haswell"] if "avx512f" in host.host_cpu().features else []), "x86-64"]


@pytest.fixture(scope="module", params=_levels())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        try:
            compilers.find_compiler()
        except ToolchainError as error:
            pytest.skip(str(error))
        binary = toolchain.build_shared({"functions": _source()}, KERNELS, march=request.param)
    path = tmp_path_factory.mktemp("library") / "functions.so"
    path.write_bytes(binary)
    yield Library(path, request.param == "native" and "avx512f" in host.host_cpu().features)


def _sample() -> Array:
    """Every exponent and sign (bit patterns at an odd stride), dense ranges, and the values where branches meet."""
    rng = np.random.default_rng(7)
    everywhere = np.arange(0, 2**32, 15013, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = [rng.uniform(-scale, scale, 60_000) for scale in (1, 4, 12, 110, 3e5, 1.1e6)]
    edges = [0.25, 0.3, 0.5, np.sqrt(0.5), 0.75, 1, np.sqrt(2), 2, 3.92, 4, 9.02, 88.72, 89, 103.97, 104, 2**20, 2**23]
    near = [np.nextafter(np.float32(edge), np.float32(way * 1e38)) for edge in edges for way in (-1, 1)]
    special = [0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, np.inf, np.nan, 1, 1.5, 2.5, 3.5, 126, 127, 128]
    signed = np.array([*edges, *near, *special])
    halves = 1 + rng.normal(size=40_000) * 0.05
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.concatenate([everywhere, *dense, halves, signed, -signed]).astype(np.float32)


SAMPLE = _sample()


def ulps(result: Array, exact: Array) -> Array:
    """|result - exact| in units of the last place of a float32 at ``exact``; subnormals share the smallest unit."""
    _, exponent = np.frexp(np.maximum(np.abs(exact), 2.0**-126))
    return np.abs(result.astype(np.float64) - exact) / np.exp2(exponent - 24.0)


@pytest.mark.parametrize("name", UNARY)
def test_float_accuracy_and_special_values(library: Library, name: str) -> None:
    reference, bound = UNARY[name]
    if library.avx512:
        bound = AVX512.get(name, bound)
    result = library(name, SAMPLE)
    with np.errstate(all="ignore"):
        exact = reference(SAMPLE.astype(np.float64))
        rounded = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(rounded))
    finite = np.isfinite(rounded) & np.isfinite(result)
    # A result may round to infinity only where the correctly rounded one is that infinity, or one step below.
    odd = np.isinf(result) != np.isinf(rounded)
    assert not odd.any(), SAMPLE[odd][:5]
    infinite = np.isinf(rounded)
    np.testing.assert_array_equal(result[infinite], rounded[infinite])
    signed = ~np.isnan(rounded)
    wrong = signed & (np.signbit(result) != np.signbit(rounded))
    assert not wrong.any(), SAMPLE[wrong][:5]
    error = ulps(result[finite], exact[finite])
    worst = error.argmax()
    assert error[worst] <= bound, f"{name}({SAMPLE[finite][worst]!r}) is {error[worst]:.3f} ulp off"


@pytest.mark.parametrize("name", UNARY)
def test_double_agrees_with_libm(library: Library, name: str) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [rng.uniform(-1, 1, 500), rng.uniform(-30, 30, 500), [0.0, -0.0, 0.5, -2.5, 1e300, np.inf, np.nan]]
    )
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(library(name, x), UNARY[name][0](x), rtol=2e-15, atol=0, equal_nan=True)


# Functions of doubles in vector code -> bound in ulps.
DOUBLE = {
    **{"exp": 0.9, "exp2": 1.1, "expm1": 0.9, "log": 0.9, "log2": 0.9, "log10": 0.9, "log1p": 0.9, "tanh": 0.9},
    **{"sin": 0.8, "cos": 0.8, "tan": 0.9, "atan": 1.0, "asin": 1.15, "acos": 1.15, "sinh": 0.9, "cosh": 0.9},
    **{"atanh": 1.2, "atan2": 1.15, "erf": 1.1, "pow": 1.15},
}


def _exact_erf(x: Array) -> Array:
    mp = pytest.importorskip("mpmath").mp
    with mp.workdps(25):
        return np.array([np.longdouble(mp.nstr(mp.erf(mp.mpf(float(v))), 25)) for v in x])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is not wider than double here")
@pytest.mark.parametrize("name", DOUBLE)
def test_double_accuracy(library: Library, name: str) -> None:
    rng = np.random.default_rng(11)
    powers = rng.uniform(1, 2, 20_000) * np.exp2(rng.uniform(-60, 19, 20_000)) * rng.choice([-1, 1], 20_000)
    edges = np.array([0.5, 1.0, np.sqrt(0.5), np.pi / 4, np.pi / 2, 3, 355, 2.0**20, 709, 1e-300, 5e-324, -720, -745.5])
    x = np.concatenate([powers, *(rng.uniform(-n, n, 20_000) for n in (1, 40)), edges, np.nextafter(edges, 0)])
    wide = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        if name == "atan2":
            y = rng.permutation(x)
            result, exact = library(name, y, x), np.arctan2(y.astype(np.longdouble), wide)
        elif name == "pow":
            x = np.abs(x)
            y = rng.uniform(-745, 710, x.size) / np.log(x)
            result, exact = library(name, x, y), np.abs(wide) ** y.astype(np.longdouble)
        elif name == "erf":
            x = x[np.abs(x) < 7][::29]
            result, exact = library(name, x), _exact_erf(x)
        else:
            reference, _ = UNARY[name]
            result, exact = library(name, x), reference(wide)
        finite = np.isfinite(exact) & (np.abs(exact) < np.finfo(np.float64).max)
        step = np.spacing(np.abs(exact[finite]).astype(np.float64)).astype(np.longdouble)
        error = (np.abs(result[finite] - exact[finite]) / step).astype(np.float64)
    worst = error.argmax()
    assert error[worst] <= DOUBLE[name], f"{name}({x[finite][worst]!r}) is {error[worst]:.3f} ulp off"


def test_powers_of_special_doubles(library: Library) -> None:
    """Signs of zeros and infinities depend on whether an exponent is odd: near 2^53, the last bit says so."""
    large = [2.0**53, 2.0**53 - 1, 2.0**52 + 1, 1e300, np.inf]
    small = [0.0, 5e-324, 1e-310, 0.3, 0.5, np.nextafter(1, 0), 1, np.nextafter(1, 2), 1.5, 2, 3, 745, 1074, 1075]
    values = np.array([np.nan, *large, *small, *(-x for x in large + small)])
    x, y = (a.ravel() for a in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        expected = np.power(x, y)
    result = library("pow", x, y)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[number]), np.signbit(expected[number]))
    np.testing.assert_allclose(result[number], expected[number], rtol=4e-16, atol=5e-324)


def test_lanes_do_not_influence_each_other(library: Library) -> None:
    """One huge or NaN lane sends a vector down another path: the other lanes must not notice."""
    x = np.random.default_rng(1).normal(size=64).astype(np.float32)
    for name in ("sin", "cos", "exp", "log", "tanh"):
        alone = library(name, x)
        for value in (1e30, np.nan, np.inf):
            mixed = x.copy()
            mixed[::16] = value
            kept = np.arange(64) % 16 != 0
            np.testing.assert_array_equal(library(name, mixed)[kept], alone[kept])


def test_monotonic_where_the_pieces_meet(library: Library) -> None:
    for name, edge in (("tanh", 0.3), ("erf", 0.75), ("sigmoid", 0.0)):
        bits = np.float32(edge).view(np.int32) + np.arange(-200 if edge else 0, 200, dtype=np.int32)
        y = library(name, bits.view(np.float32))
        assert (np.diff(y.astype(np.float64)) >= -np.spacing(y[1:])).all(), name


def _float_pairs() -> tuple[Array, Array]:
    rng = np.random.default_rng(5)
    values = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 7.0, 1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan]
    grid = np.array(np.meshgrid(values, values)).reshape(2, -1)
    random = rng.normal(size=(2, 4000)) * np.exp(rng.uniform(-8, 8, size=(2, 4000)))
    whole = rng.integers(-20, 20, size=(2, 4000)) * 0.1  # quotients that are, or nearly are, whole numbers
    both = np.concatenate([grid, random, whole], axis=1).astype(np.float32)
    return both[0], both[1]


TORCH_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "pow": torch.pow,
    "atan2": torch.atan2,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floordiv": torch.floor_divide,
    "idiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", BINARY)
def test_binary_floats_match_torch(library: Library, name: str, dtype: type) -> None:
    x, y = (a.astype(dtype) for a in _float_pairs())
    result = library(name, x, y)
    function = TORCH_BINARY[name]
    if name in ("pow", "atan2"):
        exact = function(torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y.astype(np.float64))).numpy()
        with np.errstate(over="ignore"):
            expected = exact.astype(dtype)
        np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
        finite = np.isfinite(expected) & np.isfinite(result)
        np.testing.assert_array_equal(result[~finite], expected[~finite])
        if dtype is np.float32:
            assert ulps(result[finite], exact[finite]).max() <= 1.0
        else:
            np.testing.assert_allclose(result[finite], expected[finite], rtol=1e-15)
    else:
        # torch.fmod is NaN in float32 where x / y overflows; the rest is exact, so float64 gives the same value.
        wide = np.float64 if name != "floordiv" else dtype
        expected = function(torch.from_numpy(x.astype(wide)), torch.from_numpy(y.astype(wide))).numpy()
        np.testing.assert_array_equal(result, expected.astype(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", INTEGER)
def test_integers_match_torch(library: Library, name: str, dtype: type) -> None:
    rng = np.random.default_rng(9)
    x = np.concatenate([rng.integers(-50, 50, 3000), rng.integers(-(2**31) + 1, 2**31, 3000)]).astype(dtype)
    y = np.concatenate([rng.integers(-9, 10, 5000), rng.integers(-(2**31) + 1, 2**31, 1000)]).astype(dtype)
    if name == "pow":
        y = np.clip(y, -9, 40).astype(dtype)
    else:
        y[y == 0] = 5
    expected = TORCH_BINARY[name](torch.from_numpy(x), torch.from_numpy(y)).numpy()
    np.testing.assert_array_equal(library(name, x, y), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers_never_trap(library: Library, dtype: type) -> None:
    low = np.iinfo(dtype).min
    x = np.array([low, low, 7, 0, low], dtype)
    y = np.array([-1, 0, 0, 0, low], dtype)
    assert library("idiv", x, y).tolist() == [low, 0, 0, 0, 1]
    assert library("floordiv", x, y).tolist() == [low, 0, 0, 0, 1]
    assert library("remainder", x, y).tolist() == [0, 0, 0, 0, 0]
    assert library("fmod", x, y).tolist() == [0, 0, 0, 0, 0]
    assert library("abs", x).tolist() == [low, low, 7, 0, low]
    assert library("sign", x).tolist() == [-1, -1, 1, 0, -1]


def test_coefficients_are_those_of_the_fit() -> None:
    """A function of each file by default; the other fits differ by their numbers only."""
    pytest.importorskip("mpmath")
    names = [] if FULL else ["EXP2_FACTOR", "TAN_TAIL", "ATAN_BASE", "SIN_TAIL_D", "ATAN_TAIL_F"]
    command = [sys.executable, "tools/fit_math.py", "--check", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": ok") == (len(names) or 35)
