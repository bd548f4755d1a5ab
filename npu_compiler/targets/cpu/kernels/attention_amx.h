// Attention of prompts in bfloat16 on the tiles of AMX. Interface, dimensions and panels are those of attention().
//
// For a panel and a block of keys:
//   scores [key][32]      = K Q^T   A: rows of the cache as they are;  B: the queries in VNNI order, [DH/2][32][2]
//   weights [key/2][32][2] = exp(scale * score - maximum), rounded to bfloat16: already in VNNI order
//   acc [DV][32]         += V^T P^T  A: the values, transposed once per block for all panels of a chunk;  B: the weights
//
// Sums and the softmax are float32, as in PyTorch's kernel. Row sums add the weights before they are rounded.
#pragma once
#include "amx_tile.h"
#include "attention_panels.h"

namespace npu {

// Whether attention of prompts stored as T is computed on tiles.
template <class T> constexpr bool on_tiles() { return NPU_AMX && is_same<T, bf16>::value; }

constexpr int TILE_KEYS = 128;  // of a block

template <class D> struct TilePlan : PanelPlan<D> {
  using PanelPlan<D>::PER_CHUNK;
  static constexpr long DH = ceil_div(D::DH, 32) * 32, DV = ceil_div(D::DV, 16) * 16;
  static constexpr long K_BYTES = D::k_s * 2;  // between two rows of the cache
  // Rows a multiple of 4096 bytes apart map to one set of the L1 cache.
  static constexpr bool COPY_K = D::DH % 32 != 0 || K_BYTES % 4096 == 0;
  static constexpr long Q_BYTES = DH / 2 * PANEL * 4, V_BYTES = TILE_KEYS / 32 * DV * 64, ROW = max_of(DV, TILE_KEYS);
  // Offsets in the scratch memory, in bytes.
  static constexpr long Q = 0, K = Q + PER_CHUNK * Q_BYTES, V = K + TILE_KEYS * max_of(DH, DV) * 2;
  static constexpr long S = V + V_BYTES;
  static constexpr long W = S + TILE_KEYS * PANEL * 4, ACC = W + TILE_KEYS / 2 * PANEL * 4;
  static constexpr long TOP = ACC + PER_CHUNK * DV * PANEL * 4, SUM = TOP + PER_CHUNK * PANEL * 4;
  static constexpr long ROWS = SUM + PER_CHUNK * PANEL * 4, MASK = ROWS + PANEL * max_of(ROW * 4, DH * 2);
  static constexpr long END = MASK + TILE_KEYS * PANEL * 4;
};
template <class D> constexpr long attention_tiles_scratch_bytes() { return TilePlan<D>::END; }

#if NPU_AMX
// The larger operand; b if either is NaN.
NPU_INLINE vf larger(vf a, vf b) {
#if NPU_AVX512
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// Returns 2^x with a relative error below 2^-18, and 0 below 2^-126; x <= 128. The results are rounded to bfloat16.
NPU_INLINE vf coarse_exp2(vf x) {
  static constexpr float C[] = {1.0f, 0x1.62e12cp-1f, 0x1.ec0378p-3f, 0x1.c9fc5ap-5f, 0x1.3a02acp-7f};
#if NPU_AVX512
  x = larger(splat<vf>(-200.0f), x);
  const vf whole = round(x);
  return (vf)_mm512_scalef_ps((__m512)polynomial(C, x - whole), (__m512)whole);
#else
  x = larger(splat<vf>(-127.0f), x);
  vf whole;
  const vi32 n = nearest_int(x, &whole);
  return polynomial(C, x - whole) * pow2(n);
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

// One block of the online softmax: computes weights 2^(factor * (score - row_max)) of n keys, stores them as pairs of
// bfloat16 with zeros up to `end` keys, and rescales row_sum and acc. `end` is a multiple of 32, factor > 0.
template <long DV> NPU_INLINE void softmax_pairs(const float* scores, int n, int end, float factor, uint32_t* weights,
                                                 float* row_max, float* row_sum, float* acc) {
  for (int v = 0; v < PANEL; v += VL) {
    const float* s = scores + v;
    auto at = [&](int j) __attribute__((always_inline)) { return load_bytes<vf>(s + j * PANEL); };
    const vf old = load_bytes<vf>(row_max + v);
    vf top[4] = {old, old, old, old};
    int j = 0;
    for (; j + 4 <= n; j += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) top[i] = larger(at(j + i), top[i]);
    for (; j < n; j++) top[0] = larger(at(j), top[0]);
    const vf now = larger(larger(top[0], top[1]), larger(top[2], top[3]));
    // If all keys so far are masked, the maximum is -inf; subtracting 0 instead keeps 2^-inf = 0.
    const vf base = select(now == -__builtin_inff(), vf{}, now) * -factor, scaling = splat<vf>(factor);
    const vf rescale = coarse_exp2(fma(old, scaling, base));
    vf even = load_bytes<vf>(row_sum + v) * rescale, odd = {};
    uint32_t* to = weights + v;
    for (j = 0; j + 2 <= n; j += 2, to += PANEL) {
      const vf first = coarse_exp2(fma(at(j), scaling, base)), second = coarse_exp2(fma(at(j + 1), scaling, base));
      even += first;
      odd += second;
      store_bytes(to, bf16_pairs(first, second));
    }
    if (j < n) {
      const vf last = coarse_exp2(fma(at(j), scaling, base));
      even += last;
      store_bytes(to, bf16_pairs(last, vf{}));
      j += 2, to += PANEL;
    }
    for (; j < end; j += 2, to += PANEL) store_bytes(to, vi32{});
    store_bytes(row_max + v, now);
    store_bytes(row_sum + v, even + odd);
    if (any(rescale != 1.0f))
      for (long d = 0; d < DV; d++) store_bytes(acc + d * PANEL + v, load_bytes<vf>(acc + d * PANEL + v) * rescale);
  }
}

// Transposes n rows of values, `stride` elements apart, into tiles [end/32][DV][32 keys], with zeros from n up to `end`,
// a multiple of 32. `pairs`: scratch of [16][DV] words.
template <class D>
NPU_NOINLINE void transpose_values(const bf16* v, long stride, int n, int end, uint32_t* pairs, char* out) {
  constexpr long DV = TilePlan<D>::DV;
  for (int j0 = 0; j0 < end; j0 += 32, out += DV * 64) {
    for (int i = 0; i < 16; i++) {
      const int j = j0 + 2 * i;
      const bf16* from = v + j * stride;
      for (long d = 0; d < DV; d += VL) {
        vf low = {}, high = {};
        if (d + VL <= D::DV) {
          if (j < n) low = ld(from + d, Full{});
          if (j + 1 < n) high = ld(from + stride + d, Full{});
        } else if (d < D::DV) {
          if (j < n) low = ld(from + d, (int)(D::DV - d));
          if (j + 1 < n) high = ld(from + stride + d, (int)(D::DV - d));
        }
        store_bytes(pairs + i * DV + d, (vi32)((vi32)low >> 16 & 0xffff) | (vi32)high);
      }
    }
    transpose_part(pairs, DV, (uint32_t*)out, 16, 16, DV);
  }
}

// Copies n rows of D::DH elements, padded with zeros to DH elements, and zero rows up to `end`.
template <class D, long DH> NPU_INLINE void copy_rows(const bf16* from, long stride, long n, long end, char* to) {
  for (long j = 0; j < end; j++, to += DH * 2) {
    const long have = j < n ? D::DH * 2 : 0;
    memcpy(to, from + j * stride, (size_t)have);
    memset(to + have, 0, (size_t)(DH * 2 - have));
  }
}

// Rounds n rows of N integers, times their scales, to bfloat16: rows of PITCH elements, padded with zeros, and zero rows
// up to `end`.
template <long N, long PITCH>
NPU_INLINE void decode_rows(CacheRows<int8_t> rows, long stride, int n, int end, bf16* to) {
  for (int j = 0; j < end; j++, to += PITCH)
    for (long i = 0; i < PITCH; i += VL) {
      vf x = {};
      if (j < n && i < N) {
        const int8_t* from = rows.at + j * stride + i;
        x = cvt<vf>(i + VL <= N ? ld(from, Full{}) : ld(from, (int)(N - i))) * rows.scales[j];
      }
      st(to + i, x, Full{});
    }
}

template <class D, class E, class M>
NPU_INLINE void attention_tiles(const bf16* q, CacheRows<E> k, CacheRows<E> v, const M* mask, bf16* out, Thread& th,
                                int* counter, long keys, long first) {
  using Plan = TilePlan<D>;
  constexpr long DH = Plan::DH, DV = Plan::DV;
  constexpr long STEP = AMX_UNITS * PANEL * 4;  // bytes of a panel in a step
  static const long no_tap = 0;
  constexpr bool SCALE_FIRST = !no_mask<M> || !(D::scale > 0);
  char* scratch = th.scratch;
  float *scores = (float*)(scratch + Plan::S), *acc = (float*)(scratch + Plan::ACC);
  float *row_max = (float*)(scratch + Plan::TOP), *row_sum = (float*)(scratch + Plan::SUM);
  float *rows = (float*)(scratch + Plan::ROWS), *transposed = (float*)(scratch + Plan::MASK);
  uint32_t* weights = (uint32_t*)(scratch + Plan::W);
  KeyLimits limits[Plan::PER_CHUNK];
  long i = next_chunk(th, counter);
  if (i >= Plan::COUNT) return;
  TileShapes shapes;
  for (int t = 0; t < 8; t++) shapes.set(t, 16, 64);
  Amx::configure(shapes);

  for (; i < Plan::COUNT; i = next_chunk(th, counter)) {
    const long b = i / (D::HK * Plan::CHUNKS_PER_HEAD), hk = i / Plan::CHUNKS_PER_HEAD % D::HK;
    const long panel0 = i % Plan::CHUNKS_PER_HEAD * Plan::PER_CHUNK;
    const long panels = min_of(Plan::PER_CHUNK, Plan::PANELS - panel0);
    auto panel_of = [&](long p) {
      const long row0 = (panel0 + p) * PANEL;
      return QueryPanel<D>{b, hk, row0, (int)min_of(PANEL, Plan::ROWS - row0)};
    };
    long visible = 0;  // keys that any query of the chunk attends to
    for (long p = 0; p < panels; p++) {
      const QueryPanel<D> panel = panel_of(p);
      limits[p].set(panel, mask, keys, first);
      visible = max_of(visible, limits[p].highest);
      for (int lane = 0; lane < PANEL; lane++) {
        const bf16* from = q + b * D::q_b + panel.head(lane) * D::q_h + panel.query(lane) * D::q_s;
        copy_rows<D, DH>(from, 0, 1, 1, (char*)rows + lane * DH * 2);
      }
      transpose_part((const uint32_t*)rows, DH / 2, (uint32_t*)(scratch + Plan::Q + p * Plan::Q_BYTES), PANEL, PANEL,
                     DH / 2);
    }
    for (long e = 0; e < panels * DV * PANEL; e += VL) store_bytes(acc + e, vf{});
    for (long e = 0; e < panels * PANEL; e += VL) {
      store_bytes(row_max + e, splat<vf>(-__builtin_inff()));
      store_bytes(row_sum + e, vf{});
    }

    for (long j0 = 0; j0 < visible; j0 += TILE_KEYS) {
      const int n = (int)min_of(TILE_KEYS, visible - j0), end = (n + 31) / 32 * 32;
      const long row0 = (b * D::HK + hk) * D::SK + j0;
      const CacheRows<E> k_from = k.from(b * D::k_b + hk * D::k_h + j0 * D::k_s, row0);
      const CacheRows<E> v_from = v.from(b * D::v_b + hk * D::v_h + j0 * D::v_s, row0);
      const bool copy = CacheRows<E>::SCALED || Plan::COPY_K || j0 + end > D::SK;  // whole tiles are read
      const char* k_block = copy ? scratch + Plan::K : (const char*)k_from.at;
      const long k_row = copy ? DH * 2 : Plan::K_BYTES;
      if constexpr (CacheRows<E>::SCALED) {
        bf16* decoded = (bf16*)(scratch + Plan::K);  // first values, then keys
        decode_rows<D::DV, DV>(v_from, D::v_s, n, n, decoded);
        transpose_values<D>(decoded, DV, n, end, (uint32_t*)rows, scratch + Plan::V);
        decode_rows<D::DH, DH>(k_from, D::k_s, n, end, decoded);
      } else {
        if (copy) copy_rows<D, DH>(k_from.at, D::k_s, n, end, scratch + Plan::K);
        transpose_values<D>(v_from.at, D::v_s, n, end, (uint32_t*)rows, scratch + Plan::V);
      }
      for (long p = 0; p < panels; p++) {
        const int seen = (int)min_of(n, limits[p].highest - j0), whole = (seen + 31) / 32 * 32;
        if (seen <= 0) continue;
        const char* queries = scratch + Plan::Q + p * Plan::Q_BYTES;
        for (int j = 0; j < whole; j += 32)
          amx_tile<2>({k_block + j * k_row, 16 * k_row, k_row, &no_tap, 1, (int)(DH / 32), 64, queries, STEP,
                       scores + j * PANEL, false, nullptr, 0});
        if constexpr (!no_mask<M>) {
          add_mask<TILE_KEYS>(scores, D::scale, mask, panel_of(p), j0, seen, rows, transposed);
        } else if constexpr (SCALE_FIRST) {
          for (int e = 0; e < seen * PANEL; e += VL) store_bytes(scores + e, load_bytes<vf>(scores + e) * D::scale);
        }
        mask_beyond(scores, limits[p], j0, seen);
        float* sums = acc + p * DV * PANEL;
        softmax_pairs<D::DV>(scores, seen, whole, SCALE_FIRST ? LOG2_E : D::scale * LOG2_E, weights,
                             row_max + p * PANEL, row_sum + p * PANEL, sums);
        AmxArgs values{scratch + Plan::V, 16 * 64, 64, &no_tap, 1, whole / 32, DV * 64, (const char*)weights, STEP,
                       sums, true, nullptr, 0};
        for (long d = 0; d + 32 <= DV; d += 32, values.x += 32 * 64, values.acc += 32 * PANEL) amx_tile<2>(values);
        if constexpr (DV % 32 != 0) amx_tile<1>(values);
      }
    }
    for (long p = 0; p < panels; p++)
      store_panel(acc + p * DV * PANEL, row_sum + p * PANEL, panel_of(p), out, rows, Plan::ROW);
  }
  Amx::release();
}
#endif

}  // namespace npu
