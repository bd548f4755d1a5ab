// Attention for few query rows per key/value head (decoding). Lanes run along the head dimension, so no lane is idle.
// Interface, dimensions and numerics are those of attention(), which calls it. Heads that threads do not share evenly are
// divided into ranges of keys if the cache is long (flash decoding).
#pragma once
#include "attention_decode_pairs.h"
#include "math.h"
#include "transpose.h"

namespace npu {

struct NoMask {};
struct Positions { int64_t value; };  // a mask: the position of each query in the cache, the last key that it sees

template <class M> constexpr bool no_mask = is_same<M, NoMask>::value || is_same<M, Positions>::value;

// How many of the first keys a query attends to, as far as the causal order or its position tells.
template <class D, class M> NPU_INLINE long visible_keys(const M* mask, long query, long keys, long first) {
  if constexpr (is_same<M, Positions>::value) keys = max_of(0, min_of(keys, (long)mask[query].value + 1));
  else (void)mask;
  return D::causal ? max_of(0, min_of(keys, query + first + 1)) : keys;
}

// Rows of keys or values: numbers as they are, or 8-bit integers or floats with a scale for each row.
template <class E> struct CacheRows {
  static constexpr bool SCALED = sizeof(E) == 1;
  const E* at;
  const float* scales = nullptr;
  __attribute__((always_inline)) CacheRows from(long elements, long rows) const {
    return {at + elements, SCALED ? scales + rows : nullptr};
  }
};

constexpr int DECODE_ROWS = 8;  // the most query rows of a key/value head (heads of its group x queries)

template <class D> struct DecodePlan {
  static constexpr int ROWS = (int)(D::H / D::HK * D::SQ);
  static constexpr long COUNT = D::B * D::HK;
  static constexpr long KEYS = ceil_div(D::SK, VL) * VL;  // length of a row of scores
  static constexpr int DH_VECS = (int)ceil_div(D::DH, VL), DV_VECS = (int)ceil_div(D::DV, VL);
  static constexpr int V_BLOCK = (int)max_of(1, min_of(DV_VECS, (TILE_ROWS * TILE_VECS - 4) / ROWS));
  // Offsets in the scratch memory, in floats: scores [ROWS][KEYS], queries [ROWS][DH], VL widened keys, sums
  // [ROWS][DV].
  static constexpr long Q = ROWS * KEYS, K = Q + ROWS * DH_VECS * VL, S = K + VL * DH_VECS * VL;
  static constexpr long OWN = S + ROWS * DV_VECS * VL;
  // Heads that threads do not share evenly are divided into ranges of keys. The first thread's scratch memory holds the
  // results of each: rows of sums, then the maximum and the sum of the weights of each row.
  static constexpr long MOST_RANGES = max_of(1, min_of(16, 64 / COUNT)), RANGE = ROWS * (DV_VECS * VL + 2);
  static constexpr long END = OWN + (MOST_RANGES > 1 ? COUNT * MOST_RANGES * RANGE : 0);
};
constexpr long DECODE_RANGE = 128;             // the fewest keys of a range
constexpr double DECODE_MERGE = 128 << 10;     // bytes of keys and values that are read while ranges are merged
constexpr long DECODE_BLOCK = 128;             // keys whose values stay in cache while all columns are summed
constexpr long DECODE_PREFETCH_DISTANCE = 32;  // in keys

template <long BYTES> NPU_INLINE void prefetch_row(const void* row) {
#pragma GCC unroll 8
  for (long line = 0; line < BYTES; line += 64) __builtin_prefetch((const char*)row + line);
}

// Returns a vector whose lane i is the sum of the lanes of v[i].
template <int N> NPU_INLINE vf sum_each(vf (&v)[N]) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    vf half[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; i++) half[i] = interleave_low(v[i], v[i + N / 2]) + interleave_high(v[i], v[i + N / 2]);
    return sum_each(half);
  }
}

