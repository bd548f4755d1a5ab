// Lane vectors, storage types, conversions, comparisons and selections, shared by every CPU kernel.
//
// A kernel computes on vectors of VL lanes: vf (float), vd (double), vi32, vi64. vec<T> is the compute vector of the
// storage type T: values stored as f16, bf16 and float are computed in vf, small integers and bool8 (0 or 1) in vi32.
// A lane count is `Full{}` (VL, known at compile time) or an `int n` with 0 < n < VL for a tail.
// Comparisons return masks (0 or -1) as wide as the operands; as_bool() and as_mask() convert to and from the 0/1 form.
#pragma once
#include "amx.h"
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses an ABI boundary: everything is inlined

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define NPU_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NPU_AVX2 1
#elif defined(__aarch64__)
#define NPU_NEON 1
#endif

// NPU_BF16_DOT: whether the CPU multiplies pairs of bf16; if NPU_SLOW_BF16_DOT, more slowly than floats. NPU_WORDS: whether
// blocks of small codes are multiplied as 16-bit integers instead (words.h).
#if NPU_AMX || NPU_AVX512 && defined(__AVX512BF16__) || NPU_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NPU_BF16_DOT 1
#else
#define NPU_BF16_DOT 0
#endif
#if !NPU_BF16_DOT && (NPU_AVX512 || NPU_AVX2)
#define NPU_WORDS 1
#else
#define NPU_WORDS 0
#endif

#define NPU_INLINE static inline __attribute__((always_inline))
#define NPU_HALF __attribute__((always_inline))
#define NPU_NOINLINE __attribute__((noinline))

namespace npu {

#if NPU_AVX512
constexpr int VL = 16;
#elif NPU_AVX2
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct bool8 { uint8_t value; };

template <class S, int N> struct vec_of { typedef S type __attribute__((vector_size(N * sizeof(S)))); };
typedef float vf __attribute__((vector_size(VL * 4)));
typedef double vd __attribute__((vector_size(VL * 8)));
typedef int32_t vi32 __attribute__((vector_size(VL * 4)));
typedef int64_t vi64 __attribute__((vector_size(VL * 8)));

template <class V> struct lane_of;
template <> struct lane_of<vf> { using type = float; };
template <> struct lane_of<vd> { using type = double; };
template <> struct lane_of<vi32> { using type = int32_t; };
template <> struct lane_of<vi64> { using type = int64_t; };
template <class V> using lane_t = typename lane_of<V>::type;
template <class H> struct lane_of_half;
template <> struct lane_of_half<vec_of<float, VL / 2>::type> { using type = float; };
template <> struct lane_of_half<vec_of<double, VL / 2>::type> { using type = double; };
template <> struct lane_of_half<vec_of<int32_t, VL / 2>::type> { using type = int32_t; };
template <> struct lane_of_half<vec_of<int64_t, VL / 2>::type> { using type = int64_t; };

struct Full { constexpr operator int() const { return VL; } };

// Values stored as T are computed in the lane vector Compute<T>::V or the scalar Compute<T>::S.
template <class T> struct Compute { using V = vi32; using S = int32_t; };
template <> struct Compute<float> { using V = vf; using S = float; };
template <> struct Compute<f16> { using V = vf; using S = float; };
template <> struct Compute<bf16> { using V = vf; using S = float; };
template <> struct Compute<e4m3> { using V = vf; using S = float; };
template <> struct Compute<double> { using V = vd; using S = double; };
template <> struct Compute<int64_t> { using V = vi64; using S = int64_t; };
template <class T> using vec = typename Compute<T>::V;
template <class T> using scalar = typename Compute<T>::S;

template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };

// ---------------------------------------------------------------------------------------------- scalars
template <class To, class From> NPU_INLINE To bitcast(From v) {
  static_assert(sizeof(To) == sizeof(From), "bitcast needs equal sizes");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}

