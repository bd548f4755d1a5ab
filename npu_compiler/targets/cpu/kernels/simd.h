// Loads, stores and reductions of lane vectors (vectors.h), by storage type and lane count.
#pragma once
#include "vectors.h"

namespace npu {

// ---------------------------------------------------------------------------------------------- loads
template <class V> NPU_INLINE V load_bytes(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> NPU_INLINE void store_bytes(void* p, V v) { memcpy(p, &v, sizeof v); }

// Converts between vf lanes and the codes of e4m3 in 32-bit lanes: see e4m3_to_float, float_to_e4m3.
NPU_INLINE vf e4m3_values(vi32 code) {
  const vi32 magnitude = code & 0x7f, normal = (magnitude << 20) + (120 << 23);
  const vi32 subnormal = (vi32)(cvt<vf>(magnitude) * 0x1p-9f);
  const vi32 bits = select(magnitude < 8, subnormal, normal);
  return (vf)(select(magnitude == 0x7f, vi32{} + 0x7fc00000, bits) | (code & 0x80) << 24);
}
NPU_INLINE vi32 e4m3_codes(vf v) {
  const vi32 magnitude = (vi32)v & 0x7fffffff, sign = (vi32)v >> 24 & 0x80;
  const vi32 subnormal = (vi32)((vf)magnitude + 0x1p14f) - 0x46800000;
  const vi32 normal = (magnitude - (120 << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const vi32 code = select(magnitude < 0x3c800000, subnormal, normal);
  return select(magnitude > 0x43e80000, vi32{} + 0x7f, code) | sign;
}

#if NPU_AVX512
// Converts 16 stored elements of two bytes or of one.
template <class T> NPU_INLINE vec<T> widened(__m256i x) {
  if constexpr (is_same<T, f16>::value) return (vf)_mm512_cvtph_ps(x);
  else if constexpr (is_same<T, bf16>::value) return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
  else return (vi32)_mm512_cvtepi16_epi32(x);
}
template <class T> NPU_INLINE vec<T> widened(__m128i x) {
  if constexpr (is_same<T, e4m3>::value) return e4m3_values((vi32)_mm512_cvtepu8_epi32(x));
  else if constexpr (is_same<T, int8_t>::value) return (vi32)_mm512_cvtepi8_epi32(x);
  else return (vi32)_mm512_cvtepu8_epi32(x);
}
#endif

template <class T> NPU_INLINE vec<T> ld(const T* p, Full) {
  if constexpr (is_same<T, e4m3>::value) return e4m3_values(ld((const uint8_t*)p, Full{}));
  else
  if constexpr (sizeof(T) == sizeof(scalar<T>)) {
    return load_bytes<vec<T>>(p);
  } else {
#if NPU_AVX512
    if constexpr (sizeof(T) == 2) return widened<T>(_mm256_loadu_si256((const __m256i*)p));
    else return widened<T>(_mm_loadu_si128((const __m128i*)p));
#elif NPU_AVX2
    if constexpr (is_same<T, f16>::value) return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    else if constexpr (is_same<T, bf16>::value)
      return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
    else if constexpr (is_same<T, int16_t>::value)
      return (vi32)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p));
    else if constexpr (is_same<T, int8_t>::value)
      return (vi32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
    else return (vi32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
#if NPU_NEON
    if constexpr (is_same<T, f16>::value)
      return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#endif
    vec<T> v{};
    for (int i = 0; i < VL; i++) v[i] = ld1(p + i);
    return v;
#endif
  }
}

#if NPU_AVX512
NPU_INLINE __mmask16 lane_mask(int n) { return (__mmask16)((1u << n) - 1); }
#endif

#if NPU_AVX512
// Loads the lanes of m. The other lanes are 0, and nothing is read for them.
template <class T> NPU_INLINE vec<T> ld_under(const T* p, __mmask16 m) {
  if constexpr (is_same<T, float>::value) return (vf)_mm512_maskz_loadu_ps(m, p);
  else if constexpr (is_same<T, int32_t>::value) return (vi32)_mm512_maskz_loadu_epi32(m, p);
  else if constexpr (sizeof(T) == 2) return widened<T>(_mm256_maskz_loadu_epi16(m, p));
  else if constexpr (sizeof(T) == 1) return widened<T>(_mm_maskz_loadu_epi8(m, p));
  else {
    const __m512i half[2] = {_mm512_maskz_loadu_epi64((__mmask8)m, p), _mm512_maskz_loadu_epi64(m >> 8, p + 8)};
    return load_bytes<vec<T>>(half);
  }
}

// Loads the lanes of m from every second element: loads of neighbours and a permutation, because a gather instruction is
// several times as slow. The other lanes are 0, as above.
template <class T> NPU_INLINE vec<T> ld_every_second(const T* p, __mmask16 m) {
  const uint32_t wanted = _pdep_u32(m, 0x55555555);
  if constexpr (sizeof(T) == 8) {
    const __m512i even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
    __m512i half[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m512i low = _mm512_maskz_loadu_epi64((__mmask8)(wanted >> 16 * h), p + 16 * h);
      const __m512i high = _mm512_maskz_loadu_epi64((__mmask8)(wanted >> (16 * h + 8)), p + 16 * h + 8);
      half[h] = _mm512_permutex2var_epi64(low, even, high);
    }
    return load_bytes<vec<T>>(half);
  } else if constexpr (sizeof(T) == 4) {
    const __m512i low = _mm512_maskz_loadu_epi32((__mmask16)wanted, p);
    const __m512i high = _mm512_maskz_loadu_epi32(wanted >> 16, p + 16);
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return (vec<T>)_mm512_permutex2var_epi32(low, even, high);
  } else if constexpr (sizeof(T) == 2) {
    return widened<T>(_mm512_cvtepi32_epi16(_mm512_maskz_loadu_epi16(wanted, p)));
  } else {
    return widened<T>(_mm256_cvtepi16_epi8(_mm256_maskz_loadu_epi8(wanted, p)));
  }
}
// The same for all lanes: reads p[0] to p[30]. Loads without a mask let AMD's CPUs prefetch what follows; those with one
// do not, which costs three quarters of the bandwidth of memory.
template <class T> NPU_INLINE vec<T> ld_every_second(const T* p) {
  if constexpr (sizeof(T) == 8) {
    const __m512i at = _mm512_set_epi64(15, 13, 11, 9, 6, 4, 2, 0);
    const __m512i half[2] = {_mm512_permutex2var_epi64(_mm512_loadu_si512(p), at, _mm512_loadu_si512(p + 7)),
                             _mm512_permutex2var_epi64(_mm512_loadu_si512(p + 16), at, _mm512_loadu_si512(p + 23))};
    return load_bytes<vec<T>>(half);
  } else if constexpr (sizeof(T) == 4) {
    const __m512i at = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 14, 12, 10, 8, 6, 4, 2, 0);
    return (vec<T>)_mm512_permutex2var_epi32(_mm512_loadu_si512(p), at, _mm512_loadu_si512(p + 15));
  } else if constexpr (sizeof(T) == 2) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)p), high = _mm256_loadu_si256((const __m256i*)(p + 15));
    const __m256i odd = _mm256_srli_epi32(high, 16);
    return widened<T>(_mm512_cvtepi32_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(low), odd, 1)));
  } else {
    const __m128i low = _mm_loadu_si128((const __m128i*)p), high = _mm_loadu_si128((const __m128i*)(p + 15));
    return widened<T>(_mm_packus_epi16(_mm_and_si128(low, _mm_set1_epi16(0xff)), _mm_srli_epi16(high, 8)));
  }
}
#endif

