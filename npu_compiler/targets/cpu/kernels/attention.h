// Scaled dot-product attention with an online softmax (Dao et al., FlashAttention, 2022), grouped-query heads and
// float32 arithmetic:  out = softmax(scale * q k^T + mask) v, and 0 for a row in which every key is masked.
//
//   struct D : AttentionDims { static constexpr long B, H, HK, SQ, SK, DH, DV, q_b, q_h, q_s, k_b, ... o_s; };
//   attention<D>(q, k, v, mask, out, th, counter [, keys, first])
//
// Strides are in elements; the inner one is 1. A float mask is added to the scores; a bool8 mask keeps a score if it is
// true. The mask's strides m_b, m_h, m_q, m_k may be 0; pass (const NoMask*)nullptr for no mask. A mask of Positions
// [SQ] hides the keys beyond each query's position. k and v may be CacheRows of 8-bit numbers; their scales are [B][HK]
// [SK]. `keys` is the valid length of k and v (<= SK). With D::causal,
// query i attends to keys j <= i + first (first = 0: top-left alignment).
//
// In panels (attention_panels.h): scores are computed transposed, so neither k nor v is packed, and the scores are the
// weight panel of the product with v. Where `vdpbf16ps` is fast, bfloat16 is multiplied in pairs, and with AMX it is
// computed on its tiles (attention_amx.h).
#pragma once
#include "attention_amx.h"
#include "attention_panels.h"

namespace npu {

constexpr int KEY_BLOCK = 8 * TILE_ROWS;

// How scores are computed and values are summed: in units of PER_UNIT elements of a key, or of as many keys.
struct FloatProducts {
  using Kind = F32;
  using Weights = FloatWeights;
  static constexpr long PER_UNIT = 1;
  static constexpr int SEGMENT = SEGMENT_F32;
  static constexpr float BASE = 1.0f;  // of the logarithm in which Weights expects scores, to that of e
};
struct PairProducts {
  using Kind = BF16P;
  using Weights = PairWeights;
  static constexpr long PER_UNIT = 2;
  static constexpr int SEGMENT = SEGMENT_16;
  static constexpr float BASE = LOG2_E;
};
template <class D, class T, class E> constexpr auto products_of() {
#if defined(__AVX512BF16__) && NPU_AVX512 && !NPU_SLOW_BF16_DOT
  if constexpr (is_same<T, bf16>::value && is_same<E, bf16>::value && D::DH % 2 == 0) return PairProducts{};
  else return FloatProducts{};
#else
  return FloatProducts{};
#endif
}

// acc[p][c] += sum over units k of x[k * step + p] * w[k][c]. Positions are contiguous; units are `step` bytes apart.
struct ColumnArgs {
  const char* x;
  long step;
  int len;
  const float* w;
  float* acc;
};
template <class Kind, int P> NPU_NOINLINE void tile_columns(const ColumnArgs& a) {
  vf acc[P][TILE_VECS];
#pragma GCC unroll 14
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECS; v++) acc[p][v] = vf{};
  const char* x = a.x;
  const float* w = a.w;
  for (int k = 0; k < a.len; k++, x += a.step, w += PANEL) {
    vf wv[TILE_VECS];
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECS; v++) wv[v] = load_bytes<vf>(w + v * VL);
#pragma GCC unroll 14
    for (int p = 0; p < P; p++) {
      const vf xv = splat<vf>(unit(x + p * 4));
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECS; v++) Kind::step(acc[p][v], wv[v], xv);
    }
  }
  add_to<Kind, P>(a.acc, acc, true);
}

template <class D, class T, class E> struct AttentionPlan : PanelPlan<D> {  // E: elements of k and v
  using PanelPlan<D>::PER_CHUNK;
  using Products = decltype(products_of<D, T, E>());
  static constexpr bool PAIRS = Products::PER_UNIT == 2, WIDEN = !PAIRS && !is_same<E, float>::value;
  static constexpr long DMAX = max_of(max_of(D::DH, D::DV), KEY_BLOCK);
  static constexpr long UNITS = D::DH / Products::PER_UNIT;  // of a key
  // Offsets in the scratch memory, in floats.
  static constexpr long Q = 0, K = Q + PER_CHUNK * UNITS * PANEL, V = K + (WIDEN ? KEY_BLOCK * D::DH : 0);
  static constexpr long S = V + (WIDEN || PAIRS ? KEY_BLOCK / Products::PER_UNIT * D::DV : 0);
  static constexpr long ACC = S + KEY_BLOCK * PANEL;
  static constexpr long TOP = ACC + PER_CHUNK * D::DV * PANEL, SUM = TOP + PER_CHUNK * PANEL;
  static constexpr long ROW = SUM + PER_CHUNK * PANEL, END = ROW + PANEL * DMAX;
};

