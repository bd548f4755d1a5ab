"""The Metal emulator computes what kernels say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from . import ORDERS, Library

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
DTYPES = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}

GOOD = (
    HEAD
    + r"""
#include <metal_simdgroup_matrix>

#define SUM(name, T)                                                                            \
kernel void name(const device T* x [[buffer(0)]], device float* y [[buffer(1)]],                \
                 constant uint& n [[buffer(2)]], uint row [[threadgroup_position_in_grid]],     \
                 uint tid [[thread_position_in_threadgroup]], uint size [[threads_per_threadgroup]], \
                 uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]], \
                 uint subgroups [[simdgroups_per_threadgroup]]) {                                   \
  threadgroup float part[32], total;                                                            \
  float s = 0;                                                                                  \
  for (uint i = tid; i < n; i += size) s += float(x[row * n + i]);                              \
  s = simd_sum(s);                                                                              \
  if (lane == 0) part[simd] = s;                                                                \
  threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
  if (simd == 0) {                                                                              \
    float t = simd_sum(lane < subgroups ? part[lane] : 0.0);                                        \
    if (lane == 0) total = t;                                                                   \
  }                                                                                             \
  threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
  if (tid == 0) y[row] = total;                                                                 \
}
SUM(sum_float, float)
SUM(sum_half, half)
SUM(sum_bfloat, bfloat)

// C[M,N] = A[M,K] B[K,N] in 16x16 tiles, one simdgroup each.
template <typename T>
inline void tiles(device const T* a, device const T* b, device float* c, uint n, uint k, uint2 group) {
  simdgroup_matrix<float, 8, 8> sum[2][2];
  for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint at = 0; at < k; at += 8) {
    simdgroup_matrix<T, 8, 8> left[2], right[2];
    for (int i = 0; i < 2; i++) simdgroup_load(left[i], a + (group.y * 16 + i * 8) * k + at, k);
    for (int j = 0; j < 2; j++) simdgroup_load(right[j], b, n, ulong2(group.x * 16 + j * 8, at));
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(sum[i][j], left[i], right[j], sum[i][j]);
  }
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++)
      simdgroup_store(sum[i][j], c + (group.y * 16 + i * 8) * n + group.x * 16 + j * 8, n);
}
#define GEMM(name, T)                                                                           \
kernel void name(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],              \
                 device float* c [[buffer(2)]], constant uint2& nk [[buffer(3)]],               \
                 uint2 group [[threadgroup_position_in_grid]]) { tiles<T>(a, b, c, nk.x, nk.y, group); }
GEMM(gemm_float, float)
GEMM(gemm_half, half)
GEMM(gemm_bfloat, bfloat)

kernel void transposed(device const half* a [[buffer(0)]], device half* b [[buffer(1)]]) {
  simdgroup_half8x8 m, product, one(0.0h);
  simdgroup_load(m, a, 8, ulong2(0, 0), true);
  simdgroup_multiply(product, m, one);
  simdgroup_store(m, b);
}

kernel void lanes(device uint* out [[buffer(0)]], device float* real [[buffer(1)]],
                  uint i [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  device uint* o = out + i * 12;
  o[0] = simd_shuffle_xor(i, 5);
  o[1] = simd_broadcast(i, 3);
  o[2] = simd_prefix_inclusive_sum(uint(lane));
  o[3] = simd_prefix_exclusive_sum(uint(lane));
  o[4] = simd_max(i);
  o[5] = simd_min(i);
  o[6] = simd_shuffle_down(i, 4);
  o[7] = simd_shuffle_up(i, 4);
  o[8] = uint(ulong(simd_ballot(lane < 7)));
  o[9] = uint(simd_any(lane == 40)) + 2 * uint(simd_all(lane < 32));
  o[10] = simd_shuffle(i, 31 - lane);
  o[11] = simd_sum(1u);
  float4 v = simd_sum(float4(lane, 1, 0.5, -1));
  real[i] = v.x + v.y + v.z + v.w;
}

kernel void positions(device uint4* out [[buffer(0)]], uint3 at [[thread_position_in_grid]],
                      uint3 in [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
                      uint3 grid [[threads_per_grid]], uint3 size [[threads_per_threadgroup]],
                      uint3 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]]) {
  uint flat = (at.z * grid.y + at.y) * grid.x + at.x;
  out[flat] = uint4(in.x + 10 * in.y + 100 * in.z, group.x + 10 * group.y + 100 * group.z, index,
                    size.x * groups.x + size.y * groups.y + size.z * groups.z);
}

