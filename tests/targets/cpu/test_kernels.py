"""The CPU convolution and matrix kernels against float64 numpy: every storage type, thread count, instruction set."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from npu_compiler.targets.cpu.devices import DEVICES
from npu_compiler.targets.cpu.host import host_cpu
from npu_compiler.targets.cpu.winograd import CHANNELS, filter_transform, winograd_tile
from npu_compiler.weights.format import PANEL

from ...support.kernel_driver import (
    AMX,
    ARCHS,
    CXX,
    KERNELS,
    NUMPY,
    SLOW_DOT,
    build,
    check,
    entry,
    pack,
    pack_conv,
    random,
    room,
    struct,
)
from ...support.sweeps import FULL

pytestmark = pytest.mark.skipif(CXX is None, reason="no g++ on this machine")
Shape = TypeVar("Shape")


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
    Conv(N=3, H=4, W=15, C=352, K=256),  # blocks of several images on AMX
    Conv(N=2, H=8, W=8, C=34, K=70, G=2),
    # rows of taps that only read padding, and weights of more taps than are processed at once
    *(Conv(H=18, W=16, C=n, K=32, dil_h=14, dil_w=3, pad_t=14, pad_l=3, pad_b=14, pad_r=3) for n in (20, 512)),
]
SMOKE = [CONVS[i] for i in (0, 3, 5, 7, 14)]  # for the second and third instruction set
# Mixed operands differ from the others by nothing that depends on the instruction set, and float32 has no conversions.
# float16 is float32 but for the conversion of its loads, so a few shapes are its sample.
TYPES = ("float", "f16", "bf16")
VARIANTS = [(arch, t, t) for arch in ARCHS for t in (TYPES if FULL or arch == "native" else TYPES[1:])]
VARIANTS += [("native", "float", "f16"), ("native", "f16", "float"), ("native", "bf16", "float")]
VARIANTS += [(AMX, "bf16", "bf16"), (SLOW_DOT, "bf16", "bf16")]
VARIANTS += [(arch, "double", "double") for arch in (ARCHS if FULL else ["native"])]


def sample(shapes: list[Shape], few: list[Shape], arch: str, tx: str, tw: str) -> list[Shape]:
    """The shapes with which a variant is tested: most on the instruction set of this machine and on AMX."""
    if arch == AMX:
        return shapes if FULL else shapes[1::2]
    return shapes if arch == "native" and tx == tw and (FULL or tx in ("float", "bf16")) else few


def result_of(tx: str) -> type:
    """The type of the sums of products with operands ``tx``."""
    return np.float64 if tx == "double" else np.float32


def conv_struct(i: int, c: Conv) -> str:
    oh, ow = c.out
    names = "N H W C K R S stride_h stride_w pad_t pad_l dil_h dil_w G".split()
    return struct(f"D{i}", **{n: getattr(c, n) for n in names}, OH=oh, OW=ow)


@pytest.mark.parametrize(("arch", "tx", "tw"), [v for v in VARIANTS if FULL or v[1] == v[2]])  # test_gemm mixes types
def test_conv2d(tmp_path: Path, arch: str, tx: str, tw: str) -> None:
    convs = sample(CONVS, SMOKE, arch, tx, tw)
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
                f"conv{i}", x, pack_conv(w, c.G, tw), out=np.full_like(residual, np.nan, result_of(tx)), bias=bias,
                residual=residual,
            )  # fmt: skip
            magnitude = room(arch, tx, tw) * c.reference(np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)))
            check(out, c.reference(x, w) + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


def winograd_weights(w: np.ndarray, tile: int, stride: int) -> np.ndarray:
    """Filters [K, C, 3, 3] transformed and packed for ``conv2d_winograd``: float32 [K / 32, points, C, 32]."""
    k, c, _, _ = w.shape
    g = filter_transform(tile, stride)
    u = np.einsum("ir,kcrs,js->ijck", g, w.astype(np.float64), g).reshape(-1, c, k)
    packed = np.zeros((u.shape[0], c, -(-k // PANEL) * PANEL), np.float32)
    packed[..., :k] = u
    return np.ascontiguousarray(packed.reshape(u.shape[0], c, -1, PANEL).transpose(2, 0, 1, 3))


@pytest.mark.parametrize(("arch", "tile"), [(a, t) for a in ARCHS for t in (2, 4) if FULL or a == "native" or t == 4])
def test_winograd(tmp_path: Path, arch: str, tile: int) -> None:
    cases = [
        Conv(N=2, H=14, W=14, C=32, K=64),
        Conv(H=9, W=11, C=21, K=33),
        Conv(H=7, W=30, C=128, K=40, pad_t=0, pad_l=2, pad_b=1, pad_r=0),
        Conv(H=28, W=28, C=16, K=96, pad_t=0, pad_l=0, pad_b=0, pad_r=0),
        Conv(H=1, W=1, C=3, K=5),
    ]
    if tile == 2:
        cases += [
            Conv(H=5, W=6, C=300, K=40),  # sums in two parts
            Conv(N=2, H=15, W=12, C=40, K=40, stride_h=2, stride_w=2),
            Conv(H=8, W=9, C=19, K=33, stride_h=2, stride_w=2, pad_t=0, pad_l=0),
        ]
    dtypes = ["float", "f16", "bf16"] if arch == "native" and (FULL or tile == 4) else ["float"]
    bodies, scratch = [], []
    for i, c in enumerate(cases):
        bodies.append(conv_struct(i, c))
        scratch.append(f"winograd_scratch_bytes<D{i}, {tile}>()")
        for t in dtypes:
            call = f"conv2d_winograd<D{i}, {tile}, {CHANNELS}>((const {t}*)a.x, (const float*)a.w, e, th, a.counters);"
            bodies.append(entry(f"winograd{i}_{t}", f"Store e{{a, {c.K}}}; {call}"))
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(8)
    for threads in (1, 2, 3):
        library.start(threads)
        for i, c in enumerate(cases):
            for t in dtypes:
                x, w = random(rng, (c.N, c.H, c.W, c.C), t), random(rng, (c.K, 3, 3, c.C), "float")
                if threads == 2:  # a pixel that must not show where it is not seen
                    x[0, c.H // 2, c.W // 2, c.C // 2] = 6e4 if t == "f16" else 1e7
                bias, residual = random(rng, (c.K,), "float"), random(rng, (c.N, *c.out, c.K), "float")
                u = winograd_weights(w.transpose(0, 3, 1, 2), tile, c.stride_h)
                out = library.run(
                    f"winograd{i}_{t}", x, u, out=np.full_like(residual, np.nan), bias=bias, residual=residual
                )
                weights = np.abs(w.astype(np.float64))
                if threads == 2:  # where it is seen, its error is that of the filter's largest weight
                    weights = np.broadcast_to(weights.max((1, 2), keepdims=True), w.shape)
                magnitude = c.reference(np.abs(x.astype(np.float64)), weights)
                check(out, c.reference(x, w) + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


ZEN_4 = next(d for d in DEVICES if d.name == "avx512")


@pytest.mark.parametrize(
    ("shape", "dtype", "tile"),
    [
        ((1, 28, 28, 128, 128, 2), "float32", 2),  # the last number is the stride
        ((1, 14, 14, 256, 256, 2), "float32", 2),
        ((8, 14, 14, 256, 256, 2), "float16", 2),
        ((1, 7, 7, 512, 512, 2), "float16", 0),  # the transformed weights come from memory
        ((1, 28, 28, 128, 128, 2), "bfloat16", 0),
        ((1, 56, 56, 64, 64), "float16", 4),
        ((1, 14, 14, 256, 256), "float16", 2),  # the transformed weights of F(4x4) come from memory
        ((8, 14, 14, 256, 256), "float16", 4),
        ((1, 7, 7, 512, 512), "float16", 0),
        ((8, 7, 7, 512, 512), "float16", 4),
        ((1, 56, 56, 64, 64), "float32", 2),
        ((1, 7, 7, 512, 512), "float32", 2),
        ((8, 7, 7, 512, 512), "float32", 2),
        ((1, 28, 28, 128, 128), "bfloat16", 4),
        ((1, 14, 14, 256, 256), "bfloat16", 0),
        ((1, 224, 224, 3, 64), "float16", 0),
    ],
)
def test_winograd_is_chosen_where_it_was_measured_faster(shape: tuple[int, ...], dtype: str, tile: int) -> None:
    assert winograd_tile(*shape[:5], dtype, ZEN_4, *shape[5:]) == tile


def test_convolutions_on_amx_are_direct() -> None:
    amx, cooper_lake = (next(d for d in DEVICES if d.name == name) for name in ("amx", "cooperlake"))
    for shape in ((1, 56, 56, 64, 64), (1, 28, 28, 128, 128), (8, 14, 14, 256, 256), (8, 7, 7, 512, 512)):
        assert winograd_tile(*shape, "bfloat16", amx) == 0
        assert winograd_tile(*shape, "bfloat16", cooper_lake) == winograd_tile(*shape, "float16", ZEN_4)


def test_there_are_two_sizes_of_winograd_tiles() -> None:
    with pytest.raises(ValueError, match="tile"):
        filter_transform(3)
    with pytest.raises(ValueError, match="stride 2"):
        filter_transform(4, 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_depthwise(tmp_path: Path, arch: str) -> None:
    cases = [
        Conv(C=32, K=32, G=32),
        Conv(N=2, H=20, W=33, C=21, K=21, G=21, stride_h=2, stride_w=2),
        Conv(H=12, W=30, C=5, K=5, G=5, R=5, S=5, pad_t=2, pad_l=2, pad_b=2, pad_r=2, dil_w=2),
        Conv(H=2, W=2, C=16, K=16, G=16, pad_t=3, pad_l=3, pad_b=3, pad_r=3, dil_h=3, dil_w=3),
    ]
    dtypes = ["float", "f16", "bf16", "double"]
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
                    f"depthwise{i}_{t}", x, packed, out=np.full_like(residual, np.nan, result_of(t)), bias=bias,
                    residual=residual,
                )  # fmt: skip
                magnitude = c.reference(np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)))
                check(out, c.reference(x, w) + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


# ------------------------------------------------------------------------------------------------ matrix product
GEMMS = [
    (1, 64, 64),
    (1, 1130, 33),  # in chunks of several panels a stream
    (2, 100, 77),
    (3, 32, 9),
    (4, 259, 128),
    (5, 40, 31),
    (14, 64, 64),
    (49, 1024, 64),  # in the order of the rows on AMX
    (100, 33, 1024),
    (300, 200, 40),
    (67, 1, 1),
    (13, 2000, 16),
    (45, 70, 5001),  # in slices
    (138, 40, 6000),  # in slices, also on AMX
    (137, 160, 1056),  # in parts that L1 holds, on AMX
    (138, 230, 600),  # more weights than stay in L2: blocks of rows vary fastest
]


@pytest.mark.parametrize(("arch", "tx", "tw"), VARIANTS)
def test_gemm(tmp_path: Path, arch: str, tx: str, tw: str) -> None:
    shapes = sample(GEMMS, GEMMS[1:8:2], arch, tx, tw)
    bodies, scratch = [], []
    for i, (m, n, k) in enumerate(shapes):
        images, lda, shared = 1 if n > 1000 else 2, k + i % 3, i % 2 == 0
        bodies.append(struct(f"D{i}", "GemmDims", M=m, N=n, K=k, lda=lda, B=images, batch_a=m * lda, shared_w=shared))
        call = f"Store e{{a, {n}}}; gemm<D{i}>((const {tx}*)a.x, (const {tw}*)a.w, e, th, a.counters);"
        bodies.append(entry(f"gemm{i}", call))
        scratch.append(f"gemm_scratch_bytes<D{i}, {tx}, {tw}>()")
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(3)
    for threads in (1, 2, 3):
        library.start(threads)
        for i, (m, n, k) in enumerate(shapes):
            images = 1 if n > 1000 else 2
            a, w = random(rng, (images, m, k + i % 3), tx), random(rng, (1 if i % 2 == 0 else images, k, n), tw)
            bias, residual = random(rng, (n,), "float"), random(rng, (images, m, n), "float")
            out = library.run(
                f"gemm{i}", a, pack(w, tw), out=np.full_like(residual, np.nan, result_of(tx)), bias=bias,
                residual=residual,
            )  # fmt: skip
            a64, w64 = a[..., :k].astype(np.float64), w.astype(np.float64)
            magnitude = room(arch, tx, tw) * (np.abs(a64) @ np.abs(w64))
            check(out, a64 @ w64 + bias + residual, magnitude + np.abs(bias) + np.abs(residual))
    library.handle.stop()


# Architecture and type; rows, columns and reduced dim of both products. On AMX: in parts that L1 holds, and in slices.
TWO_PRODUCTS = [
    ("native", "float", 1, 1056, 20), (AMX, "bf16", 137, 160, 1056), (AMX, "bf16", 138, 64, 6600),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype", "m", "n", "k"), TWO_PRODUCTS)
def test_two_products(tmp_path: Path, arch: str, dtype: str, m: int, n: int, k: int) -> None:
    """Panels of both alternate; of one row: chunks of several panels a stream and the last ones."""
    bodies = [
        "struct Product { Store e; template <class L> auto at(long col, L lanes) const "
        "{ return [=, *this](vf a, vf b, long row) { e(a * b, row, col, lanes); }; } "
        "void prefetch(long row, long col) const { e.prefetch(row, col); } };",
        struct("D", "GemmDims", M=m, N=n, K=k, lda=k, batch_a=m * k, dual=True),
        entry(
            "multiply",
            f"Product e{{{{a, {n}}}}}; gemm<D>((const {dtype}*)a.x, (const {dtype}*)a.w, e, th, a.counters);",
        ),
    ]
    library = build(tmp_path, arch, bodies, [f"gemm_scratch_bytes<D, {dtype}, {dtype}>()"])
    rng = np.random.default_rng(4)
    a, w = random(rng, (m, k), dtype), random(rng, (k, 2 * n), dtype)
    bias, residual = random(rng, (n,), "float"), random(rng, (m, n), "float")
    a64, pairs = a.astype(np.float64), w.reshape(k, n // 32, 2, 32).astype(np.float64)
    left, right = (a64 @ pairs[:, :, i].reshape(k, n) for i in range(2))
    for threads in (1, 2, 3):
        library.start(threads)
        out = library.run(
            "multiply", a, pack(w, dtype)[None], out=np.full_like(residual, np.nan), bias=bias, residual=residual
        )
        np.testing.assert_allclose(out, left * right + bias + residual, rtol=1e-4, atol=5e-6 * k)
    library.handle.stop()


@pytest.mark.parametrize("dtype", ["float", "f16", "bf16", "double"])
def test_right_operands_of_run_time(tmp_path: Path, dtype: str) -> None:
    b, n, k = 3, 70, 45
    packed_size = b * 3 * (46 if dtype == "bf16" else 45) * 32
    bodies = [struct("D", "GemmDims", M=20, N=n, K=k, lda=k, B=b, batch_a=20 * k, batch_b=n * k, shared_w=False)]
    strides = {"rows": f"{n}, 1", "columns": f"1, {k}"}
    for name, at in strides.items():
        bodies.append(entry(name, f"pack_b<D>((const {dtype}*)a.x, {at}, ({dtype}*)a.out, th);"))
    kinds = {"multiply": dtype}
    if dtype != "bf16" or "amx_tile" not in host_cpu().features:  # tiles multiply panels that a kernel has packed
        kinds |= {f"multiply_{of}": f"in_place<{dtype}, {k}, {at}>" for of, at in strides.items()}
    for name, kept in kinds.items():
        call = f"Store e{{a, {n}}}; gemm<D>((const {dtype}*)a.x, (const {kept}*)a.w, e, th, a.counters);"
        bodies.append(entry(name, call))
    scratch = [f"gemm_scratch_bytes<D, {dtype}, {kept}>()" for kept in kinds.values()]
    library = build(tmp_path, "native", bodies, scratch)
    rng = np.random.default_rng(4)
    library.start(2)
    right, left = random(rng, (b, k, n), dtype), random(rng, (b, 20, k), dtype)
    for name, source in (("rows", right), ("columns", np.ascontiguousarray(right.transpose(0, 2, 1)))):
        packed = library.run(name, source, out=np.ones(packed_size, NUMPY[dtype]))
        assert np.array_equal(packed, pack(right, dtype).ravel())
    zeros = np.zeros((b, 20, n), np.float32)
    left64, right64 = left.astype(np.float64), right.astype(np.float64)
    columns = np.ascontiguousarray(right.transpose(0, 2, 1))
    operands = {"multiply": packed, "multiply_rows": right, "multiply_columns": columns}
    for name in kinds:
        out = library.run(
            name, left, operands[name], out=np.empty_like(zeros, result_of(dtype)), bias=zeros, residual=zeros
        )
        check(out, left64 @ right64, np.abs(left64) @ np.abs(right64))
    library.handle.stop()


@pytest.mark.skipif("haswell" not in ARCHS, reason="instructions of x86")
@pytest.mark.parametrize("march", ["alderlake", "icelake-server", "x86-64-v4"])
def test_integer_dot_products_assemble(tmp_path: Path, march: str) -> None:
    """Their instructions are inline assembly, which a compiler passes on unread; few machines have all of them."""
    source = tmp_path / "dot.cpp"
    body = "npu::dot_u8s8(a, b, b), npu::dot_words(a, b, b);"
    source.write_text(f'#include "int8_dot.h"\nvoid dot(npu::vi32& a, npu::vi32 b) {{ {body} }}')
    flags = ["-std=c++17", "-O1", "-w", f"-march={march}", "-iquote", str(KERNELS)]
    subprocess.run([CXX or "g++", *flags, "-c", str(source), "-o", str(tmp_path / "dot.o")], check=True)