template <class D, class T, class E = T> constexpr long attention_scratch_bytes() {
  if (AttentionPlan<D, T, E>::ROWS <= DECODE_ROWS) return DecodePlan<D>::END * 4;
  if (on_tiles<T>()) return attention_tiles_scratch_bytes<D>();
  return align64(AttentionPlan<D, T, E>::END * 4) + align64(KEY_BLOCK * 4) + align64(KEY_BLOCK * PANEL * 4);
}

// Converts n rows to float, one after the other.
template <long N, class E> NPU_INLINE void widen_rows(float* out, CacheRows<E> rows, long stride, int n) {
  for (int j = 0; j < n; j++, out += N) {
    const E* from = rows.at + j * stride;
    if constexpr (CacheRows<E>::SCALED) {
      const vf scale = splat<vf>(rows.scales[j]);
      long i = 0;
      for (; i + VL <= N; i += VL) st(out + i, cvt<vf>(ld(from + i, Full{})) * scale, Full{});
      if (i < N) st(out + i, cvt<vf>(ld(from + i, (int)(N - i))) * scale, (int)(N - i));
    } else {
      copy_units<F32>((char*)out, from, N);
    }
  }
}

// Interleaves n rows of values, `stride` elements apart, two by two: [n/2][N][2], with zeros behind an odd row.
template <long N> NPU_INLINE void pair_rows(const bf16* rows, long stride, int n, float* out) {
  for (int j = 0; j < n; j += 2, out += N, rows += 2 * stride) {
    auto words = [&](const bf16* row, long d, bool there) __attribute__((always_inline)) {
      if (!there) return vi32{};
      return (vi32)(d + VL <= N ? ld(row + d, Full{}) : ld(row + d, (int)(N - d)));
    };
    for (long d = 0; d < N; d += VL) {
      // A number that was widened to float has its bits in the upper half.
      const vi32 low = words(rows, d, true), high = words(rows + stride, d, j + 1 < n);
      const vf pairs = (vf)((low >> 16 & 0xffff) | high);
      if (d + VL <= N) store_bytes(out + d, pairs);
      else st(out + d, pairs, (int)(N - d));
    }
  }
}

