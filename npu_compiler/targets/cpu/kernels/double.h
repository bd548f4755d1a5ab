// Elementary functions on half lane vectors of doubles: one register, half_vd.
//
// With FULL, functions are within 1.2 ulp, on average as close as PyTorch's; math.h makes the functions of vd from
// them. The others, and those with FULL = false, are for arguments that were floats and results that will be rounded to
// float. All are branch-free vector code from minimax fits (tools/fit_math.py). Subnormals, infinities, NaN and signed
// zeros behave as in C.
#pragma once
#include "elementary.h"

namespace npu {

// ---------------------------------------------------------------------------------------------- building blocks
constexpr double INFINITY_D = __builtin_inf();

NPU_INLINE half_vd splat_d(double x) { return half_vd{} + x; }
NPU_INLINE half_vd choose(half_vi64 mask, half_vd a, half_vd b) { return mask ? a : b; }
NPU_INLINE half_vd abs(half_vd x) { return (half_vd)((half_vi64)x & INT64_MAX); }
NPU_INLINE half_vd copysign(half_vd magnitude, half_vd sign) {
  return (half_vd)(((half_vi64)magnitude & INT64_MAX) | ((half_vi64)sign & INT64_MIN));
}

// Clamps x to [low, high]; NaN stays NaN.
NPU_INLINE half_vd clamp_keep_nan(half_vd x, double low, double high) {
  half_vd lo = splat_d(low), hi = splat_d(high);
  x = hi < x ? hi : x;
  return lo > x ? lo : x;
}

NPU_INLINE half_vd sqrt(half_vd x) {
#if NPU_AVX512
  return (half_vd)_mm512_sqrt_pd((__m512d)x);
#elif NPU_AVX2
  return (half_vd)_mm256_sqrt_pd((__m256d)x);
#elif NPU_NEON
  return (half_vd)vsqrtq_f64((float64x2_t)x);
#else
  for (int i = 0; i < VL / 2; i++) x[i] = __builtin_sqrt(x[i]);
  return x;
#endif
}

// Returns a * b + c, rounded once if a * b is near -c.
NPU_INLINE half_vd fused(half_vd a, half_vd b, half_vd c) {
#if NPU_AVX512
  return (half_vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif NPU_AVX2
  return (half_vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif NPU_NEON
  return (half_vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  half_vd ah = (half_vd)((half_vi64)a & ~0x7ffffffLL), al = a - ah;  // Dekker's product, as for vf
  half_vd bh = (half_vd)((half_vi64)b & ~0x7ffffffLL), bl = b - bh;
  half_vd p = a * b;
  return (p + c) + (((ah * bh - p) + ah * bl + al * bh) + al * bl);
#endif
}

// Returns c[0] + c[1] x + c[2] x^2 + ...
template <int N> NPU_INLINE half_vd polynomial(const double (&c)[N], half_vd x) {
  half_vd r = splat_d(c[N - 1]);
  for (int i = N - 2; i >= 0; i--) r = r * x + c[i];
  return r;
}

template <bool FULL, int N, int M>
NPU_INLINE half_vd polynomial(const double (&full)[N], const double (&rounded)[M], half_vd x) {
  if constexpr (FULL) return polynomial(full, x);
  else return polynomial(rounded, x);
}

// Adding MAGIC leaves an integer below 2^51 in the low bits.
constexpr double MAGIC = 0x1.8p52;
NPU_INLINE half_vi64 nearest_int(half_vd scaled, half_vd* whole) {
  half_vd k = scaled + MAGIC;
  *whole = k - MAGIC;
  return (half_vi64)k - (half_vi64)splat_d(MAGIC);
}
NPU_INLINE half_vd to_double(half_vi64 n) { return (half_vd)(n + (half_vi64)splat_d(MAGIC)) - MAGIC; }
NPU_INLINE half_vd pow2(half_vi64 n) { return (half_vd)((n + 1023) << 52); }  // 2^n for -1023 < n < 1024

// Returns x * 2^n for -2044 < n < 2048, rounded once if the result is subnormal. `whole` is n as a double.
NPU_INLINE half_vd scale(half_vd x, half_vi64 n, half_vd whole) {
#if NPU_AVX512
  return (half_vd)_mm512_scalef_pd((__m512d)x, (__m512d)whole);
#else
  half_vi64 half = n >> 1;
  return x * pow2(half) * pow2(n - half);
#endif
}

// A number as hi + lo, where |lo| is at most a few units in the last place of hi.
struct HeadTail { half_vd hi, lo; };
NPU_INLINE HeadTail fast_sum(half_vd a, half_vd b) {  // exact if |a| >= |b| or a is 0
  half_vd hi = a + b;
  return {hi, (a - hi) + b};
}
NPU_INLINE HeadTail product(half_vd a, half_vd b) {
#if NPU_AVX512 || NPU_AVX2 || NPU_NEON
  const half_vd hi = fused(a, b, half_vd{});  // a * b could become part of another fused operation
#else
  const half_vd hi = a * b;
#endif
  return {hi, fused(a, b, -hi)};
}
NPU_INLINE half_vd quotient(HeadTail a, HeadTail b) {
  half_vd q = a.hi / b.hi;
  return q + ((fused(-q, b.hi, a.hi) + a.lo) - q * b.lo) / b.hi;
}

// ---------------------------------------------------------------------------------------------- exponentials
constexpr double LOG2_E_D = 0x1.71547652b82fep+0;
constexpr double LN2_HI_D = 0x1.62e42fee00000p-1, LN2_LO_D = 0x1.a39ef35793c76p-33;  // 32 bits: n * LN2_HI_D is exact
constexpr double LN2_D = 0x1.62e42fefa39efp-1;
constexpr double EXP_TAIL_D[] = {0x1.555555555555dp-3, 0x1.555555555556cp-5, 0x1.111111110e567p-7,
                                 0x1.6c16c16c0a4fep-10, 0x1.a01a01b5d3c7bp-13, 0x1.a01a01e722972p-16,
                                 0x1.71ddeb600272bp-19, 0x1.27e45569cb007p-22, 0x1.af71ee79f8accp-26,
                                 0x1.2025b0bd444a8p-29};
constexpr double EXP_TAIL_F[] = {0x1.55553c3e992dp-3, 0x1.5554f21db9275p-5, 0x1.1136b94581c05p-7,
                                 0x1.6d4117a5d5009p-10, 0x1.6c35addae91b8p-13};

// exp(x) = 2^n (1 + p) for x that does not overflow; p is between sqrt(1/2) - 1 and sqrt(2) - 1.
struct PowerOfE { half_vd p, whole; half_vi64 n; };
template <bool FULL> NPU_INLINE PowerOfE power_of_e(half_vd x) {
  half_vd whole;
  half_vi64 n = nearest_int(x * LOG2_E_D, &whole);
  half_vd exact = x - whole * LN2_HI_D, low = whole * LN2_LO_D;
  half_vd r = exact - low, tail = (exact - r) - low;
  half_vd rest = r * r * (0.5 + r * polynomial<FULL>(EXP_TAIL_D, EXP_TAIL_F, r));
  return {r + (FULL ? rest + tail : rest), whole, n};
}

template <bool FULL = true> NPU_INLINE half_vd exp(half_vd x) {  // |x| < 700 unless FULL
  if constexpr (!FULL) {
    PowerOfE e = power_of_e<false>(x);
    return (1.0 + e.p) * pow2(e.n);
  }
  PowerOfE e = power_of_e<true>(clamp_keep_nan(x, -746., 710.));
  return scale(1.0 + e.p, e.n, e.whole);
}

NPU_INLINE half_vd exp2(half_vd x) {
  half_vd whole, y = clamp_keep_nan(x, -1076., 1025.);
  half_vi64 n = nearest_int(y, &whole);
  half_vd r = (y - whole) * LN2_D;
  return scale(1.0 + (r + r * r * (0.5 + r * polynomial(EXP_TAIL_D, r))), n, whole);
}

// Returns (exp(x) - 1) / 2 for x in [-80, 710.6].
NPU_INLINE HeadTail half_expm1(half_vd x) {
  half_vd whole;
  half_vi64 n = nearest_int(x * LOG2_E_D, &whole);
  half_vd exact = x - whole * LN2_HI_D, low = whole * LN2_LO_D;
  half_vd r = exact - low, tail = (exact - r) - low;
  half_vd rest = r * r * (0.5 + r * polynomial(EXP_TAIL_D, r)) + (tail + tail * r);
  half_vd s = pow2(n - 2), base = s - 0.25, base_lost = (s - base) - 0.25;
  HeadTail sum = fast_sum(base, s * r), y = fast_sum(sum.hi, sum.lo + (s * rest + base_lost));
  return {y.hi + y.hi, y.lo + y.lo};
}
NPU_INLINE half_vd expm1(half_vd x) {
  half_vd y = 2.0 * half_expm1(clamp_keep_nan(x, -40., 710.)).hi;
  return choose(abs(x) < 0x1p-54, x, y);
}

// With m = (exp(a) - 1) / 2: sinh(a) = m + m / (2 m + 1), cosh(a) = m + 1/2 + 1 / (4 m + 2).
template <bool FULL = false> NPU_INLINE half_vd sinh(half_vd x);
template <bool FULL = false> NPU_INLINE half_vd cosh(half_vd x);
template <> inline __attribute__((always_inline)) half_vd sinh<true>(half_vd x) {
  HeadTail m = half_expm1(clamp_keep_nan(abs(x), 0., 710.6));
  half_vd e = m.hi + m.hi, d = e + 1.0, q = m.hi / d;
  half_vd d_lost = choose(e > 1.0, (e - d) + 1.0, (1.0 - d) + e) + (m.lo + m.lo);
  half_vd q_lost = ((fused(-q, d, m.hi) + m.lo) - q * d_lost) / d;
  HeadTail sum = fast_sum(m.hi, q);
  half_vd y = sum.hi + (sum.lo + (m.lo + q_lost));
  return copysign(choose(e < INFINITY_D, choose(abs(x) < 0x1p-28, abs(x), y), m.hi), x);
}
template <> inline __attribute__((always_inline)) half_vd cosh<true>(half_vd x) {
  HeadTail m = half_expm1(clamp_keep_nan(abs(x), 0., 710.6));
  half_vd h = m.hi + 0.5, h_lost = choose(m.hi > 0.5, (m.hi - h) + 0.5, (0.5 - h) + m.hi) + m.lo;
  HeadTail sum = fast_sum(h, 0.25 / h);
  half_vd y = sum.hi + (sum.lo + (h_lost - h_lost * (0.25 / (h * h))));
  return choose(h < INFINITY_D, y, h);
}

NPU_INLINE half_vd tanh(half_vd x) {
  half_vd a = abs(x);
  HeadTail m = half_expm1(clamp_keep_nan(a + a, 0., 80.));  // m / (m + 1)
  HeadTail d = fast_sum(choose(m.hi > 1.0, m.hi, splat_d(1.0)), choose(m.hi > 1.0, splat_d(1.0), m.hi));
  return copysign(choose(a < 0x1p-28, a, quotient(m, {d.hi, d.lo + m.lo})), x);
}

template <> inline __attribute__((always_inline)) half_vd sinh<false>(half_vd x) {  // |x| < 700
  PowerOfE e = power_of_e<false>(abs(x));
  half_vd s = pow2(e.n), m = s * e.p + (s - 1.0);  // exp(|x|) - 1
  return copysign(0.5 * (m + m / (m + 1.0)), x);
}
template <> inline __attribute__((always_inline)) half_vd cosh<false>(half_vd x) {  // |x| < 700
  half_vd e = exp<false>(abs(x));
  return 0.5 * (e + 1.0 / e);
}

constexpr double ERF_NEAR_D[] = {0x1.06eba8214db69p-3, -0x1.812746b037a25p-2, 0x1.ce2f21a0458ddp-4,
                                 -0x1.b82ce31354fedp-6, 0x1.565bcd2c6ddbp-8, -0x1.c02db935a9a41p-11,
                                 0x1.f9a3b9ae884dp-14, -0x1.f4dcf96aacd18p-17, 0x1.ba698b3be8c1fp-20,
                                 -0x1.6395301056599p-23, 0x1.133af0853d789p-26, -0x1.c56b8c61d0552p-30,
                                 0x1.3ca46eea355abp-33};
constexpr double ERF_FAR_D[] = {0x1.20dd741282012p+0, 0x1.45f316fca3ad4p-1, 0x1.a4f305894fcadp-4,
                                -0x1.3957e754f2ed7p-6, -0x1.bcaf0ebc82318p-13, 0x1.bbb57a432fb1p-10,
                                -0x1.2d4a5e56ed3a9p-11, -0x1.0425d9587787ep-20, 0x1.907c3608aba38p-14,
                                -0x1.d61261832422ep-15, 0x1.556df42b67ccbp-16, -0x1.6962f9bdee281p-18,
                                0x1.2165f09e50b9dp-20, -0x1.5e13ecef9148ep-23, 0x1.377832d23cdefp-26,
                                -0x1.81791700abcd2p-30, 0x1.289ddb1d67f6ep-34, -0x1.ab7af34c657b3p-40};
// As erf of vf: x + x P(x^2) up to 1, and 1 - exp(-x P(x)) further out.
NPU_INLINE half_vd erf(half_vd x) {
  half_vd a = abs(x), z = x * x;
  half_vd near = x + x * polynomial(ERF_NEAR_D, z);
  half_vd b = clamp_keep_nan(a, 1., 6.);  // erf(6) is 1
  PowerOfE e = power_of_e<true>(-b * polynomial(ERF_FAR_D, b));
  half_vd s = pow2(e.n);
  return choose(a < 1.0, near, copysign(1.0 - (s + s * e.p), x));
}

// ---------------------------------------------------------------------------------------------- logarithms
constexpr double LOG_TAIL_D[] = {0x1.5555555555592p-1, 0x1.999999997ff39p-2, 0x1.24924941df1a6p-2,
                                 0x1.c71c52161d3ddp-3, 0x1.74663c993bcd1p-3, 0x1.39a1efc0678e9p-3,
                                 0x1.2f0385fa31d5fp-3};
constexpr double LOG_TAIL_F[] = {0x1.555554fdcf323p-1, 0x1.999a7a3d6052fp-2, 0x1.2438e83f01357p-2,
                                 0x1.e2f43f0c379e6p-3};
constexpr int64_t SQRT_HALF_BITS_D = 0x3fe6a09e667f3bcd;

// Inserts the results for x = 0, infinity, NaN and negative x. `x` is the argument whose logarithm is taken.
NPU_INLINE half_vd log_special(half_vd x, half_vd y) {
  y = choose(x < INFINITY_D, y, x);
  return choose(x > 0.0, y, choose(x == 0.0, splat_d(-INFINITY_D), splat_d(__builtin_nan(""))));
}

// As fdlibm's log (Sun Microsystems, 1993): with s = f / (2 + f), log(1+f) = f - (f^2/2 - s (f^2/2 + s^2 P(s^2))).
template <bool FULL = true> NPU_INLINE half_vd log(half_vd x) {
  half_vi64 subnormal = FULL ? x < 0x1p-1022 : half_vi64{};
  half_vd scaled = choose(subnormal, x * 0x1p54, x);
  half_vi64 bits = (half_vi64)scaled - SQRT_HALF_BITS_D;
  half_vd n = to_double((bits >> 52) - (subnormal & 54));
  half_vd f = (half_vd)((bits & 0xfffffffffffff) + SQRT_HALF_BITS_D) - 1.0;
  half_vd s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  half_vd rest = s * (half + z * polynomial<FULL>(LOG_TAIL_D, LOG_TAIL_F, z));
  return log_special(x, n * LN2_HI_D - ((half - (rest + n * LN2_LO_D)) - f));
}

template <bool FULL = true> NPU_INLINE half_vd log1p(half_vd x);
template <> inline __attribute__((always_inline)) half_vd log1p<false>(half_vd x) {
  half_vd u = 1.0 + x, lost = x - (u - 1.0);
  return log<false>(u) + choose(u < 4.0, lost, half_vd{});  // log(u + lost) = log(u) + lost / u
}
template <> inline __attribute__((always_inline)) half_vd log1p<true>(half_vd x) {
  half_vd u = 1.0 + x, lost = choose(x > 1.0, 1.0 - (u - x), x - (u - 1.0)) / u;
  half_vi64 bits = (half_vi64)u - SQRT_HALF_BITS_D;
  half_vd n = to_double(bits >> 52);
  half_vd f = (half_vd)((bits & 0xfffffffffffff) + SQRT_HALF_BITS_D) - 1.0;
  half_vd s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  half_vd rest = s * (half + z * polynomial(LOG_TAIL_D, z));
  half_vd y = n * LN2_HI_D - ((half - (rest + (n * LN2_LO_D + lost))) - f);
  return choose(abs(x) < 0x1p-54, x, log_special(u, y));
}

// Returns the logarithm to another base, in which log(2) is hi + lo and log(e) is scale + scale_error.
NPU_INLINE half_vd log_base(half_vd x, double hi, double lo, double scale, double scale_error) {
  half_vi64 subnormal = x < 0x1p-1022;
  half_vi64 bits = (half_vi64)choose(subnormal, x * 0x1p54, x) - SQRT_HALF_BITS_D;
  half_vd n = to_double((bits >> 52) - (subnormal & 54));
  half_vd f = (half_vd)((bits & 0xfffffffffffff) + SQRT_HALF_BITS_D) - 1.0;
  half_vd s = f / (2.0 + f), z = s * s, twice = 0.5 * f, half = twice * f;
  half_vd rest = s * (half + z * polynomial(LOG_TAIL_D, z)) - fused(twice, f, -half);
  HeadTail m = fast_sum(f, -half);
  m.lo += rest;
  half_vd factor = splat_d(scale), part = m.hi * factor;
  half_vd part_lost = fused(m.hi, factor, -part) + (m.hi * scale_error + m.lo * scale);
  HeadTail sum = fast_sum(n * hi, part);
  return log_special(x, sum.hi + (sum.lo + (part_lost + n * lo)));
}
NPU_INLINE half_vd log2(half_vd x) { return log_base(x, 1.0, 0.0, LOG2_E_D, 0x1.777d0ffda0d24p-56); }
NPU_INLINE half_vd log10(half_vd x) {
  return log_base(x, 0x1.34413509f0000p-2, 0x1.e7fbcc47c4acdp-40, 0x1.bcb7b1526e50ep-2, 0x1.95355baaafad3p-57);
}

NPU_INLINE half_vd asinh(half_vd x) {  // for |x| < 2^500
  half_vd a = abs(x), square = a * a;
  half_vd y = log1p<false>(a + square / (1.0 + sqrt(square + 1.0)));
  return copysign(choose(a < INFINITY_D, y, a), x);
}
NPU_INLINE half_vd acosh(half_vd x) {  // for x < 2^500
  half_vd t = x - 1.0;
  return log1p<false>(t + sqrt(choose(t < 0.0, t, t * (t + 2.0))));
}
// Half the logarithm of (1+a) / (1-a). The quotient need not be known: with 1-a = 2^k m, s is (1+a-m) / (1+a+m).
template <bool FULL = false> NPU_INLINE half_vd atanh(half_vd x) {
  half_vd a = abs(x), up = 1.0 + a;
  half_vi64 bits = (half_vi64)(1.0 - a) - SQRT_HALF_BITS_D, k = bits >> 52;
  half_vd m = (half_vd)((bits & 0xfffffffffffff) + SQRT_HALF_BITS_D);
  half_vi64 wide = up > m * 0x1.6a09e667f3bcdp+0;
  m = choose(wide, m + m, m);
  k += wide;  // the mask is -1
  half_vd n = to_double(k), s = (up - m) / (up + m);
  if constexpr (FULL) {  // what the roundings of 1+a and 1-a lost
    half_vd up_lost = a - (up - 1.0), m_lost = ((1.0 - (1.0 - a)) - a) * pow2(0 - k);
    HeadTail sum = fast_sum(choose(up > m, up, m), choose(up > m, m, up));
    s = quotient({up - m, up_lost - m_lost}, {sum.hi, sum.lo + (up_lost + m_lost)});
  }
  s = choose(k == 0, a, s);
  half_vd z = s * s;
  half_vd rest = 0.5 * s * z * polynomial<FULL>(LOG_TAIL_D, LOG_TAIL_F, z) - n * (0.5 * LN2_LO_D);
  half_vd y = s - n * (0.5 * LN2_HI_D), lost = (-n * (0.5 * LN2_HI_D) - y) + s;
  y += rest + lost;
  return copysign(choose(a < 1.0, y, choose(a == 1.0, splat_d(INFINITY_D), splat_d(__builtin_nan("")))), x);
}

// ---------------------------------------------------------------------------------------------- powers
constexpr double POW_TAIL_D[] = {0x1.9999999999b2fp-2, 0x1.2492492457f15p-2, 0x1.c71c722d43886p-3,
                                 0x1.745ce9ee32468p-3, 0x1.3b1eea445e685p-3, 0x1.0f800f3bec719p-3, 0x1.0e416ef0e8d6cp-3};
// The logarithm of a positive finite number within 2^-63 of itself: as in log(), but with 2 s + s^3 (2/3 + s^2 P(s^2)) as
// head and tail.
NPU_INLINE HeadTail exact_log(half_vd x) {
  half_vi64 subnormal = x < 0x1p-1022;
  half_vi64 bits = (half_vi64)choose(subnormal, x * 0x1p54, x) - SQRT_HALF_BITS_D;
  half_vd n = to_double((bits >> 52) - (subnormal & 54));
  half_vd f = (half_vd)((bits & 0xfffffffffffff) + SQRT_HALF_BITS_D) - 1.0;
  half_vd d = 2.0 + f, d_lost = f - (d - 2.0), inverse = 1.0 / d;
  HeadTail s = {f * inverse, half_vd{}};
  s.lo = (fused(-s.hi, d, f) - s.hi * d_lost) * inverse;
  HeadTail z = product(s.hi, s.hi);
  z.lo += 2.0 * s.hi * s.lo;
  HeadTail factor = fast_sum(splat_d(2. / 3), z.hi * polynomial(POW_TAIL_D, z.hi));
  factor.lo += 0x1.5555555555555p-55;  // 2/3 is not a double
  HeadTail cube = product(s.hi, z.hi);
  cube.lo += s.hi * z.lo + s.lo * z.hi;
  HeadTail rest = product(cube.hi, factor.hi);
  rest.lo += cube.hi * factor.lo + cube.lo * factor.hi;
  HeadTail m = fast_sum(2.0 * s.hi, rest.hi), sum = fast_sum(n * LN2_HI_D, m.hi);
  return fast_sum(sum.hi, sum.lo + (m.lo + (2.0 * s.lo + rest.lo) + n * LN2_LO_D));
}

NPU_INLINE half_vi64 is_whole(half_vd x) {  // also of infinities
  half_vd a = abs(x);
  return (a >= 0x1p52) | ((a + 0x1p52) - 0x1p52 == a);
}

// |x|^y is exp(y log|x|). The rules for signs and special values are those of C's pow.
NPU_INLINE half_vd pow(half_vd x, half_vd y) {
  const half_vd zero{}, one = splat_d(1.0), inf = splat_d(INFINITY_D), nan = splat_d(__builtin_nan(""));
  const half_vd a = abs(x);
  HeadTail l = exact_log(a), e = product(y, l.hi);
  half_vi64 ordinary = abs(e.hi) < 1000.0;
  half_vd low = choose(ordinary, e.lo + y * l.lo, zero);
  PowerOfE p = power_of_e<true>(clamp_keep_nan(e.hi, -1400., 1400.));
  half_vd r = scale(1.0 + (p.p + low * (1.0 + p.p)), p.n, p.whole);
  r = choose((a == zero) | (a == inf), choose((a == zero) == (y < zero), inf, zero), r);
  half_vi64 whole = is_whole(y), negative = (half_vi64)x < 0;
  r = choose(negative & whole & ~is_whole(0.5 * y), -r, r);
  r = choose((x < zero) & ~whole & (a < inf), nan, r);
  r = choose((a == one) & (abs(y) == inf), one, r);
  r = choose((x == x) & (y == y), r, nan);
  return choose((y == zero) | (x == one), one, r);
}

// ---------------------------------------------------------------------------------------------- division with rest
// fmod(x, y) for |x / y| < 2^50, y != 0 and finite x. The truncated quotient is exact or 1 too large; the rest tells.
NPU_INLINE half_vd fmod(half_vd x, half_vd y) {
  half_vd a = abs(x), b = abs(y), q = a / b;
  half_vd whole = (q + MAGIC) - MAGIC;
  whole = choose(whole > q, whole - 1.0, whole);
  half_vd r = choose(whole == 0.0, a, fused(-whole, b, a));
  return copysign(choose(r < 0.0, r + b, r), x);
}

}  // namespace npu
