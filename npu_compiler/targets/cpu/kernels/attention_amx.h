// Attention of prompts in bfloat16 on the tiles of AMX. Interface, dimensions and panels are those of attention().
//
// For a panel and a block of keys:
//   scores [key][32]       = K Q^T   A: rows of the cache as they are;  B: the queries in VNNI order, [DH/2][32][2]
//   weights [key/2][32][2] = SoftmaxBlock(scores), rounded to bfloat16 in VNNI order, in the place of the scores
//   acc [DV][32]          += V^T P^T  A: the values, transposed once for all panels of a chunk;  B: the weights
//
// Sums and the softmax are float32, as in PyTorch's kernel. Row sums add the weights before they are rounded.
#pragma once
#include "amx_tile.h"
#include "attention_panels.h"

namespace npu {

// Whether attention of prompts stored as T is computed on tiles.
template <class T> constexpr bool on_tiles() { return NPU_AMX && is_same<T, bf16>::value; }

// Keys of a block, whose scores stay in the L1 cache with those of two others, and of a span, whose keys and values stay
// in the L2 cache.
constexpr int TILE_KEYS = 64, TILE_SPAN = 512;
constexpr int SCORE_BUFFERS = 3;  // of blocks: one is scored, one gets its weights, one is multiplied by the values

template <class D> struct TilePlan : PanelPlan<D, 8> {
  using PanelPlan<D, 8>::PER_CHUNK;
  static constexpr long DH = ceil_div(D::DH, 32) * 32, DV = ceil_div(D::DV, 16) * 16;
  static constexpr long K_BYTES = D::k_s * 2;  // between two rows of the cache
  // Rows a multiple of 4096 bytes apart map to one set of the L1 cache.
  static constexpr bool COPY_K = D::DH % 32 != 0 || K_BYTES % 4096 == 0;
  static constexpr long Q_BYTES = DH / 2 * PANEL * 4, V_BYTES = TILE_SPAN / 32 * DV * 64, ROW = max_of(DV, TILE_KEYS);
  // Offsets in the scratch memory, in bytes.
  static constexpr long Q = 0, K = Q + PER_CHUNK * Q_BYTES, V = K + TILE_SPAN * max_of(DH, DV) * 2;
  static constexpr long S = V + V_BYTES;
  static constexpr long ACC = S + SCORE_BUFFERS * TILE_KEYS * PANEL * 4;
  static constexpr long TOP = ACC + PER_CHUNK * DV * PANEL * 4, SUM = TOP + PER_CHUNK * PANEL * 4;
  static constexpr long ROWS = SUM + PER_CHUNK * PANEL * 4, MASK = ROWS + PANEL * max_of(ROW * 4, DH * 2);
  static constexpr long END = MASK + TILE_KEYS * PANEL * 4;
};
template <class D> constexpr long attention_tiles_scratch_bytes() { return TilePlan<D>::END; }

#if NPU_AMX
// Transposes n rows of values, `stride` elements apart, into tiles [end/32][DV][32 keys], with zeros from n up to
// `end`, a multiple of 32.
template <class D> NPU_NOINLINE void transpose_values(const bf16* v, long stride, int n, int end, char* out) {
  constexpr long DV = TilePlan<D>::DV, N = transpose_block<4>();
  typedef typename vec_of<uint32_t, N>::type Words;  // of two elements
  auto load = [&](int key, long d) __attribute__((always_inline)) {
    Words words = {};
    const long have = min_of(2 * N, D::DV - d);
    if (key >= n || have <= 0) return words;
    if (have == 2 * N) memcpy(&words, v + key * stride + d, sizeof words);
    else memcpy(&words, v + key * stride + d, (size_t)have * 2);
    return words;
  };
  for (int j0 = 0; j0 < end; j0 += 32, out += DV * 64)
    for (int i0 = 0; i0 < 16; i0 += N)
      for (long d0 = 0; d0 < DV; d0 += 2 * N) {
        Words even[N], odd[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
          const int key = j0 + 2 * (i0 + i);
          const Words low = load(key, d0), high = load(key + 1, d0);
          even[i] = (low & 0xffff) | high << 16;
          odd[i] = low >> 16 | (high & 0xffff0000);
        }
        transpose_registers(even);
        transpose_registers(odd);
        char* to = out + d0 * 64 + i0 * 4;
#pragma GCC unroll 16
        for (int i = 0; i < N && d0 + 2 * i < DV; i++) {
          store_bytes(to + 2 * i * 64, even[i]);
          store_bytes(to + (2 * i + 1) * 64, odd[i]);
        }
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

// Rounds n rows of N 8-bit numbers, times their scales, to bfloat16: rows of PITCH elements, padded with zeros, and
// zero rows up to `end`.
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

// The product of tiles of A, one below the other, and a panel. A is loaded once, without a place in L1, which keeps the
// panels and the scores.
struct PanelProduct {
  const char* a;
  long tile, step, pitch;  // bytes between tiles of A, between steps of the reduced dim, and between rows
  int tiles, steps;
  const char* b;  // [16 * steps][PANEL] words
  float* c;       // [16 * tiles][PANEL]
};

template <int TILES, class Between>
NPU_INLINE void panel_tiles(const PanelProduct& x, const char* a, float* c, bool add, Between between) {
  constexpr long ROW = PANEL * 4, HALF = PANEL / 2;
  float* low = c + AMX_ROWS * PANEL;
  if (add) {
    Amx::load<0>(c, ROW), Amx::load<1>(c + HALF, ROW);
    if constexpr (TILES == 2) Amx::load<2>(low, ROW), Amx::load<3>(low + HALF, ROW);
  } else {
    Amx::zero<0>(), Amx::zero<1>();
    if constexpr (TILES == 2) Amx::zero<2>(), Amx::zero<3>();
  }
  const char* b = x.b;
  for (int s = 0; s < x.steps; s++, a += x.step, b += AMX_UNITS * ROW) {
    Amx::load<6>(b, ROW);
    Amx::stream<4>(a, x.pitch);
    Amx::dpbf16ps<0, 4, 6>();
    Amx::load<7>(b + ROW / 2, ROW);
    Amx::dpbf16ps<1, 4, 7>();
    if constexpr (TILES == 2) {
      Amx::stream<5>(a + x.tile, x.pitch);
      Amx::dpbf16ps<2, 5, 6>();
      Amx::dpbf16ps<3, 5, 7>();
    }
    between();
  }
  Amx::store<0>(c, ROW), Amx::store<1>(c + HALF, ROW);
  if constexpr (TILES == 2) Amx::store<2>(low, ROW), Amx::store<3>(low + HALF, ROW);
}

// Computes C = A B, or C += A B, and calls between() after each step of a pair of tiles.
template <class Between> NPU_NOINLINE void multiply_panel(PanelProduct x, bool add, Between between) {
  int t = 0;
  for (; t + 2 <= x.tiles; t += 2)
    panel_tiles<2>(x, x.a + t * x.tile, x.c + t * AMX_ROWS * PANEL, add, between);
  if (t < x.tiles) panel_tiles<1>(x, x.a + t * x.tile, x.c + t * AMX_ROWS * PANEL, add, between);
}

// What runs between the steps of other products: nothing, or the weights of the next `share` keys of a block.
struct Nothing {
  void operator()() const {}
};
template <class Block> NPU_NOINLINE void run_block(Block& block, int to) { block.run(to); }
template <class Block> struct Weighting {
  Block* block;
  int count, share;
  void operator()() const {
    if (block->next < count) run_block(*block, (int)min_of(count, block->next + share));
  }
};

template <class D, class E, class M>
NPU_INLINE void attention_tiles(const bf16* q, CacheRows<E> k, CacheRows<E> v, const M* mask, bf16* out, Thread& th,
                                int* counter, long keys, long first) {
  using Plan = TilePlan<D>;
  constexpr long DH = Plan::DH, DV = Plan::DV;
  constexpr bool SCALE_FIRST = !no_mask<M> || !(D::scale > 0);
  using Block = SoftmaxBlock<PairWeights, D::DV>;
  constexpr long STEPS = TILE_KEYS / 32 * (DH / 32 + ceil_div(DV, 32));  // of the products of a block
  constexpr int SHARE = (int)ceil_div(TILE_KEYS, STEPS * 4) * 4;
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

    for (long s0 = 0; s0 < chunk.visible; s0 += TILE_SPAN) {
      const int n = (int)min_of(TILE_SPAN, chunk.visible - s0), end = (n + 31) / 32 * 32;
      const long row0 = (chunk.b * D::HK + chunk.hk) * D::SK + s0;
      const CacheRows<E> k_from = k.from(chunk.b * D::k_b + chunk.hk * D::k_h + s0 * D::k_s, row0);
      const CacheRows<E> v_from = v.from(chunk.b * D::v_b + chunk.hk * D::v_h + s0 * D::v_s, row0);
      const bool copy = CacheRows<E>::SCALED || Plan::COPY_K || s0 + end > D::SK;  // whole tiles are read
      const char* k_span = copy ? scratch + Plan::K : (const char*)k_from.at;
      const long k_row = copy ? DH * 2 : Plan::K_BYTES;
      if constexpr (CacheRows<E>::SCALED) {
        bf16* decoded = (bf16*)(scratch + Plan::K);  // first values, then keys
        decode_rows<D::DV, DV>(v_from, D::v_s, n, n, decoded);
        transpose_values<D>(decoded, DV, n, end, scratch + Plan::V);
        decode_rows<D::DH, DH>(k_from, D::k_s, n, end, decoded);
      } else {
        if (copy) copy_rows<D, DH>(k_from.at, D::k_s, n, end, scratch + Plan::K);
        transpose_values<D>(v_from.at, D::v_s, n, end, scratch + Plan::V);
      }
      for (long p = 0; p < chunk.panels; p++) {
        const long visible = min_of(n, chunk.limits[p].highest - s0);
        const char* queries = scratch + Plan::Q + p * Plan::Q_BYTES;
        float *sums = acc + p * DV * PANEL, *reference = references + p * PANEL, *row_sums = row_sum + p * PANEL;
        auto seen = [&](long j0) { return (int)min_of(TILE_KEYS, visible - j0); };
        auto key_tiles = [&](long j0) { return (int)ceil_div(seen(j0), 32); };
        auto scores_of = [&](long j0) { return scores + j0 / TILE_KEYS % SCORE_BUFFERS * TILE_KEYS * PANEL; };
        auto multiply_keys = [&](long j0, auto between) {
          multiply_panel({k_span + j0 * k_row, 16 * k_row, 64, k_row, 2 * key_tiles(j0), (int)(DH / 32), queries,
                          scores_of(j0)}, false, between);
        };
        auto multiply_values = [&](long j0, auto between) {
          multiply_panel({scratch + Plan::V + j0 * DV * 2, 16 * 64, DV * 64, 64, (int)(DV / 16), key_tiles(j0),
                          (const char*)scores_of(j0), sums}, s0 + j0 > 0, between);
        };
        // A pipeline: while a block gets its weights, tiles multiply the next block's keys and the last one's values.
        long unmultiplied = -1;  // the block that has its weights
        auto flush = [&] {
          if (unmultiplied >= 0) multiply_values(unmultiplied, Nothing{});
          unmultiplied = -1;
        };
        if (visible > 0) multiply_keys(0, Nothing{});
        for (long j0 = 0; j0 < visible; j0 += TILE_KEYS) {
          float* block_scores = scores_of(j0);
          if constexpr (!no_mask<M>) {
            add_mask<TILE_KEYS>(block_scores, D::scale, mask, chunk.panel(p), s0 + j0, seen(j0), rows, transposed);
          } else if constexpr (SCALE_FIRST) {
            for (int e = 0; e < seen(j0) * PANEL; e += VL)
              store_bytes(block_scores + e, load_bytes<vf>(block_scores + e) * D::scale);
          }
          mask_beyond(block_scores, chunk.limits[p], s0 + j0, seen(j0));
          Block block(block_scores, seen(j0), SCALE_FIRST ? LOG2_E : D::scale * LOG2_E, reference, row_sums);
          block.begin(s0 + j0 == 0, flush, sums);
          const Weighting<Block> weighting{&block, 32 * key_tiles(j0), SHARE};
          if (j0 + TILE_KEYS < visible) multiply_keys(j0 + TILE_KEYS, weighting);
          if (unmultiplied >= 0) multiply_values(unmultiplied, weighting);
          run_block(block, weighting.count);
          block.end();
          unmultiplied = j0;
        }
        flush();
      }
    }
    for (long p = 0; p < chunk.panels; p++)
      store_panel(acc + p * DV * PANEL, row_sum + p * PANEL, chunk.panel(p), out, rows, Plan::ROW);
  }
  Amx::release();
}
#endif

}  // namespace npu
