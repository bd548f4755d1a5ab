// Building blocks of generated loop nests: lane loops, accumulators, checked indices, wrapping integers.
//
// A loop body takes (position of lane 0, lanes L, number u of the vector), where L is Full or an int below VL.
#pragma once
#include "math.h"
#include "pool.h"
#include "transpose.h"

#define NPU_BODY __attribute__((always_inline))

namespace npu {

template <int N> struct Count { constexpr operator int() const { return N; } };

// ---------------------------------------------------------------------------------------------- lane loops
// Calls f for [LO, HI) in vectors: unrolled by U, then single vectors, then the tail.
template <int U, long LO, long HI, class F> NPU_INLINE void lanes(F f) {
  long i = LO;
  if constexpr (U > 1 && HI - LO >= U * VL)
    for (; i + U * VL <= HI; i += U * VL) {
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) f(i + u * VL, Full{}, u);
    }
  if constexpr (U > 1 ? (HI - LO) % (U * VL) >= VL : HI - LO >= VL)
    for (; i + VL <= HI; i += VL) f(i, Full{}, 0);
  if constexpr ((HI - LO) % VL > 0) f(i, (int)((HI - LO) % VL), 0);
}
template <int U, class F> NPU_INLINE void lanes(long lo, long hi, F f) {
  long i = lo;
  if constexpr (U > 1)
    for (; i + U * VL <= hi; i += U * VL) {
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) f(i + u * VL, Full{}, u);
    }
  for (; i + VL <= hi; i += VL) f(i, Full{}, 0);
  if (i < hi) f(i, (int)(hi - i), 0);
}

// Calls f for [LO, HI) in tiles of N vectors, then single vectors, then the tail. f receives the number of vectors as a
// Count.
template <int N, long LO, long HI, class F> NPU_INLINE void tiles(F f) {
  long i = LO;
  if constexpr (N > 1 && HI - LO >= N * VL)
    for (; i + N * VL <= HI; i += N * VL) f(i, Full{}, Count<N>{});
  if constexpr (N > 1 ? (HI - LO) % (N * VL) >= VL : HI - LO >= VL)
    for (; i + VL <= HI; i += VL) f(i, Full{}, Count<1>{});
  if constexpr ((HI - LO) % VL > 0) f(i, (int)((HI - LO) % VL), Count<1>{});
}
template <int N, class F> NPU_INLINE void tiles(long lo, long hi, F f) {
  long i = lo;
  if constexpr (N > 1)
    for (; i + N * VL <= hi; i += N * VL) f(i, Full{}, Count<N>{});
  for (; i + VL <= hi; i += VL) f(i, Full{}, Count<1>{});
  if (i < hi) f(i, (int)(hi - i), Count<1>{});
}

template <class V> NPU_INLINE V lane_index(long i) { return splat<V>((lane_t<V>)i) + iota<V>(); }

// The mask of the active lanes: all, or the first n.
NPU_INLINE vi32 active(Full) { return vi32{} - 1; }
NPU_INLINE vi32 active(int n) { return iota<vi32>() < splat<vi32>(n); }
// x in the active lanes, `other` in the rest.
template <class V> NPU_INLINE V select_active(V x, V, Full) { return x; }
template <class V> NPU_INLINE V select_active(V x, V other, int n) { return select(active(n), x, other); }

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

// Gathers p[offset]; offsets have 32 or 64 bits. Lanes outside the mask are 0 and read nothing.
template <class T, class I, class L> NPU_INLINE vec<T> gather(const T* p, I offset, L l) {
#if NPU_AVX512
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
  if (stride == 1) return ld_under(p, m);
  if constexpr (sizeof(T) >= 4) {
    if constexpr (sizeof(T) == 4)
      if (stride == 2) return ld_every_second(p, m);
    return gather_words(p, iota<vi64>() * stride, m);
  }
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
// Loads a tile transposed: lane i of out[k] is p[i * stride + k], for k < n.
template <class T, class L> NPU_INLINE void ld_tile(vec<T> (&out)[VL], const T* p, long stride, L rows, int n) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) {
    if (i >= (int)rows) out[i] = vec<T>{};
    else out[i] = n == VL ? ld(p + i * stride, Full{}) : ld(p + i * stride, n);
  }
  transpose_registers(out);
}