template <class T> NPU_INLINE vec<T> ld(const T* p, int n) {
#if NPU_AVX512
  return ld_under(p, lane_mask(n));
#else
  T lanes[VL] = {};
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return ld(lanes, Full{});
#endif
}

// ---------------------------------------------------------------------------------------------- stores
// Converts vf lanes to bf16 in the low halves of 32-bit lanes. Rounds to nearest even; NaN stays NaN; subnormals are
// kept (the AVX512_BF16 conversion would flush them).
NPU_INLINE vi32 bf16_lanes(vf v) {
  typedef uint32_t vu32 __attribute__((vector_size(VL * 4)));
  vu32 u = (vu32)v;
  vu32 rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return select(v != v, (vi32)(u >> 16 | 0x40), (vi32)rounded);
}

template <class T> NPU_INLINE void st(T* p, vec<T> v, Full) {
  if constexpr (is_same<T, e4m3>::value) return st((uint8_t*)p, e4m3_codes(v), Full{});
  if constexpr (is_same<T, bool8>::value) v = as_bool(v != 0);
  if constexpr (is_wide<vec<T>>) {  // compilers would pass a vector that was loaded as a whole through the stack
    half_t<vec<T>> half[2];
    memcpy(half, &v, sizeof half);
    store_bytes(p, half[0]);
    store_bytes(p + VL / 2, half[1]);
  } else if constexpr (sizeof(T) == sizeof(scalar<T>)) {
    store_bytes(p, v);
  } else {
#if NPU_AVX512
    if constexpr (is_same<T, f16>::value)
      _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    else if constexpr (is_same<T, bf16>::value) {
#ifdef __AVX512BF16__  // 0x20: subnormals, which it would flush
      if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, 0x20), 1))
        return _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#endif
      _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)bf16_lanes(v)));
    } else if constexpr (sizeof(T) == 2) _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
    else _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
    return;