kernel void histogram(device const uchar* x [[buffer(0)]], device atomic_uint* h [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&h[x[i] & 15], 1u, memory_order_relaxed);
}

kernel void arithmetic(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                       device half* h [[buffer(2)]], device float* f [[buffer(3)]],
                       uint i [[thread_position_in_grid]]) {
  h[i * 4 + 0] = a[i] + b[i];
  h[i * 4 + 1] = a[i] * b[i] - 1;
  h[i * 4 + 2] = a[i] / b[i];
  half x = sqrt(fabs(a[i]));
  x += 0.1h;
  h[i * 4 + 3] = x;
  f[i * 4 + 0] = a[i] * 0.1f;
  f[i * 4 + 1] = float(bfloat(float(a[i]) * 1.001f)) + 1.5bf;
  f[i * 4 + 2] = 1 / 3.0;
  f[i * 4 + 3] = as_type<float>(as_type<uint>(float(b[i])) ^ 0x80000000u);
}

kernel void vectors(device const half4* x [[buffer(0)]], device float4* y [[buffer(1)]],
                    device const packed_float3* p [[buffer(2)]], device float* q [[buffer(3)]],
                    uint i [[thread_position_in_grid]]) {
  half4 h = x[i];
  float4 v = float4(h) * 2.0 + 1.0;
  y[i] = float4(v.zw, v.x, max(v, float4(0)).y);
  device const half* one = (device const half*)(x + i);
  float3 t = p[i];
  q[i] = dot(v, float4(1, 2, 3, 4)) + float(one[2]) + t.x + t.z;
}

