// Mathematical functions on lane vectors: vf (float), vd (double), vi32 and vi64 where they make sense.
//
// The common functions of vf are vector code (elementary.h). The others call libm's double versions lane by lane and
// round once.
#pragma once
#include "elementary.h"

namespace npu {

// ---------------------------------------------------------------------------------------------- through libm
// Not inlined: one libm call per lane is large.
template <class V, class F> static NPU_NOINLINE V call_by_lane(V x, F f) { return by_lane(x, f); }
template <class V, class F> static NPU_NOINLINE V call_by_lane(V x, V y, F f) { return by_lane(x, y, f); }

#define NPU_DOUBLE(name) \
  NPU_INLINE vd name(vd x) { return call_by_lane(x, [](double v) { return __builtin_##name(v); }); }
#define NPU_FLOAT_AND_DOUBLE(name) \
  NPU_DOUBLE(name)                 \
  NPU_INLINE vf name(vf x) { return call_by_lane(x, [](float v) { return (float)__builtin_##name((double)v); }); }
NPU_DOUBLE(exp)
NPU_DOUBLE(exp2)
NPU_DOUBLE(expm1)
NPU_DOUBLE(log)
NPU_DOUBLE(log2)
NPU_DOUBLE(log10)
NPU_DOUBLE(log1p)
NPU_DOUBLE(tanh)
NPU_DOUBLE(erf)
NPU_DOUBLE(sin)
NPU_DOUBLE(cos)
NPU_FLOAT_AND_DOUBLE(erfc)
NPU_FLOAT_AND_DOUBLE(tan)
NPU_FLOAT_AND_DOUBLE(asin)
NPU_FLOAT_AND_DOUBLE(acos)
NPU_FLOAT_AND_DOUBLE(atan)
NPU_FLOAT_AND_DOUBLE(sinh)
NPU_FLOAT_AND_DOUBLE(cosh)
NPU_FLOAT_AND_DOUBLE(asinh)
NPU_FLOAT_AND_DOUBLE(acosh)
NPU_FLOAT_AND_DOUBLE(atanh)
#undef NPU_FLOAT_AND_DOUBLE
#undef NPU_DOUBLE

NPU_INLINE vd sigmoid(vd x) { return 1.0 / (1.0 + exp(-x)); }

NPU_INLINE vf atan2(vf y, vf x) {
  return call_by_lane(y, x, [](float a, float b) { return (float)__builtin_atan2((double)a, (double)b); });
}
NPU_INLINE vd atan2(vd y, vd x) {
  return call_by_lane(y, x, [](double a, double b) { return __builtin_atan2(a, b); });
}
NPU_INLINE vf pow(vf x, vf y) {
  return call_by_lane(x, y, [](float a, float b) { return __builtin_powf(a, b); });
}
NPU_INLINE vd pow(vd x, vd y) {
  return call_by_lane(x, y, [](double a, double b) { return __builtin_pow(a, b); });
}

// ---------------------------------------------------------------------------------------------- division with rest
// fmod has the sign of x, remainder has the sign of y (Python's %), and floordiv rounds down (Python's //).
NPU_INLINE vf fmod(vf x, vf y) {
  return call_by_lane(x, y, [](float a, float b) { return __builtin_fmodf(a, b); });
}
NPU_INLINE vd fmod(vd x, vd y) {
  return call_by_lane(x, y, [](double a, double b) { return __builtin_fmod(a, b); });
}

template <class V> NPU_INLINE V remainder_from(V rest, V y) {
  V zero{};
  return select((rest != zero) & ((rest < zero) != (y < zero)), rest + y, rest);
}
NPU_INLINE vf remainder(vf x, vf y) { return remainder_from(fmod(x, y), y); }
NPU_INLINE vd remainder(vd x, vd y) { return remainder_from(fmod(x, y), y); }

// Computed from the exact remainder, so that a quotient just below an integer is not rounded up to it.
template <class V> NPU_INLINE V floordiv_float(V x, V y) {
  V zero{}, one = splat<V>(1), rest = fmod(x, y), quotient = x / y;
  V whole = (x - rest) / y;
  whole = select((rest != zero) & ((rest < zero) != (y < zero)), whole - one, whole);
  V down = floor(whole);
  down = select(whole - down > splat<V>(0.5), down + one, down);
  V signed_zero = quotient * zero;
  return select(y == zero, quotient, select(whole == zero, signed_zero, down));
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
#define NPU_INTEGER(name)                                                                            \
  NPU_INLINE vi32 name(vi32 a, vi32 b) { return call_by_lane(a, b, Integer<int32_t>::name); }        \
  NPU_INLINE vi64 name(vi64 a, vi64 b) { return call_by_lane(a, b, Integer<int64_t>::name); }
NPU_INTEGER(idiv)
NPU_INTEGER(fmod)
NPU_INTEGER(floordiv)
NPU_INTEGER(remainder)
NPU_INTEGER(pow)
#undef NPU_INTEGER

}  // namespace npu