#elif NPU_AVX2
    if constexpr (is_same<T, f16>::value) {
      _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
      return;
    } else if constexpr (is_same<T, bf16>::value) {
      __m256i u = (__m256i)bf16_lanes(v);
      __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08);
      _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
      return;
    }
#elif NPU_NEON
    if constexpr (is_same<T, f16>::value) {
      vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
      return;
    }
#endif
    if constexpr (is_same<T, bf16>::value) {
      vi32 u = bf16_lanes(v);
      for (int i = 0; i < VL; i++) p[i].bits = (uint16_t)u[i];
    } else {
      for (int i = 0; i < VL; i++) st1(p + i, v[i]);
    }
  }
}

template <class T> NPU_INLINE void st(T* p, vec<T> v, int n) {
  if constexpr (is_same<T, e4m3>::value) return st((uint8_t*)p, e4m3_codes(v), n);
#if NPU_AVX512
  __mmask16 m = lane_mask(n);
  if constexpr (is_same<T, bool8>::value) v = as_bool(v != 0);
  if constexpr (is_same<T, float>::value || is_same<T, int32_t>::value) {
    _mm512_mask_storeu_epi32(p, m, (__m512i)v);
    return;
  } else if constexpr (is_same<T, f16>::value) {
    _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  } else if constexpr (is_same<T, bf16>::value) {
    _mm256_mask_storeu_epi16(p, m, _mm512_cvtepi32_epi16((__m512i)bf16_lanes(v)));
    return;
  } else if constexpr (sizeof(T) == 2) {
    _mm256_mask_storeu_epi16(p, m, _mm512_cvtepi32_epi16((__m512i)v));
    return;
  } else if constexpr (sizeof(T) == 1) {
    _mm_mask_storeu_epi8(p, m, _mm512_cvtepi32_epi8((__m512i)v));
    return;
  } else if constexpr (sizeof(T) == 8) {
    __m512i half[2];
    memcpy(half, &v, sizeof half);
    _mm512_mask_storeu_epi64(p, (__mmask8)m, half[0]);
    return _mm512_mask_storeu_epi64(p + 8, m >> 8, half[1]);
  }
#endif
  T lanes[VL];
  st(lanes, v, Full{});
  for (int i = 0; i < n; i++) p[i] = lanes[i];
}

