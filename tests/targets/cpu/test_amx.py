"""The model of AMX (tests/support/amx_model.h) against exact arithmetic, and against the instructions where the CPU has
them."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.cpu.toolchain import build_shared
from npu_runtime import Executor

from ...support.amx_model import FLAGS, HAS_AMX
from ...support.kernel_driver import CXX, KERNELS

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on this machine")

DRIVER = Path(__file__).parents[2] / "support" / "amx_driver.cpp"
KINDS = {"bf16": 0, "ssd": 1, "sud": 2, "usd": 3, "uud": 4}
TINY = np.finfo(np.float32).tiny

Product = Callable[..., np.ndarray]


def _library(folder: Path, *flags: str) -> Path:
    path = folder / "driver.so"
    path.write_bytes(build_shared({"driver.cpp": DRIVER.read_text()}, KERNELS, more_flags=flags))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _library(tmp_path_factory.mktemp("amx"), *FLAGS)


def product(
    library: Path, kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, streamed: bool = False
) -> np.ndarray:
    """Return c [M, N] plus the product of a [M, K] and b [K, N], with b in the order of [K/2][N][2] or [K/4][N][4]."""
    depth = 2 if kind == "bf16" else 4
    packed = np.ascontiguousarray(b.reshape(-1, depth, b.shape[1]).swapaxes(1, 2))
    out, a = c.copy(), np.ascontiguousarray(a)
    sizes = (*a.shape[:1], a.shape[1] // depth, b.shape[1])
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (a, packed, out))
    assert ctypes.CDLL(str(library)).product(KINDS[kind], *sizes, *pointers, streamed) == 0
    return out


def rounded(exact: Fraction, sign: float = 0.0) -> np.float32:
    """Round to float32, to nearest even, with results below the normal range as zero. ``sign``: that of an exact 0."""
    if exact == 0:
        return np.float32(np.copysign(0, sign))
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    nearest = round(exact / unit) * unit  # Python rounds halves to even
    if abs(nearest) < Fraction(float(TINY)):
        return np.float32(np.copysign(0, float(exact > 0) - 0.5))
    return np.float32(float(nearest)) if abs(nearest) < 2**128 else np.float32(np.copysign(np.inf, float(nearest)))


def flushed(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def reference(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS of finite operands, in exact arithmetic that is rounded after each addition."""
    a, b, out = flushed(a), flushed(b), flushed(c)

    def fma(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
        """Return x * y + z."""
        if not np.isfinite(z) or not np.isfinite(x):
            return np.float32(float(x) * float(y) + float(z))
        sign = np.copysign(1, x) * np.copysign(1, y)
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        return rounded(exact, float(sign) if sign == np.copysign(1, z) else 0.0)

    one = np.float32(1)
    for m, n in np.ndindex(*out.shape):
        even = odd = np.float32(0)
        for k in range(0, a.shape[1], 2):
            even, odd = fma(a[m, k], b[k, n], even), fma(a[m, k + 1], b[k + 1, n], odd)
        out[m, n] = fma(fma(odd, one, even), one, out[m, n])
    return out


def bits(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


def operands(seed: int, m: int, k: int, n: int, spread: float = 1.0, size: float = 1.0) -> tuple[np.ndarray, ...]:
    """Random a, b in bfloat16 and c in float32; exponents vary by ``spread`` around ``size``."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * np.exp2(spread * rng.standard_normal(shape)) * size).astype(np.float32)

    return draw(m, k).astype(ml_dtypes.bfloat16), draw(k, n).astype(ml_dtypes.bfloat16), draw(m, n)


# Rows, K and columns; how far exponents vary; their size. 2^-64: products around the smallest normal float.
CASES = {
    "full": (16, 32, 16, 1.0, 1.0),
    "wide": (5, 32, 16, 12.0, 1.0),
    "odd": (3, 6, 9, 4.0, 1.0),
    "denormal": (16, 32, 16, 4.0, 2.0**-64),
    "overflow": (7, 32, 5, 3.0, 2.0**63),
    "one": (1, 2, 1, 1.0, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_two_chains_of_bfloat16(model: Path, name: str) -> None:
    m, k, n, spread, size = CASES[name]
    a, b, c = operands(1, m, k, n, spread, size)
    if name == "denormal":
        c = (c * np.float32(2.0**-62)).astype(np.float32)
        a[:, 3], b[5] = np.float32(TINY / 4), np.float32(-TINY / 2)
        assert (np.abs(c) < TINY).any() and (np.abs(c) > TINY).any()
    with np.errstate(over="ignore", invalid="ignore"):
        want = reference(a, b, c)
    got = product(model, "bf16", a, b, c)
    np.testing.assert_array_equal(bits(got), bits(want))
    np.testing.assert_array_equal(bits(product(model, "bf16", a, b, c, streamed=True)), bits(want))
    if name == "full":
        straight = c.copy()
        for i in range(k):
            straight += a[:, i : i + 1].astype(np.float32) * b[i].astype(np.float32)
        assert (straight != got).any()  # one chain has other bits
    if name == "denormal":
        assert ((want == 0) & (c != 0)).any()
    if name == "overflow":
        assert np.isinf(want).any()


def test_a_sum_just_below_the_normal_range_is_zero(model: Path) -> None:
    """Tininess is detected after rounding to 24 bits: a sum becomes zero if only the fewer bits of a denormal round it
    up to the smallest normal float."""
    for high, want in ((2.0**-75, 0.0), (1.5 * 2.0**-76, 0.0), (2.0**-76, TINY)):
        a, b = np.zeros((1, 4), ml_dtypes.bfloat16), np.zeros((4, 1), ml_dtypes.bfloat16)
        a[0, ::2], b[::2, 0] = (2.0**-63, -(2.0**-75)), (2.0**-63, high)
        c = np.zeros((1, 1), np.float32)
        np.testing.assert_array_equal(reference(a, b, c), [[want]])
        np.testing.assert_array_equal(product(model, "bf16", a, b, c), [[want]])


def test_infinities_and_nan(model: Path) -> None:
    a, b, c = operands(2, 6, 8, 4)
    a[0, 1], a[1, 0], b[2, 1], c[3, 2] = np.inf, np.nan, -np.inf, np.nan
    a[2, 2] = 0  # times an infinity
    a[4, 4], a[4, 6], b[4], b[6] = np.inf, -np.inf, 1, 1
    c[5, 0] = -np.inf
    with np.errstate(invalid="ignore"):
        want = c + a.astype(np.float32) @ b.astype(np.float32)
    got = product(model, "bf16", a, b, c)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])
    assert np.isnan(want).sum() >= 9 and np.isinf(want).sum() >= 5


@pytest.mark.parametrize("kind", ["ssd", "sud", "usd", "uud"])
def test_int8(model: Path, kind: str) -> None:
    rng = np.random.default_rng(3)
    types = [np.int8 if letter == "s" else np.uint8 for letter in kind[:2]]
    (m, k, n) = 11, 64, 16
    a, b = (rng.integers(0, 256, s).astype(np.uint8).view(t) for s, t in zip(((m, k), (k, n)), types, strict=True))
    c = rng.integers(-(2**31), 2**31, (m, n)).astype(np.int32)
    want = (c + a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)  # wraps around
    np.testing.assert_array_equal(product(model, kind, a, b, c), want)


def test_tiles_are_stored_with_a_stride_and_no_more_than_their_shape(model: Path) -> None:
    out = np.full((16, 16), 7, np.int32)
    ctypes.CDLL(str(model)).zeros(3, 5, ctypes.c_void_p(out.ctypes.data), ctypes.c_long(64))
    assert (out[:3, :5] == 0).all() and (out[3:] == 7).all() and (out[:, 5:] == 7).all()


FAULTS = (
    "used without a configuration", "no such palette", "16 rows x 64 bytes", "eight tiles", "rows without bytes",
    "reserved byte", "a tile is used that is not configured", "shapes of a product", "used without a configuration",
)  # fmt: skip


@pytest.mark.parametrize(("number", "message"), [*enumerate(FAULTS)])
def test_what_faults_in_hardware_ends_the_process(model: Path, number: int, message: str) -> None:
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(model)!r}).fault({number})"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGABRT and run.stderr.startswith("AMX model: #") and message in run.stderr


LAYERS = """
struct Trace : AmxModel {
  static inline long steps = 0, fetched[1 << 14], lines[1 << 14];
  static inline const char* weights;
  static void prefetch(const void* at) {
    const long line = ((const char*)at - weights) / 64;
    if (line >= 0 && line < 512 << 4) fetched[steps - 1]++, lines[line]++;
  }
  template <class Shapes> static void configure(const Shapes&) {}
  static void release() {}
  template <int T> static void zero() {}
  template <int T> static void load(const void*, long) {}
  template <int T> static void stream(const void*, long) {}
  template <int T> static void store(void*, long) {}
  template <int C, int, int> static void dpbf16ps() { steps += C == 0; }
};
#undef NPU_AMX_MODEL
#define NPU_AMX_MODEL ::Trace
#define __builtin_prefetch(at, ...) ::Trace::prefetch(at)
#include "conv.h"
using namespace npu;
template <long SIZE, long CHANNELS, long FILTERS, long TAPS> struct Layer {
  static constexpr long N = 1, H = SIZE, W = SIZE, C = CHANNELS, K = FILTERS, R = TAPS, S = TAPS, G = 1, OH = SIZE;
  static constexpr long OW = SIZE, stride_h = 1, stride_w = 1, dil_h = 1, dil_w = 1, pad_t = TAPS / 2, pad_l = TAPS / 2;
};
template <class D> using Plan = typename AmxConv<D, bf16>::Plan;
template <class D> long second_half() {
  return Plan<D>::first_row(0, Chunk<Plan<D>>::of(Chunk<Plan<D>>::COUNT / 2).block);
}
struct None {
  template <class Lanes> auto at(long, Lanes) const { return [](vf, long) {}; }
  template <class Lanes> void operator()(vf, long, long, Lanes) const {}
  void prefetch(long, long) const {}
};
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void halves(long* rows) {
  rows[0] = second_half<Layer<14, 1024, 256, 1>>(), rows[1] = second_half<Layer<14, 256, 1024, 1>>();
  rows[2] = second_half<Layer<28, 128, 128, 3>>();
}
EXPORT void heights(long* of) {
  of[0] = Plan<Layer<14, 256, 1024, 1>>::HEIGHT, of[1] = Plan<Layer<14, 256, 256, 3>>::HEIGHT;
  of[2] = Plan<Layer<28, 128, 512, 1>>::HEIGHT, of[3] = Plan<Layer<7, 512, 512, 3>>::HEIGHT;
}
EXPORT int rows_of_49(int32_t* rows) {
  int32_t first[4];
  return Plan<Layer<14, 256, 1024, 1>>::tiles(0, first, rows);
}
EXPORT void blocks(long* of) {
  of[0] = Plan<Layer<28, 512, 128, 1>>::BLOCKS, of[1] = Chunk<Plan<Layer<28, 512, 128, 1>>>::COUNT;
  of[2] = Plan<Layer<28, 512, 256, 1>>::BLOCKS, of[3] = Chunk<Plan<Layer<28, 512, 256, 1>>>::COUNT;
}
using Wide = Layer<14, 256, 1024, 1>;  // 32 panels in chunks of 4, of 2 pairs of tiles and 8 steps
alignas(64) static char memory[conv2d_scratch_bytes<Wide, bf16, bf16>() + (1 << 20)];
EXPORT long prefetched(long* steps) {
  const bf16* x = (const bf16*)(memory + conv2d_scratch_bytes<Wide, bf16, bf16>());
  Thread th = {0, 1, nullptr, memory, 0, -1};
  int counter = 0;
  None epi;
  Trace::weights = memory + 2 * sizeof memory;  // far from what else is prefetched
  conv2d<Wide>(x, (const bf16*)Trace::weights, epi, th, &counter);
  for (long s = 0; s < 8 * 64; s++) steps[s] = Trace::fetched[s];
  long missed = 0;
  for (long line = 256; line < 512 << 4; line++) missed += Trace::lines[line] == 0;
  return missed;
}
"""


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("layers") / "layers.so"
    path.write_bytes(build_shared({"layers.cpp": LAYERS}, KERNELS, more_flags=FLAGS))
    return ctypes.CDLL(str(path))


def test_two_threads_have_the_same_rows_in_the_convolutions_of_a_network(layers: ctypes.CDLL) -> None:
    """Each would read from the other one's cache what it has not computed itself."""
    layers.halves(rows := (ctypes.c_long * 3)())
    assert rows[:] == [14 * 14 // 2, 14 * 14 // 2, 28 * 28 // 2]


def test_tiles_have_equal_heights(layers: ctypes.CDLL) -> None:
    """A block of 49 rows is 4 tiles of 13, and a row of 14 pixels and 2 of padding one tile. Blocks of 64 rows, and
    pixels without a gap after 14 or 15, fill tiles of 16."""
    layers.heights(heights := (ctypes.c_long * 4)())
    assert heights[:] == [13, 14, 16, 16]
    rows = (ctypes.c_int32 * 64)()
    assert layers.rows_of_49(rows) == 4 and [r for r in rows if r >= 0] == list(range(49))


def test_products_of_long_rows_have_large_blocks(layers: ctypes.CDLL) -> None:
    """L1 keeps a panel for all rows of a block. There are chunks for 16 threads."""
    layers.blocks(counts := (ctypes.c_long * 4)())
    assert counts[:] == [4, 16, 2, 16]


def test_weights_of_the_next_chunk_are_prefetched_in_equal_shares(layers: ctypes.CDLL) -> None:
    """All but the first panel are prefetched. A step has 32 lines of weights, half of which are for the next chunk,
    because two pairs of tiles read a chunk; the first chunk prefetches its own in 24 of its 64 steps."""
    steps = (ctypes.c_long * 512)()
    assert layers.prefetched(steps) == 0
    assert set(steps[:64]) == {32, 26} and set(steps[64:448]) == {16} and set(steps[448:]) == {0}


ORDER = """
struct Trace : AmxModel {
  static inline char events[64];
  static inline int count = 0;
  static void put(char event) { events[count++] = event; }
  template <int T> static void zero() {}
  template <int T> static void load(const void*, long) { put('0' + T); }
  template <int T> static void stream(const void*, long) { put('0' + T); }
  template <int T> static void store(void*, long) {}
  template <int C, int, int> static void dpbf16ps() { put('a' + C); }
};
#undef NPU_AMX_MODEL
#define NPU_AMX_MODEL ::Trace
#include "amx_tile.h"
using namespace npu;
extern "C" __attribute__((visibility("default"))) const char* order(long next_second) {
  const AmxTap taps[] = {{0, 0}, {64, 1}};
  AmxArgs a = {};
  a.taps = taps, a.ntaps = 2, a.steps = 2, a.second = 1024;
  a.x = a.w = a.next_x = a.next_w = "", a.next_second = next_second;
  NoAmxWork work;
  amx_tile<2, false, 1, STREAM_NONE, true>(a, work);
  return Trace::events;
}
"""


@pytest.mark.parametrize(("next_second", "last"), [(1024, "ab4c6d57"), (-1, "ab4c6d7")])
def test_operands_of_the_next_step_are_loaded_once_their_tiles_have_been_read(
    tmp_path: Path, next_second: int, last: str
) -> None:
    """Products a and b read tile 4, c and d tile 5, a and c tile 6, b and d tile 7. Loads that wait for the next step
    arrive after the products of this one."""
    path = tmp_path / "order.so"
    path.write_bytes(build_shared({"order.cpp": ORDER}, KERNELS, more_flags=FLAGS))
    order = ctypes.CDLL(str(path)).order
    order.restype = ctypes.c_char_p
    assert order(ctypes.c_long(next_second)).decode() == "6475" + 3 * "ab4c6d57" + last


def test_a_program_says_that_tiles_are_refused(amx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    program = npu_compiler.compile(capture(net, (x,)), target=amx)
    weights = {k: v.numpy() for k, v in net.state_dict().items()}
    (y,) = Executor(program, weights).run([x.numpy()]).values()
    np.testing.assert_allclose(y, net(x).detach().numpy(), rtol=1e-5)
    monkeypatch.setenv("AMX_MODEL_REFUSES", "1")
    with pytest.raises(BackendError, match=r"refuses the AMX tile registers.*cpu:avx512"):
        Executor(program, weights)


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
def test_the_model_agrees_with_the_instructions(model: Path, tmp_path: Path) -> None:
    hardware = _library(tmp_path)
    for seed, (m, k, n, spread, size) in enumerate(list(CASES.values()) * 50):
        a, b, c = operands(seed, m, k, n, spread, size)
        got = product(hardware, "bf16", a, b, c, streamed=seed % 2 == 0)
        np.testing.assert_array_equal(bits(got), bits(product(model, "bf16", a, b, c)))
