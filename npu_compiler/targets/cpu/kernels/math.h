// Mathematical functions on lane vectors: vf (float), vd (double), vi32 and vi64 where they make sense.
//
// The common functions of vf are vector code (elementary*.h, arcsine.h), and so are those of vd that double.h and
// double_trigonometry.h have. Other functions of vf are those, rounded once. What is left calls libm lane by lane.
#pragma once
#include "arcsine.h"
#include "double_trigonometry.h"

namespace npu {

static NPU_NOINLINE __attribute__((unused)) vf tan_through_double(vf x) {
  if (__builtin_expect(any(abs(x) > (float)TURN_LIMIT), 0))
    return by_lane(x, [](float v) { return (float)__builtin_tan((double)v); });
  return through_double([](half_vd v) NPU_HALF { return tan<false>(v); }, x);
}

}  // namespace npu

#if NPU_AVX512
#include "elementary_avx512.h"
#else
#include "elementary_portable.h"
#endif

namespace npu {

// ---------------------------------------------------------------------------------------------- through libm
// Not inlined: one libm call per lane is large.
template <class V, class F> static NPU_NOINLINE V call_by_lane(V x, F f) { return by_lane(x, f); }
template <class V, class F> static NPU_NOINLINE V call_by_lane(V x, V y, F f) { return by_lane(x, y, f); }

#define NPU_LIBM(name) \
  NPU_INLINE vd name(vd x) { return call_by_lane(x, [](double v) { return __builtin_##name(v); }); }
NPU_LIBM(asinh)
NPU_LIBM(acosh)
NPU_LIBM(erfc)
#undef NPU_LIBM
NPU_INLINE vf erfc(vf x) { return call_by_lane(x, [](float v) { return (float)__builtin_erfc((double)v); }); }

// ---------------------------------------------------------------------------------------------- through double.h
NPU_INLINE vd exp(vd x) { return by_halves([](half_vd v) NPU_HALF { return exp(v); }, x); }
NPU_INLINE vd log(vd x) { return by_halves([](half_vd v) NPU_HALF { return log(v); }, x); }
NPU_INLINE vd sigmoid(vd x) { return 1.0 / (1.0 + exp(-x)); }

// The others are not inlined: their constants do not fit into registers anyway.
#define NPU_DOUBLE(name, call)                                       \
  static NPU_NOINLINE __attribute__((unused)) vd name(vd x) {        \
    return by_halves([](half_vd v) NPU_HALF { return call(v); }, x); \
  }
#define NPU_FLOAT(name, call, limit)                                                                     \
  static NPU_NOINLINE __attribute__((unused)) vf name(vf x) {                                            \
    return through_double([](half_vd v) NPU_HALF { return call(clamp_keep_nan(v, -limit, limit)); }, x); \
  }
NPU_DOUBLE(erf, erf)
NPU_DOUBLE(exp2, exp2)
NPU_DOUBLE(expm1, expm1)
NPU_DOUBLE(log1p, log1p<true>)
NPU_DOUBLE(log2, log2)
NPU_DOUBLE(log10, log10)
NPU_DOUBLE(tanh, tanh)
NPU_DOUBLE(sinh, sinh<true>)
NPU_DOUBLE(cosh, cosh<true>)
NPU_DOUBLE(atanh, atanh<true>)
NPU_DOUBLE(atan, atan)
NPU_DOUBLE(asin, asin)
NPU_DOUBLE(acos, acos)
NPU_FLOAT(asinh, asinh, INFINITY_D)
NPU_FLOAT(acosh, acosh, INFINITY_D)
NPU_FLOAT(atanh, atanh<false>, INFINITY_D)
NPU_FLOAT(sinh, sinh<false>, 100.)  // infinity as a float
NPU_FLOAT(cosh, cosh<false>, 100.)
#undef NPU_FLOAT
#undef NPU_DOUBLE
template <class V> NPU_INLINE V log2_rough(V x) { return log2(x); }

// Of arguments beyond the limit of the argument reduction, libm takes all lanes.
#define NPU_PERIODIC(name)                                                    \
  static NPU_NOINLINE __attribute__((unused)) vd name(vd x) {                 \
    if (__builtin_expect(any(compare<Gt>(abs(x), splat<vd>(TURN_LIMIT))), 0)) \
      return by_lane(x, [](double v) { return __builtin_##name(v); });        \
    return by_halves([](half_vd v) NPU_HALF { return name(v); }, x);          \
  }
NPU_PERIODIC(sin)
NPU_PERIODIC(cos)
NPU_PERIODIC(tan)
#undef NPU_PERIODIC

static NPU_NOINLINE __attribute__((unused)) vf atan2(vf y, vf x) {
  return through_double([](half_vd a, half_vd b) NPU_HALF { return atan2<false>(a, b); }, y, x);
}
static NPU_NOINLINE __attribute__((unused)) vd atan2(vd y, vd x) {
  return by_halves([](half_vd a, half_vd b) NPU_HALF { return atan2(a, b); }, y, x);
}
static NPU_NOINLINE __attribute__((unused)) vd pow(vd x, vd y) {
  return by_halves([](half_vd a, half_vd b) NPU_HALF { return pow(a, b); }, x, y);
}

// |x|^y is exp(y log|x|) in double. The rules for signs and special values are those of C's pow.
static NPU_NOINLINE __attribute__((unused)) vf pow(vf x, vf y) {
  const vf zero{}, one = splat<vf>(1), half = splat<vf>(0.5f), inf = splat<vf>(INFINITY_F);
  const vf nan = splat<vf>(__builtin_nanf(""));
  vf r = through_double([](half_vd a, half_vd b) NPU_HALF {
    return exp<false>(clamp_keep_nan(b * log<false>(a), -200., 200.));
  }, abs(x), y);
  vi32 whole = floor(y) == y, odd = whole & (floor(y * half) != y * half) & (abs(y) < inf);
  vi32 negative = (vi32)x < 0;
  r = select(negative & odd, -r, r);
  r = select((x < zero) & ~whole & (x > -inf), nan, r);
  r = select((abs(x) == one) & (abs(y) == inf), one, r);
  r = select((x != x) | (y != y), nan, r);
  return select((y == zero) | (x == one), one, r);
}

// ---------------------------------------------------------------------------------------------- division with rest
// fmod has the sign of x, remainder has the sign of y (Python's %), and floordiv rounds down (Python's //).
// Of quotients from 2^50 on, libm takes all lanes.
#define NPU_FMOD(V, libm, apply)                                                                \
  static NPU_NOINLINE __attribute__((unused)) V fmod(V x, V y) {                                \
    const V inf = splat<V>(INFINITY_F), zero{};                                                 \
    const vi32 ordinary = compare<Lt>(abs(x), inf) & compare<Ne>(y, zero) & compare<Eq>(y, y);  \
    const vi32 far = compare<Gt>(abs(x / y), splat<V>(0x1p50f));                                \
    if (__builtin_expect(any(ordinary & far), 0))                                               \
      return by_lane(x, y, [](lane_t<V> a, lane_t<V> b) { return __builtin_##libm(a, b); });    \
    V rest = apply([](half_vd a, half_vd b) NPU_HALF { return fmod(a, b); });                   \
    return select(ordinary, rest, splat<V>(__builtin_nanf("")));                                \
  }
#define NPU_BY_HALVES(f) by_halves(f, x, y)
#define NPU_THROUGH_DOUBLE(f) through_double(f, x, y)
NPU_FMOD(vd, fmod, NPU_BY_HALVES)
NPU_FMOD(vf, fmodf, NPU_THROUGH_DOUBLE)
#undef NPU_THROUGH_DOUBLE
#undef NPU_BY_HALVES
#undef NPU_FMOD

template <class V> NPU_INLINE V remainder_from(V rest, V y) {
  return by_registers([](auto rest, auto y) NPU_HALF {
    decltype(rest) zero{};
    return (rest != zero) & ((rest < zero) != (y < zero)) ? rest + y : rest;
  }, rest, y);
}
NPU_INLINE vf remainder(vf x, vf y) { return remainder_from(fmod(x, y), y); }
NPU_INLINE vd remainder(vd x, vd y) { return remainder_from(fmod(x, y), y); }

// Computed from the exact remainder, so that a quotient just below an integer is not rounded up to it.
template <class V> NPU_INLINE V floordiv_float(V x, V y) {
  const V rest = fmod(x, y);
  const V whole = by_registers([](auto x, auto y, auto rest) NPU_HALF {
    decltype(x) zero{}, whole = (x - rest) / y;
    return (rest != zero) & ((rest < zero) != (y < zero)) ? whole - 1 : whole;
  }, x, y, rest);
  return by_registers([](auto x, auto y, auto whole, auto down) NPU_HALF {
    decltype(x) zero{}, half = zero + 0.5f, quotient = x / y;
    down = whole - down > half ? down + 1 : down;
    down = whole == zero ? quotient * zero : down;  // a zero with the sign of the quotient
    return y == zero ? quotient : down;
  }, x, y, whole, floor(whole));
}
NPU_INLINE vf floordiv(vf x, vf y) { return floordiv_float(x, y); }
NPU_INLINE vd floordiv(vd x, vd y) { return floordiv_float(x, y); }

// Integers wrap around and never trap. Division by zero returns 0 (ops/arithmetic.py reports it to the user), and the
// lowest value divided by -1 returns itself.
template <class S> struct Integer {
  static S idiv(S a, S b) { return b == 0 ? 0 : b == -1 ? 0 - a : a / b; }
  static S fmod(S a, S b) { return b == 0 || b == -1 ? 0 : a % b; }
  static bool inexact_below_zero(S a, S b) { return fmod(a, b) != 0 && (a < 0) != (b < 0); }
  static S floordiv(S a, S b) { return idiv(a, b) - inexact_below_zero(a, b); }
  static S remainder(S a, S b) { return fmod(a, b) + (inexact_below_zero(a, b) ? b : 0); }
  static S pow(S base, S exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
    S result = 1;
    for (; exponent; exponent >>= 1, base *= base)
      if (exponent & 1) result *= base;
    return result;
  }
};
#define NPU_INTEGER(name)                                                                     \
  NPU_INLINE vi32 name(vi32 a, vi32 b) { return call_by_lane(a, b, Integer<int32_t>::name); } \
  NPU_INLINE vi64 name(vi64 a, vi64 b) { return call_by_lane(a, b, Integer<int64_t>::name); }
NPU_INTEGER(idiv)
NPU_INTEGER(fmod)
NPU_INTEGER(floordiv)
NPU_INTEGER(remainder)
NPU_INTEGER(pow)
#undef NPU_INTEGER

// min(max(round(x) + zero, low), high) as integers, with round half to even; NaN gives `low`. The whole numbers have up
// to 16 bits.
NPU_INLINE vi32 round_clamped(vf x, int32_t zero, int32_t low, int32_t high) {
  // Integers below the range of int32 become INT32_MIN, and so does NaN, which the minimum keeps.
#if NPU_AVX512
  vi32 q = (vi32)_mm512_cvtps_epi32(_mm512_min_ps(_mm512_set1_ps(0x1p24f), (__m512)x));
  q = (vi32)_mm512_max_epi32((__m512i)q, _mm512_set1_epi32(low - zero));
  q = (vi32)_mm512_min_epi32((__m512i)q, _mm512_set1_epi32(high - zero));
  return zero ? q + zero : q;
#elif NPU_AVX2
  vi32 q = (vi32)_mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(0x1p24f), (__m256)x));
  q = (vi32)_mm256_max_epi32((__m256i)q, _mm256_set1_epi32(low - zero));
  q = (vi32)_mm256_min_epi32((__m256i)q, _mm256_set1_epi32(high - zero));
  return zero ? q + zero : q;
#else
  const vf known = select(x == x, x, splat<vf>((float)(low - zero)));
  return cvt<vi32>(min(max(round(known) + splat<vf>((float)zero), splat<vf>((float)low)), splat<vf>((float)high)));
#endif
}

// Stores min(max(round(x) + zero, low), 255), for a `low` that is not negative; NaN gives `low`.
template <class L> NPU_INLINE void st_quantized(uint8_t* p, vf x, int32_t zero, int32_t low, L lanes) {
#if NPU_AVX512
  __m512i q = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_set1_ps(0x1p24f), (__m512)x));  // NaN: INT32_MIN
  if constexpr (is_same<L, FirstOfTwo>::value) {
    *lanes.first = (vf)q;
  } else if constexpr (is_same<L, SecondOfTwo>::value) {  // packing saturates, and interleaves 4 numbers of each
    __m512i words = _mm512_packs_epi32((__m512i)*lanes.first, q);
    if (zero) words = _mm512_adds_epi16(words, _mm512_set1_epi16((short)zero));
    if (low) words = _mm512_max_epi16(words, _mm512_set1_epi16((short)low));
    const __m512i order = _mm512_castsi256_si512(_mm256_set_epi32(13, 9, 5, 1, 12, 8, 4, 0));
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(words, words));
    _mm256_storeu_si256((__m256i*)(p - VL), _mm512_castsi512_si256(bytes));
  } else {
    q = _mm512_max_epi32(q, _mm512_set1_epi32(low - zero));
    if (zero) q = _mm512_add_epi32(q, _mm512_set1_epi32(zero));
    if constexpr (is_same<L, Full>::value) _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(q));
    else _mm_mask_storeu_epi8(p, lane_mask(lanes), _mm512_cvtusepi32_epi8(q));
  }
#else
  st(p, round_clamped(x, zero, low, 255), lanes);
#endif
}

}  // namespace npu
