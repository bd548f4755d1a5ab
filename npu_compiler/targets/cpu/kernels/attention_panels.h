// Parts that the attention kernels of prompts share. A panel is 32 query rows of a key/value head: each lane holds one
// query, so the softmax needs no horizontal operation. Scores are transposed, [key][32 queries].
#pragma once
#include "attention_decode.h"
#include "blocked.h"
#include "math.h"
#include "operands.h"
#include "transpose.h"

namespace npu {

struct AttentionDims {
  static constexpr long m_b = 0, m_h = 0, m_q = 0, m_k = 0;
  static constexpr bool causal = false;
  static constexpr float scale = 1.0f;
};

// How panels are divided into chunks. The panels of a chunk belong to one head and share a block of keys and values.
template <class D, long MOST = 4> struct PanelPlan {
  static constexpr long ROWS = D::H / D::HK * D::SQ, PANELS = ceil_div(ROWS, PANEL);  // for one key/value head
  static constexpr long TOTAL = D::B * D::HK * PANELS;
  static constexpr long PER_CHUNK = max_of(1, min_of(min_of(MOST, PANELS), TOTAL / CHUNKS));
  static constexpr long CHUNKS_PER_HEAD = ceil_div(PANELS, PER_CHUNK), COUNT = D::B * D::HK * CHUNKS_PER_HEAD;
};

// The 32 query rows of a panel, from row0 on. Lanes beyond the last row repeat it.
template <class D> struct QueryPanel {
  long b, hk, row0;
  int rows;
  NPU_INLINE long clamp(long row) { return min_of(row, D::H / D::HK * D::SQ - 1); }
  long head(long lane) const { return hk * (D::H / D::HK) + clamp(row0 + lane) / D::SQ; }
  long query(long lane) const { return clamp(row0 + lane) % D::SQ; }
};

// Stores the queries of a panel as columns, [words][32]. copy(to, query) writes the words of a query to a row of the
// scratch `rows`, whose pitch is in words.
template <class D, class T, class Copy>
NPU_INLINE void gather_queries(const T* q, const QueryPanel<D>& panel, char* rows, long pitch, char* out, long words,
                               Copy copy) {
  for (long lane = 0; lane < PANEL; lane++)
    copy(rows + lane * pitch * 4, q + panel.b * D::q_b + panel.head(lane) * D::q_h + panel.query(lane) * D::q_s);
  transpose_part((const uint32_t*)rows, pitch, (uint32_t*)out, PANEL, PANEL, words);
}

// Multiplies scores[n][32] by `scale` and adds the mask of keys j0 .. j0 + n - 1. `rows` and `transposed` are scratch of
// 32 x BLOCK floats.
template <int BLOCK, class D, class M>
NPU_INLINE void add_mask(float* scores, float scale, const M* mask, const QueryPanel<D>& panel, long j0, int n,
                         float* rows, float* transposed) {
  const float masked = -__builtin_inff();
  mask += panel.b * D::m_b + j0 * D::m_k;
  for (int lane = 0; lane < PANEL; lane++) {
    const M* from = mask + panel.head(lane) * D::m_h + panel.query(lane) * D::m_q;
    float* to = rows + lane * BLOCK;
    for (int j = 0; j < n; j += VL) {
      const int lanes = n - j < VL ? n - j : VL;
      vec<M> value = lanes == VL ? ld_strided(from + j * D::m_k, D::m_k, Full{})
                                 : ld_strided(from + j * D::m_k, D::m_k, lanes);
      if constexpr (is_same<M, bool8>::value) store_bytes(to + j, select(value != 0, vf{}, splat<vf>(masked)));
      else store_bytes(to + j, value);
    }
  }
  transpose_part((const uint32_t*)rows, BLOCK, (uint32_t*)transposed, PANEL, PANEL, n);
  for (int i = 0; i < n * PANEL; i += VL)
    store_bytes(scores + i, load_bytes<vf>(scores + i) * scale + load_bytes<vf>(transposed + i));
}

// How many of the first keys each query of a panel attends to.
struct KeyLimits {
  int32_t of[PANEL];
  long lowest, highest;
  template <class D, class M> void set(const QueryPanel<D>& panel, const M* mask, long keys, long first) {
    lowest = keys, highest = 0;
    for (int lane = 0; lane < PANEL; lane++) {
      const long limit = visible_keys<D>(mask, panel.query(lane), keys, first);
      of[lane] = (int32_t)limit;
      lowest = min_of(lowest, limit);
      highest = max_of(highest, limit);
    }
  }
};

// Panels that one thread computes, which read the same keys and values. `visible`: the keys that any query attends to.
// Chunks with later queries come first: with a causal mask they take longer.
template <class D, class Plan> struct PanelChunk {
  long b, hk, first_panel, panels, visible = 0;
  KeyLimits limits[Plan::PER_CHUNK];
  template <class M> PanelChunk(long i, const M* mask, long keys, long first) {
    i = Plan::COUNT - 1 - i;
    b = i / (D::HK * Plan::CHUNKS_PER_HEAD), hk = i / Plan::CHUNKS_PER_HEAD % D::HK;
    first_panel = i % Plan::CHUNKS_PER_HEAD * Plan::PER_CHUNK;
    panels = min_of(Plan::PER_CHUNK, Plan::PANELS - first_panel);
    for (long p = 0; p < panels; p++) {
      limits[p].set(panel(p), mask, keys, first);
      visible = max_of(visible, limits[p].highest);
    }
  }
  QueryPanel<D> panel(long p) const {
    const long row0 = (first_panel + p) * PANEL;
    return {b, hk, row0, (int)min_of(PANEL, Plan::ROWS - row0)};
  }
};

// Masks the keys at or beyond each lane's limit.
NPU_INLINE void mask_beyond(float* scores, const KeyLimits& limits, long j0, int n) {
  if (limits.lowest >= j0 + n) return;
  for (int v = 0; v < PANEL; v += VL) {
    const vi32 limit = load_bytes<vi32>(limits.of + v);
    for (long j = max_of(0, limits.lowest - j0); j < n; j++) {
      float* s = scores + j * PANEL + v;
      const vi32 key = splat<vi32>((int32_t)(j0 + j));
      store_bytes(s, select(key < limit, load_bytes<vf>(s), splat<vf>(-__builtin_inff())));
    }
  }
}

// The larger operand; b if either is NaN.
NPU_INLINE vf larger(vf a, vf b) {
#if NPU_AVX512
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// Weights of the softmax as float, which replace the scores: e^x. store() takes those of two keys, the first one even.
struct FloatWeights {
  NPU_INLINE vf power(vf x) { return exp(x); }
  NPU_INLINE void store(float* scores, int key, vf first, vf second) {
    store_bytes(scores + key * PANEL, first);
    store_bytes(scores + (key + 1) * PANEL, second);
  }
};

// Returns 2^x with a relative error below 2^-13, and 0 if x < -126, because a subnormal result takes Intel's CPUs more
// than 100 cycles; x <= 128. The results are rounded to bfloat16.
NPU_INLINE vf coarse_exp2(vf x) {
  static constexpr float C[] = {0x1.fff692p-1f, 0x1.62f31ap-1f, 0x1.f0de1ap-3f, 0x1.c3f76p-5f};
#if NPU_AVX512
  const vf whole = round(x);
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)polynomial(C, x - whole), (__m512)whole);
#else
  vf whole;
  const vi32 n = nearest_int(larger(splat<vf>(-127.0f), x), &whole);
  return select(x < -126.0f, vf{}, polynomial(C, x - whole) * pow2(n));
#endif
}

