// Scalar and vector math: overloads for float, half and their vectors, none for bfloat or integers, as in Metal.
#pragma once
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_2_SQRTPI_F 1.12837916709551257390f

namespace metal {

template <class T> constexpr bool is_math = is_same_v<element_of<T>, float> || is_same_v<element_of<T>, half>;
template <class T> constexpr bool is_whole = is_integer<element_of<T>> && !is_same_v<element_of<T>, bool>;

template <class T, class F> EMU_INLINE T each(T x, F f) {
  if constexpr (is_vector<T>) {
    for (int i = 0; i < vector_of<T>::size; i++) x[i] = element_of<T>(f((float)x[i]));
    return x;
  } else
    return T(f((float)x));
}
template <class T, class F> EMU_INLINE T each(T x, T y, F f) {
  if constexpr (is_vector<T>) {
    for (int i = 0; i < vector_of<T>::size; i++) x[i] = element_of<T>(f((float)x[i], (float)y[i]));
    return x;
  } else
    return T(f((float)x, (float)y));
}

#define EMU_ONE(name, result) \
  template <class T, class = enable_if_t<is_math<T>>> EMU_INLINE T name(T x) { return each(x, [](float a) { return result; }); }
#define EMU_TWO(name, result) \
  template <class T, class = enable_if_t<is_math<T>>> EMU_INLINE T name(T x, T y) { return each(x, y, [](float a, float b) { return result; }); }
#define EMU_MATH                                                                                                        \
  EMU_ONE(exp, __builtin_expf(a)) EMU_ONE(exp2, __builtin_exp2f(a)) EMU_ONE(exp10, __builtin_powf(10.0f, a))            \
  EMU_ONE(log, __builtin_logf(a)) EMU_ONE(log2, __builtin_log2f(a)) EMU_ONE(log10, __builtin_log10f(a))                 \
  EMU_ONE(sin, __builtin_sinf(a)) EMU_ONE(cos, __builtin_cosf(a)) EMU_ONE(tan, __builtin_tanf(a))                       \
  EMU_ONE(asin, __builtin_asinf(a)) EMU_ONE(acos, __builtin_acosf(a)) EMU_ONE(atan, __builtin_atanf(a))                 \
  EMU_ONE(sinh, __builtin_sinhf(a)) EMU_ONE(cosh, __builtin_coshf(a)) EMU_ONE(tanh, __builtin_tanhf(a))                 \
  EMU_ONE(asinh, __builtin_asinhf(a)) EMU_ONE(acosh, __builtin_acoshf(a)) EMU_ONE(atanh, __builtin_atanhf(a))           \
  EMU_ONE(sqrt, __builtin_sqrtf(a)) EMU_ONE(rsqrt, 1.0f / __builtin_sqrtf(a)) EMU_ONE(fabs, __builtin_fabsf(a))         \
  EMU_ONE(floor, __builtin_floorf(a)) EMU_ONE(ceil, __builtin_ceilf(a)) EMU_ONE(trunc, __builtin_truncf(a))             \
  EMU_ONE(round, __builtin_roundf(a)) EMU_ONE(rint, __builtin_rintf(a))                                                 \
  EMU_ONE(fract, __builtin_fminf(a - __builtin_floorf(a), 0x1.fffffep-1f))                                              \
  EMU_ONE(saturate, __builtin_fminf(__builtin_fmaxf(a, 0.0f), 1.0f))                                                    \
  EMU_TWO(pow, __builtin_powf(a, b)) EMU_TWO(powr, __builtin_powf(a, b)) EMU_TWO(fmod, __builtin_fmodf(a, b))           \
  EMU_TWO(atan2, __builtin_atan2f(a, b)) EMU_TWO(fmin, __builtin_fminf(a, b)) EMU_TWO(fmax, __builtin_fmaxf(a, b))      \
  EMU_TWO(divide, a / b)
EMU_MATH
namespace precise { EMU_MATH }
namespace fast { EMU_MATH }
EMU_ONE(sign, a > 0 ? 1.0f : a < 0 ? -1.0f : 0.0f)
EMU_TWO(copysign, __builtin_copysignf(a, b))
EMU_TWO(nextafter, __builtin_nextafterf(a, b))

// max, min, clamp, abs: for whole numbers, too. Both arguments have one type: max(1.0f, 0) is ambiguous in Metal.
template <class T, class F> EMU_INLINE T pick(T x, T y, F f) {
  if constexpr (is_vector<T>) {
    for (int i = 0; i < vector_of<T>::size; i++) x[i] = f(x[i], y[i]);
    return x;
  } else
    return f(x, y);
}
template <class T, class = enable_if_t<is_math<T> || is_whole<T>>> EMU_INLINE T max(T x, T y) {
  if constexpr (is_math<T>) return fmax(x, y);
  else return pick(x, y, [](auto a, auto b) { return a > b ? a : b; });
}
template <class T, class = enable_if_t<is_math<T> || is_whole<T>>> EMU_INLINE T min(T x, T y) {
  if constexpr (is_math<T>) return fmin(x, y);
  else return pick(x, y, [](auto a, auto b) { return a < b ? a : b; });
}
template <class T, class = enable_if_t<is_math<T> || is_whole<T>>> EMU_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T, class = enable_if_t<is_math<T> || is_whole<T>>> EMU_INLINE T abs(T x) {
  if constexpr (is_math<T>) return fabs(x);
  else return pick(x, x, [](auto a, auto) -> decltype(a) { return a < 0 ? -a : a; });
}
template <class T, class = enable_if_t<is_math<T>>> EMU_INLINE T fma(T x, T y, T z) {
  if constexpr (is_vector<T>) {
    for (int i = 0; i < vector_of<T>::size; i++) x[i] = element_of<T>(__builtin_fma((double)(float)x[i], (double)(float)y[i], (double)(float)z[i]));
    return x;
  } else
    return T(__builtin_fmaf((float)x, (float)y, (float)z));
}
template <class T, class = enable_if_t<is_math<T>>> EMU_INLINE T mix(T x, T y, T a) { return x + (y - x) * a; }
template <class T, int N> EMU_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; i++) s = s + a[i] * b[i];
  return s;
}

