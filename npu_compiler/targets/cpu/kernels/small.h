// Scans and sorts of one row at a time. Elements of a row are `stride` elements apart; no memory is allocated.
#pragma once
#include "loops.h"

namespace npu {

// ---------------------------------------------------------------------------------------------- scan
// Running sums and products accumulate in double or 64 bits; a NaN propagates to the end of the row.
template <class Op, class V> struct ScanAccumulator { using type = V; };
template <class Op> struct ScanAccumulator<Op, vf> { using type = vd; };
template <class Op> struct ScanAccumulator<Op, vi32> { using type = vi64; };
template <> struct ScanAccumulator<Max, vf> { using type = vf; };
template <> struct ScanAccumulator<Min, vf> { using type = vf; };
template <> struct ScanAccumulator<Max, vi32> { using type = vi32; };
template <> struct ScanAccumulator<Min, vi32> { using type = vi32; };

// log(exp(x) + exp(acc)). Equal infinities have no difference.
struct LogAddExp {
  template <class V> static NPU_BODY V identity() { return Limits<double>::low - V{}; }
  template <class V> static NPU_BODY V combine(V x, V acc) {
    return by_registers([](half_vd x, half_vd acc) NPU_HALF {
      const half_vd apart = x - acc;
      return (x == acc) & (apart != 0.0) ? x : MaxOp{}(x, acc) + log1p<true>(exp(-abs(apart)));
    }, x, acc);
  }
};

// Scans one row per lane. Lanes beyond the tail compute with zeros.
template <class Op, class T, class L>
NPU_INLINE void scan_lanes(const T* in, long in_stride, T* out, long out_stride, long n, L l) {
  using A = typename ScanAccumulator<Op, vec<T>>::type;
  A acc = Op::template identity<A>();
  for (long i = 0; i < n; i++) {
    acc = Op::combine(cvt<A>(ld(in + i * in_stride, l)), acc);
    st(out + i * out_stride, cvt<vec<T>>(acc), l);
  }
}

// Scans one row of dense elements per lane. Tiles of VL elements are transposed in registers.
template <class Op, class T, class L>
NPU_INLINE void scan_tiles(const T* in, long in_row, T* out, long out_row, long n, L rows) {
  using A = typename ScanAccumulator<Op, vec<T>>::type;
  A acc = Op::template identity<A>();
  for (long i = 0; i < n; i += VL) {
    vec<T> tile[VL];
    const int width = (int)scalar_min<long>(VL, n - i);
    ld_tile<1>(tile, in + i, in_row, rows, width);
#pragma GCC unroll 16
    for (int k = 0; k < VL; k++) {
      acc = Op::combine(cvt<A>(tile[k]), acc);
      tile[k] = cvt<vec<T>>(acc);
    }
    transpose_registers(tile);
#pragma GCC unroll 16
    for (int r = 0; r < VL; r++) {
      if (r >= (int)rows) continue;
      if (width == VL) st(out + r * out_row + i, tile[r], Full{});
      else st(out + r * out_row + i, tile[r], width);
    }
  }
}

template <class Op, class T> NPU_INLINE void scan_row(const T* in, long in_stride, T* out, long out_stride, long n) {
  if constexpr (is_same<Op, LogAddExp>::value) {  // has no scalar form
    for (half_vd acc = Op::template identity<half_vd>(); n > 0; n--, in += in_stride, out += out_stride) {
      acc = Op::combine(splat_d((double)ld1(in)), acc);
      st1(out, (scalar<T>)acc[0]);
    }
    return;
  }
  using A = lane_t<typename ScanAccumulator<Op, vec<T>>::type>;
  A acc{};
  for (long i = 0; i < n; i++) {
    A x = (A)ld1(in + i * in_stride);
    if (i == 0) acc = x;
    else if constexpr (is_same<Op, Sum>::value) acc = acc + x;
    else if constexpr (is_same<Op, Prod>::value) acc = acc * x;
    else if constexpr (is_same<Op, Max>::value) acc = x > acc || x != x ? x : acc;
    else acc = x < acc || x != x ? x : acc;
    st1(out + i * out_stride, (scalar<T>)acc);
  }
}

// A running maximum or minimum per lane, and the position of the last element that attains it: the last NaN, if any.
template <class Op, class V> struct RunningExtreme {
  V value = Op::template identity<V>();
  vi32 place{};
  NPU_BODY void add(V x, long i) {
    const auto later = is_same<Op, Max>::value ? (x >= value) | (x != x) : (x <= value) | (x != x);
    value = select(later, x, value);
    place = select(cvt<vi32>(later), splat<vi32>((int)i), place);
  }
};

// Scans one row per lane, with positions, which are stored at `at`.
template <class Op, class T, class L>
NPU_INLINE void scan_lanes_at(const T* in, long in_stride, T* out, long out_stride, int64_t* at, long at_stride, long n,
                              L l) {
  RunningExtreme<Op, vec<T>> acc;
  for (long i = 0; i < n; i++) {
    acc.add(ld(in + i * in_stride, l), i);
    st(out + i * out_stride, acc.value, l);
    st(at + i * at_stride, cvt<vi64>(acc.place), l);
  }
}

// The lanes of v moved up by S; the lowest ones are those of `fill`.
template <int S, class V, int... I> NPU_INLINE V moved_up(V v, V fill, Seq<I...>) {
  return __builtin_shufflevector(fill, v, (I < S ? I : VL + I - S)...);
}
// Lane i combines the lanes up to i, in log2(VL) steps (G. Blelloch, Prefix Sums and Their Applications, 1990).
template <class Op, int S = 1, class V> NPU_INLINE V prefix(V v) {
  if constexpr (S >= VL) return v;
  else {
    const V before = moved_up<S>(v, Op::template identity<V>(), typename MakeSeq<VL>::type{});
    return prefix<Op, 2 * S>(Op::combine(v, before));
  }
}

// Scans one row, with positions, which are stored at `at`.
template <class Op, class T>
NPU_INLINE void scan_row_at(const T* in, long in_stride, T* out, long out_stride, int64_t* at, long at_stride, long n) {
  if constexpr (sizeof(lane_t<vec<T>>) == 8) {  // compilers would scalarise shuffles of two-register vectors
    auto value = ld1(in);
    for (long i = 0, found = 0; i < n; i++) {
      const auto x = ld1(in + i * in_stride);
      if (i == 0 || (is_same<Op, Max>::value ? x >= value : x <= value) || x != x) value = x, found = i;
      st1(out + i * out_stride, (scalar<T>)value);
      at[i * at_stride] = found;
    }
    return;
  }
  vec<T> extreme = Op::template identity<vec<T>>();
  vi32 place{};
  for (long i = 0; i < n; i += VL) {
    const int width = (int)scalar_min<long>(VL, n - i);
    const vec<T> x = ld_strided(in + i * in_stride, in_stride, width);
    const vec<T> found = Op::combine(prefix<Op>(x), extreme);
    const vi32 attained = cvt<vi32>((x == found) | (x != x));
    const vi32 places = max(prefix<Max>(select(attained, lane_index<vi32>(i), splat<vi32>(-1))), place);
    st_strided(out + i * out_stride, out_stride, found, width);
    st_strided(at + i * at_stride, at_stride, cvt<vi64>(places), width);
    extreme = splat<vec<T>>(found[VL - 1]), place = splat<vi32>(places[VL - 1]);
  }
}

// ---------------------------------------------------------------------------------------------- sort
// Maps a value to an integer of the same order: -0 equals 0, and NaN is the largest, as in PyTorch.
NPU_INLINE int32_t order_key(float x) {
  int32_t bits = bitcast<int32_t>(x + 0.f);
  return x != x ? INT32_MAX : bits ^ (bits >> 31 & INT32_MAX);
}
NPU_INLINE int64_t order_key(double x) {
  int64_t bits = bitcast<int64_t>(x + 0.0);
  return x != x ? INT64_MAX : bits ^ (bits >> 63 & INT64_MAX);
}
NPU_INLINE int32_t order_key(int32_t x) { return x; }
NPU_INLINE int64_t order_key(int64_t x) { return x; }

// Key and position in one word: one comparison orders both, so every sort is stable.
struct Packed {
  uint64_t word;
  static Packed make(int32_t key, long at) { return {(uint64_t)((uint32_t)key ^ 0x80000000u) << 32 | (uint64_t)at}; }
  bool operator<(Packed o) const { return word < o.word; }
  long at() const { return (long)(word & 0xffffffffu); }
};
struct Pair {
  int64_t key;
  long place;
  static Pair make(int64_t key, long at) { return {key, at}; }
  bool operator<(Pair o) const { return key < o.key || (key == o.key && place < o.place); }
  long at() const { return place; }
};
template <class S> struct Entry { using type = Packed; };
template <> struct Entry<double> { using type = Pair; };
template <> struct Entry<int64_t> { using type = Pair; };

// Bottom-up merge sort of a[0, n). `spare` has the same length. Returns the array that holds the result.
template <class E> static NPU_NOINLINE E* merge_sort(E* a, E* spare, long n) {
  constexpr long RUN = 16;
  for (long start = 0; start < n; start += RUN)
    for (long i = start + 1; i < n && i < start + RUN; i++) {
      E x = a[i];
      long j = i;
      for (; j > start && x < a[j - 1]; j--) a[j] = a[j - 1];
      a[j] = x;
    }
  for (long width = RUN; width < n; width *= 2) {
    for (long start = 0; start < n; start += 2 * width) {
      long middle = scalar_min(start + width, n), end = scalar_min(start + 2 * width, n);
      for (long i = start, j = middle, k = start; k < end; k++) {
        bool left = j >= end || (i < middle && !(a[j] < a[i]));
        spare[k] = left ? a[i++] : a[j++];
      }
    }
    E* t = a;
    a = spare, spare = t;
  }
  return a;
}

template <class E> NPU_INLINE void sift_down(E* heap, long k, E x) {
  long i = 0;
  for (long child; (child = 2 * i + 1) < k; i = child) {
    if (child + 1 < k && heap[child] < heap[child + 1]) child++;
    if (!(x < heap[child])) break;
    heap[i] = heap[child];
  }
  heap[i] = x;
}

// Stores values and positions of the first k of n elements, in order. `scratch` holds 2 n entries.
template <bool DESCENDING, class T>
static NPU_NOINLINE void sort_row(const T* in, long in_stride, T* values, long value_stride, int64_t* places,
                                  long place_stride, long n, long k, char* scratch) {
  using S = scalar<T>;
  using E = typename Entry<S>::type;
  E* a = (E*)scratch;
  auto entry = [&](long i) {
    auto key = order_key(ld1(in + i * in_stride));
    return E::make(DESCENDING ? ~key : key, i);
  };
  if (k * 8 <= n) {  // few of many: a heap of the first k so far, with the last of them on top
    for (long i = 0; i < k; i++) a[i] = entry(i);
    a = merge_sort(a, a + n, k);
    for (long i = 0; i < k / 2; i++) {
      E t = a[i];
      a[i] = a[k - 1 - i], a[k - 1 - i] = t;
    }
    for (long i = k; i < n && k > 0; i++) {
      E x = entry(i);
      if (x < a[0]) sift_down(a, k, x);
    }
    a = merge_sort(a, a == (E*)scratch ? a + n : (E*)scratch, k);
  } else {
    for (long i = 0; i < n; i++) a[i] = entry(i);
    a = merge_sort(a, a + n, n);
  }
  for (long i = 0; i < k; i++) {
    values[i * value_stride] = in[a[i].at() * in_stride];
    places[i * place_stride] = a[i].at();
  }
}

}  // namespace npu