kernel void argument(device const int* x [[buffer(0)]], device int* y [[buffer(1)]],
                     threadgroup int* space [[threadgroup(0)]], uint tid [[thread_index_in_threadgroup]],
                     uint group [[threadgroup_position_in_grid]]) {
  space[tid] = x[group * 64 + tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[group * 64 + tid] = space[63 - tid] / 3;
}

inline float total(float x) { return simd_sum(x); }
inline void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }
kernel void helpers(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[i] = total(float(i));
  meet();
  float x = s[63 - i];
  meet();
  s[i] = x + total(1);
  meet();
  y[i] = s[i ^ 1];
}
constant float TABLE[4] = {1.5, 2.5, 3.5, 4.5};
kernel void table(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = TABLE[i & 3]; }
"""
)


@pytest.fixture(scope="module")
def good() -> Library:
    return Library(GOOD)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum(good: Library, dtype: str, order: str) -> None:
    x = np.random.default_rng(1).standard_normal((5, 1000)).astype(DTYPES[dtype])
    y = np.zeros(5, np.float32)
    good[f"sum_{dtype}"]({0: x, 1: y, 2: np.uint32(1000).tobytes()}, (5,), (256,), order=order, seed=3)
    np.testing.assert_allclose(y, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices(good: Library, dtype: str) -> None:
    rng = np.random.default_rng(2)
    a = rng.standard_normal((48, 40)).astype(DTYPES[dtype])
    b = rng.standard_normal((40, 32)).astype(DTYPES[dtype])
    c = np.zeros((48, 32), np.float32)
    good[f"gemm_{dtype}"]({0: a, 1: b, 2: c, 3: np.array([32, 40], np.uint32).tobytes()}, (2, 3), (32,), jobs=2)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64), atol=2e-5)


def test_transposed_matrix(good: Library) -> None:
    a, b = np.arange(64, dtype=np.float16).reshape(8, 8), np.zeros((8, 8), np.float16)
    good["transposed"]({0: a, 1: b}, (1,), (32,))
    np.testing.assert_array_equal(b, a.T)


def test_simdgroup_functions(good: Library) -> None:
    out, real = np.zeros((64, 12), np.uint32), np.zeros(64, np.float32)
    good["lanes"]({0: out, 1: real}, (1,), (64,), order="shuffled", seed=5)
    i = np.arange(64)
    lane, base = i % 32, i // 32 * 32
    expected = [
        i ^ 5, base + 3, np.cumsum(np.arange(32))[lane], np.cumsum(np.arange(32))[lane] - lane, base + 31, base,
        np.where(lane < 28, i + 4, i), np.where(lane >= 4, i - 4, i), np.full(64, 127), np.full(64, 2),
        base + 31 - lane, np.full(64, 32),
    ]  # fmt: skip
    np.testing.assert_array_equal(out, np.stack(expected, 1))
    np.testing.assert_array_equal(real, np.full(64, 31 * 16 + 32 + 16 - 32))


def test_positions(good: Library) -> None:
    out = np.zeros((2, 6, 8, 4), np.uint32)
    good["positions"]({0: out}, (2, 3, 1), (4, 2, 2), order="descending")
    z, y, x = np.indices((2, 6, 8))
    np.testing.assert_array_equal(out[..., 0], x % 4 + 10 * (y % 2) + 100 * (z % 2))
    np.testing.assert_array_equal(out[..., 1], x // 4 + 10 * (y // 2) + 100 * (z // 2))
    np.testing.assert_array_equal(out[..., 2], x % 4 + 4 * (y % 2) + 8 * (z % 2))
    assert (out[..., 3] == 8 + 6 + 2).all()


def test_atomics_and_two_host_threads(good: Library) -> None:
    x, h = np.random.default_rng(3).integers(0, 256, 4096).astype(np.uint8), np.zeros(16, np.uint32)
    good["histogram"]({0: x, 1: h}, (16,), (256,), jobs=2)
    np.testing.assert_array_equal(h, np.bincount(x & 15, minlength=16))


def test_half_types_round_as_numpy(good: Library) -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(128) * 10 ** rng.uniform(-7, 4, 128)).astype(np.float16), rng.standard_normal(128)
    b = b.astype(np.float16)
    h, f = np.zeros((128, 4), np.float16), np.zeros((128, 4), np.float32)
    good["arithmetic"]({0: a, 1: b, 2: h, 3: f}, (4,), (32,))
    one = np.float16(1)
    with np.errstate(over="ignore"):
        wanted = [a + b, a * b - one, a / b, np.sqrt(np.abs(a)) + np.float16(0.1)]
    np.testing.assert_array_equal(h, np.stack(wanted, 1))
    rounded = (a.astype(np.float32) * np.float32(1.001)).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(f[:, 0], a.astype(np.float32) * np.float32(0.1))
    np.testing.assert_array_equal(f[:, 1], rounded + np.float32(1.5))
    assert (f[:, 2] == np.float32(1) / np.float32(3)).all()
    np.testing.assert_array_equal(f[:, 3], -b.astype(np.float32))


def test_vectors(good: Library) -> None:
    x = np.random.default_rng(5).standard_normal((32, 4)).astype(np.float16)
    y, q = np.zeros((32, 4), np.float32), np.zeros(32, np.float32)
    p = np.random.default_rng(6).standard_normal((32, 3)).astype(np.float32)
    good["vectors"]({0: x, 1: y, 2: p, 3: q}, (1,), (32,))
    v = x.astype(np.float32) * 2 + 1
    np.testing.assert_array_equal(y, np.stack([v[:, 2], v[:, 3], v[:, 0], np.maximum(v[:, 1], 0)], 1))
    np.testing.assert_allclose(q, v @ np.float32([1, 2, 3, 4]) + x[:, 2] + p[:, 0] + p[:, 2], rtol=1e-5, atol=1e-5)


def test_threadgroup_argument(good: Library) -> None:
    x, y = np.arange(-64, 64, dtype=np.int32), np.zeros(128, np.int32)
    good["argument"]({0: x, 1: y}, (2,), (64,), {0: 256})
    np.testing.assert_array_equal(y, np.trunc(x.reshape(2, 64)[:, ::-1].ravel() / 3))
    assert good["argument"].shared_used == 256


@pytest.mark.parametrize("order", ORDERS)
def test_threads_meet_in_helper_functions(good: Library, order: str) -> None:
    y = np.zeros(64, np.float32)
    good["helpers"]({0: y}, (1,), (64,), order=order)
    sums = np.float32([31 * 16, 31 * 16 + 32 * 32])
    np.testing.assert_array_equal(y, np.repeat(sums[::-1], 32) + 32)


def test_program_scope_constants(good: Library) -> None:
    y = np.zeros(8, np.float32)
    good["table"]({0: y}, (1,), (8,))
    np.testing.assert_array_equal(y, [1.5, 2.5, 3.5, 4.5] * 2)


def test_without_checks_the_numbers_are_the_same() -> None:
    x = np.random.default_rng(1).standard_normal((3, 500)).astype(np.float16)
    results = []
    for checks in (True, False):
        y = np.zeros(3, np.float32)
        Library(GOOD, checks)["sum_half"]({0: x, 1: y, 2: np.uint32(500).tobytes()}, (3,), (96,))
        results.append(y)
    np.testing.assert_array_equal(*results)
