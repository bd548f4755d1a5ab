// Building blocks of generated loop nests: wrapping integers, checked indices, guarded and interleaved memory.
#pragma once
#include "accumulators.h"
#include "pool.h"
#include "transpose.h"

namespace npu {

// ---------------------------------------------------------------------------------------------- scalars, integers
template <class S> NPU_INLINE S scalar_min(S a, S b) { return a < b ? a : b; }
template <class S> NPU_INLINE S scalar_max(S a, S b) { return a > b ? a : b; }
template <class S> NPU_INLINE S scalar_abs(S a) { return a < 0 ? 0 - a : a; }
template <class S> NPU_INLINE S scalar_sign(S a) { return (a > 0) - (a < 0); }
NPU_INLINE long floor_quotient(long a, long b) { return a / b - (a % b < 0); }  // b > 0
NPU_INLINE long ceil_quotient(long a, long b) { return a / b + (a % b > 0); }

template <class I> struct unsigned_of;
template <> struct unsigned_of<int> { using type = unsigned; };
template <> struct unsigned_of<long> { using type = unsigned long; };
template <> struct unsigned_of<long long> { using type = unsigned long long; };
template <> struct unsigned_of<vi32> { using type = vec_of<uint32_t, VL>::type; };
template <> struct unsigned_of<vi64> { using type = vec_of<uint64_t, VL>::type; };
template <> struct unsigned_of<half_vi64> { using type = vec_of<uint64_t, VL / 2>::type; };
template <class I> using unsigned_t = typename unsigned_of<I>::type;
template <class I> NPU_INLINE I add_wrapping(I a, I b) { return (I)((unsigned_t<I>)a + (unsigned_t<I>)b); }
template <class I> NPU_INLINE I sub_wrapping(I a, I b) { return (I)((unsigned_t<I>)a - (unsigned_t<I>)b); }
template <class I> NPU_INLINE I mul_wrapping(I a, I b) { return (I)((unsigned_t<I>)a * (unsigned_t<I>)b); }

// Shifts by a negative count, or by the number of bits or more, shift out all bits.
struct ShlOp {
  template <class V> __attribute__((always_inline)) V operator()(V a, V by) const {
    constexpr int bits = 8 * sizeof(a[0]);
    V in = (by >= 0) & (by < bits);
    return (V)((unsigned_t<V>)a << (unsigned_t<V>)(by & in)) & in;
  }
};
struct ShrOp {
  template <class V> __attribute__((always_inline)) V operator()(V a, V by) const {
    constexpr int bits = 8 * sizeof(a[0]);
    V in = (by >= 0) & (by < bits);
    return a >> ((by & in) | (~in & (bits - 1)));
  }
};
#if NPU_AVX512  // the instructions treat such counts in the same way
NPU_INLINE vi32 shl(vi32 a, vi32 by) { return (vi32)_mm512_sllv_epi32((__m512i)a, (__m512i)by); }
NPU_INLINE vi32 shr(vi32 a, vi32 by) { return (vi32)_mm512_srav_epi32((__m512i)a, (__m512i)by); }
NPU_INLINE vi64 shl(vi64 a, vi64 by) {
  return by_halves([](auto x, auto n) NPU_HALF { return (half_vi64)_mm512_sllv_epi64((__m512i)x, (__m512i)n); }, a, by);
}
NPU_INLINE vi64 shr(vi64 a, vi64 by) {
  return by_halves([](auto x, auto n) NPU_HALF { return (half_vi64)_mm512_srav_epi64((__m512i)x, (__m512i)n); }, a, by);
}
#else
template <class V> NPU_INLINE V shl(V a, V by) {
  if constexpr (is_wide<V>) return by_halves(ShlOp{}, a, by);
  else return ShlOp{}(a, by);
}
template <class V> NPU_INLINE V shr(V a, V by) {
  if constexpr (is_wide<V>) return by_halves(ShrOp{}, a, by);
  else return ShrOp{}(a, by);
}
#endif
NPU_INLINE int scalar_shl(int a, int by) { return by < 0 || by > 31 ? 0 : (int)((unsigned)a << by); }
NPU_INLINE int scalar_shr(int a, int by) { return a >> (by < 0 || by > 31 ? 31 : by); }
NPU_INLINE long scalar_shl(long a, long by) { return by < 0 || by > 63 ? 0 : (long)((unsigned long)a << by); }
NPU_INLINE long scalar_shr(long a, long by) { return a >> (by < 0 || by > 63 ? 63 : by); }

// Wraps a 32-bit result to the range of a smaller integer type.
template <class T> NPU_INLINE vi32 wrap(vi32 v) {
  if constexpr (is_same<T, uint8_t>::value) return v & 0xff;
  else return v << (32 - 8 * (int)sizeof(T)) >> (32 - 8 * (int)sizeof(T));
}
template <class T> NPU_INLINE int wrap(int v) { return (int)(T)v; }

// Moves elements of two bytes as they are.
template <class T, class L> NPU_INLINE void move(T* to, const T* from, L lanes) {
  if constexpr (is_same<L, Full>::value) memcpy(to, from, VL * sizeof(T));
  else st((int16_t*)to, ld((const int16_t*)from, lanes), lanes);
}

// Stores values that are bf16 numbers: nothing is rounded.
template <class L> NPU_INLINE void st_exact(bf16* p, vf v, L lanes) {
#if NPU_AVX2
  if constexpr (is_same<L, Full>::value) {
    __m256i u = _mm256_srli_epi32((__m256i)v, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08);
    return _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
  }
#elif NPU_NEON
  if constexpr (is_same<L, Full>::value) return vst1_u16((uint16_t*)p, vshrn_n_u32((uint32x4_t)v, 16));
#endif
  st((int16_t*)p, (vi32)v >> 16, lanes);
}

// Rounds to a narrow float, like a store followed by a load.
template <class T> NPU_INLINE vf round_to(vf v) {
  if constexpr (is_same<T, bf16>::value) return (vf)(bf16_lanes(v) << 16);
  else if constexpr (is_same<T, e4m3>::value) return e4m3_values(e4m3_codes(v));
#if NPU_AVX512
  else return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif NPU_AVX2
  else return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
  T lanes[VL];
  st(lanes, v, Full{});
  return ld(lanes, Full{});
}

// ---------------------------------------------------------------------------------------------- guarded memory
// Returns the index i, or 0 if it is not below n. Then sets `bad`, if the element is `needed`.
NPU_INLINE long checked(long i, long n, int& bad, bool needed = true) {
  if (__builtin_expect((unsigned long)i < (unsigned long)n, 1)) return i;
  bad |= needed;
  return 0;
}
template <class L> NPU_INLINE vi64 checked(vi64 i, long n, int& bad, vi32 needed, L l) {
#if NPU_AVX512  // compilers would scalarise the comparison of a two-register vector
  __m512i half[2];
  memcpy(half, &i, sizeof half);
  const __m512i end = _mm512_set1_epi64(n);
  const __mmask8 low = _mm512_cmplt_epu64_mask(half[0], end), high = _mm512_cmplt_epu64_mask(half[1], end);
  const __mmask16 wanted = _mm512_movepi32_mask((__m512i)needed) & lane_mask((int)l);
  bad |= (wanted & ~(low | high << 8)) != 0;
  half[0] = _mm512_maskz_mov_epi64(low, half[0]);
  half[1] = _mm512_maskz_mov_epi64(high, half[1]);
  memcpy(&i, half, sizeof half);
  return i;
#else
  vi64 out = (i < 0) | (i >= n);
  bad |= any(cvt<vi32>(out) & needed & active(l));
  return i & ~out;
#endif
}
template <class L> NPU_INLINE vi64 checked(vi64 i, long n, int& bad, L l) {
  return checked(i, n, bad, vi32{} - 1, l);
}

template <class L> NPU_INLINE vi32 checked(vi32 i, long n, int& bad, vi32 needed, L l) {
  vi32 out = (unsigned_t<vi32>)i >= (uint32_t)n;
  bad |= any(out & needed & active(l));
  return i & ~out;
}
template <class L> NPU_INLINE vi32 checked(vi32 i, long n, int& bad, L l) {
  return checked(i, n, bad, vi32{} - 1, l);
}

#if NPU_AVX512
// Gathers p[offset] of four or eight bytes in the lanes of m; the other lanes are 0 and read nothing.
template <class T> NPU_INLINE vec<T> gather_words(const T* p, vi32 offset, __mmask16 m) {
  if constexpr (sizeof(T) == 4) {
    return (vec<T>)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), m, (__m512i)offset, p, 4);
  } else {
    __m256i at[2];
    memcpy(at, &offset, sizeof at);
    const __m512i zero = _mm512_setzero_si512();
    const __m512i half[2] = {_mm512_mask_i32gather_epi64(zero, (__mmask8)m, at[0], p, 8),
                             _mm512_mask_i32gather_epi64(zero, m >> 8, at[1], p, 8)};
    return load_bytes<vec<T>>(half);
  }
}
template <class T> NPU_INLINE vec<T> gather_words(const T* p, vi64 offset, __mmask16 m) {
  __m512i at[2];
  memcpy(at, &offset, sizeof at);
  if constexpr (sizeof(T) == 4) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i half[2] = {_mm512_mask_i64gather_epi32(zero, (__mmask8)m, at[0], p, 4),
                             _mm512_mask_i64gather_epi32(zero, m >> 8, at[1], p, 4)};
    return load_bytes<vec<T>>(half);
  } else {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i half[2] = {_mm512_mask_i64gather_epi64(zero, (__mmask8)m, at[0], p, 8),
                             _mm512_mask_i64gather_epi64(zero, m >> 8, at[1], p, 8)};
    return load_bytes<vec<T>>(half);
  }
}
NPU_INLINE __mmask16 lane_mask(vi32 mask, int n) { return _mm512_movepi32_mask((__m512i)mask) & lane_mask(n); }
#endif

