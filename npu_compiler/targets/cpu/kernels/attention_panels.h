// Parts that the attention kernels of prompts share. A panel is 32 query rows of a key/value head: each lane holds one
// query, so the softmax needs no horizontal operation. Scores are transposed, [key][32 queries].
#pragma once
#include "attention_decode.h"
#include "math.h"
#include "tile.h"
#include "transpose.h"

namespace npu {

struct AttentionDims {
  static constexpr long m_b = 0, m_h = 0, m_q = 0, m_k = 0;
  static constexpr bool causal = false;
  static constexpr float scale = 1.0f;
};

// How panels are divided into chunks. The panels of a chunk belong to one head and share a block of keys and values.
template <class D> struct PanelPlan {
  static constexpr long ROWS = D::H / D::HK * D::SQ, PANELS = ceil_div(ROWS, PANEL);  // for one key/value head
  static constexpr long TOTAL = D::B * D::HK * PANELS;
  static constexpr long PER_CHUNK = max_of(1, min_of(min_of(4, PANELS), TOTAL / CHUNKS));
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

// Masks the keys at or beyond each lane's limit.
NPU_INLINE void mask_beyond(float* scores, const KeyLimits& limits, long j0, int n) {
  if (limits.lowest >= j0 + n) return;
  for (int v = 0; v < PANEL; v += VL) {
    const vi32 limit = load_bytes<vi32>(limits.of + v);
    for (int j = 0; j < n; j++) {
      float* s = scores + j * PANEL + v;
      const vi32 key = splat<vi32>((int32_t)(j0 + j));
      store_bytes(s, select(key < limit, load_bytes<vf>(s), splat<vf>(-__builtin_inff())));
    }
  }
}

// Divides acc[DV][32] by the panel's sums and stores it as rows of `out`. `rows`: scratch of 32 x `pitch` floats.
template <class D, class T>
NPU_INLINE void store_panel(float* acc, const float* row_sum, const QueryPanel<D>& panel, T* out, float* rows, long pitch) {
  for (int s = 0; s < PANEL; s += VL) {
    const vf total = load_bytes<vf>(row_sum + s);
    const vf factor = select(total == 0.0f, vf{}, 1.0f / total);
    for (long d = 0; d < D::DV; d++) store_bytes(acc + d * PANEL + s, load_bytes<vf>(acc + d * PANEL + s) * factor);
  }
  transpose_part((const uint32_t*)acc, PANEL, (uint32_t*)rows, pitch, D::DV, PANEL);
  for (int lane = 0; lane < panel.rows; lane++) {
    T* to = out + panel.b * D::o_b + panel.head(lane) * D::o_h + panel.query(lane) * D::o_s;
    const float* from = rows + lane * pitch;
    long d = 0;
    for (; d + VL <= D::DV; d += VL) st(to + d, load_bytes<vf>(from + d), Full{});
    if (d < D::DV) st(to + d, ld(from + d, (int)(D::DV - d)), (int)(D::DV - d));
  }
}

}  // namespace npu