template <class D, class T, class E, class M>
NPU_NOINLINE void attention(const T* q, CacheRows<E> k, CacheRows<E> v, const M* mask, T* out, Thread& th, int* counter,
                            long keys = D::SK, long first = 0) {
  using Plan = AttentionPlan<D, T, E>;
  using Products = typename Plan::Products;
  using Kind = typename Products::Kind;
  if constexpr (Plan::ROWS <= DECODE_ROWS) return attention_decode<D>(q, k, v, mask, out, th, counter, keys, first);
#if NPU_AMX
  if constexpr (on_tiles<T>()) return attention_tiles<D>(q, k, v, mask, out, th, counter, keys, first);
#endif
  float* scratch = (float*)th.scratch;
  float *queries = scratch + Plan::Q, *scores = scratch + Plan::S, *acc = scratch + Plan::ACC;
  float *references = scratch + Plan::TOP, *row_sum = scratch + Plan::SUM, *rows = scratch + Plan::ROW;
  int32_t* off = (int32_t*)(th.scratch + align64(Plan::END * 4));
  float* transposed = (float*)(off + align64(KEY_BLOCK * 4) / 4);
  static const long no_tap = 0;
  // Bytes between keys, and between the units of values.
  constexpr long K_STEP = Plan::WIDEN ? D::DH * 4 : D::k_s * (long)sizeof(E);
  constexpr long V_STEP = Plan::WIDEN || Plan::PAIRS ? D::DV * 4 : D::v_s * 4;
  // Floats: queries are scaled. Pairs: scores are, by the factor of the exponent unless a mask is added to them.
  constexpr bool SCALE_QUERIES = !Plan::PAIRS, SCALE_SCORES = Plan::PAIRS && (!no_mask<M> || !(D::scale > 0));
  constexpr float FACTOR = Products::BASE * (SCALE_QUERIES || SCALE_SCORES ? 1.0f : D::scale);
  constexpr int DV_TILES = (int)ceil_div(D::DV, TILE_ROWS), DV_ROWS = (int)(D::DV / DV_TILES);
  constexpr int DV_TALL = (int)(D::DV % DV_TILES);

  for (long i; (i = next_chunk(th, counter)) < Plan::COUNT;) {
    const PanelChunk<D, Plan> chunk(i, mask, keys, first);
    for (long p = 0; p < chunk.panels; p++) {
      float* to = queries + p * Plan::UNITS * PANEL;
      gather_queries(q, chunk.panel(p), (char*)rows, Plan::DMAX, (char*)to, Plan::UNITS,
                     [](char* row, const T* query) { copy_units<Kind>(row, query, D::DH); });
      if constexpr (SCALE_QUERIES)
        for (long e = 0; e < D::DH * PANEL; e += VL) store_bytes(to + e, load_bytes<vf>(to + e) * D::scale);
    }
    for (long e = 0; e < chunk.panels * D::DV * PANEL; e += VL) store_bytes(acc + e, vf{});
    for (long e = 0; e < chunk.panels * PANEL; e += VL) store_bytes(row_sum + e, vf{});

    for (long j0 = 0; j0 < chunk.visible; j0 += KEY_BLOCK) {
      const int n = (int)min_of(KEY_BLOCK, chunk.visible - j0);
      const long row0 = (chunk.b * D::HK + chunk.hk) * D::SK + j0;
      const CacheRows<E> k_from = k.from(chunk.b * D::k_b + chunk.hk * D::k_h + j0 * D::k_s, row0);
      const CacheRows<E> v_from = v.from(chunk.b * D::v_b + chunk.hk * D::v_h + j0 * D::v_s, row0);
      const char *k_block = (const char*)k_from.at, *v_block = (const char*)v_from.at;
      if constexpr (Plan::WIDEN) {
        k_block = (const char*)(scratch + Plan::K);
        v_block = (const char*)(scratch + Plan::V);
        widen_rows<D::DH>(scratch + Plan::K, k_from, D::k_s, n);
        widen_rows<D::DV>(scratch + Plan::V, v_from, D::v_s, n);
      } else if constexpr (Plan::PAIRS) {
        v_block = (const char*)(scratch + Plan::V);
        pair_rows<D::DV>(v_from.at, D::v_s, n, scratch + Plan::V);
      }
      // The last tile of a short block repeats the last key; these scores are never read.
      for (int j = 0; j < KEY_BLOCK; j++) off[j] = (int32_t)(min_of(j, n - 1) * K_STEP);
      const TileArgs dot{k_block, &no_tap, 1, (int)Plan::UNITS, Products::SEGMENT};
      for (long p = 0; p < chunk.panels; p++) {
        const int seen = (int)min_of(n, chunk.limits[p].highest - j0);
        if (seen <= 0) continue;
        for (int j = 0; j < seen; j += TILE_ROWS) {
          for (int c = 0; c < PANEL; c += TILE_COLS) {
            const char* w = (const char*)(queries + p * Plan::UNITS * PANEL + c);
            tile<Kind, TILE_ROWS>(dot, off + j, w, scores + j * PANEL + c, {w, 0});
          }
        }
        if constexpr (!no_mask<M>) {
          add_mask<KEY_BLOCK>(scores, SCALE_SCORES ? D::scale : 1.0f, mask, chunk.panel(p), j0, seen, rows, transposed);
        } else if constexpr (SCALE_SCORES) {
          for (int e = 0; e < seen * PANEL; e += VL)
            store_bytes(scores + e, load_bytes<vf>(scores + e) * D::scale);
        }
        mask_beyond(scores, chunk.limits[p], j0, seen);
        float* values = acc + p * D::DV * PANEL;
        SoftmaxBlock<typename Products::Weights, D::DV> block(scores, seen, FACTOR, references + p * PANEL,
                                                              row_sum + p * PANEL);
        block.begin(j0 == 0, [] {}, values);
        block.run((seen + 1) / 2 * 2);
        block.end();
        for (int t = 0, d = 0; t < DV_TILES; t++) {
          for (int c = 0; c < PANEL; c += TILE_COLS) {
            const ColumnArgs args{v_block + d * 4, V_STEP, (int)ceil_div(seen, Products::PER_UNIT), scores + c,
                                  values + d * PANEL + c};
            if constexpr (DV_TALL > 0) {
              if (t < DV_TALL) {
                tile_columns<Kind, DV_ROWS + 1>(args);
                continue;
              }
            }
            tile_columns<Kind, DV_ROWS>(args);
          }
          d += DV_ROWS + (t < DV_TALL);
        }
      }
    }

    for (long p = 0; p < chunk.panels; p++)
      store_panel(acc + p * D::DV * PANEL, row_sum + p * PANEL, chunk.panel(p), out, rows, Plan::DMAX);
  }
}

template <class D, class T, class M>
NPU_INLINE void attention(const T* q, const T* k, const T* v, const M* mask, T* out, Thread& th, int* counter,
                          long keys = D::SK, long first = 0) {
  attention<D>(q, CacheRows<T>{k}, CacheRows<T>{v}, mask, out, th, counter, keys, first);
}

}  // namespace npu