#define EMU_CLASS(name, result) \
  template <class T, class = enable_if_t<is_same_v<T, float> || is_same_v<T, half>>> EMU_INLINE bool name(T x) { float a = (float)x; return result; }
EMU_CLASS(isnan, __builtin_isnan(a)) EMU_CLASS(isinf, __builtin_isinf(a)) EMU_CLASS(isfinite, __builtin_isfinite(a))
EMU_CLASS(signbit, __builtin_signbit(a))

template <class T> EMU_INLINE T select(T if_false, T if_true, bool c) { return c ? if_true : if_false; }
template <class T, int N> EMU_INLINE vec<T, N> select(vec<T, N> if_false, vec<T, N> if_true, vec<bool, N> c) {
  for (int i = 0; i < N; i++) if_false[i] = c[i] ? if_true[i] : if_false[i];
  return if_false;
}
template <int N> EMU_INLINE bool any(vec<bool, N> c) { bool r = false; for (int i = 0; i < N; i++) r |= c[i]; return r; }
template <int N> EMU_INLINE bool all(vec<bool, N> c) { bool r = true; for (int i = 0; i < N; i++) r &= c[i]; return r; }

EMU_INLINE uint popcount(uint x) { return (uint)__builtin_popcount(x); }
EMU_INLINE int popcount(int x) { return __builtin_popcount((uint)x); }
EMU_INLINE uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32; }
EMU_INLINE uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32; }
EMU_INLINE uint mulhi(uint a, uint b) { return (uint)((ulong)a * b >> 32); }
EMU_INLINE int mulhi(int a, int b) { return (int)((long)a * b >> 32); }

}  // namespace metal
