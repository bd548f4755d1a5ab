// Attention of prompts in bfloat16 on the tiles of AMX. Interface, dimensions and panels are those of attention().
//
// For a panel and a block of keys:
//   scores [key][32]       = K Q^T   A: rows of the cache as they are;  B: the queries in VNNI order, [DH/2][32][2]
//   weights [key/2][32][2] = softmax_block(scores), rounded to bfloat16 in VNNI order, in the place of the scores
//   acc [DV][32]          += V^T P^T  A: the values, transposed once per block for all panels of a chunk;  B: the weights
//
// Sums and the softmax are float32, as in PyTorch's kernel. Row sums add the weights before they are rounded.
#pragma once


#include "amx_tile.h"
#include "attention_panels.h"

namespace npu {

// Whether attention of prompts stored as T is computed on tiles.
template <class T> constexpr bool on_tiles() { return NPU_AMX && is_same<T, bf16>::value; }

constexpr int TILE_KEYS = 64;  // of a block: a panel with these keys, values and scores fits in an L1 cache of 48 KB

template <class D> struct TilePlan : PanelPlan<D, 8> {
  using PanelPlan<D, 8>::PER_CHUNK;
  static constexpr long DH = ceil_div(D::DH, 32) * 32, DV = ceil_div(D::DV, 16) * 16;
  static constexpr long K_BYTES = D::k_s * 2;  // between two rows of the cache
  // Rows a multiple of 4096 bytes apart map to one set of the L1 cache.
  static constexpr bool COPY_K = D::DH % 32 != 0 || K_BYTES % 4096 == 0;
  static constexpr long Q_BYTES = DH / 2 * PANEL * 4, V_BYTES = TILE_KEYS / 32 * DV * 64, ROW = max_of(DV, TILE_KEYS);
  // Offsets in the scratch memory, in bytes.
  static constexpr long Q = 0, K = Q + PER_CHUNK * Q_BYTES, V = K + TILE_KEYS * max_of(DH, DV) * 2;
  static constexpr long S = V + V_BYTES;
  static constexpr long ACC = S + TILE_KEYS * PANEL * 4;
  static constexpr long TOP = ACC + PER_CHUNK * DV * PANEL * 4, SUM = TOP + PER_CHUNK * PANEL * 4;
  static constexpr long ROWS = SUM + PER_CHUNK * PANEL * 4, MASK = ROWS + PANEL * max_of(ROW * 4, DH * 2);
  static constexpr long END = MASK + TILE_KEYS * PANEL * 4;
};
template <class D> constexpr long attention_tiles_scratch_bytes() { return TilePlan<D>::END; }

#if NPU_AMX
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

// Rounds n rows of N 8-bit numbers, times their scales, to bfloat16: rows of PITCH elements, padded with zeros, and zero rows
// up to `end`.
template <long N, long PITCH, class E>
NPU_INLINE void decode_rows(CacheRows<E> rows, long stride, int n, int end, bf16* to) {
  for (int j = 0; j < end; j++, to += PITCH)
    for (long i = 0; i < PITCH; i += VL) {
      vf x = {};
      if (j < n && i < N) {
        const E* from = rows.at + j * stride + i;
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
  static const AmxTap no_tap = {0, 0};
  constexpr bool SCALE_FIRST = !no_mask<M> || !(D::scale > 0);
  char* scratch = th.scratch;
  float *scores = (float*)(scratch + Plan::S), *acc = (float*)(scratch + Plan::ACC);
  float *references = (float*)(scratch + Plan::TOP), *row_sum = (float*)(scratch + Plan::SUM);
  float *rows = (float*)(scratch + Plan::ROWS), *transposed = (float*)(scratch + Plan::MASK);
  long i = next_chunk(th, counter);
  if (i >= Plan::COUNT) return;
  TileShapes shapes;
  for (int t = 0; t < 8; t++) shapes.set(t, 16, 64);
  Amx::configure(shapes);

  for (; i < Plan::COUNT; i = next_chunk(th, counter)) {
    const PanelChunk<D, Plan> chunk(i, mask, keys, first);
    for (long p = 0; p < chunk.panels; p++) {
      gather_queries(q, chunk.panel(p), (char*)rows, DH / 2, scratch + Plan::Q + p * Plan::Q_BYTES, DH / 2,
                     [](char* to, const bf16* query) { copy_rows<D, DH>(query, 0, 1, 1, to); });
      if (chunk.limits[p].highest > 0) continue;  // the first block of keys sets acc and row_sum
      for (long e = 0; e < DV * PANEL; e += VL) store_bytes(acc + p * DV * PANEL + e, vf{});
      for (long e = 0; e < PANEL; e += VL) store_bytes(row_sum + p * PANEL + e, vf{});
    }

    for (long j0 = 0; j0 < chunk.visible; j0 += TILE_KEYS) {
      const int n = (int)min_of(TILE_KEYS, chunk.visible - j0), end = (n + 31) / 32 * 32;
      const long row0 = (chunk.b * D::HK + chunk.hk) * D::SK + j0;
      const CacheRows<E> k_from = k.from(chunk.b * D::k_b + chunk.hk * D::k_h + j0 * D::k_s, row0);
      const CacheRows<E> v_from = v.from(chunk.b * D::v_b + chunk.hk * D::v_h + j0 * D::v_s, row0);
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
      for (long p = 0; p < chunk.panels; p++) {
        const int seen = (int)min_of(n, chunk.limits[p].highest - j0), whole = (seen + 31) / 32 * 32;
        if (seen <= 0) continue;
        const char* queries = scratch + Plan::Q + p * Plan::Q_BYTES;
        for (int j = 0; j < whole; j += 32)
          amx_tile<2>({k_block + j * k_row, 16 * k_row, k_row, &no_tap, 1, (int)(DH / 32), 64, queries, STEP,
                       scores + j * PANEL, false, nullptr, 0});
        if constexpr (!no_mask<M>) {
          add_mask<TILE_KEYS>(scores, D::scale, mask, chunk.panel(p), j0, seen, rows, transposed);
        } else if constexpr (SCALE_FIRST) {
          for (int e = 0; e < seen * PANEL; e += VL) store_bytes(scores + e, load_bytes<vf>(scores + e) * D::scale);
        }
        mask_beyond(scores, chunk.limits[p], j0, seen);
        float* sums = acc + p * DV * PANEL;
        softmax_block<PairWeights, D::DV>(scores, seen, whole, SCALE_FIRST ? LOG2_E : D::scale * LOG2_E, j0 == 0,
                                          references + p * PANEL, row_sum + p * PANEL, sums);
        AmxArgs values{scratch + Plan::V, 16 * 64, 64, &no_tap, 1, whole / 32, DV * 64, (const char*)scores, STEP,
                       sums, j0 > 0, nullptr, 0};
        for (long d = 0; d + 32 <= DV; d += 32, values.x += 32 * 64, values.acc += 32 * PANEL) amx_tile<2>(values);
        if constexpr (DV % 32 != 0) amx_tile<1>(values);
      }
    }
    for (long p = 0; p < chunk.panels; p++)
      store_panel(acc + p * DV * PANEL, row_sum + p * PANEL, chunk.panel(p), out, rows, Plan::ROW);
  }
  Amx::release();
}
#endif

}  // namespace npu