// Index sequences, as in <utility>.
template <int... I> struct Seq {};
template <int N, int... I> struct MakeSeq : MakeSeq<N - 1, N - 1, I...> {};
template <int... I> struct MakeSeq<0, I...> { using type = Seq<I...>; };

// Lane l of vector Q of the interleaved sequence is element (Q VL + l) / M of vector (Q VL + l) % M. This step inserts
// vector K.
template <int M, int Q, int K> constexpr int interleaved_lane(int l) {
  int e = Q * VL + l;
  return e % M == K ? VL + e / M : K == 1 ? e / M : l;
}
template <int M, int Q, int K, class V, int... I> NPU_INLINE V interleave_step(V a, V b, Seq<I...>) {
  return __builtin_shufflevector(a, b, interleaved_lane<M, Q, K>(I)...);
}
template <int M, int Q, class V> NPU_INLINE V interleave(const V (&v)[M]) {
  using Lanes = typename MakeSeq<VL>::type;
  V w = interleave_step<M, Q, 1>(v[0], v[1], Lanes{});
  if constexpr (M > 2) w = interleave_step<M, Q, 2>(w, v[2], Lanes{});
  if constexpr (M > 3) w = interleave_step<M, Q, 3>(w, v[3], Lanes{});
  return w;
}
// Stores M vectors interleaved: lane 0 of each in order, then lane 1, and so on.
template <class T, class L, class... V> NPU_INLINE void st_interleaved(T* p, L l, V... each) {
  constexpr int M = sizeof...(V);
  const vec<T> v[M] = {each...};
  if constexpr (is_same<L, Full>::value) {
    st(p, interleave<M, 0>(v), l);
    st(p + VL, interleave<M, 1>(v), l);
    if constexpr (M > 2) st(p + 2 * VL, interleave<M, 2>(v), l);
    if constexpr (M > 3) st(p + 3 * VL, interleave<M, 3>(v), l);
  } else {
    for (int m = 0; m < M; m++) st_strided(p + m, M, v[m], l);
  }
}

// ---------------------------------------------------------------------------------------------- accumulators
template <class S> struct Limits {
  static constexpr S low = sizeof(S) == 4 ? (S)INT32_MIN : (S)INT64_MIN, high = ~low;
};
template <> struct Limits<float> { static constexpr float low = -__builtin_inff(), high = __builtin_inff(); };
template <> struct Limits<double> { static constexpr double low = -__builtin_inf(), high = __builtin_inf(); };

struct Sum {
  template <class V> static NPU_BODY V identity() { return V{}; }
  template <class V> static NPU_BODY V combine(V x, V acc) { return acc + x; }
  template <class V> static NPU_BODY lane_t<V> horizontal(V v) { return hsum(v); }
};
struct Prod {
  template <class V> static NPU_BODY V identity() { return splat<V>((lane_t<V>)1); }
  template <class V> static NPU_BODY V combine(V x, V acc) { return acc * x; }
  template <class V> static NPU_BODY lane_t<V> horizontal(V v) { return hprod(v); }
};
struct Max {
  using Beats = Gt;
  template <class V> static NPU_BODY V identity() { return splat<V>(Limits<lane_t<V>>::low); }
  template <class V> static NPU_BODY V combine(V x, V acc) { return max(x, acc); }
  template <class V> static NPU_BODY lane_t<V> horizontal(V v) { return hmax(v); }
};
struct Min {
  using Beats = Lt;
  template <class V> static NPU_BODY V identity() { return splat<V>(Limits<lane_t<V>>::high); }
  template <class V> static NPU_BODY V combine(V x, V acc) { return min(x, acc); }
  template <class V> static NPU_BODY lane_t<V> horizontal(V v) { return hmin(v); }
};

