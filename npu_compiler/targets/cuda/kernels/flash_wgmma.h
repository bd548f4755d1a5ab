// Attention of many queries on Hopper: TMA loads keys and values into a ring buffer; each warpgroup multiplies 64 rows.
//
// Scores stay in registers. The softmax of a tile of keys overlaps the product with the values of the tile before, and
// the products of the other warpgroup. The warp behind the warpgroups issues the copies.
// Source: Shah et al., "FlashAttention-3" (2024), https://arxiv.org/abs/2407.08608.
// Tiles are blocks of 64 columns, which TMA pads with zeros. Constants in addition to those of flash.h: WARPGROUPS that
// multiply; SLOTS tiles of keys or of values in the ring; TMA_STORE: rows of the output begin at multiples of 16 bytes, so
// that TMA can store it. D and DV are equal: the width of a product with values.
#pragma once
#include "flash.h"
#include "tma.h"
#include "wgmma.h"

template <class C> struct FlashWgmma {
  typedef typename C::T T;
  CONSTANTS int BLOCKS = (C::D + 63) / 64, BLOCK = C::KEYS * 64, SIZE = BLOCKS * BLOCK;  // of a tile; elements
  CONSTANTS int QUERY_BLOCK = 64 * 64, QUERIES = BLOCKS * QUERY_BLOCK;                   // of a warpgroup
  CONSTANTS int STEPS = (C::KEY_SIZE + 15) / 16;                                         // products of a score
  FlashRows<C> rows;
  T* ring;  // [SLOTS, BLOCKS, KEYS, 64]
  T* qs;    // [WARPGROUPS, BLOCKS, 64, 64]: queries, and in the end results
  int64_t* full;
  int64_t* empty;
  int64_t* queries;
  int slot, phase;

  INLINE void advance() {
    if (++slot == C::SLOTS) {
      slot = 0;
      phase ^= 1;
    }
  }

  INLINE void load_tile(const TensorMap& map, int step) {
    mbarrier_wait(empty + slot, phase);
    mbarrier_expect_bytes(full + slot, SIZE * 2);
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
      tma_load(ring + slot * SIZE + n * BLOCK, map, full + slot, n * 64, step * C::KEYS, rows.hk, rows.b);
    advance();
  }

  INLINE void load(const TensorMap& q, const TensorMap& k, const TensorMap& v, int steps) {
    fence_async_global();
    mbarrier_expect_bytes(queries, C::WARPGROUPS * QUERIES * 2);
#pragma unroll
    for (int n = 0; n < C::WARPGROUPS * BLOCKS; n++)
      tma_load(qs + n * QUERY_BLOCK, q, queries, n % BLOCKS * 64, rows.q0 + n / BLOCKS * 64, rows.h, rows.b);
    slot = 0;
    phase = 1;
    for (int step = 0; step < steps; step++) {  // in the order in which they are used
      if (step == 0) load_tile(k, 0);
      if (step + 1 < steps) load_tile(k, step + 1);
      load_tile(v, step);
    }
  }

  INLINE void release(int used) {
    if (rows.at.tid % 128 == 0) mbarrier_arrive(empty + used);
  }

  // Starts the product of queries and the next tile of keys, and returns its slot.
  INLINE int start_scores(WgmmaC<C::KEYS>& scores) {
    const int used = slot;
    wgmma_zero(scores);
    mbarrier_wait(full + used, phase);
    wgmma_fence();
    uint64_t left = wgmma_descriptor<64>(qs + rows.at.subgroup / 4 * QUERIES);
    defined_here(left);  // or else registers would hold the descriptors of all products
    const uint64_t right = wgmma_descriptor<64>(ring + used * SIZE);
#pragma unroll
    for (int k = 0; k < STEPS; k++)
      wgmma_k16(scores, left + k / 4 * (QUERY_BLOCK / 8) + k % 4 * 2, right + k / 4 * (BLOCK / 8) + k % 4 * 2, ring);
    wgmma_commit();
    advance();
    return used;
  }

  // Starts the product of weights and the next tile of values, and returns its slot.
  INLINE int start_values(WgmmaC<C::D>& results, const FragA<T>* weights) {
    const int used = slot;
    mbarrier_wait(full + used, phase);
    wgmma_fence();
    const uint64_t values = wgmma_transposed_descriptor<C::KEYS>(ring + used * SIZE);
#pragma unroll
    for (int n = 0; n < C::KEYS / 16; n++) wgmma_k16(results, weights[n], values + n * (16 * 128 / 16));
    wgmma_commit();
    advance();
    return used;
  }

  INLINE void attend(int steps, const TensorMap& output, T* out) {
    WgmmaC<C::D> results;
    wgmma_zero(results);
    FragC* const o = (FragC*)results.v;
    rows.start();
    slot = phase = 0;
    mbarrier_wait(queries, 0);
    if (steps > 0) {
      WgmmaC<C::KEYS> scores;
      FragC* const s = (FragC*)scores.v;
      FragA<T> weights[C::KEYS / 16];
      float rescaling[2];
      int keys = start_scores(scores);
      wgmma_finish(scores);
      release(keys);
      rows.softmax(s, rescaling, 0);
#pragma unroll 1
      for (int step = 1; step < steps; step++) {
#pragma unroll
        for (int n = 0; n < C::KEYS / 16; n++) frag_a_from_c(weights[n], s[2 * n], s[2 * n + 1]);
        keys = start_scores(scores);
        const int values = start_values(results, weights);
        wgmma_finish<1>(scores);
        release(keys);
        rows.softmax(s, rescaling, step);
        wgmma_finish(results);
        release(values);
        rows.rescale(o, rescaling);
      }
#pragma unroll
      for (int n = 0; n < C::KEYS / 16; n++) frag_a_from_c(weights[n], s[2 * n], s[2 * n + 1]);
      const int values = start_values(results, weights);
      wgmma_finish(results);
      release(values);
    }
    if (C::TMA_STORE) store(o, output);
    else rows.store(o, out);
  }

  // The results of a warpgroup take the place of its queries, from where TMA stores them: exchanges between lanes until
  // each has a vector would be three times as many instructions, which run once and must all be fetched.
  INLINE void store(const FragC* o, const TensorMap& output) {
    const int warpgroup = rows.at.subgroup / 4, row = rows.at.subgroup % 4 * 16 + (rows.at.lane & 15);
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = frag_row_sum(rows.row_sum[r]);
      scale[r] = total > 0.0f ? 1.0f / total : 0.0f;
    }
    T* const own = qs + warpgroup * QUERIES;
#pragma unroll
    for (int n = 0; n < C::D / 16; n++) {
      uint pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* const x = o[2 * n + i / 2].v + i % 2 * 2;
        pairs[i] = pack_pair(x[0] * scale[i % 2], x[1] * scale[i % 2], (T*)nullptr);
      }
      stmatrix_x4(own + n / 4 * QUERY_BLOCK + swizzle_128(row, n % 4 * 2 + (rows.at.lane >> 4)), pairs);
    }
    fence_async_shared();
    named_barrier(1 + warpgroup, 128);
    if (rows.at.tid % 128 == 0) {
#pragma unroll
      for (int n = 0; n < BLOCKS; n++)
        tma_store(output, own + n * QUERY_BLOCK, n * 64, rows.q0 + warpgroup * 64, rows.h, rows.b);
      tma_store_commit();
      tma_store_wait_read();
    }
  }
};