NPU_INLINE float f16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) {
    uint32_t quiet = magnitude > 0x7c00 ? 0x400000u : 0u;
    return bitcast<float>(sign | 0x7f800000u | quiet | (magnitude & 0x3ff) << 13);
  }
  // 2^112 moves the exponent bias and normalises subnormals in one exact multiplication.
  return bitcast<float>(sign | bitcast<uint32_t>(bitcast<float>(magnitude << 13) * 0x1p112f));
}

NPU_INLINE uint16_t float_to_f16(float f) {
  uint32_t u = bitcast<uint32_t>(f);
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff));
  if (u >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000)  // subnormal result: adding 0.5 aligns the last f16 bit with the last float bit
    return (uint16_t)(sign | (bitcast<uint32_t>(bitcast<float>(u) + 0.5f) - 0x3f000000u));
  u += 0xc8000fffu + (u >> 13 & 1);
  return (uint16_t)(sign | u >> 13);
}

NPU_INLINE float bf16_to_float(uint16_t h) { return bitcast<float>((uint32_t)h << 16); }
NPU_INLINE uint16_t float_to_bf16(float f) {
  uint32_t u = bitcast<uint32_t>(f);
  return f != f ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// 8-bit floats without infinities (float8_e4m3fn). Numbers that would round to more than 448 become NaN.
NPU_INLINE float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7f;  // below 2^-6: a multiple of 2^-9
  if (magnitude == 0x7f) return bitcast<float>(0x7fc00000u);
  const uint32_t bits = magnitude < 8 ? bitcast<uint32_t>((float)magnitude * 0x1p-9f) : (magnitude << 20) + (120u << 23);
  return bitcast<float>(bits | (uint32_t)(code & 0x80) << 24);
}
NPU_INLINE uint8_t float_to_e4m3(float f) {
  const uint32_t u = bitcast<uint32_t>(f), magnitude = u & 0x7fffffff, sign = u >> 24 & 0x80;
  if (magnitude > 0x43e80000) return (uint8_t)(sign | 0x7f);
  if (magnitude < 0x3c800000)  // adding 2^14 aligns the last bit of a subnormal with that of the float
    return (uint8_t)(sign | (bitcast<uint32_t>(bitcast<float>(magnitude) + 0x1p14f) - 0x46800000u));
  return (uint8_t)(sign | (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20);
}

// ld1 and st1 load and store one element, as the compute scalar of T.
template <class T> NPU_INLINE scalar<T> ld1(const T* p) { return (scalar<T>)*p; }
template <> inline __attribute__((always_inline)) float ld1(const bf16* p) { return bf16_to_float(p->bits); }
template <> inline __attribute__((always_inline)) float ld1(const e4m3* p) { return e4m3_to_float(p->bits); }
template <> inline __attribute__((always_inline)) int32_t ld1(const bool8* p) { return p->value != 0; }
template <> inline __attribute__((always_inline)) float ld1(const f16* p) {
#if NPU_AVX512 || NPU_AVX2
  return _cvtsh_ss(p->bits);
#else
  return f16_to_float(p->bits);
#endif
}

template <class T> NPU_INLINE void st1(T* p, scalar<T> v) { *p = (T)v; }
template <> inline __attribute__((always_inline)) void st1(bf16* p, float v) { p->bits = float_to_bf16(v); }
template <> inline __attribute__((always_inline)) void st1(e4m3* p, float v) { p->bits = float_to_e4m3(v); }
template <> inline __attribute__((always_inline)) void st1(bool8* p, int32_t v) { p->value = v != 0; }
template <> inline __attribute__((always_inline)) void st1(f16* p, float v) {
#if NPU_AVX512 || NPU_AVX2
  p->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
#else
  p->bits = float_to_f16(v);
#endif
}

// ---------------------------------------------------------------------------------------------- conversions
template <class V, class S> NPU_INLINE V splat(S s) {
  return (lane_t<V>)s - V{};  // x - 0 is x for every x, -0.0 and NaN included: folds to a broadcast
}
template <> inline __attribute__((always_inline)) vf splat<vf>(float s) {
#if NPU_AVX512
  return (vf)_mm512_set1_ps(s);
#elif NPU_AVX2
  return (vf)_mm256_set1_ps(s);
#else
  return vf{s, s, s, s};
#endif
}

// Applies f to each half of a vector. Compilers would scalarise a comparison or a select of a whole vector that takes two
// registers (vd, vi64), and would pass a vector that takes one through the stack.
template <class V> using half_t = typename vec_of<lane_t<V>, VL / 2>::type;
typedef half_t<vf> half_vf;
typedef half_t<vd> half_vd;
typedef half_t<vi32> half_vi32;
typedef half_t<vi64> half_vi64;
template <class F, class A, class... Vs> NPU_INLINE auto by_halves(F f, A a, Vs... vs) {
  auto half = [](auto v, int h) NPU_HALF {
    half_t<decltype(v)> x;
#if NPU_AVX512
    if constexpr (sizeof v == 64) {
      const __m256i part = h ? _mm512_extracti64x4_epi64((__m512i)v, 1) : _mm512_castsi512_si256((__m512i)v);
      memcpy(&x, &part, sizeof x);
      return x;
    }
#endif
    memcpy(&x, (const char*)&v + h * sizeof x, sizeof x);
    return x;
  };
  auto low = f(half(a, 0), half(vs, 0)...), high = f(half(a, 1), half(vs, 1)...);
  typename vec_of<typename lane_of_half<decltype(low)>::type, VL>::type out;
#if NPU_AVX512
  if constexpr (sizeof low == 32)
    return (decltype(out))_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
#endif
  memcpy(&out, &low, sizeof low);
  memcpy((char*)&out + sizeof low, &high, sizeof high);
  return out;
}

// Value conversion between lane vectors, or between their halves; float to integer truncates. Compilers would convert half
// a vector of floats to doubles, or back, a quarter at a time.
template <class To, class From> NPU_INLINE To cvt(From v) {
  if constexpr (is_same<To, From>::value) return v;
#if NPU_AVX512
  else if constexpr (is_same<From, half_vf>::value && is_same<To, half_vd>::value) return (To)_mm512_cvtps_pd((__m256)v);
  else if constexpr (is_same<From, half_vd>::value && is_same<To, half_vf>::value) return (To)_mm512_cvtpd_ps((__m512d)v);
  else if constexpr ((is_same<From, vf>::value && is_same<To, vd>::value) ||
                     (is_same<From, vd>::value && is_same<To, vf>::value))
    return by_halves([](auto half) NPU_HALF { return cvt<half_t<To>>(half); }, v);
#endif
  else return __builtin_convertvector(v, To);
}

template <class V> constexpr bool is_wide = sizeof(V) > sizeof(vi32);
template <class F, class V, class... Vs> NPU_INLINE auto by_registers(F f, V v, Vs... vs) {
  if constexpr (is_wide<V>) return by_halves(f, v, vs...);
  else return f(v, vs...);
}

// compare<Op>(a, b) returns a mask of 32-bit lanes.
struct Lt { template <class V> __attribute__((always_inline)) auto operator()(V a, V b) const { return a < b; } };
struct Le { template <class V> __attribute__((always_inline)) auto operator()(V a, V b) const { return a <= b; } };
struct Gt { template <class V> __attribute__((always_inline)) auto operator()(V a, V b) const { return a > b; } };
struct Ge { template <class V> __attribute__((always_inline)) auto operator()(V a, V b) const { return a >= b; } };
struct Eq { template <class V> __attribute__((always_inline)) auto operator()(V a, V b) const { return a == b; } };
struct Ne { template <class V> __attribute__((always_inline)) auto operator()(V a, V b) const { return a != b; } };
#if NPU_AVX512
template <class Op> struct Predicate;  // of instructions that compare doubles and integers
#define NPU_PREDICATE(op, for_doubles, for_integers) \
  template <> struct Predicate<op> { static constexpr int doubles = for_doubles, integers = for_integers; };
NPU_PREDICATE(Lt, _CMP_LT_OQ, _MM_CMPINT_LT)
NPU_PREDICATE(Le, _CMP_LE_OQ, _MM_CMPINT_LE)
NPU_PREDICATE(Gt, _CMP_GT_OQ, _MM_CMPINT_NLE)
NPU_PREDICATE(Ge, _CMP_GE_OQ, _MM_CMPINT_NLT)
NPU_PREDICATE(Eq, _CMP_EQ_OQ, _MM_CMPINT_EQ)
NPU_PREDICATE(Ne, _CMP_NEQ_UQ, _MM_CMPINT_NE)
#undef NPU_PREDICATE
#endif
template <class Op, class V> NPU_INLINE vi32 compare(V a, V b) {
  if constexpr (!is_wide<V>) {
    return Op{}(a, b);
  } else {
#if NPU_AVX512
    half_t<V> x[2], y[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    __mmask8 m[2];
    for (int h = 0; h < 2; h++) {
      if constexpr (is_same<V, vi64>::value)
        m[h] = _mm512_cmp_epi64_mask((__m512i)x[h], (__m512i)y[h], Predicate<Op>::integers);
      else m[h] = _mm512_cmp_pd_mask((__m512d)x[h], (__m512d)y[h], Predicate<Op>::doubles);
    }
    return (vi32)_mm512_movm_epi32(_mm512_kunpackb(m[1], m[0]));
#else
    typedef half_t<vi32> narrow;
    return by_halves([](auto x, auto y) NPU_HALF { return __builtin_convertvector(Op{}(x, y), narrow); }, a, b);
#endif
  }
}

// Convert masks (0 or -1, of either width) to and from bool lanes (vi32, 0 or 1).
NPU_INLINE vi32 as_bool(vi32 mask) { return mask & 1; }
NPU_INLINE vi32 as_bool(vi64 mask) { return cvt<vi32>(mask) & 1; }
NPU_INLINE vi32 as_mask(vi32 b) { return b != 0; }

// select(mask, a, b) takes the lanes of a where the mask is -1, those of b where it is 0. The mask may have another
// lane width.
template <class M, class V> NPU_INLINE V select(M mask, V a, V b) {
  if constexpr (sizeof(M) == sizeof(V) && is_wide<V>) {
    return by_halves([](auto m, auto x, auto y) NPU_HALF { return m ? x : y; }, (vi64)mask, a, b);
  } else if constexpr (sizeof(M) == sizeof(V)) {
    return mask ? a : b;
  } else if constexpr (sizeof(V) == sizeof(vi32)) {
    return cvt<vi32>(mask) ? a : b;
  } else {
#if NPU_AVX512
    half_t<V> x[2], y[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    const __mmask16 m = _mm512_movepi32_mask((__m512i)mask);
    for (int h = 0; h < 2; h++)
      x[h] = (half_t<V>)_mm512_mask_blend_epi64((__mmask8)(m >> 8 * h), (__m512i)y[h], (__m512i)x[h]);
    memcpy(&a, x, sizeof a);
    return a;
#else
    typedef half_t<vi64> wide;
    auto choose = [](auto m, auto x, auto y) NPU_HALF { return __builtin_convertvector(m, wide) ? x : y; };
    return by_halves(choose, (vi32)mask, a, b);
#endif
  }
}

template <class V> NPU_INLINE V fma(V a, V b, V c) { return a * b + c; }  // contracted by -ffp-contract=fast

struct MaxOp {
  template <class V> __attribute__((always_inline)) V operator()(V a, V b) const {
    return ((a != a) | (a > b)) ? a : b;
  }
};
struct MinOp {
  template <class V> __attribute__((always_inline)) V operator()(V a, V b) const {
    return ((a != a) | (a < b)) ? a : b;
  }
};

// min and max return NaN if either operand is NaN, like torch.minimum and torch.maximum.
template <class V> NPU_INLINE V max(V a, V b) {
  if constexpr (is_wide<V>) return by_halves([](auto x, auto y) NPU_HALF { return max(x, y); }, a, b);
  else return MaxOp{}(a, b);
}
template <class V> NPU_INLINE V min(V a, V b) {
  if constexpr (is_wide<V>) return by_halves([](auto x, auto y) NPU_HALF { return min(x, y); }, a, b);
  else return MinOp{}(a, b);
}
#if NPU_AVX512
// vmaxps returns its second operand if either is NaN, so only a NaN in `a` needs correction.
template <> inline __attribute__((always_inline)) vf max(vf a, vf b) {
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
  return (vf)_mm512_mask_mov_ps(_mm512_max_ps((__m512)a, (__m512)b), nan, (__m512)a);
}
template <> inline __attribute__((always_inline)) vf min(vf a, vf b) {
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
  return (vf)_mm512_mask_mov_ps(_mm512_min_ps((__m512)a, (__m512)b), nan, (__m512)a);
}
template <> inline __attribute__((always_inline)) half_vd max(half_vd a, half_vd b) {
  __mmask8 nan = _mm512_cmp_pd_mask((__m512d)a, (__m512d)a, _CMP_UNORD_Q);
  return (half_vd)_mm512_mask_mov_pd(_mm512_max_pd((__m512d)a, (__m512d)b), nan, (__m512d)a);
}
template <> inline __attribute__((always_inline)) half_vd min(half_vd a, half_vd b) {
  __mmask8 nan = _mm512_cmp_pd_mask((__m512d)a, (__m512d)a, _CMP_UNORD_Q);
  return (half_vd)_mm512_mask_mov_pd(_mm512_min_pd((__m512d)a, (__m512d)b), nan, (__m512d)a);
}
#elif NPU_AVX2
template <> inline __attribute__((always_inline)) vf max(vf a, vf b) {
  __m256 x = (__m256)a;
  return (vf)_mm256_blendv_ps(_mm256_max_ps(x, (__m256)b), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
template <> inline __attribute__((always_inline)) vf min(vf a, vf b) {
  __m256 x = (__m256)a;
  return (vf)_mm256_blendv_ps(_mm256_min_ps(x, (__m256)b), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
#elif NPU_NEON
template <> inline __attribute__((always_inline)) vf max(vf a, vf b) {
  return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
}
template <> inline __attribute__((always_inline)) vf min(vf a, vf b) {
  return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
}
#endif

// max(x, bound) and min(x, bound) for a bound that is not NaN. NaN stays NaN; a zero keeps its sign beside a zero.
template <class V> NPU_INLINE V at_least(V x, V bound) {
  if constexpr (is_wide<V>) return by_halves([](auto x, auto bound) NPU_HALF { return at_least(x, bound); }, x, bound);
  else return x < bound ? bound : x;
}
template <class V> NPU_INLINE V at_most(V x, V bound) {
  if constexpr (is_wide<V>) return by_halves([](auto x, auto bound) NPU_HALF { return at_most(x, bound); }, x, bound);
  else return x > bound ? bound : x;
}
#if NPU_AVX512
template <> inline __attribute__((always_inline)) vf at_least(vf x, vf bound) {
  return (vf)_mm512_max_ps((__m512)bound, (__m512)x);
}
template <> inline __attribute__((always_inline)) vf at_most(vf x, vf bound) {
  return (vf)_mm512_min_ps((__m512)bound, (__m512)x);
}
template <> inline __attribute__((always_inline)) half_vd at_least(half_vd x, half_vd bound) {
  return (half_vd)_mm512_max_pd((__m512d)bound, (__m512d)x);
}
template <> inline __attribute__((always_inline)) half_vd at_most(half_vd x, half_vd bound) {
  return (half_vd)_mm512_min_pd((__m512d)bound, (__m512d)x);
}
#elif NPU_AVX2
template <> inline __attribute__((always_inline)) vf at_least(vf x, vf bound) {
  return (vf)_mm256_max_ps((__m256)bound, (__m256)x);
}
template <> inline __attribute__((always_inline)) vf at_most(vf x, vf bound) {
  return (vf)_mm256_min_ps((__m256)bound, (__m256)x);
}
#elif NPU_NEON
template <> inline __attribute__((always_inline)) vf at_least(vf x, vf bound) { return max(x, bound); }
template <> inline __attribute__((always_inline)) vf at_most(vf x, vf bound) { return min(x, bound); }
#endif

}  // namespace npu