template <class Op, class V, int U> NPU_INLINE V combine_all(const V (&part)[U]) {
  if constexpr (U == 1) return part[0];
  else if constexpr (U == 2) return Op::combine(part[1], part[0]);
  else return Op::combine(Op::combine(part[3], part[2]), Op::combine(part[1], part[0]));
}

template <class V> struct Wider { using type = V; };
template <> struct Wider<vf> { using type = vd; };

// An accumulator. Compilers would keep one that takes two registers (vd, vi64) in memory, and every addition would wait
// for a store: it is held as halves.
template <class V, bool = is_wide<V>> struct Held {
  V v;
  NPU_BODY V get() const { return v; }
  NPU_BODY void set(V x) { v = x; }
  template <class Op> NPU_BODY void combine(V x) { v = Op::combine(x, v); }
};
template <class V> struct Held<V, true> {
  half_t<V> low, high;
  NPU_BODY V get() const {
    const half_t<V> both[2] = {low, high};
    return load_bytes<V>(both);
  }
  NPU_BODY void set(V x) {
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char*)&x + sizeof low, sizeof high);
  }
  template <class Op> NPU_BODY void combine(V x) {
    Held y;
    y.set(x);
    low = Op::combine(y.low, low), high = Op::combine(y.high, high);
  }
};

// U independent vectors of partial results. Sums are combined in twice the precision.
template <class Op, class V, int U> struct Reduction {
  Held<V> part[U];
  NPU_BODY Reduction() {
    for (int u = 0; u < U; u++) part[u].set(Op::template identity<V>());
  }
  template <class L> NPU_BODY void add(int u, V x, L l) {
    part[u].template combine<Op>(select_active(x, Op::template identity<V>(), l));
  }
  NPU_BODY lane_t<V> all() const {
    V each[U];
    for (int u = 0; u < U; u++) each[u] = part[u].get();
    if constexpr (is_same<Op, Sum>::value) {
      typename Wider<V>::type total = cvt<typename Wider<V>::type>(each[0]);
      for (int u = 1; u < U; u++) total += cvt<typename Wider<V>::type>(each[u]);
      return (lane_t<V>)hsum(total);
    } else {
      return Op::horizontal(combine_all<Op>(each));
    }
  }
  NPU_BODY V get(int u) const { return part[u].get(); }
};

// The largest or smallest elements of 16-bit floats T in memory, in U neighbouring vectors whose lanes L are active. add()
// and get() are called for all of them.
template <class Op, class T, int U, class L> struct StoredReduction {
  Reduction<Op, vf, U> values;
  NPU_BODY void add(int u, const T* p, L l) { values.add(u, ld(p, l), l); }
  NPU_BODY vf get(int u) const { return values.get(u); }
};
#if NPU_AVX512
// Two vectors at once, in registers of 32 unsigned keys with the order of the numbers: 0 is the infinity that any number
// exceeds, and NaN of either sign exceeds all. A smallest number is the largest of the negated ones.
template <class Op, class T, int U> struct PairReduction {
  static constexpr short INFINITY_BITS = is_same<T, bf16>::value ? 0x7f80 : 0x7c00;
  static constexpr short NEGATE = is_same<Op, Min>::value ? (short)0x8000 : 0, LOWEST = ~INFINITY_BITS;
  __m512i keys[U / 2];
  NPU_BODY PairReduction() {
    for (__m512i& k : keys) k = _mm512_setzero_si512();
  }
  // x as a signed integer with the order of the floats, and back.
  static NPU_BODY __m512i ordered(__m512i x) {
    return _mm512_ternarylogic_epi32(x, _mm512_srai_epi16(x, 15), _mm512_set1_epi16(0x7fff), 0x78);  // x ^ (sign & c)
  }
  NPU_BODY void add(int u, const T* p, Full) {
    if (u % 2) return;
    const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(NEGATE));
    keys[u / 2] = _mm512_max_epu16(keys[u / 2], _mm512_sub_epi16(ordered(x), _mm512_set1_epi16(LOWEST)));
  }
  NPU_BODY vf get(int u) const {
    const __m512i x = ordered(_mm512_add_epi16(keys[u / 2], _mm512_set1_epi16(LOWEST)));
    T lanes[2 * VL];
    _mm512_storeu_si512(lanes, _mm512_xor_si512(x, _mm512_set1_epi16(NEGATE)));
    return ld(lanes + u % 2 * VL, Full{});
  }
};
template <class Op, class T> struct StoredReduction<Op, T, 2, Full> : PairReduction<Op, T, 2> {};
template <class Op, class T> struct StoredReduction<Op, T, 4, Full> : PairReduction<Op, T, 4> {};
#endif