// Converts n elements to float, zero padded to a multiple of VL.
template <class T> NPU_INLINE void widen_row(float* out, const T* in, long n) {
  long i = 0;
  for (; i + VL <= n; i += VL) store_bytes(out + i, cvt<vf>(ld(in + i, Full{})));
  if (i < n) store_bytes(out + i, cvt<vf>(ld(in + i, (int)(n - i))));
}

// Computes scores from keys that are widened to float, VL keys at a time.
template <class D, class T>
NPU_INLINE void decode_scores_wide(const T* k, long keys, const float* q, float* wide, float* scores) {
  using Plan = DecodePlan<D>;
  constexpr int N = Plan::DH_VECS;
  for (long j0 = 0; j0 < keys; j0 += VL) {
    for (int j = 0; j < VL; j++) {  // keys beyond the last one repeat it; their scores are overwritten
      const T* from = k + min_of(j0 + j, keys - 1) * D::k_s;
      prefetch_row<D::DH * (long)sizeof(T)>(from + DECODE_PREFETCH_DISTANCE * D::k_s);
      widen_row(wide + j * N * VL, from, D::DH);
    }
    for (int r = 0; r < Plan::ROWS; r++) {
      vf dot[VL];
      for (int j = 0; j < VL; j += 4) {
        vf acc[4] = {};
        for (int c = 0; c < N; c++) {
          const vf qv = load_bytes<vf>(q + (r * N + c) * VL);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) acc[i] = fma(load_bytes<vf>(wide + ((j + i) * N + c) * VL), qv, acc[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) dot[j + i] = acc[i];
      }
      store_bytes(scores + r * Plan::KEYS + j0, sum_each(dot));
    }
  }
}

#if defined(__AVX512BF16__) && NPU_AVX512
// Computes scores from pairs of bf16 as they are in memory: exact products, float sums.
template <class D, int ROWS>
NPU_INLINE void decode_scores_pairs(const bf16* k, long keys, const bf16* const* q, float* scores) {
  constexpr int N = (int)(D::DH / (2 * VL));
  for (long j0 = 0; j0 < keys; j0 += VL) {
    vf dot[ROWS][VL];
    for (int j = 0; j < VL; j += 4) {
      const bf16* from[4];
      vf acc[ROWS][4] = {};
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        from[i] = k + min_of(j0 + j + i, keys - 1) * D::k_s;
        prefetch_row<D::DH * 2>(from[i] + DECODE_PREFETCH_DISTANCE * D::k_s);
      }
      for (int c = 0; c < N; c++) {
        vf kv[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) kv[i] = load_bytes<vf>(from[i] + c * 2 * VL);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const vf qv = load_bytes<vf>(q[r] + c * 2 * VL);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) BF16P::step(acc[r][i], kv[i], qv);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) dot[r][j + i] = acc[r][i];
    }
    for (int r = 0; r < ROWS; r++) store_bytes(scores + r * DecodePlan<D>::KEYS + j0, sum_each(dot[r]) * D::scale);
  }
}
#endif

// Multiplies n floats by the scales of their rows.
NPU_INLINE void scale_each(float* x, const float* scales, long n) {
  long j = 0;
  for (; j + VL <= n; j += VL) store_bytes(x + j, load_bytes<vf>(x + j) * load_bytes<vf>(scales + j));
  for (; j < n; j++) x[j] *= scales[j];
}