#if NPU_AVX512
// Gathers p[offset] with one load and one permutation, if no offset of the first n lanes is below the first or above the
// last one, and these are less than 16 apart, as in an image that is enlarged: a gather instruction is several times as
// slow. Reads only elements from the first to the last one.
template <class T> NPU_INLINE bool gather_neighbours(const T* p, vi32 offset, int n, vec<T>& out) {
  const __m512i at = (__m512i)offset;
  const __m512i from = _mm512_sub_epi32(at, _mm512_broadcastd_epi32(_mm512_castsi512_si128(at)));
  const __m512i last = _mm512_permutexvar_epi32(_mm512_set1_epi32(n - 1), from);
  const uint32_t apart = (uint32_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(last));
  const __mmask16 lanes = lane_mask(n);
  if (apart >= 16 || _mm512_mask_cmpgt_epu32_mask(lanes, from, last)) return false;
  const __mmask16 needed = (__mmask16)((2u << apart) - 1);
  const T* const first = p + _mm_cvtsi128_si32(_mm512_castsi512_si128(at));
  __builtin_prefetch((const char*)first + 2048);  // loads with a mask do not train AMD's prefetcher
  if constexpr (sizeof(T) == 8) {
    const __m512i low = _mm512_maskz_loadu_epi64((__mmask8)needed, first);
    const __m512i high = _mm512_maskz_loadu_epi64((__mmask8)(needed >> 8), first + 8);
    __m256i half[2];
    memcpy(half, &from, sizeof half);
    const __m512i found[2] = {
        _mm512_maskz_permutex2var_epi64((__mmask8)lanes, low, _mm512_cvtepu32_epi64(half[0]), high),
        _mm512_maskz_permutex2var_epi64((__mmask8)(lanes >> 8), low, _mm512_cvtepu32_epi64(half[1]), high)};
    out = load_bytes<vec<T>>(found);
  } else if constexpr (sizeof(T) == 4) {
    out = (vec<T>)_mm512_maskz_permutexvar_epi32(lanes, from, _mm512_maskz_loadu_epi32(needed, first));
  } else if constexpr (sizeof(T) == 2) {
    const __m256i words = _mm256_maskz_loadu_epi16(needed, first);
    out = widened<T>(_mm256_maskz_permutexvar_epi16(lanes, _mm512_cvtepi32_epi16(from), words));
  } else {
    const __m128i bytes = _mm_maskz_loadu_epi8(needed, first);
    out = widened<T>(_mm_maskz_shuffle_epi8(lanes, bytes, _mm512_cvtepi32_epi8(from)));
  }
  return true;
}
#endif