// barriers: [2 * SLOTS + 1], mbarriers of full and of empty slots, and of the queries. `output`: its tiles, if
// TMA_STORE; otherwise threads store to `out`.
template <class C>
INLINE void flash_wgmma(
    const TensorMap& q, const TensorMap& k, const TensorMap& v, const TensorMap& output, const typename C::Mask* mask,
    const int64_t* positions, typename C::T* out, typename C::T* ring, typename C::T* qs, int64_t* barriers, int* limit, Thread at) {
  FlashWgmma<C> f;
  const int tiles = (C::SQ + C::ROWS - 1) / C::ROWS, heads = C::H * C::B;
  f.rows.q0 = (tiles - 1 - at.workgroup / heads) * C::ROWS;  // tiles with the most keys first
  f.rows.h = at.workgroup % C::H;
  f.rows.b = at.workgroup % heads / C::H;
  f.rows.hk = f.rows.h / C::HEADS_PER_KV;
  f.rows.mask = mask;
  f.rows.positions = positions;
  f.rows.limit = limit;
  f.rows.at = at;
  f.ring = ring;
  f.qs = qs;
  f.full = barriers;
  f.empty = barriers + C::SLOTS;
  f.queries = barriers + 2 * C::SLOTS;
  if (at.tid == 0) {
    for (int i = 0; i < C::SLOTS; i++) {
      mbarrier_init(f.full + i, 1);
      mbarrier_init(f.empty + i, C::WARPGROUPS);
    }
    mbarrier_init(f.queries, 1);
    mbarrier_init_fence();
    tma_prefetch(q);
    tma_prefetch(k);
    tma_prefetch(v);
  }
  barrier();
  f.rows.range();
  const int steps = (f.rows.valid + C::KEYS - 1) / C::KEYS;
  if (at.subgroup >= C::WARPGROUPS * 4) {
    if (C::WARPGROUPS == 2) fewer_registers<40>();
    if (at.subgroup == C::WARPGROUPS * 4 && at.lane == 0) f.load(q, k, v, steps);
  } else {
    if (C::WARPGROUPS == 2) more_registers<232>();
    f.attend(steps, output, out);
  }
}