// Computes scores[row][j] = scale * q[row] . k[j] for all rows and keys.
template <class D, class E, class T>
NPU_INLINE void decode_scores(CacheRows<E> rows, long keys, const T* const* q, float* queries, float* wide,
                              float* scores) {
  using Plan = DecodePlan<D>;
  const E* k = rows.at;
  if constexpr (decode_in_pairs<D, E, T>) return DecodePairs<D, Plan>::scores(k, keys, q, queries, scores);
#if defined(__AVX512BF16__) && NPU_AVX512
  if constexpr (is_same<E, bf16>::value && is_same<T, bf16>::value && D::DH % (2 * VL) == 0) {
    constexpr int FIRST = Plan::ROWS > 6 ? Plan::ROWS / 2 : Plan::ROWS;  // accumulators for 4 keys fill the registers
    decode_scores_pairs<D, FIRST>(k, keys, q, scores);
    if constexpr (FIRST < Plan::ROWS)
      decode_scores_pairs<D, Plan::ROWS - FIRST>(k, keys, q + FIRST, scores + FIRST * Plan::KEYS);
    return;
  }
#endif
  for (int r = 0; r < Plan::ROWS; r++) {
    float* to = queries + r * Plan::DH_VECS * VL;
    widen_row(to, q[r], D::DH);
    for (int c = 0; c < Plan::DH_VECS; c++) store_bytes(to + c * VL, load_bytes<vf>(to + c * VL) * D::scale);
  }
  decode_scores_wide<D>(k, keys, queries, wide, scores);
  if constexpr (CacheRows<E>::SCALED)
    for (int r = 0; r < Plan::ROWS; r++) scale_each(scores + r * Plan::KEYS, rows.scales, keys);
}

// The maximum of a row of scores, and the sum of their weights exp(score - maximum): -infinity and 0 if all are masked.
struct SoftmaxSums {
  float max, sum;
  float factor() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};

// Replaces a row of scores by weights, and by 0 from `visible` on. PAIRS: whether DecodePairs sums the values.
template <class D, bool PAIRS> NPU_INLINE SoftmaxSums decode_softmax(float* s, long visible, long end) {
  for (long j = visible; j < end; j++) s[j] = -__builtin_inff();
  vf row_max = splat<vf>(-__builtin_inff()), total = {};
  for (long j = 0; j < end; j += VL) row_max = max(row_max, load_bytes<vf>(s + j));
  const float max_score = hmax(row_max);
  const vf base = splat<vf>(max_score == -__builtin_inff() ? 0.0f : max_score);
  for (long j = 0; j < end; j += VL) {
    vf weight = exp(load_bytes<vf>(s + j) - base);
    if constexpr (PAIRS) weight = DecodePairs<D, DecodePlan<D>>::store_weights(s, j, weight);
    else store_bytes(s + j, weight);
    total += weight;
  }
  return {max_score, hsum(total)};
}