// Gathers p[offset]; offsets have 32 or 64 bits. Lanes outside the mask are 0 and read nothing.
template <class T, class I, class L> NPU_INLINE vec<T> gather(const T* p, I offset, L l) {
#if NPU_AVX512
  if constexpr (sizeof(I) == sizeof(vi32)) {
    vec<T> found;
    if (gather_neighbours(p, offset, (int)l, found)) return found;
  }
  if constexpr (sizeof(T) >= 4) return gather_words(p, offset, lane_mask((int)l));
#endif
  vec<T> v{};
  for (int i = 0; i < (int)l; i++) v[i] = ld1(p + offset[i]);
  return v;
}
template <class T, class I, class L> NPU_INLINE vec<T> gather(const T* p, I offset, vi32 mask, L l) {
#if NPU_AVX512
  if constexpr (sizeof(T) >= 4) return gather_words(p, offset, lane_mask(mask, (int)l));
#endif
  vec<T> v{};
  for (int i = 0; i < (int)l; i++)
    if (mask[i]) v[i] = ld1(p + offset[i]);
  return v;
}
template <class T, class L> NPU_INLINE vec<T> ld_masked(const T* p, long stride, vi32 mask, L l) {
#if NPU_AVX512
  const __mmask16 m = lane_mask(mask, (int)l);
  if constexpr (is_same<L, Full>::value)
    if ((stride == 1 || stride == 2) && __builtin_expect(m == 0xffff, 1)) return ld_strided(p, stride, l);
  if (stride == 1) return ld_under(p, m);
  if (stride == 2) return ld_every_second(p, m);
  if constexpr (sizeof(T) >= 4) return gather_words(p, iota<vi64>() * stride, m);
#endif
  mask &= active(l);
  if (!any(~mask)) return ld_strided(p, stride, l);
  vec<T> v{};
  if (any(mask))
    for (int i = 0; i < VL; i++)
      if (mask[i]) v[i] = ld1(p + i * stride);
  return v;
}
template <class T, class I, class L> NPU_INLINE void scatter(T* p, I offset, vec<T> v, L l) {
  for (int i = 0; i < (int)l; i++) st1(p + offset[i], v[i]);
}