#if NPU_AVX512
#define NPU_PAIRED_STORES 1
// Lanes of the first of two neighbouring vectors, and of the second, whose store rounds and stores both: single vectors
// are rounded more slowly than tiles compute them.
struct FirstOfTwo : Full { vf* first; };
struct SecondOfTwo : Full { const vf* first; };
#ifdef __AVX512BF16__
// Loads as well: the compiler merges the loads of both vectors, each of which is then one permutation.
NPU_INLINE vf ld(const bf16* p, FirstOfTwo) {
  const __m512i from = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0,  //
                                        7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  return (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, from, _mm512_loadu_si512(p));
}
NPU_INLINE vf ld(const bf16* p, SecondOfTwo) {
  const __m512i from = _mm512_set_epi16(31, 0, 30, 0, 29, 0, 28, 0, 27, 0, 26, 0, 25, 0, 24, 0,  //
                                        23, 0, 22, 0, 21, 0, 20, 0, 19, 0, 18, 0, 17, 0, 16, 0);
  return (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, from, _mm512_loadu_si512(p - VL));
}
inline __attribute__((noinline, cold)) void st_subnormal(bf16* p, vf first, vf second) { st(p, first, Full{}), st(p + VL, second, Full{}); }
NPU_INLINE void st(bf16* p, vf v, FirstOfTwo lanes) { *lanes.first = v; }
NPU_INLINE void st(bf16* p, vf v, SecondOfTwo lanes) {
  const __m512 first = (__m512)*lanes.first, second = (__m512)v;
  const __mmask16 a = _mm512_fpclass_ps_mask(first, 0x20), b = _mm512_fpclass_ps_mask(second, 0x20);
  if (__builtin_expect(!_kortestz_mask16_u8(a, b), 0)) st_subnormal(p - VL, *lanes.first, v);
  else _mm512_storeu_si512(p - VL, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif
#else
#define NPU_PAIRED_STORES 0
#endif

template <class V> NPU_INLINE V reversed(V v) {
  constexpr int n = sizeof(V) / sizeof(v[0]);
  if constexpr (is_wide<V>) {
    half_t<V> half[2];
    memcpy(half, &v, sizeof half);
    const half_t<V> swapped[2] = {reversed(half[1]), reversed(half[0])};
    return load_bytes<V>(swapped);
  } else if constexpr (n == 2) return __builtin_shufflevector(v, v, 1, 0);
  else if constexpr (n == 4) return __builtin_shufflevector(v, v, 3, 2, 1, 0);
  else if constexpr (n == 8) return __builtin_shufflevector(v, v, 7, 6, 5, 4, 3, 2, 1, 0);
  else return __builtin_shufflevector(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

// Load and store lanes that are `stride` elements apart.
template <class T, class L> NPU_INLINE vec<T> ld_strided(const T* p, long stride, L lanes) {
  if (stride == 1) return ld(p, lanes);
  if constexpr (is_same<L, Full>::value)
    if (stride == -1) return reversed(ld(p - (VL - 1), lanes));
#if NPU_AVX512
  if constexpr (is_same<L, Full>::value) {
    if (stride == 2) return ld_every_second(p);
  } else {
    if (stride == 2) return ld_every_second(p, lane_mask(lanes));
    if (stride == -1) return reversed(ld_under(p - (VL - 1), (__mmask16)(lane_mask(lanes) << (VL - lanes))));
  }
#endif
  vec<T> v{};
  for (int i = 0; i < (int)lanes; i++) v[i] = ld1(p + i * stride);
  return v;
}
template <class T, class L> NPU_INLINE void st_strided(T* p, long stride, vec<T> v, L lanes) {
  if (stride == 1) return st(p, v, lanes);
  for (int i = 0; i < (int)lanes; i++) st1(p + i * stride, v[i]);
}

// Loads one element into every lane.
template <class T> NPU_INLINE vec<T> ld_splat(const T* p) { return splat<vec<T>>(ld1(p)); }

// 0, 1, 2, ... VL-1
template <class V> NPU_INLINE V iota() {
  V v{};
  for (int i = 0; i < VL; i++) v[i] = i;
  return v;
}

// ---------------------------------------------------------------------------------------------- reductions
// Reduces by a fixed halving tree (lane i with lane i + N/2), so results do not depend on the compiler or the run.
template <class S, int N, class Op> NPU_INLINE S reduce_tree(typename vec_of<S, N>::type v, Op op) {
  if constexpr (N == 2) {
    return op((S)v[0], (S)v[1]);
  } else {
    typename vec_of<S, N / 2>::type lo, hi;
    memcpy(&lo, &v, sizeof lo);
    memcpy(&hi, (const char*)&v + sizeof lo, sizeof hi);
    return reduce_tree<S, N / 2>(op(lo, hi), op);
  }
}
struct AddOp { template <class V> __attribute__((always_inline)) V operator()(V a, V b) const { return a + b; } };
struct MulOp { template <class V> __attribute__((always_inline)) V operator()(V a, V b) const { return a * b; } };
struct OrOp { template <class V> __attribute__((always_inline)) V operator()(V a, V b) const { return a | b; } };

template <class V> NPU_INLINE lane_t<V> hsum(V v) { return reduce_tree<lane_t<V>, VL>(v, AddOp{}); }
template <class V> NPU_INLINE lane_t<V> hprod(V v) { return reduce_tree<lane_t<V>, VL>(v, MulOp{}); }
template <class V> NPU_INLINE lane_t<V> hmax(V v) { return reduce_tree<lane_t<V>, VL>(v, MaxOp{}); }
template <class V> NPU_INLINE lane_t<V> hmin(V v) { return reduce_tree<lane_t<V>, VL>(v, MinOp{}); }
template <class V> NPU_INLINE bool any(V mask) { return reduce_tree<lane_t<V>, VL>(mask, OrOp{}) != 0; }
#if NPU_AVX512
NPU_INLINE bool any(vi32 mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }
#endif

}  // namespace npu