// Rounds two vectors to bfloat16, one in the low halves of the lanes and one in the high halves.
NPU_INLINE vi32 bf16_pairs(vf low, vf high) {
#if defined(__AVX512BF16__) && NPU_AVX512
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  static constexpr struct Order {
    alignas(64) uint16_t at[32] = {};
    constexpr Order() {
      for (int i = 0; i < 32; i++) at[i] = (uint16_t)(i / 2 + i % 2 * 16);
    }
  } ORDER;
  return (vi32)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER.at), both);
#else
  return bf16_lanes(low) | bf16_lanes(high) << 16;
#endif
}

// Weights of the softmax as pairs of bfloat16, which replace the scores of the first keys, [key/2][32][2]: 2^x.
struct PairWeights {
  NPU_INLINE vf power(vf x) { return coarse_exp2(x); }
  NPU_INLINE void store(float* scores, int key, vf first, vf second) {
    store_bytes(scores + key / 2 * PANEL, bf16_pairs(first, second));
  }
};

// One block of the online softmax, [n][32] scores: replaces them by weights power(factor * score - reference) and adds
// these to row_sum. A lane's reference is the maximum of earlier keys: only a score that exceeds it by more than 8
// replaces it, and then row_sum and acc[DV][32] are rescaled. Weights above 1 are as accurate as others. factor > 0.
//
//   begin(first, flush, acc)  finds the references. `first`: row_sum and acc count as zero. Calls flush() before acc is
//                             rescaled.
//   run(to)                   computes the next weights, up to key `to`, an even number. Those beyond n are zero.
//   end()                     stores row_sum
template <class Weights, long DV> struct SoftmaxBlock {
  static constexpr int VECTORS = PANEL / VL;
  float *scores, *references, *row_sum;
  int n, next = 0;
  float factor;
  vf base[VECTORS], sums[VECTORS];

  SoftmaxBlock(float* scores, int n, float factor, float* references, float* row_sum)
      : scores(scores), references(references), row_sum(row_sum), n(n), factor(factor) {}

  template <class Flush> __attribute__((always_inline)) void begin(bool first, Flush flush, float* acc) {
    constexpr float NONE = -__builtin_inff(), SLACK = 8.0f;
    vf most[VECTORS], reference[VECTORS];
    vi32 grows[VECTORS], any_grows = {};
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const float* s = scores + v * VL;
      auto at = [&](int j) __attribute__((always_inline)) { return load_bytes<vf>(s + j * PANEL); };
      vf top[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) top[i] = splat<vf>(NONE);
      int j = 0;
      for (; j + 4 <= n; j += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) top[i] = larger(at(j + i), top[i]);
      for (; j < n; j++) top[0] = larger(at(j), top[0]);
      most[v] = larger(larger(top[0], top[1]), larger(top[2], top[3])) * factor;
      reference[v] = first ? splat<vf>(NONE) : load_bytes<vf>(references + v * VL);
      sums[v] = first ? vf{} : load_bytes<vf>(row_sum + v * VL);
      grows[v] = most[v] > reference[v] + SLACK;
      any_grows |= grows[v];
    }
    if (any(any_grows)) {
      if (!first) flush();
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        const vf rescale = select(grows[v], Weights::power(reference[v] - most[v]), splat<vf>(1.0f));
        reference[v] = select(grows[v], most[v], reference[v]);
        store_bytes(references + v * VL, reference[v]);
        if (first) continue;
        sums[v] *= rescale;
        float* a = acc + v * VL;
        for (long d = 0; d < DV; d++) store_bytes(a + d * PANEL, load_bytes<vf>(a + d * PANEL) * rescale);
      }
    } else if (first) {
      for (int v = 0; v < VECTORS; v++) store_bytes(references + v * VL, reference[v]);
    }
    // If all keys so far are masked, the reference is -inf; subtracting 0 instead keeps weights of 0.
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) base[v] = select(reference[v] == NONE, vf{}, -reference[v]);
  }

  __attribute__((always_inline)) void run(int to) {
    const vf scaling = splat<vf>(factor);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      float* s = scores + v * VL;
      const vf from = base[v];
      auto weight = [&](int j) __attribute__((always_inline)) {
        return Weights::power(fma(load_bytes<vf>(s + j * PANEL), scaling, from));
      };
      vf even = sums[v], odd = {};
      int j = next;
      for (; j + 4 <= to && j + 4 <= n; j += 4) {
        vf w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) w[i] = weight(j + i);
        even += w[0] + w[2];
        odd += w[1] + w[3];
        Weights::store(s, j, w[0], w[1]);
        Weights::store(s, j + 2, w[2], w[3]);
      }
      for (; j < to; j += 2) {
        const vf first = j < n ? weight(j) : vf{}, second = j + 1 < n ? weight(j + 1) : vf{};
        even += first;
        odd += second;
        Weights::store(s, j, first, second);
      }
      sums[v] = even + odd;
    }
    next = to;
  }

  __attribute__((always_inline)) void end() {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store_bytes(row_sum + v * VL, sums[v]);
  }
};

// Divides acc[DV][32] by the panel's sums and stores it as rows of `out`. `rows`: scratch of 32 x `pitch` floats.
template <class D, class T>
NPU_INLINE void store_panel(const float* acc, const float* row_sum, const QueryPanel<D>& panel, T* out, float* rows,
                            long pitch) {
  float factors[PANEL];
  for (int s = 0; s < PANEL; s += VL) {
    const vf total = load_bytes<vf>(row_sum + s);
    store_bytes(factors + s, select(total == 0.0f, vf{}, 1.0f / total));
  }
  transpose_part((const uint32_t*)acc, PANEL, (uint32_t*)rows, pitch, D::DV, PANEL);
  for (int lane = 0; lane < panel.rows; lane++) {
    T* to = out + panel.b * D::o_b + panel.head(lane) * D::o_h + panel.query(lane) * D::o_s;
    const float* from = rows + lane * pitch;
    const vf factor = splat<vf>(factors[lane]);
    long d = 0;
    for (; d + VL <= D::DV; d += VL) st(to + d, load_bytes<vf>(from + d) * factor, Full{});
    if (d < D::DV) st(to + d, ld(from + d, (int)(D::DV - d)) * factor, (int)(D::DV - d));
  }
}

}  // namespace npu