// ---------------------------------------------------------------------------------------------- tiles
// Loads a tile transposed: lane i of out[k] is p[i * stride + k * STEP], for k < n. Vectors of two registers are transposed
// in four blocks, each of which fits in the registers.
template <int STEP, class T, class L> NPU_INLINE void ld_tile(vec<T> (&out)[VL], const T* p, long stride, L rows, int n) {
  typedef typename vec_of<scalar<T>, is_wide<vec<T>> ? VL / 2 : VL>::type Part;
  constexpr int side = sizeof(Part) / sizeof(scalar<T>);
#pragma GCC unroll 2
  for (int column = 0; column < VL; column += side) {
#pragma GCC unroll 2
    for (int row = 0; row < VL; row += side) {
      Part block[side];
#pragma GCC unroll 16
      for (int i = 0; i < side; i++) {
        vec<T> v{};
        const T* const from = p + (row + i) * stride;
        if (row + i < (int)rows) v = n == VL ? ld_strided(from, STEP, Full{}) : ld_strided(from, STEP, n);
        memcpy(&block[i], (const scalar<T>*)&v + column, sizeof(Part));
      }
      transpose_registers(block);
#pragma GCC unroll 16
      for (int k = 0; k < side; k++) memcpy((scalar<T>*)&out[column + k] + row, &block[k], sizeof(Part));
    }
  }
}

// Index sequences, as in <utility>.
template <int... I> struct Seq {};
template <int N, int... I> struct MakeSeq : MakeSeq<N - 1, N - 1, I...> {};
template <int... I> struct MakeSeq<0, I...> { using type = Seq<I...>; };

// Lane l of vector Q of the interleaved sequence, of N lanes, is element (Q N + l) / M of vector (Q N + l) % M. This step
// inserts vector K.
template <int M, int Q, int K, int N> constexpr int interleaved_lane(int l) {
  int e = Q * N + l;
  return e % M == K ? N + e / M : K == 1 ? e / M : l;
}
template <int M, int Q, int K, class V, int... I> NPU_INLINE V interleave_step(V a, V b, Seq<I...>) {
  return __builtin_shufflevector(a, b, interleaved_lane<M, Q, K, sizeof...(I)>(I)...);
}
template <int M, int Q, class V> NPU_INLINE V interleave(const V (&v)[M]) {
  using Lanes = typename MakeSeq<sizeof(V) / sizeof(V{}[0])>::type;
  V w = interleave_step<M, Q, 1>(v[0], v[1], Lanes{});
  if constexpr (M > 2) w = interleave_step<M, Q, 2>(w, v[2], Lanes{});
  if constexpr (M > 3) w = interleave_step<M, Q, 3>(w, v[3], Lanes{});
  return w;
}
template <int M, class T, int... Q> NPU_INLINE void st_all_interleaved(T* p, const vec<T> (&v)[M], Seq<Q...>) {
  if constexpr (is_wide<vec<T>>) {  // compilers would shuffle vectors of two registers lane by lane
    half_t<vec<T>> half[M][2], low[M], high[M];
    memcpy(half, v, sizeof half);
    for (int m = 0; m < M; m++) low[m] = half[m][0], high[m] = half[m][1];
    (store_bytes(p + Q * (VL / 2), interleave<M, Q>(low)), ...);
    (store_bytes(p + (M + Q) * (VL / 2), interleave<M, Q>(high)), ...);
  } else {
    (st(p + Q * VL, interleave<M, Q>(v), Full{}), ...);
  }
}
// Stores M vectors interleaved: lane 0 of each in order, then lane 1, and so on.
template <class T, class L, class... V> NPU_INLINE void st_interleaved(T* p, L l, V... each) {
  constexpr int M = sizeof...(V);
  const vec<T> v[M] = {each...};
  if constexpr (is_same<L, Full>::value) st_all_interleaved<M>(p, v, typename MakeSeq<M>::type{});
  else
    for (int m = 0; m < M; m++) st_strided(p + m, M, v[m], l);
}

}  // namespace npu