// Adds the values of keys begin .. end - 1 to VECS vectors of the sums of all rows, from column d on.
template <class D, int VECS, class T>
NPU_INLINE void decode_values(const T* v, long begin, long end, const float* weights, long d, float* sums) {
  using Plan = DecodePlan<D>;
  vf acc[Plan::ROWS][VECS];
  auto at = [&](int r, int c) { return sums + (r * Plan::DV_VECS + c) * VL + d; };
#pragma GCC unroll 8
  for (int r = 0; r < Plan::ROWS; r++)
#pragma GCC unroll 24
    for (int c = 0; c < VECS; c++) acc[r][c] = begin ? load_bytes<vf>(at(r, c)) : vf{};
  const long rest = D::DV - d;  // columns from d on; the last vector may be partial
  for (long j = begin; j < end; j++) {
    const T* from = v + j * D::v_s + d;
    if (d == 0) prefetch_row<D::DV * (long)sizeof(T)>(from + DECODE_PREFETCH_DISTANCE * D::v_s);
    vf value[VECS];
#pragma GCC unroll 24
    for (int c = 0; c < VECS; c++)
      value[c] = cvt<vf>(D::DV % VL == 0 || rest >= (c + 1) * VL ? ld(from + c * VL, Full{})
                                                                 : ld(from + c * VL, (int)(rest - c * VL)));
#pragma GCC unroll 8
    for (int r = 0; r < Plan::ROWS; r++) {
      const vf w = splat<vf>(weights[r * Plan::KEYS + j]);
#pragma GCC unroll 24
      for (int c = 0; c < VECS; c++) mul_add(acc[r][c], value[c], w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Plan::ROWS; r++)
#pragma GCC unroll 24
    for (int c = 0; c < VECS; c++) store_bytes(at(r, c), acc[r][c]);
}

// Sums the values of all keys and stores the rows, multiplied by their factors.
template <class D, bool PAIRS, class E, class T>
NPU_INLINE void decode_output(const E* v, long keys, const float* weights, const float* factors, float* sums,
                              T* const* out) {
  using Plan = DecodePlan<D>;
  if constexpr (PAIRS) return DecodePairs<D, Plan>::sum_values(v, keys, weights, factors, sums, out);
  constexpr int WHOLE = Plan::DV_VECS / Plan::V_BLOCK, REST = Plan::DV_VECS % Plan::V_BLOCK;
  for (long j = 0; j == 0 || j < keys; j += DECODE_BLOCK) {
    const long end = min_of(keys, j + DECODE_BLOCK);
    for (int c = 0; c < WHOLE; c++)
      decode_values<D, Plan::V_BLOCK>(v, j, end, weights, (long)c * Plan::V_BLOCK * VL, sums);
    if constexpr (REST > 0) decode_values<D, REST>(v, j, end, weights, (long)WHOLE * Plan::V_BLOCK * VL, sums);
  }
  for (int r = 0; r < Plan::ROWS; r++)
    for (int c = 0; c < Plan::DV_VECS; c++) {
      const vf y = load_bytes<vf>(sums + (r * Plan::DV_VECS + c) * VL) * factors[r];
      if (D::DV % VL == 0 || c + 1 < Plan::DV_VECS) st(out[r] + c * VL, y, Full{});
      else st(out[r] + c * VL, y, (int)(D::DV % VL));
    }
}

// The ranges of keys, each of `bytes` with its value, into which heads are divided, so that all threads end at once.
template <class D> NPU_INLINE long decode_ranges(long threads, long keys, long bytes) {
  using Plan = DecodePlan<D>;
  long best = 1;
  double least = (double)(ceil_div(Plan::COUNT, threads) * keys * bytes);
  for (long ranges = 2; ranges <= Plan::MOST_RANGES && ranges * DECODE_RANGE <= keys; ranges++) {
    const double share = (double)ceil_div(Plan::COUNT * ranges, threads) / (double)ranges;
    const double cost = share * (double)(keys * bytes) + DECODE_MERGE;
    if (cost < 0.95 * least) best = ranges, least = cost;
  }
  return best;
}

// Stores rows first, first + step, ... of the output: the mean of the ranges' rows by their sums of weights.
template <class D, class T>
NPU_INLINE void decode_merge(const float* results, long ranges, T* out, long first, long step) {
  using Plan = DecodePlan<D>;
  for (long i = first; i < Plan::COUNT * Plan::ROWS; i += step) {
    const long head = i / Plan::ROWS, r = i % Plan::ROWS;
    const float* from = results + head * ranges * Plan::RANGE + r * Plan::DV_VECS * VL;
    auto sums = [&](long range) {
      const float* at = results + (head * ranges + range + 1) * Plan::RANGE - 2 * (Plan::ROWS - r);
      return SoftmaxSums{at[0], at[1]};
    };
    float top = -__builtin_inff(), weights[Plan::MOST_RANGES], sum = 0;
    for (long j = 0; j < ranges; j++) top = sums(j).max > top ? sums(j).max : top;
    for (long j = 0; j < ranges; j++) {
      weights[j] = sums(j).sum == 0.0f ? 0.0f : hmax(exp(splat<vf>(sums(j).max - top)));
      sum += weights[j] * sums(j).sum;
    }
    const vf factor = splat<vf>(SoftmaxSums{top, sum}.factor());
    T* to = out + head / D::HK * D::o_b + (head % D::HK * (D::H / D::HK) + r / D::SQ) * D::o_h + r % D::SQ * D::o_s;
    for (int c = 0; c < Plan::DV_VECS; c++) {
      vf y = {};
      for (long j = 0; j < ranges; j++)
        y = fma(load_bytes<vf>(from + j * Plan::RANGE + c * VL), splat<vf>(weights[j]), y);
      if (D::DV % VL == 0 || c + 1 < Plan::DV_VECS) st(to + c * VL, y * factor, Full{});
      else st(to + c * VL, y * factor, (int)(D::DV % VL));
    }
  }
}

template <class D, class T, class E, class M>
NPU_INLINE void attention_decode(const T* q, CacheRows<E> k, CacheRows<E> v, const M* mask, T* out, Thread& th,
                                 int* counter, long keys, long first) {
  using Plan = DecodePlan<D>;
  float *scores = (float*)th.scratch, *queries = scores + Plan::Q, *wide = scores + Plan::K, *sums = scores + Plan::S;
  float* results = (float*)first_scratch(th) + Plan::OWN;
  constexpr bool PAIRS = decode_in_pairs<D, E, T>;
  const long ranges = decode_ranges<D>(th.n, keys, (D::DH + D::DV) * (long)sizeof(E));
  const long length = ceil_div(ceil_div(keys, ranges), VL) * VL;
  for (long i; (i = next_chunk(th, counter)) < Plan::COUNT * ranges;) {
    const long head_pair = i / ranges, b = head_pair / D::HK, hk = head_pair % D::HK;
    const long begin = i % ranges * length, count = max_of(0, min_of(length, keys - begin));
    const long end = ceil_div(count, VL) * VL;
    T* rows[Plan::ROWS];
    float* range_rows[Plan::ROWS];
    SoftmaxSums softmax[Plan::ROWS];
    float factors[Plan::ROWS];
    const T* query_rows[Plan::ROWS];
    for (int r = 0; r < Plan::ROWS; r++) {
      const long head = hk * (D::H / D::HK) + r / D::SQ, query = r % D::SQ;
      query_rows[r] = q + b * D::q_b + head * D::q_h + query * D::q_s;
      rows[r] = out + b * D::o_b + head * D::o_h + query * D::o_s;
      range_rows[r] = results + i * Plan::RANGE + r * Plan::DV_VECS * VL;
    }
    const long row0 = (b * D::HK + hk) * D::SK + begin;
    const CacheRows<E> values = v.from(b * D::v_b + hk * D::v_h + begin * D::v_s, row0);
    if (count > 0)
      decode_scores<D>(k.from(b * D::k_b + hk * D::k_h + begin * D::k_s, row0), count, query_rows, queries, wide,
                       scores);
    for (int r = 0; r < Plan::ROWS; r++) {
      const long head = hk * (D::H / D::HK) + r / D::SQ, query = r % D::SQ;
      const long visible = max_of(0, min_of(count, visible_keys<D>(mask, query, keys, first) - begin));
      float* s = scores + r * Plan::KEYS;
      if constexpr (!no_mask<M>) {
        const M* from = mask + b * D::m_b + head * D::m_h + query * D::m_q + begin * D::m_k;
        for (long j = 0; j < visible; j += VL) {
          const int lanes = (int)min_of(VL, visible - j);
          const vec<M> m = lanes == VL ? ld_strided(from + j * D::m_k, D::m_k, Full{})
                                       : ld_strided(from + j * D::m_k, D::m_k, lanes);
          vf added;
          if constexpr (is_same<M, bool8>::value) added = select(m != 0, vf{}, splat<vf>(-__builtin_inff()));
          else added = m;
          store_bytes(s + j, load_bytes<vf>(s + j) + added);
        }
      }
      softmax[r] = decode_softmax<D, PAIRS>(s, visible, end);
      factors[r] = ranges > 1 ? 1.0f : softmax[r].factor();
      if constexpr (CacheRows<E>::SCALED) scale_each(s, values.scales, count);
    }
    if (ranges == 1) {
      decode_output<D, PAIRS>(values.at, count, scores, factors, sums, rows);
    } else {
      decode_output<D, PAIRS>(values.at, count, scores, factors, sums, range_rows);
      memcpy(results + (i + 1) * Plan::RANGE - 2 * Plan::ROWS, softmax, sizeof softmax);
    }
  }
  if (ranges == 1) return;
  barrier(th);
  decode_merge<D>(results, ranges, out, th.tid, th.n);
  barrier(th);  // the scratch memory is in use until then
}

}  // namespace npu
