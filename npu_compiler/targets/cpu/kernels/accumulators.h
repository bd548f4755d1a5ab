// Accumulators of generated loop nests: reductions, long sums, positions of extremes.
#pragma once
#include "lanes.h"

namespace npu {

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
    if constexpr (VL == 16) {  // after memcpy, compilers would store both halves, although nothing reads them
      low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
      high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    } else if constexpr (VL == 8) {
      low = __builtin_shufflevector(x, x, 0, 1, 2, 3), high = __builtin_shufflevector(x, x, 4, 5, 6, 7);
    } else {
      memcpy(&low, &x, sizeof low);
      memcpy(&high, (const char*)&x + sizeof low, sizeof high);
    }
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
  template <class L> NPU_BODY void load(const lane_t<V>* from, L l) {
    for (int u = 0; u < U; u++) part[u].set(ld(from + u * VL, l));
  }
  template <class L> NPU_BODY void save(lane_t<V>* to, L l) const {
    for (int u = 0; u < U; u++) st(to + u * VL, part[u].get(), l);
  }
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
  // Between two blocks of rows, after carry().
  template <class L> NPU_BODY void load(const lane_t<W>* from, L l) {
    for (int u = 0; u < U; u++) total[u].set(ld(from + u * VL, l));
  }
  template <class L> NPU_BODY void save(lane_t<W>* to, L l) const {
    for (int u = 0; u < U; u++) st(to + u * VL, total[u].get(), l);
  }
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
