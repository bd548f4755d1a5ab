"""Products and convolutions of half and float numbers on AMX tiles, in limbs of bfloat16, with the model of AMX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from npu_compiler.weights import packing

from ...support.kernel_driver import AMX, CXX, Library, build, check, entry, pack, pack_conv, random, room, struct
from ...support.sweeps import FULL
from .test_kernels import POINTWISE, Conv, conv_struct

pytestmark = pytest.mark.skipif(CXX is None, reason="no g++ on this machine")

GEMMS = [(3, 40, 31), (37, 70, 600)]
CONVS = [
    Conv(N=2, H=9, W=7, C=20, K=33, stride_h=2, stride_w=2),
    replace(POINTWISE, N=2, H=7, W=7, C=96, K=70),
]
MORE_CONVS = [
    Conv(H=14, W=14, C=64, K=40),
    Conv(H=12, W=17, C=3, K=32, R=7, S=7, stride_h=2, stride_w=2, pad_t=3, pad_l=3, pad_b=3, pad_r=3),
    Conv(H=9, W=8, C=8, K=32, dil_h=2, dil_w=3, pad_t=2, pad_l=3, pad_b=2, pad_r=3),
    replace(POINTWISE, N=2, H=9, W=7, C=64, K=32, stride_h=2, stride_w=2),
]
CONVS += MORE_CONVS if FULL else []


@pytest.mark.parametrize("dtype", ["float", "f16"])
def test_limbs(tmp_path: Path, dtype: str) -> None:
    """Errors are those of float32 sums, or 2^-18. Infinities and NaN come out where they go in, and only there. Weights
    are split in the run, or (of ``split*``) when they are loaded."""
    bodies, scratch = [], []

    def add(name: str, plan: str, columns: int, weights: str = dtype) -> None:
        operands = f"(const {dtype}*)a.x, (const {weights}*)a.w"
        call = f"Store e{{a, {columns}}}; amx_blocked<{plan}>({operands}, e, th, a.counters);"
        bodies.append(entry(name, call))
        scratch.append(f"AmxScratch<{plan}>::END")

    for i, (m, n, k) in enumerate(GEMMS):
        dims = dict(M=m, N=n, K=k, lda=k + i, B=2, batch_a=m * (k + i), shared_w=i % 2 == 0)
        bodies.append(struct(f"G{i}", "GemmDims", **dims))
        add(f"gemm{i}", f"LimbGemmPlan<G{i}, {dtype}, AmxGemmPlan>", n)
    for i, c in enumerate(CONVS):
        bodies.append(conv_struct(i, c))
        add(f"conv{i}", f"LimbConv<D{i}, {dtype}>::Plan", c.K)
        add(f"split{i}", f"LimbConv<D{i}, {dtype}, limbs<{dtype}>>::Plan", c.K, f"limbs<{dtype}>")
    library = build(tmp_path, AMX, bodies, scratch)
    rng = np.random.default_rng(6)
    for threads, special in ((1, None), (2, np.inf), (2, np.nan)):
        library.start(threads)
        for i, (m, n, k) in enumerate(GEMMS):
            x, w = random(rng, (2, m, k + i), dtype), random(rng, (1 if i % 2 == 0 else 2, k, n), dtype)
            if special is not None:
                x[1, m // 2, k // 2], w[0, k // 3, n // 2] = special, -special
            wanted, magnitude = (f(x[..., :k].astype(np.float64)) @ f(w.astype(np.float64)) for f in (np.array, np.abs))
            compare(library, f"gemm{i}", x, pack(w, dtype), wanted.reshape(2 * m, n), magnitude.reshape(2 * m, n))
        for i, c in enumerate(CONVS):
            x, w = random(rng, (c.N, c.H, c.W, c.C), dtype), random(rng, (c.K, c.R, c.S, c.C), dtype)
            if special is not None:
                x[0, c.H // 2, c.W // 2, c.C // 2], w[c.K // 2, 0, 0, 0] = special, -special
            wanted, magnitude = (
                c.reference(f(x.astype(np.float64)), f(w.astype(np.float64))) for f in (np.array, np.abs)
            )
            compare(library, f"conv{i}", x, pack_conv(w, 1, dtype), wanted, magnitude)
            split = packing.pack(w.reshape(1, c.K, c.R * c.S, c.C), 32, packing.LIMBS_OF[w.dtype.name])
            compare(library, f"split{i}", x, split, wanted, magnitude)
    library.handle.stop()


def compare(
    library: Library, name: str, x: np.ndarray, w: np.ndarray, wanted: np.ndarray, magnitude: np.ndarray
) -> None:
    bias, residual = np.zeros(wanted.shape[-1], np.float32), np.zeros(wanted.shape, np.float32)
    out = library.run(name, x, w, out=np.full(wanted.shape, np.nan, np.float32), bias=bias, residual=residual)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(out[~finite], wanted[~finite].astype(np.float32))
    dtype = "f16" if x.dtype == np.float16 else "float"
    check(out[finite], wanted[finite], room(AMX, dtype, dtype) * magnitude[finite])