// A long sum: partial sums of few elements each, which carry() adds to totals of twice the precision.
template <class V, int U, bool ALONG> struct LongSum {
  using W = typename Wider<V>::type;
  Held<V> part[U];
  Held<W> total[ALONG ? 1 : U];
  NPU_BODY LongSum() {
    for (Held<V>& p : part) p.set(V{});
    for (Held<W>& t : total) t.set(W{});
  }
  template <class L> NPU_BODY void add(int u, V x, L l) { part[u].template combine<Sum>(select_active(x, V{}, l)); }
  NPU_BODY V together() const {
    V each[U];
    for (int u = 0; u < U; u++) each[u] = part[u].get();
    return combine_all<Sum>(each);
  }
  NPU_BODY void carry() {
    if constexpr (ALONG) total[0].template combine<Sum>(cvt<W>(together()));
    for (int u = 0; u < U; u++) {
      if constexpr (!ALONG) total[u].template combine<Sum>(cvt<W>(part[u].get()));
      part[u].set(V{});
    }
  }
  NPU_BODY lane_t<V> all() const { return (lane_t<V>)hsum(total[0].get() + cvt<W>(together())); }
  NPU_BODY V get(int u) const { return cvt<V>(total[u].get() + cvt<W>(part[u].get())); }
};

// The largest (Op Max) or smallest value and its position. NaN wins; of equal values, the first.
template <class Op, class V, class P, int U> struct ArgReduction {
  V best[U];
  P at[U];
  NPU_BODY ArgReduction() {
    for (int u = 0; u < U; u++) best[u] = Op::template identity<V>(), at[u] = P{};
  }
  static NPU_BODY vi32 better(V x, V y) {
    using Beats = typename Op::Beats;
    return compare<Beats>(x, y) | (compare<Ne>(x, x) & compare<Eq>(y, y));
  }
  template <class L> NPU_BODY void add(int u, V x, P position, L l) {
    const vi32 wins = better(select_active(x, Op::template identity<V>(), l), best[u]);
    best[u] = select(wins, x, best[u]);
    at[u] = select(wins, position, at[u]);
  }
  // The first position of the best value of all lanes, or of NaN.
  NPU_BODY long all() const {
    V top = best[0];
    for (int u = 1; u < U; u++) top = Op::combine(best[u], top);
    const V value = splat<V>(Op::horizontal(top));
    const P none = splat<P>(Limits<lane_t<P>>::high);
    P first = none;
    for (int u = 0; u < U; u++) {
      const vi32 same = compare<Eq>(best[u], value) | (compare<Ne>(best[u], best[u]) & compare<Ne>(value, value));
      first = min(first, select(same, at[u], none));
    }
    return hmin(first);
  }
  NPU_BODY vi64 get(int u) const { return cvt<vi64>(at[u]); }
};

}  // namespace npu
