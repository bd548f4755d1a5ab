"""The hand-written CPU kernels against float64 numpy: every storage type, thread count and instruction set.

Small drivers are generated, compiled with g++ and called through ctypes, the way a compiled program uses the kernels.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.targets.cpu.winograd import winograd_tile, winograd_weights

KERNELS = Path(__file__).parent.parent / "npu_compiler" / "targets" / "cpu" / "kernels"
FLAGS = (
    "-std=c++17 -O1 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden -fno-exceptions -fno-rtti"
    " -fPIC -shared -w"
).split()
# Every code path this machine can run: its own, AVX2, and the portable one (baseline x86-64: 4 lanes, no F16C).
ARCHS = ["native", "haswell", "x86-64"] if platform.machine() == "x86_64" else ["native"]
NUMPY = {"float": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "bool8": np.bool_}
CXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="no g++ on this machine")

PRELUDE = """
#include "attention.h"
#include "conv.h"
#include "depthwise.h"
#include "transpose.h"
#include "winograd.h"
using namespace npu;
#define EXPORT extern "C" __attribute__((visibility("default")))
struct Args { const void *x, *w, *extra; float* out; const float *bias, *residual; int counters[64]; long keys, first; };
// bias, then a residual of the same layout: exercises row, column and lane arguments.
struct Store {
  const Args& a; long ld_out;
  template <class L> inline __attribute__((always_inline)) void operator()(vf acc, long row, long col, L lanes) {
    acc += ld(a.bias + col, lanes) + ld(a.residual + row * ld_out + col, lanes);
    st(a.out + row * ld_out + col, acc, lanes);
  }
};
EXPORT int start(int threads, long scratch) { return pool_start(threads, scratch); }
EXPORT void stop() { pool_stop(); }
"""


@dataclass(frozen=True)
class Library:
    """A compiled driver: calls ``name(args)`` on the pool."""

    handle: ctypes.CDLL

    def start(self, threads: int) -> None:
        assert self.handle.start(threads, ctypes.c_long(self.handle.scratch())) == threads

    def run(
        self,
        name: str,
        *arrays: np.ndarray | None,
        out: np.ndarray,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
        keys: int = 0,
        first: int = 0,
    ) -> np.ndarray:
        pointers = [None if a is None else a.ctypes.data for a in (*arrays, *[None] * (3 - len(arrays)))]
        extra = [None if a is None else a.ctypes.data for a in (out, bias, residual)]
        args = (ctypes.c_void_p * 40)(*pointers, *extra)
        args[38], args[39] = keys or None, first or None
        getattr(self.handle, name)(args)
        return out


def build(directory: Path, arch: str, bodies: list[str], scratch: list[str]) -> Library:
    """Compiles the cases into one shared object."""
    text = [PRELUDE, *bodies, "EXPORT long scratch() { long most = 0;"]
    text += [f"  most = max_of(most, {s});" for s in scratch] + ["  return most; }"]
    source = directory / "driver.cpp"
    source.write_text("\n".join(text))
    library = directory / "driver.so"
    command = [
        CXX or "g++",
        *FLAGS,
        f"-march={arch}",
        "-iquote",
        str(KERNELS),
        str(source),
        "-o",
        str(library),
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return Library(ctypes.CDLL(str(library)))


def struct(name: str, base: str = "", **values: int | float | bool) -> str:
    def text(v: int | float | bool) -> str:
        return str(v).lower() if isinstance(v, bool) else f"{v!r}f" if isinstance(v, float) else str(v)

    def kind(v: int | float | bool) -> str:
        return "bool" if isinstance(v, bool) else "float" if isinstance(v, float) else "long"

    fields = " ".join(f"static constexpr {kind(v)} {k} = {text(v)};" for k, v in values.items())
    return f"struct {name}{f' : {base}' if base else ''} {{ {fields} }};"


def entry(name: str, call: str) -> str:
    return (
        f"static void body_{name}(void* p, Thread& th) {{ Args& a = *(Args*)p; {call} }}\n"
        f"EXPORT void {name}(void* p) {{ memset(((Args*)p)->counters, 0, 256); pool_run(body_{name}, p); }}"
    )


def pack(w: np.ndarray, dtype: str) -> np.ndarray:
    """[..., K, N] -> panels [..., ceil(N/32), K, 32], or [..., ceil(N/32), ceil(K/2), 32, 2] for bf16."""
    *lead, k, n = w.shape
    pair = 2 if dtype == "bf16" else 1
    full = np.zeros((*lead, -(-k // pair) * pair, -(-n // 32) * 32), w.dtype)
    full[..., :k, :n] = w
    panels = full.reshape(*lead, full.shape[-2] // pair, pair, full.shape[-1] // 32, 32)
    d = len(lead)
    return np.ascontiguousarray(panels.transpose(*range(d), d + 2, d, d + 3, d + 1))


def pack_conv(w: np.ndarray, groups: int, dtype: str) -> np.ndarray:
    """[K, R, S, C/G] -> for each group [ceil(K/G/32)][R][S][C/G][32], or [..][ceil(C/G/2)][32][2] for bf16."""
    k, r, s, c = w.shape
    per_tap = pack(w.reshape(groups, k // groups, r, s, c).transpose(0, 2, 3, 4, 1), dtype)  # [G, R, S, panels, ...]
    return np.ascontiguousarray(np.moveaxis(per_tap, 3, 1))


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


def check(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> None:
    """fp32 accumulation: the error stays within a few units in the last place of the sum of magnitudes."""
    error = np.abs(got.astype(np.float64) - want)
    assert np.isfinite(got).all()
    assert (error <= 2e-6 * magnitude + 1e-6).all(), f"worst {np.max(error / (magnitude + 1e-30)):.2e}"


# ------------------------------------------------------------------------------------------------ convolution
@dataclass(frozen=True)
class Conv:
    N: int = 1
    H: int = 9
    W: int = 11
    C: int = 16
    K: int = 32
    R: int = 3
    S: int = 3
    stride_h: int = 1
    stride_w: int = 1
    pad_t: int = 1
    pad_l: int = 1
    dil_h: int = 1
    dil_w: int = 1
    pad_b: int = 1
    pad_r: int = 1
    G: int = 1

    @property
    def out(self) -> tuple[int, int]:
        high = self.H + self.pad_t + self.pad_b - (self.R - 1) * self.dil_h - 1
        wide = self.W + self.pad_l + self.pad_r - (self.S - 1) * self.dil_w - 1
        return high // self.stride_h + 1, wide // self.stride_w + 1

    def reference(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        oh, ow = self.out
        span_h, span_w = (oh - 1) * self.stride_h + 1, (ow - 1) * self.stride_w + 1
        pads = ((0, 0), (self.pad_t, self.pad_b), (self.pad_l, self.pad_r), (0, 0))
        x = np.pad(x.astype(np.float64), pads).reshape(
            self.N, self.H + self.pad_t + self.pad_b, -1, self.G, self.C // self.G
        )
        w = w.astype(np.float64).reshape(self.G, self.K // self.G, self.R, self.S, -1)
        y = np.zeros((self.N, oh, ow, self.G, self.K // self.G))
        for r in range(self.R):
            for s in range(self.S):
                top, left = r * self.dil_h, s * self.dil_w
                part = x[:, top : top + span_h : self.stride_h, left : left + span_w : self.stride_w]
                y += np.einsum("nhwgc,gkc->nhwgk", part, w[:, :, r, s])
        return y.reshape(self.N, oh, ow, self.K)


POINTWISE = Conv(R=1, S=1, pad_t=0, pad_l=0, pad_b=0, pad_r=0)
CONVS = [
    Conv(),
    Conv(N=2, H=14, W=14, C=32, K=64),
    Conv(H=7, W=7, C=24, K=40),
    Conv(H=17, W=23, C=3, K=33, R=7, S=7, stride_h=2, stride_w=2, pad_t=3, pad_l=3, pad_b=3, pad_r=3),
    Conv(H=20, W=6, C=5, K=7, stride_h=3, stride_w=2, pad_t=0, pad_l=2, pad_b=2, pad_r=0),
    Conv(H=13, W=12, C=8, K=48, dil_h=2, dil_w=3, pad_t=2, pad_l=3, pad_b=2, pad_r=3),
    Conv(C=12, K=20, G=4),
    Conv(C=6, K=66, G=2, stride_h=2),
    Conv(H=5, W=5, C=10, K=10, G=10, R=2, S=4, pad_b=0),
    Conv(H=3, W=40, C=7, K=32, R=1, S=5, pad_t=0, pad_b=0, pad_l=2, pad_r=2),
    Conv(H=6, W=6, C=4, K=16, R=5, S=5, pad_t=4, pad_l=4, pad_b=4, pad_r=4),  # more padding than image
    Conv(H=2, W=2, C=8, K=32, pad_t=3, pad_l=3, pad_b=3, pad_r=3, dil_h=3, dil_w=3),
    Conv(N=2, H=9, W=9, C=512, K=32, stride_h=2, stride_w=2),  # pixels of the copy 4096 bytes apart
    POINTWISE,
    replace(POINTWISE, N=3, H=7, W=7, C=65, K=70),
    replace(POINTWISE, H=15, W=14, C=20, K=96, stride_h=2, stride_w=2),
    replace(POINTWISE, H=6, W=7, C=1024, K=35),  # rows 4096 bytes apart
    replace(POINTWISE, H=1, W=1, C=30, K=10),
    replace(POINTWISE, H=29, W=31, C=16, K=40, pad_t=1, pad_r=2),
]
SMOKE = [CONVS[i] for i in (0, 3, 5, 7, 14)]  # for the second and third instruction set
# Mixed operands differ from the others by nothing that depends on the instruction set.
VARIANTS = [(arch, t, t) for arch in ARCHS for t in ("float", "f16", "bf16")]
VARIANTS += [("native", "float", "f16"), ("native", "f16", "float"), ("native", "bf16", "float")]


def conv_struct(i: int, c: Conv) -> str:
    oh, ow = c.out
    names = "N H W C K R S stride_h stride_w pad_t pad_l dil_h dil_w G".split()
    return struct(f"D{i}", **{n: getattr(c, n) for n in names}, OH=oh, OW=ow)


@pytest.mark.parametrize(("arch", "tx", "tw"), VARIANTS)
def test_conv2d(tmp_path: Path, arch: str, tx: str, tw: str) -> None:
    convs = CONVS if arch == "native" and tx == tw else SMOKE
    bodies, scratch = [], []
    for i, c in enumerate(convs):
        call = f"Store e{{a, {c.K}}}; conv2d<D{i}>((const {tx}*)a.x, (const {tw}*)a.w, e, th, a.counters);"
        bodies += [conv_struct(i, c), entry(f"conv{i}", call)]
        scratch.append(f"conv2d_scratch_bytes<D{i}, {tx}, {tw}>()")
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(1)
    for threads in (1, 2, 3):
        library.start(threads)
        for i, c in enumerate(convs):
            x, w = random(rng, (c.N, c.H, c.W, c.C), tx), random(rng, (c.K, c.R, c.S, c.C // c.G), tw)
            bias, residual = random(rng, (c.K,), "float"), random(rng, (c.N, *c.out, c.K), "float")
            out = library.run(
                f"conv{i}", x, pack_conv(w, c.G, tw), out=np.full_like(residual, np.nan), bias=bias, residual=residual
            )
            magnitude = c.reference(np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)))
            check(out, c.reference(x, w) + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", [2, 4])
def test_winograd(tmp_path: Path, arch: str, tile: int) -> None:
    cases = [
        Conv(N=2, H=14, W=14, C=32, K=64),
        Conv(H=9, W=11, C=21, K=33),
        Conv(H=7, W=30, C=128, K=40, pad_t=0, pad_l=2, pad_b=1, pad_r=0),
        Conv(H=28, W=28, C=16, K=96, pad_t=0, pad_l=0, pad_b=0, pad_r=0),
        Conv(H=1, W=1, C=3, K=5),
    ]
    dtypes = ["float", "f16", "bf16"]
    bodies, scratch = [], []
    for i, c in enumerate(cases):
        bodies.append(conv_struct(i, c))
        scratch.append(f"winograd_scratch_bytes<D{i}, {tile}>()")
        for t in dtypes if arch == "native" else dtypes[:1]:
            call = f"Store e{{a, {c.K}}}; conv2d_winograd<D{i}, {tile}>((const {t}*)a.x, (const float*)a.w, e, th, a.counters);"
            bodies.append(entry(f"winograd{i}_{t}", call))
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(8)
    for threads in (1, 2, 3):
        library.start(threads)
        for i, c in enumerate(cases):
            for t in dtypes if arch == "native" else dtypes[:1]:
                x, w = random(rng, (c.N, c.H, c.W, c.C), t), random(rng, (c.K, 3, 3, c.C), "float")
                bias, residual = random(rng, (c.K,), "float"), random(rng, (c.N, *c.out, c.K), "float")
                u = winograd_weights(w.transpose(0, 3, 1, 2), tile)
                out = library.run(
                    f"winograd{i}_{t}", x, u, out=np.full_like(residual, np.nan), bias=bias, residual=residual
                )
                magnitude = c.reference(np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)))
                check(out, c.reference(x, w) + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


@pytest.mark.parametrize(
    ("shape", "dtype", "tile"),
    [
        ((1, 56, 56, 64, 64), "float16", 4),
        ((1, 14, 14, 256, 256), "float16", 2),  # the transformed weights of F(4x4) come from memory
        ((8, 14, 14, 256, 256), "float16", 4),
        ((1, 7, 7, 512, 512), "float16", 0),
        ((8, 7, 7, 512, 512), "float16", 4),
        ((1, 56, 56, 64, 64), "float32", 2),
        ((8, 7, 7, 512, 512), "float32", 0),  # too inaccurate
        ((1, 28, 28, 128, 128), "bfloat16", 4),
        ((1, 14, 14, 256, 256), "bfloat16", 0),
        ((1, 224, 224, 3, 64), "float16", 0),
    ],
)
def test_winograd_is_chosen_where_it_was_measured_faster(shape: tuple[int, ...], dtype: str, tile: int) -> None:
    assert winograd_tile(*shape, dtype) == tile


def test_winograd_rejects_other_filters() -> None:
    with pytest.raises(ValueError, match="3x3"):
        winograd_weights(np.zeros((4, 4, 5, 5), np.float32))
    with pytest.raises(ValueError, match="tile"):
        winograd_weights(np.zeros((4, 4, 3, 3), np.float32), 3)


@pytest.mark.parametrize("arch", ARCHS)
def test_depthwise(tmp_path: Path, arch: str) -> None:
    cases = [
        Conv(C=32, K=32, G=32),
        Conv(N=2, H=20, W=33, C=21, K=21, G=21, stride_h=2, stride_w=2),
        Conv(H=12, W=30, C=5, K=5, G=5, R=5, S=5, pad_t=2, pad_l=2, pad_b=2, pad_r=2, dil_w=2),
        Conv(H=2, W=2, C=16, K=16, G=16, pad_t=3, pad_l=3, pad_b=3, pad_r=3, dil_h=3, dil_w=3),
    ]
    dtypes = ["float", "f16", "bf16"]
    bodies = [conv_struct(i, c) for i, c in enumerate(cases)]
    for i, c in enumerate(cases):
        for t in dtypes:
            call = f"Store e{{a, {c.K}}}; depthwise<D{i}>((const {t}*)a.x, (const {t}*)a.w, e, th, a.counters);"
            bodies.append(entry(f"depthwise{i}_{t}", call))
    library = build(tmp_path, arch, bodies, [])
    rng = np.random.default_rng(2)
    for threads in (1, 3):
        library.start(threads)
        for i, c in enumerate(cases):
            for t in dtypes:
                x, w = random(rng, (c.N, c.H, c.W, c.C), t), random(rng, (c.K, c.R, c.S, 1), t)
                bias, residual = random(rng, (c.K,), "float"), random(rng, (c.N, *c.out, c.K), "float")
                packed = np.ascontiguousarray(w[..., 0].transpose(1, 2, 0))
                out = library.run(
                    f"depthwise{i}_{t}", x, packed, out=np.full_like(residual, np.nan), bias=bias, residual=residual
                )
                magnitude = c.reference(np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)))
                check(out, c.reference(x, w) + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


# ------------------------------------------------------------------------------------------------ matrix product
GEMMS = [
    (1, 64, 64),
    (1, 130, 33),
    (2, 100, 77),
    (3, 32, 9),
    (4, 259, 128),
    (5, 40, 31),
    (14, 64, 64),
    (49, 70, 50),
    (100, 33, 1024),
    (300, 200, 40),
    (67, 1, 1),
    (13, 2000, 16),
]


@pytest.mark.parametrize(("arch", "tx", "tw"), VARIANTS)
def test_gemm(tmp_path: Path, arch: str, tx: str, tw: str) -> None:
    shapes = GEMMS if arch == "native" and tx == tw else GEMMS[1:8:2]
    bodies, scratch = [], []
    for i, (m, n, k) in enumerate(shapes):
        bodies.append(
            struct(f"D{i}", "GemmDims", M=m, N=n, K=k, lda=k + i % 3, B=2, batch_a=m * (k + i % 3), shared_w=i % 2 == 0)
        )
        call = f"Store e{{a, {n}}}; gemm<D{i}>((const {tx}*)a.x, (const {tw}*)a.w, e, th, a.counters);"
        bodies.append(entry(f"gemm{i}", call))
        scratch.append(f"gemm_scratch_bytes<D{i}, {tx}, {tw}>()")
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(3)
    for threads in (1, 2, 3):
        library.start(threads)
        for i, (m, n, k) in enumerate(shapes):
            a, w = random(rng, (2, m, k + i % 3), tx), random(rng, (1 if i % 2 == 0 else 2, k, n), tw)
            bias, residual = random(rng, (n,), "float"), random(rng, (2, m, n), "float")
            out = library.run(
                f"gemm{i}", a, pack(w, tw), out=np.full_like(residual, np.nan), bias=bias, residual=residual
            )
            a64, w64 = a[..., :k].astype(np.float64), w.astype(np.float64)
            check(out, a64 @ w64 + bias + residual, np.abs(a64) @ np.abs(w64) + np.abs(bias) + np.abs(residual))
    library.handle.stop()


@pytest.mark.parametrize("dtype", ["float", "f16", "bf16"])
def test_pack_b(tmp_path: Path, dtype: str) -> None:
    b, n, k = 3, 70, 45
    packed_size = b * 3 * (46 if dtype == "bf16" else 45) * 32
    bodies = [struct("D", "GemmDims", M=20, N=n, K=k, lda=k, B=b, batch_a=20 * k, batch_b=n * k, shared_w=False)]
    for name, strides in (("rows", f"{n}, 1"), ("columns", f"1, {k}")):
        bodies.append(entry(name, f"pack_b<D>((const {dtype}*)a.x, {strides}, ({dtype}*)a.out, th);"))
    call = f"Store e{{a, {n}}}; gemm<D>((const {dtype}*)a.x, (const {dtype}*)a.w, e, th, a.counters);"
    bodies.append(entry("multiply", call))
    library = build(tmp_path, "native", bodies, [f"gemm_scratch_bytes<D, {dtype}, {dtype}>()"])
    rng = np.random.default_rng(4)
    library.start(2)
    right, left = random(rng, (b, k, n), dtype), random(rng, (b, 20, k), dtype)
    for name, source in (("rows", right), ("columns", np.ascontiguousarray(right.transpose(0, 2, 1)))):
        packed = library.run(name, source, out=np.ones(packed_size, NUMPY[dtype]))
        assert np.array_equal(packed, pack(right, dtype).ravel())
    zeros = np.zeros((b, 20, n), np.float32)
    out = library.run("multiply", left, packed, out=np.empty_like(zeros), bias=zeros, residual=zeros)
    left64, right64 = left.astype(np.float64), right.astype(np.float64)
    check(out, left64 @ right64, np.abs(left64) @ np.abs(right64))
    library.handle.stop()


# ------------------------------------------------------------------------------------------------ attention
@dataclass(frozen=True)
class Attention:
    B: int = 1
    H: int = 2
    HK: int = 2
    SQ: int = 37
    SK: int = 37
    DH: int = 16
    DV: int = 16
    causal: bool = False
    mask: str = ""
    keys: int = 0
    first: int = 0


ATTENTIONS = [
    Attention(),
    Attention(B=2, H=4, HK=2, SQ=20, SK=150, DH=33, DV=65),
    Attention(H=6, HK=2, SQ=1, SK=300, DH=64, DV=64, keys=211),
    Attention(H=4, HK=1, SQ=3, SK=130, DH=40, DV=24, causal=True, keys=120, first=100),
    Attention(SQ=130, SK=130, causal=True, DH=64, DV=64),
    Attention(SQ=70, SK=40, causal=True),
    Attention(B=2, SQ=40, SK=120, mask="float"),
    Attention(SQ=40, SK=61, mask="bool8"),
    Attention(B=2, H=3, HK=3, SQ=5, SK=90, mask="f16", causal=True),
    Attention(B=2, H=8, HK=1, SQ=1, SK=37, DH=40, DV=21, mask="bool8"),
    Attention(H=8, HK=2, SQ=2, SK=50, DH=7, DV=129, causal=True, keys=45, first=43),
]


def attention_reference(
    c: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None
) -> np.ndarray:
    keys = c.keys or c.SK
    q, k, v = (t.astype(np.float64) for t in (q, k[:, :, :keys], v[:, :, :keys]))
    k, v = (np.repeat(t, c.H // c.HK, axis=1) for t in (k, v))
    s = 0.3 * np.einsum("bhid,bhjd->bhij", q, k)
    if mask is not None:
        s = s + (np.where(mask, 0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64))
    if c.causal:
        s = np.where(np.arange(keys) <= np.arange(c.SQ)[:, None] + c.first, s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bhjd->bhid", np.divide(e, total, out=np.zeros_like(e), where=total > 0), v)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float", "f16", "bf16"])
def test_attention(tmp_path: Path, arch: str, dtype: str) -> None:
    cases = ATTENTIONS if arch == "native" else ATTENTIONS[1:8:2]
    bodies, scratch = [], []
    for i, c in enumerate(cases):
        strides: dict[str, int] = {}
        for name, heads, rows, width in (
            ("q", c.H, c.SQ, c.DH),
            ("k", c.HK, c.SK, c.DH),
            ("v", c.HK, c.SK, c.DV),
            ("o", c.H, c.SQ, c.DV),
        ):
            if i % 2:  # [B, S, H, D] in memory
                strides |= {f"{name}_b": heads * rows * width, f"{name}_h": width, f"{name}_s": heads * width}
            else:
                strides |= {f"{name}_b": heads * rows * width, f"{name}_h": rows * width, f"{name}_s": width}
        if c.mask:  # shared by the heads
            strides |= {"m_b": c.SQ * c.SK, "m_q": c.SK, "m_k": 1}
        names = "B H HK SQ SK DH DV causal".split()
        bodies.append(struct(f"D{i}", "AttentionDims", **{n: getattr(c, n) for n in names}, scale=0.3, **strides))
        mask = f"(const {c.mask}*)a.extra" if c.mask else "(const NoMask*)nullptr"
        bodies.append(
            entry(
                f"attention{i}",
                f"attention<D{i}>((const {dtype}*)a.x, (const {dtype}*)a.w, (const {dtype}*)a.bias, {mask},"
                f" ({dtype}*)a.out, th, a.counters, a.keys, a.first);",
            )
        )
        scratch.append(f"attention_scratch_bytes<D{i}, {dtype}>()")
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(5)
    for threads in (1, 2):
        library.start(threads)
        for i, c in enumerate(cases):

            def stored(t: np.ndarray, swap: bool = bool(i % 2)) -> np.ndarray:
                return np.ascontiguousarray(t.transpose(0, 2, 1, 3)) if swap else t

            q, k, v = (
                random(rng, (c.B, c.H, c.SQ, c.DH), dtype),
                random(rng, (c.B, c.HK, c.SK, c.DH), dtype),
                random(rng, (c.B, c.HK, c.SK, c.DV), dtype),
            )
            mask = None
            if c.mask:
                keep = rng.random((c.B, 1, c.SQ, c.SK)) > 0.3
                keep[:, :, 3:4] = False  # a row that sees nothing
                mask = (
                    keep
                    if c.mask == "bool8"
                    else np.where(keep, random(rng, keep.shape, "float"), -np.inf).astype(NUMPY[c.mask])
                )
            out = np.full(stored(np.empty((c.B, c.H, c.SQ, c.DV))).shape, np.nan, NUMPY[dtype])
            library.run(
                f"attention{i}", stored(q), stored(k), mask, out=out, bias=stored(v), keys=c.keys or c.SK, first=c.first
            )
            want = attention_reference(c, q, k, v, mask)
            got = stored(out).astype(np.float64)
            half_ulp = {"float": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
            assert np.isfinite(got).all()
            error = np.abs(got - want)
            assert (error <= half_ulp * np.abs(want) + 4e-6).all(), f"case {i}: worst {error.max():.2e}"
            if c.mask:
                assert (got[:, :, 3:4] == 0).all()
    library.handle.stop()


# ------------------------------------------------------------------------------------------------ transpose, conversions
@pytest.mark.parametrize("arch", ARCHS)
def test_transpose(tmp_path: Path, arch: str) -> None:
    shapes = [(2, 3, 300), (1, 64, 49), (2, 49, 64), (1, 70, 131), (3, 5, 17), (1, 16, 16), (1, 200, 4), (1, 1, 9)]
    types = {"uint8_t": np.uint8, "f16": np.uint16, "float": np.uint32, "int64_t": np.uint64}
    bodies = [
        struct(f"D{i}", B=b, M=m, N=n, in_b=m * n, in_m=n, out_b=m * n, out_n=m) for i, (b, m, n) in enumerate(shapes)
    ]
    for i in range(len(shapes)):
        bodies += [
            entry(f"turn{i}_{t}", f"transpose<D{i}>((const {t}*)a.x, ({t}*)a.out, th, a.counters);") for t in types
        ]
    library = build(tmp_path, arch, bodies, [])
    rng = np.random.default_rng(6)
    for threads in (1, 3):
        library.start(threads)
        for i, (b, m, n) in enumerate(shapes):
            for name, dtype in types.items():
                x = rng.integers(0, np.iinfo(dtype).max, (b, m, n), dtype)
                out = library.run(f"turn{i}_{name}", x, out=np.zeros((b, n, m), dtype))
                assert np.array_equal(out, x.transpose(0, 2, 1)), (shapes[i], name)
    library.handle.stop()


@pytest.mark.parametrize("arch", ARCHS)
def test_conversions(tmp_path: Path, arch: str) -> None:
    """Every f16 and bf16 value widens exactly; float rounds to nearest even as numpy does; tails touch nothing else."""
    bodies = []
    for source, target in (
        ("f16", "float"),
        ("bf16", "float"),
        ("float", "f16"),
        ("float", "bf16"),
        ("float", "int32_t"),
        ("int8_t", "float"),
        ("uint8_t", "float"),
    ):
        step = f"cvt<vec<{target}>>(ld(x + i, n))"
        bodies.append(
            entry(
                f"from_{source}_to_{target}",
                f"const {source}* x = (const {source}*)a.x; {target}* y = ({target}*)a.out; long i = 0;"
                f"{{ Full n; for (; i + VL <= a.keys; i += VL) st(y + i, {step}, n); }}"
                f"if (i < a.keys) {{ int n = (int)(a.keys - i); st(y + i, {step}, n); }}"
                f"st1(y + a.keys, (scalar<{target}>)ld1(x));",
            )
        )
    library = build(tmp_path, arch, bodies, [])
    library.start(1)

    def convert(x: np.ndarray, source: str, target: str, dtype: type) -> np.ndarray:
        y = np.zeros(x.size + 2, dtype)
        library.run(f"from_{source}_to_{target}", x, out=y, keys=x.size)
        assert y[-1] == 0
        np.testing.assert_array_equal(y[-2], y[0])
        return y[:-2]

    rng = np.random.default_rng(7)
    patterns = np.arange(1 << 16, dtype=np.uint16)[:-3]
    floats = np.concatenate(
        [
            rng.integers(0, 1 << 32, 200003, np.uint32).view(np.float32),
            (rng.standard_normal(200003) * 10.0 ** rng.integers(-9, 6, 200003)).astype(np.float32),
            np.array(
                [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 2.0**-24, 2.0**-25, 3e-8], np.float32
            ),
        ]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        for name in ("f16", "bf16"):
            halves = patterns.view(NUMPY[name])
            np.testing.assert_array_equal(convert(halves, name, "float", np.float32), halves.astype(np.float32))
            rounded = convert(floats, "float", name, np.uint16).view(NUMPY[name])
            np.testing.assert_array_equal(rounded.astype(np.float32), floats.astype(NUMPY[name]).astype(np.float32))
    small = floats[np.abs(floats) < 2**31]
    np.testing.assert_array_equal(convert(small, "float", "int32_t", np.int32), small.astype(np.int32))
    bytes_ = np.arange(256, dtype=np.uint8)[:-1]
    np.testing.assert_array_equal(convert(bytes_, "uint8_t", "float", np.float32), bytes_.astype(np.float32))
    np.testing.assert_array_equal(
        convert(bytes_.view(np.int8), "int8_t", "float", np.float32), bytes_.view(np.int8).astype(np.float32)
    )
    library.handle.stop()


@pytest.mark.parametrize("arch", ARCHS)
def test_reductions_and_nan(tmp_path: Path, arch: str) -> None:
    body = """float* y = a.out; const float* x = (const float*)a.x;
      vf v = ld(x, Full{}); y[0] = hsum(v); y[1] = hmax(v); y[2] = hmin(v); y[3] = hprod(v);
      vf nan = v; nan[VL - 2] = __builtin_nanf("");
      y[4] = hmax(nan); y[5] = hmin(nan); y[6] = any(nan != nan); y[7] = any(v != v);
      vf both = max(nan, v) - min(v, nan); y[8] = both[VL - 2]; y[9] = both[0];
      y[10] = (float)hsum(cvt<vd>(v)); y[11] = (float)hsum(cvt<vi64>(v)); y[12] = select(v < vf{}, v, -v)[0];
      y[13] = (float)select(cvt<vd>(v) < vd{}, v, -v)[0]; y[14] = hsum(as_bool(cvt<vd>(v) < vd{})); y[15] = VL;
      y[16] = __builtin_signbit(splat<vd>(-0.0)[1]) != 0;"""
    library = build(tmp_path, arch, [entry("reduce", body)], [])
    library.start(1)
    x = np.linspace(-1.7, 2.9, 16).astype(np.float32)
    y = library.run("reduce", x, out=np.zeros(17, np.float32))
    lanes = int(y[15])
    v = x[:lanes].astype(np.float64)
    np.testing.assert_allclose(y[:4], [v.sum(), v.max(), v.min(), v.prod()], rtol=1e-5, atol=1e-6)
    assert np.isnan(y[[4, 5, 8]]).all()
    assert list(y[[6, 7, 9]]) == [1, 0, 0]
    np.testing.assert_allclose(y[10:12], [v.sum(), np.trunc(v).sum()], rtol=1e-5, atol=1e-6)
    assert list(y[12:14]) == [x[0], x[0]]
    assert y[14] == (v < 0).sum()
    assert y[16] == 1
    library.handle.stop()


# ------------------------------------------------------------------------------------------------ thread pool
POOL_BODY = entry(
    "rounds",
    """long* cells = (long*)a.out;  // each round every thread adds what the others wrote in the round before
       for (long r = 0; r < a.keys; r++) {
         for (int i; (i = next_chunk(th, a.counters + r % 2)) < 37;) __atomic_fetch_add(&cells[0], 1, __ATOMIC_RELAXED);
         barrier(th);
         if (th.tid == 0) { cells[1] += cells[0] == 37 * (r + 1); a.counters[r % 2] = 0; }
         barrier(th);
       }""",
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("pool"), "native", [POOL_BODY], ["100"])


def rounds(library: Library, count: int) -> None:
    out = library.run("rounds", out=np.zeros(2, np.int64), keys=count)
    assert list(out) == [37 * count, count]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_pool_barriers(pool: Library, threads: int) -> None:
    pool.start(threads)
    for count in (1, 5, 300):
        rounds(pool, count)
    pool.handle.stop()


def test_pool_sleeps_and_wakes(pool: Library) -> None:
    pool.start(2)
    for _ in range(20):
        rounds(pool, 3)
        threading.Event().wait(0.002)  # far beyond the spin time
    pool.handle.stop()


def test_pool_serialises_callers(pool: Library) -> None:
    pool.start(2)
    failures: list[BaseException] = []

    def caller(run: Callable[[], None]) -> None:
        try:
            for _ in range(30):
                run()
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=caller, args=(lambda: rounds(pool, 4),)) for _ in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(30)
    assert not failures
    assert not any(t.is_alive() for t in callers)
    pool.handle.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_pool_survives_fork(pool: Library) -> None:
    pool.start(2)
    rounds(pool, 3)
    child = os.fork()
    if child == 0:
        try:
            rounds(pool, 3)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    rounds(pool, 3)
    pool.handle.stop()
