// Elementary functions on lane vectors of floats, and the building blocks they share with math.h.
//
// On vf, exp/exp2/expm1/log/log2/log10/log1p/tanh/sigmoid/erf/sin/cos are branch-free vector code, within 1 ulp over
// the whole range (sigmoid 2.3, and without FMA exp2 1.1: on average as close as PyTorch's). Subnormals, infinities,
// NaN and signed zeros behave as in C. The polynomials are minimax fits from tools/fit_math.py. A result is the sum of
// a large head without error and a small tail, so only the last addition rounds visibly. This is correct without FMA,
// faster with it, and forbids -ffast-math.
#pragma once
#include "simd.h"

namespace npu {

// ---------------------------------------------------------------------------------------------- building blocks
constexpr float INFINITY_F = __builtin_inff();

template <class V, class F> NPU_INLINE V by_lane(V x, F f) {
  lane_t<V> a[VL];
  store_bytes(a, x);
  for (int i = 0; i < VL; i++) a[i] = f(a[i]);
  return load_bytes<V>(a);
}
template <class V, class F> NPU_INLINE V by_lane(V x, V y, F f) {
  lane_t<V> a[VL], b[VL];
  store_bytes(a, x);
  store_bytes(b, y);
  for (int i = 0; i < VL; i++) a[i] = f(a[i], b[i]);
  return load_bytes<V>(a);
}

NPU_INLINE vf abs(vf x) { return (vf)((vi32)x & 0x7fffffff); }
NPU_INLINE vd abs(vd x) { return (vd)((vi64)x & INT64_MAX); }
NPU_INLINE vi32 abs(vi32 x) { return select(x < 0, 0 - x, x); }
NPU_INLINE vi64 abs(vi64 x) { return max(x, 0 - x); }

NPU_INLINE vf copysign(vf magnitude, vf sign) {
  return (vf)(((vi32)magnitude & 0x7fffffff) | ((vi32)sign & INT32_MIN));
}

// Returns 1, 0 or -1; 0 for NaN, as in PyTorch.
template <class V> NPU_INLINE V sign(V x) {
  return by_registers([](auto x) NPU_HALF {
    decltype(x) zero{}, one = zero + 1;
    return x > zero ? one : x < zero ? zero - one : zero;
  }, x);
}

// Clamps x to [low, high]; NaN stays NaN.
NPU_INLINE vf clamp_keep_nan(vf x, float low, float high) {
  vf lo = splat<vf>(low), hi = splat<vf>(high);
  x = hi < x ? hi : x;
  return lo > x ? lo : x;
}

// Returns a * b + c with a single rounding if the exact a * b is near -c or the sum needs no more than 24 bits.
NPU_INLINE vf fused(vf a, vf b, vf c) {
#if NPU_AVX512
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif NPU_AVX2
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif NPU_NEON
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  // Dekker's product (1971): 12-bit halves multiply exactly.
  vf ah = (vf)((vi32)a & ~0xfff), al = a - ah, bh = (vf)((vi32)b & ~0xfff), bl = b - bh;
  vf p = a * b;
  return (p + c) + (((ah * bh - p) + ah * bl + al * bh) + al * bl);
#endif
}

// Returns c[first] + c[first + 1] x + c[first + 2] x^2 + ...
template <int N> NPU_INLINE vf polynomial(const float (&c)[N], vf x, int first = 0) {
  vf r = splat<vf>(c[N - 1]);
  for (int i = N - 2; i >= first; i--) r = fma(r, x, splat<vf>(c[i]));
  return r;
}

NPU_INLINE vf pow2(vi32 n) { return (vf)((n + 127) << 23); }  // 2^n for -127 < n < 128

// Returns x * 2^n for -252 < n < 256, rounded once if the result is subnormal. `whole` is n as a float.
NPU_INLINE vf scale(vf x, vi32 n, vf whole) {
#if NPU_AVX512
  return (vf)_mm512_scalef_ps((__m512)x, (__m512)whole);
#else
  vi32 half = n >> 1;
  return x * pow2(half) * pow2(n - half);
#endif
}

// ---------------------------------------------------------------------------------------------- rounding, roots
#if NPU_AVX512
#define NPU_ROUNDING(name, mode, neon, libm)                                             \
  NPU_INLINE vf name(vf x) { return (vf)_mm512_roundscale_ps((__m512)x, mode | _MM_FROUND_NO_EXC); }
#elif NPU_AVX2
#define NPU_ROUNDING(name, mode, neon, libm) \
  NPU_INLINE vf name(vf x) { return (vf)_mm256_round_ps((__m256)x, mode | _MM_FROUND_NO_EXC); }
#elif NPU_NEON
#define NPU_ROUNDING(name, mode, neon, libm) \
  NPU_INLINE vf name(vf x) { return (vf)neon((float32x4_t)x); }
#else
#define NPU_ROUNDING(name, mode, neon, libm) \
  NPU_INLINE vf name(vf x) { return by_lane(x, [](float v) { return __builtin_##libm##f(v); }); }
#endif
#define NPU_ROUND_ALL(name, mode, neon, libm) \
  NPU_ROUNDING(name, mode, neon, libm)        \
  NPU_INLINE vd name(vd x) { return by_lane(x, [](double v) { return __builtin_##libm(v); }); }
NPU_ROUND_ALL(floor, _MM_FROUND_TO_NEG_INF, vrndmq_f32, floor)
NPU_ROUND_ALL(ceil, _MM_FROUND_TO_POS_INF, vrndpq_f32, ceil)
NPU_ROUND_ALL(trunc, _MM_FROUND_TO_ZERO, vrndq_f32, trunc)
NPU_ROUND_ALL(round, _MM_FROUND_TO_NEAREST_INT, vrndnq_f32, rint)  // ties round to even
#undef NPU_ROUND_ALL
#undef NPU_ROUNDING

NPU_INLINE vf sqrt(vf x) {
#if NPU_AVX512
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif NPU_AVX2
  return (vf)_mm256_sqrt_ps((__m256)x);
#elif NPU_NEON
  return (vf)vsqrtq_f32((float32x4_t)x);
#else
  return by_lane(x, [](float v) { return __builtin_sqrtf(v); });
#endif
}
NPU_INLINE vd sqrt(vd x) { return by_lane(x, [](double v) { return __builtin_sqrt(v); }); }
template <class V> NPU_INLINE V rsqrt(V x) { return splat<V>(1) / sqrt(x); }
template <class V> NPU_INLINE V reciprocal(V x) { return splat<V>(1) / x; }

// ---------------------------------------------------------------------------------------------- exponentials
constexpr float LOG2_E = 0x1.715476p0f;
constexpr float LN2_HI = 0x1.62e4p-1f, LN2_LO = 0x1.7f7d1cp-20f;       // 15 bits, so that n * LN2_HI is exact
constexpr float EXP_TAIL[] = {0x1.55553cp-3f, 0x1.5554f2p-5f, 0x1.11370ep-7f, 0x1.6d411p-10f, 0x1.6bc6c4p-13f};

// The argument of an exponential as n ln 2 + head + tail, where |head| <= ln(2)/2 and |tail| is below the last bit of
// head. `whole` is n as a float.
struct Reduced { vf head, tail, whole; vi32 n; };

NPU_INLINE vi32 nearest_int(vf scaled, vf* whole) {
  const vf magic = splat<vf>(0x1.8p23f);  // adding it leaves the integer in the low bits
  vf k = scaled + magic;
  *whole = k - magic;
  return (vi32)k - (vi32)magic;
}

NPU_INLINE Reduced reduce_ln2(vf x) {  // |x| < 128
  Reduced r;
  r.n = nearest_int(x * LOG2_E, &r.whole);
  vf exact = x - r.whole * LN2_HI;
  r.head = exact - r.whole * LN2_LO;
  r.tail = (exact - r.head) - r.whole * LN2_LO;
  return r;
}

// Returns exp(head + tail) - (1 + head). The rounding error of the quadratic term is included.
NPU_INLINE vf exp_rest(const Reduced& r) {
  vf square = r.head * r.head, square_error = fused(r.head, r.head, -square);
  vf cube = square * r.head;
  vf small = fma(cube, polynomial(EXP_TAIL, r.head), fma(r.tail, r.head, r.tail) + 0.5f * square_error);
  return fma(square, splat<vf>(0.5f), small);
}

// exp(argument) / 2^n as head + tail, where |tail| <= 0.07 and head is exact.
struct Exponential { vf head, tail; };
NPU_INLINE Exponential exp_parts(const Reduced& r) {
  vf one = splat<vf>(1), head = one + r.head;
  return {head, ((one - head) + r.head) + exp_rest(r)};
}

#if NPU_AVX512
// 2^(n/32) as head and tail (tools/fit_math.py).
alignas(64) constexpr float EXP_TABLE[2][32] = {{0x1p+0f, 0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f,
    0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f, 0x1.29e9ep+0f, 0x1.306fep+0f, 0x1.371a74p+0f, 0x1.3dea64p+0f,
    0x1.44e086p+0f, 0x1.4bfdaep+0f, 0x1.5342b6p+0f, 0x1.5ab07ep+0f, 0x1.6247ecp+0f, 0x1.6a09e6p+0f, 0x1.71f75ep+0f,
    0x1.7a1148p+0f, 0x1.82589ap+0f, 0x1.8ace54p+0f, 0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f, 0x1.ae89fap+0f,
    0x1.b7f77p+0f, 0x1.c199bep+0f, 0x1.cb720ep+0f, 0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f},
    {0x0p+0f, -0x1.9d4f52p-25f, 0x1.9f3122p-25f, -0x1.fdb496p-25f, -0x1.c15742p-27f, -0x1.d2e8cap-25f,
    0x1.ceac48p-25f, -0x1.5c0424p-25f, 0x1.4636e2p-25f, -0x1.18aac6p-25f, 0x1.824684p-25f, 0x1.8624b4p-30f,
    -0x1.593abcp-25f, -0x1.2c561p-25f, -0x1.5bd5ecp-27f, -0x1.f8b55p-25f, 0x1.9fcef4p-26f, 0x1.1d8beep-25f,
    -0x1.829fdp-25f, -0x1.accc7cp-26f, 0x1.15506ep-27f, -0x1.e64744p-25f, 0x1.51f848p-27f, -0x1.b83b54p-25f,
    -0x1.a94b14p-26f, -0x1.a09438p-25f, -0x1.3d56b2p-27f, -0x1.8837ccp-27f, -0x1.822dbcp-27f, -0x1.908c94p-25f,
    0x1.52486cp-27f, -0x1.246ebp-26f}};

// Returns the entries of a row of 32 numbers, by the last five bits of an index.
NPU_INLINE vf look_up(const float* row, vi32 at) {
  return (vf)_mm512_permutex2var_ps(_mm512_load_ps(row), (__m512i)at, _mm512_load_ps(row + 16));
}

NPU_INLINE vf exp(vf x) {  // half the instructions of the form below; x = n ln(2)/32 + r
  // A result that is subnormal or rounded to 0 takes Intel's CPUs more than 100 cycles, and masked scores are many.
  const __mmask16 nonzero = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-0x1.9fe368p6f), _CMP_NLT_UQ);
  x = (vf)_mm512_min_ps(_mm512_set1_ps(89.f), (__m512)x);  // keeps NaN
  vf whole;
  const vi32 n = nearest_int(x * (32 * LOG2_E), &whole);
  const vf r = fused(whole, splat<vf>(-LN2_LO / 32), fused(whole, splat<vf>(-LN2_HI / 32), x));
  const vf p = fma(r * r, fma(r, splat<vf>(1.f / 6), splat<vf>(0.5f)), r), head = look_up(EXP_TABLE[0], n);
  const vf y = head + fma(head, p, look_up(EXP_TABLE[1], n));
  return (vf)_mm512_maskz_scalef_ps(nonzero, (__m512)y, (__m512)(whole * (1.f / 32)));  // rounds the exponent down
}
#else
NPU_INLINE vf exp(vf x) {
  Reduced r = reduce_ln2(clamp_keep_nan(x, -104.f, 89.f));
  Exponential e = exp_parts(r);
  return scale(e.head + e.tail, r.n, r.whole);
}
#endif

// Returns exp(x) for -104 <= x <= 0, within 1.1 ulp.
NPU_INLINE vf exp_below(vf x) {
  Reduced r = reduce_ln2(x);
  vf p = fma(r.head * r.head, fma(r.head, polynomial(EXP_TAIL, r.head), splat<vf>(0.5f)), r.head);
  return scale(1.f + p, r.n, r.whole);
}

constexpr float EXP2_FACTOR[] = {0x1.62e432p-1f, 0x1.ebfbe6p-3f, 0x1.c6ada6p-5f, 0x1.3b21ccp-7f, 0x1.5fbfcp-10f,
                                 0x1.4bc2d8p-13f};

NPU_INLINE vf exp2(vf x) {
  x = clamp_keep_nan(x, -151.f, 129.f);
  vf whole;
  vi32 n = nearest_int(x, &whole);
  vf fraction = x - whole;
  return scale(fma(fraction, polynomial(EXP2_FACTOR, fraction), splat<vf>(1)), n, whole);
}

NPU_INLINE vf expm1(vf x) {
  Reduced r = reduce_ln2(clamp_keep_nan(x, -30.f, 89.f));
  // exp(x) - 1 = 2 (s - 1/2 + s (exp(..) - 1)) with s = 2^(n-1), which cannot overflow.
  vf half = splat<vf>(0.5f), s = pow2(r.n - 1);
  vf base = s - half, base_error = (s - base) - half;
  vf head = base + s * r.head, error = (base - head) + s * r.head;
  vf y = 2.f * (head + (error + (s * exp_rest(r) + base_error)));
  return select(abs(x) < 0x1p-25f, x, y);
}

// Returns head and tail of exp(y), which must be neither above the largest float nor below exp(-104).
NPU_INLINE Exponential exp_sum(vf y) {
  Reduced r = reduce_ln2(y);
  Exponential e = exp_parts(r);
  vf head = e.head + e.tail;
  return {scale(head, r.n, r.whole), scale((e.head - head) + e.tail, r.n, r.whole)};
}

// Returns 1 / (1 + exp(-x)), with the same relative accuracy down to subnormal results.
NPU_INLINE vf sigmoid(vf x) {
  vf one = splat<vf>(1), e = exp_below(clamp_keep_nan(-abs(x), -104.f, 0.f));
  return select(x < vf{}, e, one) / (one + e);
}

constexpr float TANH_TAIL[] = {-0x1.555552p-2f, 0x1.110e72p-3f, -0x1.b8d2p-5f, 0x1.460d44p-6f};

NPU_INLINE vf tanh(vf x) {
  vf a = abs(x), square = x * x, one = splat<vf>(1), two = splat<vf>(2);
  vf near = fma(x * square, polynomial(TANH_TAIL, square), x);
  // Far from zero: 1 - 2 / (exp(2a) + 1), which is 1 from 9.02 on.
  Exponential e = exp_sum(clamp_keep_nan(a + a, 0.5f, 20.f));
  vf d = e.head + one, d_error = ((e.head - d) + one) + e.tail;
  vf inverse = one / d, q = inverse + inverse;
  vf q_error = inverse * (fused(-q, d, two) - q * d_error);
  vf head = one - q;
  vf far = head + (((one - head) - q) - q_error);
  return copysign(select(a < 0.3f, near, far), x);
}

constexpr float ERF_NEAR[] = {0x1.06eba8p-3f, -0x1.81273ap-2f, 0x1.ce2acep-4f, -0x1.b7a75cp-6f, 0x1.4f188cp-8f,
                              -0x1.613e7cp-11f};
constexpr float ERF_FAR[] = {0x1.20e902p+0f, 0x1.456716p-1f, 0x1.b0466ap-4f, -0x1.7ae30ap-6f, 0x1.b3f40ap-9f,
                             -0x1.f9fbdap-13f, 0x1.6d8b62p-19f};

#if NPU_AVX512
// For intervals of a = |x| that are 1/8 wide: centre, value and coefficients (tools/fit_math.py).
alignas(64) constexpr float ERF_TABLE[7][32] = {{0x0p+0f, 0x1.81f2p-3f, 0x1.419c4p-2f, 0x1.c048p-2f, 0x1.20016p-1f,
    0x1.5faa2p-1f, 0x1.9f738p-1f, 0x1.df622p-1f, 0x1.1077ap+0f, 0x1.300a1p+0f, 0x1.4fd2dp+0f, 0x1.705f9p+0f,
    0x1.9077p+0f, 0x1.afedcp+0f, 0x1.d0509p+0f, 0x1.efa26p+0f, 0x1.0802p+1f, 0x1.182efp+1f, 0x1.2836cp+1f,
    0x1.382c48p+1f, 0x1.47cf4p+1f, 0x1.57ea2p+1f, 0x1.67f47p+1f, 0x1.781888p+1f, 0x1.87eb8p+1f, 0x1.98282p+1f,
    0x1.a80698p+1f, 0x1.b7c18p+1f, 0x1.c7c18p+1f, 0x1.d83e8p+1f, 0x1.e83e8p+1f, 0x1.f83e8p+1f}, {0x0p+0f,
    0x1.ae645p-3f, 0x1.5f4fa4p-2f, 0x1.db4b32p-2f, 0x1.25b9cap-1f, 0x1.5655d6p-1f, 0x1.7f67cp-1f, 0x1.a10b0cp-1f,
    0x1.bc4632p-1f, 0x1.d05d96p-1f, 0x1.df73bp-1f, 0x1.ea9272p-1f, 0x1.f233eep-1f, 0x1.f7480ap-1f, 0x1.fab7a8p-1f,
    0x1.fcd5d6p-1f, 0x1.fe30ap-1f, 0x1.fefe92p-1f, 0x1.ff7464p-1f, 0x1.ffb644p-1f, 0x1.ffd9a8p-1f, 0x1.ffed04p-1f,
    0x1.fff6dap-1f, 0x1.fffbbep-1f, 0x1.fffe0cp-1f, 0x1.ffff26p-1f, 0x1.ffffa2p-1f, 0x1.ffffd8p-1f, 0x1.fffffp-1f,
    0x1.fffffap-1f, 0x1.fffffep-1f, 0x1p+0f}, {0x1.06eba8p-3f, 0x1.16c95ap+0f, 0x1.05bb3p+0f, 0x1.dcf92p-1f,
    0x1.a50608p-1f, 0x1.6873p-1f, 0x1.2b12f8p-1f, 0x1.e0dfaep-2f, 0x1.743678p-2f, 0x1.19f372p-2f, 0x1.9d7518p-3f,
    0x1.236e24p-3f, 0x1.8ffffep-4f, 0x1.0c39fep-4f, 0x1.587ee8p-5f, 0x1.b37d46p-6f, 0x1.069d26p-6f, 0x1.32e9c4p-7f,
    0x1.5d3ca4p-8f, 0x1.822c94p-9f, 0x1.a35358p-10f, 0x1.b155a8p-11f, 0x1.b31732p-12f, 0x1.a564d6p-13f,
    0x1.91651p-14f, 0x1.6b4a6cp-15f, 0x1.44834ap-16f, 0x1.1b3406p-17f, 0x1.d873bp-19f, 0x1.735ca2p-20f,
    0x1.22b754p-21f, 0x1.b929c6p-23f}, {0x1.a79d88p-23f, -0x1.a44c46p-3f, -0x1.48cf6ap-2f, -0x1.a19dp-2f,
    -0x1.d9a8fep-2f, -0x1.ef252ap-2f, -0x1.e55aa8p-2f, -0x1.c23d6cp-2f, -0x1.8c27dp-2f, -0x1.4edc32p-2f,
    -0x1.0f306p-2f, -0x1.a35b2ap-3f, -0x1.38dd02p-3f, -0x1.c48ecep-4f, -0x1.38693ep-4f, -0x1.a591bep-5f,
    -0x1.0ed41ap-5f, -0x1.4fe7e8p-6f, -0x1.9418bp-7f, -0x1.d6e8e2p-8f, -0x1.0c7944p-8f, -0x1.2312bap-9f,
    -0x1.31e20ap-10f, -0x1.3589a6p-11f, -0x1.33409p-12f, -0x1.219ae4p-13f, -0x1.0cbfe4p-14f, -0x1.e67a1cp-16f,
    -0x1.a48b1ap-17f, -0x1.568478p-18f, -0x1.15381p-19f, -0x1.b27704p-21f}, {-0x1.812a72p-2f, -0x1.595062p-2f,
    -0x1.18210cp-2f, -0x1.88342cp-3f, -0x1.9c39dap-4f, -0x1.b25d1ep-7f, 0x1.f95de2p-5f, 0x1.e2fd1p-4f,
    0x1.3a0b04p-3f, 0x1.564bdep-3f, 0x1.5082f8p-3f, 0x1.3125ep-3f, 0x1.039cb6p-3f, 0x1.a3a266p-4f, 0x1.405656p-4f,
    0x1.d78b2cp-5f, 0x1.48a1a4p-5f, 0x1.b707e6p-6f, 0x1.1a9cb4p-6f, 0x1.5ea4d2p-7f, 0x1.a76ffp-8f, 0x1.e54502p-9f,
    0x1.0c9a4cp-9f, 0x1.1d9b7p-10f, 0x1.28de9p-11f, 0x1.24aebap-12f, 0x1.1b3e28p-13f, 0x1.0ac59ep-14f,
    0x1.df79c6p-16f, 0x1.95bc94p-17f, 0x1.54582ep-18f, 0x1.140c74p-19f}, {0x1.00691cp-12f, 0x1.99b2b8p-4f,
    0x1.32b976p-3f, 0x1.6bbec4p-3f, 0x1.754728p-3f, 0x1.5312f8p-3f, 0x1.101fc6p-3f, 0x1.76285ep-4f, 0x1.845b18p-5f,
    0x1.42a77p-7f, -0x1.3da3f4p-6f, -0x1.3e350ap-5f, -0x1.8a6714p-5f, -0x1.95d80cp-5f, -0x1.7479c4p-5f,
    -0x1.3bdcd8p-5f, -0x1.f1564cp-6f, -0x1.70bc5p-6f, -0x1.03e78cp-6f, -0x1.5d944cp-7f, -0x1.c5871ep-8f,
    -0x1.1611bcp-8f, -0x1.4794cap-9f, -0x1.712fdap-10f, -0x1.94c484p-11f, -0x1.a4277ep-12f, -0x1.aa62b6p-13f,
    -0x1.a3e656p-14f, -0x1.8a0662p-15f, -0x1.5bf554p-16f, -0x1.2f9ecap-17f, -0x1.ff8298p-19f}, {0x1.c73bc6p-4f,
    0x1.7faa7ap-4f, 0x1.04401ap-4f, 0x1.b02bcep-6f, -0x1.62785ap-7f, -0x1.54b0acp-5f, -0x1.f93532p-5f,
    -0x1.1cc392p-4f, -0x1.0f277ap-4f, -0x1.c09214p-5f, -0x1.3f5828p-5f, -0x1.6fdca2p-6f, -0x1.0741a8p-7f,
    0x1.650ee8p-9f, 0x1.36aa1ep-7f, 0x1.9cb24ep-7f, 0x1.a9c12cp-7f, 0x1.7e557ep-7f, 0x1.37f58ep-7f, 0x1.d82f8ep-8f,
    0x1.4fb3bap-8f, 0x1.c25c6ap-9f, 0x1.1ef66p-9f, 0x1.5c5424p-10f, 0x1.94bb18p-11f, 0x1.c1296p-12f, 0x1.df1dbp-13f,
    0x1.eb44d6p-14f, 0x1.e34b3ep-15f, 0x1.c79b44p-16f, 0x1.9f065cp-17f, 0x1.6c2f5ep-18f}};

NPU_INLINE vf erf(vf x) {  // a third of the instructions of the form below
  const vf a = (vf)_mm512_min_ps(_mm512_set1_ps(0x1.fffffep1f), (__m512)abs(x));  // NaN stays; erf(4) is 1
  const vi32 interval = (vi32)_mm512_cvttps_epi32((__m512)(a * 8.f));
  const auto entry = [&](int row) NPU_HALF { return look_up(ERF_TABLE[row], interval); };
  const vf t = a - entry(0), value = select(a < 0.125f, a, entry(1));
  vf p = entry(6);
  for (int i = 5; i >= 2; i--) p = fma(p, t, entry(i));
  return copysign(fma(p, t, value), x);
}
#else
NPU_INLINE vf erf(vf x) {
  vf a = abs(x), one = splat<vf>(1);
  vf near = fma(x, polynomial(ERF_NEAR, x * x), x);
  // Far from zero: 1 - exp(-a p(a)), which is 1 from 3.92 on. The last two rounding errors of a p(a) are corrected.
  vf limited = clamp_keep_nan(a, 0.5f, 4.f), inner = polynomial(ERF_FAR, limited, 1), first = splat<vf>(ERF_FAR[0]);
  vf p = fma(limited, inner, first), p_error = fused(limited, inner, first - p);
  vf y = limited * p, y_error = fused(limited, p, -y) + limited * p_error;
  Reduced r = reduce_ln2(-y);
  r.tail -= y_error;
  Exponential e = exp_parts(r);
  vf s = pow2(r.n), q = e.head * s, head = one - q;
  vf far = head + (((one - head) - q) - e.tail * s);
  return select(a < 0.75f, near, copysign(far, x));
}
#endif

// ---------------------------------------------------------------------------------------------- logarithms
constexpr float LOG_TAIL[] = {0x1.555554p-2f, -0x1.ffffdp-3f, 0x1.999ab4p-3f, -0x1.5564d2p-3f, 0x1.2479dp-3f,
                              -0x1.fc9fc6p-4f, 0x1.c639b8p-4f, -0x1.bf3b9cp-4f, 0x1.aa6e7cp-4f, -0x1.c4c688p-5f};
constexpr int32_t SQRT_HALF_BITS = 0x3f3504f3;

// log(x) = exponent ln 2 + head + tail, where x = 2^exponent m with m in [sqrt(1/2), sqrt(2)) and head + tail = log(m).
struct Logarithm { vf exponent, head, tail; };

// Returns log(1 + f) as head + tail, with the rounding errors of f - f^2/2 in the tail.
NPU_INLINE Logarithm log_of_fraction(vf exponent, vf f) {
  vf square = f * f, square_error = fused(f, f, -square), half = 0.5f * square;
  vf head = f - half, head_error = (f - head) - half;
  vf tail = fma(square * f, polynomial(LOG_TAIL, f), fma(square_error, splat<vf>(-0.5f), head_error));
  return {exponent, head, tail};
}

NPU_INLINE vi32 exponent_of(vf x) { return ((vi32)x - SQRT_HALF_BITS) >> 23; }
NPU_INLINE vf fraction_of(vf x) { return (vf)((((vi32)x - SQRT_HALF_BITS) & 0x7fffff) + SQRT_HALF_BITS) - 1.f; }

NPU_INLINE Logarithm log_parts(vf x) {  // x > 0 and finite
  vi32 subnormal = x < 0x1p-126f;
  x = select(subnormal, x * 0x1p24f, x);
  return log_of_fraction(cvt<vf>(exponent_of(x) - (subnormal & 24)), fraction_of(x));
}

// Inserts the results for x = 0, infinity, NaN and negative x. `x` is the argument whose logarithm is taken.
NPU_INLINE vf log_special(vf x, vf y) {
  vf zero{}, inf = splat<vf>(INFINITY_F);
  y = select(x < inf, y, x);
  return select(x > zero, y, select(x == zero, -inf, splat<vf>(__builtin_nanf(""))));
}

// Returns exponent (hi + lo) + part + rest. Only the last addition rounds: hi has few bits, and |part| < |hi|.
NPU_INLINE vf log_sum(vf exponent, float hi, float lo, vf part, vf rest) {
  vf head = exponent * hi + part, error = (exponent * hi - head) + part;
  return head + (error + (rest + exponent * lo));
}

NPU_INLINE vf log(vf x) {
  Logarithm l = log_parts(x);
  return log_special(x, log_sum(l.exponent, LN2_HI, LN2_LO, l.head, l.tail));
}

// Returns the logarithm to another base, in which log(2) is hi + lo and log(e) is scale + scale_error.
NPU_INLINE vf log_base(vf x, float hi, float lo, float scale, float scale_error) {
  Logarithm l = log_parts(x);
  vf factor = splat<vf>(scale), part = l.head * factor;
  vf part_error = fused(l.head, factor, -part) + (l.head * scale_error + l.tail * scale);
  return log_special(x, log_sum(l.exponent, hi, lo, part, part_error));
}
NPU_INLINE vf log2(vf x) { return log_base(x, 1.f, 0.f, LOG2_E, 0x1.4ae0cp-26f); }
NPU_INLINE vf log10(vf x) { return log_base(x, 0x1.344p-2f, 0x1.3509f8p-18f, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f); }

NPU_INLINE vf log1p(vf x) {
  vf u = 1.f + x;
  vi32 n = exponent_of(u);
  vi32 huge = n > 60;  // then u is x exactly
  vf s = pow2(select(huge, vi32{}, 0 - n));
  // 1 + f = 2^-n (1 + x); the two terms are exact and their sum keeps its error (Knuth's two-sum).
  vf a = x * s, b = s - 1.f, sum = a + b, b_part = sum - a;
  vf lost = (a - (sum - b_part)) + (b - b_part);
  vf f = select(huge, fraction_of(u), sum);
  lost = select(huge, vf{}, lost);
  Logarithm l = log_of_fraction(cvt<vf>(n), f);
  vf y = log_sum(l.exponent, LN2_HI, LN2_LO, l.head, l.tail + (lost - lost * f));
  return copysign(log_special(u, y), x);
}

// ---------------------------------------------------------------------------------------------- sine, cosine
constexpr double SIN_TAIL[] = {-0x1.55555547658b7p-3, 0x1.11110c48efecap-7, -0x1.a017d944a8dd9p-13,
                               0x1.7170742e3a5ecp-19, -0x1.9a6776258b0bp-26};
constexpr double PI_HI = 0x1.921fb544p+1, PI_LO = 0x1.0b4611a626331p-33;  // 31 bits, so that n * PI_HI is exact
constexpr double PI_INVERSE = 0x1.45f306dc9c883p-2;
constexpr float SIN_LIMIT = 0x1p20f;  // the argument reduction loses accuracy beyond it

// Returns sin(x + shift pi) for shift 0 or 1/2 and |x| <= SIN_LIMIT, on half a lane vector of doubles.
NPU_INLINE half_vd sin_shifted(half_vd x, double shift) {
  half_vd magic = half_vd{} + 0x1.8p52;
  half_vd k = (x * PI_INVERSE + shift) + magic;
  half_vd n = (k - magic) - shift;
  half_vd r = (x - n * PI_HI) - n * PI_LO, z = r * r;
  half_vd p = half_vd{} + SIN_TAIL[4];
  for (int i = 3; i >= 0; i--) p = p * z + SIN_TAIL[i];
  half_vd y = r * (p * z + 1.0);
  return (half_vd)((half_vi64)y ^ ((half_vi64)k << 63));  // an odd multiple of pi changes the sign
}

NPU_INLINE vf sin_shifted(vf x, double shift) {
  half_vf half[2];
  store_bytes(half, x);
  for (half_vf& h : half)
    h = __builtin_convertvector(sin_shifted(__builtin_convertvector(h, half_vd), shift), half_vf);
  return load_bytes<vf>(half);
}

static NPU_NOINLINE __attribute__((unused)) vf sin_by_lane(vf x) {
  return by_lane(x, [](float v) { return (float)__builtin_sin((double)v); });
}
static NPU_NOINLINE __attribute__((unused)) vf cos_by_lane(vf x) {
  return by_lane(x, [](float v) { return (float)__builtin_cos((double)v); });
}
NPU_INLINE vf sin(vf x) {
  if (__builtin_expect(any(abs(x) > SIN_LIMIT), 0)) return sin_by_lane(x);
  return sin_shifted(x, 0.0);
}
NPU_INLINE vf cos(vf x) {
  if (__builtin_expect(any(abs(x) > SIN_LIMIT), 0)) return cos_by_lane(x);
  return sin_shifted(x, 0.5);
}

}  // namespace npu
