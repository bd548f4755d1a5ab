// Attention for a few query rows per key/value head (decoding): lanes run along the head dimension, so nothing is
// computed for absent queries. Same interface, dimensions and numerics as attention(), which calls it.
#pragma once
#include "math.h"
#include "transpose.h"

namespace npu {

struct NoMask {};

constexpr int DECODE_ROWS = 8;  // most query rows (heads of a group x queries)

template <class D> struct DecodePlan {
  static constexpr int ROWS = (int)(D::H / D::HK * D::SQ);
  static constexpr long COUNT = D::B * D::HK;
  static constexpr long KEYS = ceil_div(D::SK, VL) * VL;  // row of scores
  static constexpr int DH_VECS = (int)ceil_div(D::DH, VL), DV_VECS = (int)ceil_div(D::DV, VL);
  static constexpr int V_BLOCK = (int)max_of(1, min_of(DV_VECS, (TILE_ROWS * TILE_VECS - 4) / ROWS));
  // Scratch, in floats: scores [ROWS][KEYS], queries [ROWS][DH], VL widened keys.
  static constexpr long Q = ROWS * KEYS, K = Q + ROWS * DH_VECS * VL, END = K + VL * DH_VECS * VL;
};

// Lane i of the result is the sum of the lanes of v[i].
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

template <class T> NPU_INLINE void widen_row(float* out, const T* in, long n) {  // zero padded to whole vectors
  long i = 0;
  for (; i + VL <= n; i += VL) store_bytes(out + i, ld(in + i, Full{}));
  if (i < n) store_bytes(out + i, ld(in + i, (int)(n - i)));
}

// scores[row][j] = q[row] . k[j] for all rows and keys.
template <class D, class T> NPU_INLINE void decode_scores(const T* k, long keys, const float* q, float* wide, float* scores) {
  using Plan = DecodePlan<D>;
  constexpr int N = Plan::DH_VECS;
  for (long j0 = 0; j0 < keys; j0 += VL) {
    for (int j = 0; j < VL; j++) {  // surplus keys repeat the last one; their scores are overwritten
      const T* from = k + min_of(j0 + j, keys - 1) * D::k_s;
      __builtin_prefetch(from + 2 * VL * D::k_s);
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

// Turns a row of scores into weights exp(s - max), 0 beyond `seen`; returns 1 / sum, 0 if every key is hidden.
NPU_INLINE float decode_softmax(float* s, long seen, long end) {
  for (long j = seen; j < end; j++) s[j] = -__builtin_inff();
  vf top = splat<vf>(-__builtin_inff()), total = {};
  for (long j = 0; j < end; j += VL) top = max(top, load_bytes<vf>(s + j));
  const float most = hmax(top);
  const vf base = splat<vf>(most == -__builtin_inff() ? 0.0f : most);
  for (long j = 0; j < end; j += VL) {
    const vf weight = exp(load_bytes<vf>(s + j) - base);
    store_bytes(s + j, weight);
    total += weight;
  }
  const float sum = hsum(total);
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// V_BLOCK vectors of the output, from column d on, for all rows.
template <class D, int VECS, class T>
NPU_INLINE void decode_values(const T* v, long keys, const float* weights, const float* factors, long d, T* const* out) {
  using Plan = DecodePlan<D>;
  vf acc[Plan::ROWS][VECS] = {};
  const long rest = D::DV - d;  // columns left; the last vector may be partial
  for (long j = 0; j < keys; j++) {
    const T* from = v + j * D::v_s + d;
    vf value[VECS];
#pragma GCC unroll 24
    for (int c = 0; c < VECS; c++)
      value[c] = D::DV % VL == 0 || rest >= (c + 1) * VL ? ld(from + c * VL, Full{}) : ld(from + c * VL, (int)(rest - c * VL));
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
    for (int c = 0; c < VECS; c++) {
      const vf y = acc[r][c] * factors[r];
      if (D::DV % VL == 0 || rest >= (c + 1) * VL) st(out[r] + d + c * VL, y, Full{});
      else st(out[r] + d + c * VL, y, (int)(rest - c * VL));
    }
}

template <class D, class T, class M>
NPU_INLINE void attention_decode(const T* q, const T* k, const T* v, const M* mask, T* out, Thread& th, int* counter,
                                 long keys, long first) {
  using Plan = DecodePlan<D>;
  float *scores = (float*)th.scratch, *queries = scores + Plan::Q, *wide = scores + Plan::K;
  const long end = ceil_div(keys, VL) * VL;
  for (long i; (i = next_chunk(th, counter)) < Plan::COUNT;) {
    const long b = i / D::HK, hk = i % D::HK;
    T* rows[Plan::ROWS];
    float factors[Plan::ROWS];
    for (int r = 0; r < Plan::ROWS; r++) {
      const long head = hk * (D::H / D::HK) + r / D::SQ, query = r % D::SQ;
      float* to = queries + r * Plan::DH_VECS * VL;
      widen_row(to, q + b * D::q_b + head * D::q_h + query * D::q_s, D::DH);
      for (int c = 0; c < Plan::DH_VECS; c++) store_bytes(to + c * VL, load_bytes<vf>(to + c * VL) * D::scale);
      rows[r] = out + b * D::o_b + head * D::o_h + query * D::o_s;
    }
    if (keys > 0) decode_scores<D>(k + b * D::k_b + hk * D::k_h, keys, queries, wide, scores);
    for (int r = 0; r < Plan::ROWS; r++) {
      const long head = hk * (D::H / D::HK) + r / D::SQ, query = r % D::SQ;
      const long seen = D::causal ? max_of(0, min_of(keys, query + first + 1)) : keys;
      float* s = scores + r * Plan::KEYS;
      if constexpr (!is_same<M, NoMask>::value) {
        const M* from = mask + b * D::m_b + head * D::m_h + query * D::m_q;
        for (long j = 0; j < seen; j += VL) {
          const int lanes = (int)min_of(VL, seen - j);
          const vec<M> m = lanes == VL ? ld_strided(from + j * D::m_k, D::m_k, Full{})
                                       : ld_strided(from + j * D::m_k, D::m_k, lanes);
          vf added;
          if constexpr (is_same<M, bool8>::value) added = select(m != 0, vf{}, splat<vf>(-__builtin_inff()));
          else added = m;
          store_bytes(s + j, load_bytes<vf>(s + j) + added);
        }
      }
      factors[r] = decode_softmax(s, seen, end);
    }
    constexpr int WHOLE = Plan::DV_VECS / Plan::V_BLOCK, REST = Plan::DV_VECS % Plan::V_BLOCK;
    const T* values = v + b * D::v_b + hk * D::v_h;
    for (int c = 0; c < WHOLE; c++)
      decode_values<D, Plan::V_BLOCK>(values, keys, scores, factors, (long)c * Plan::V_BLOCK * VL, rows);
    if constexpr (REST > 0)
      decode_values<D, REST>(values, keys, scores, factors, (long)WHOLE * Plan::V_BLOCK * VL, rows);
  }
}

}  // namespace npu
