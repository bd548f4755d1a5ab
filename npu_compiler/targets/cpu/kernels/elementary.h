// Elementary functions on lane vectors of floats, and the building blocks they share with math.h.
//
// Those here and in elementary_portable.h, or elementary_avx512.h in its place, are branch-free vector code, within 1.1 ulp
// over the whole range (sigmoid 2.3), and on average as close as PyTorch's. Subnormals, infinities, NaN and signed zeros
// behave as in C. The polynomials are minimax fits from tools/fit_math.py. A result is the sum of
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

// Returns 1 / (1 + exp(-x)), with the same relative accuracy down to subnormal results.
NPU_INLINE vf sigmoid(vf x) {
  vf one = splat<vf>(1), e = exp_below(clamp_keep_nan(-abs(x), -104.f, 0.f));
  return select(x < vf{}, e, one) / (one + e);
}

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

// Returns f of the lanes as doubles, rounded once.
template <class F, class... V> NPU_INLINE vf through_double(F f, V... x) {
  return by_halves([&](auto... half) NPU_HALF { return cvt<half_vf>(f(cvt<half_vd>(half)...)); }, x...);
}

static NPU_NOINLINE __attribute__((unused)) vf sin_by_lane(vf x) {
  return by_lane(x, [](float v) { return (float)__builtin_sin((double)v); });
}
static NPU_NOINLINE __attribute__((unused)) vf cos_by_lane(vf x) {
  return by_lane(x, [](float v) { return (float)__builtin_cos((double)v); });
}
NPU_INLINE vf sin_through_double(vf x) {
  if (__builtin_expect(any(abs(x) > SIN_LIMIT), 0)) return sin_by_lane(x);
  return through_double([](half_vd v) NPU_HALF { return sin_shifted(v, 0.0); }, x);
}
NPU_INLINE vf cos_through_double(vf x) {
  if (__builtin_expect(any(abs(x) > SIN_LIMIT), 0)) return cos_by_lane(x);
  return through_double([](half_vd v) NPU_HALF { return sin_shifted(v, 0.5); }, x);
}

}  // namespace npu

