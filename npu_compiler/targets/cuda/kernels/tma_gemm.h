// Matrix products and convolutions on Hopper: persistent thread blocks process tiles of the result, and the next tile's
// operands are loaded while results are stored. A block has one producer warp and TILE_M / 64 warpgroups
// (tma_mainloop.h). If there are few tiles, the blocks of a cluster share each tile (split-K): they exchange partial
// sums, and each adds up its share of the rows, in order (tma_thread_stores.h). With OVERLAP, threads store the results
// themselves while they multiply the next tile (tma_overlap.h).
//
//   tma_gemm<D>(Operands<S>{left, right}, ring, full, parts, epilogue, scale, columns, {out, out1, residual}, row_sums,
//               NoSum(), NoDecoder(), th)
#pragma once
#include "tma_float_sums.h"
#include "tma_overlap.h"
#include "tma_result_stages.h"

// An earlier product whose results stay in registers, as a second operand of the epilogue (dual_conv.py).
struct NoSum {
  static constexpr bool ENABLED = false;
};
template <class S, class E> struct KeptSum {
  static constexpr bool ENABLED = true;
  Operands<S> operands;
  E epilogue;
};
template <class S, class E> INLINE KeptSum<S, E> keep(const Operands<S>& operands, const E& epilogue) {
  return {operands, epilogue};
}

// The right operand is loaded as it is. Decoder (tma_decoder.h) decodes weights.
struct NoDecoder {
  static constexpr bool ENABLED = false;
  static constexpr int COPIERS = 0;
};

template <class D> struct OneOutput : D {
  static constexpr int OUTPUTS = 1, SUM_ROWS = 0;
  static constexpr bool KEEPS = false;
};

// Keeps the results of an earlier product.
template <class D, class E>
INLINE void keep_pairs(const E& epilogue, const TileC<D>& acc, const TileRows& row, int column0, int lane,
                       KeptPairs<D>& kept) {
#pragma unroll
  for (int q = 0; q < D::TILE_N / 16; q++) {
    typename E::Ahead none[4];
    const auto keep = [&](int, int i, float left, float right) { kept.put(4 * q + i, left, right); };
    compute_pairs<OneOutput<D>>(epilogue, acc, RowFactors<NoRowScale>(), row, column0, lane, q, nullptr, none, nullptr,
                                keep, nullptr);
  }
}

template <class D, class S, class E, class Scale, class Columns, class Before, class Decoder>
INLINE void tma_gemm(const Operands<S>& operands, typename D::T* slots, int64_t* full, typename D::Sum* parts,
                     const E& epilogue, const Scale& scale, const Columns& columns, const TileOutputs& to, float* row_sums,
                     const Before& before, const Decoder& decoder, const Thread& th) {
  constexpr int CONSUMERS = D::TILE_M / 64 * 4, COPIERS = CONSUMERS + D::DECODERS;  // the first warps of each kind
  constexpr int PRODUCER = COPIERS + Decoder::COPIERS;                                // the warp that issues loads
  ASSUME(th.tid >= 0 && th.tid < PRODUCER * 32 + D::LOADERS * 32);
  int64_t* const sent = full + 2 * D::STAGES;  // of the partial sums, if SPLITS > 1
  const Ring<D> ring = {slots, full, full + D::STAGES, D::LIMBS ? sent + (D::SPLITS > 1) : full};
  const int rank = D::SPLITS > 1 ? cluster_rank() : 0;
  if (th.tid == 0) {
    if constexpr (Decoder::ENABLED) decoder.template init<D>();
    if constexpr (D::SPLITS > 1) {
      mbarrier_init(sent, 1);
      mbarrier_expect_bytes(sent, (D::SPLITS - 1) * (D::TILE_M / D::SPLITS) * D::TILE_N * 4);
    }
    init_ring(ring);
  }
  if (D::SPLITS > 1) cluster_start();
  else barrier();
  if (th.subgroup >= PRODUCER) {
    if constexpr (D::FEWER_REGISTERS > 0) fewer_registers<D::FEWER_REGISTERS>();
    if constexpr (D::LIMBS) {
      if (th.subgroup > PRODUCER) split_stages<D, S>(ring, th.workgroup / D::SPLITS, rank, th.subgroup - PRODUCER - 1, th.lane);
    }
    if (th.subgroup == PRODUCER && th.lane == 0) {
      if constexpr (Before::ENABLED) {
        tma_prefetch(before.operands.left);
        tma_prefetch(before.operands.right);
      }
      tma_prefetch(operands.left);
      tma_prefetch(operands.right);
      if constexpr (D::PRIMED > 0) {
        const TileIndex tile = tile_index<D>(th.workgroup / D::SPLITS);
        if constexpr (Before::ENABLED) prime(ring, before.operands, tile, rank);
        else prime(ring, operands, tile, rank);
      }
      pdl_wait();
      fence_async_global();
      RingPosition<D::STAGES> at = {0, 1};
      int count = 0;
      for (int t = th.workgroup / D::SPLITS; t < D::TILES; t += D::STEP) {
        const TileIndex tile = tile_index<D>(t);
        if constexpr (Before::ENABLED)
          load_stages<D::PRIMED>(ring, before.operands, at, count, tile, rank);
        load_stages<Before::ENABLED ? 0 : D::PRIMED>(ring, operands, at, count, tile, rank);
        if constexpr (D::RESULT_STAGES > 0) ResultStages<D>::template prefill<0>(ring, at, tile, to);
      }
    }
    return;
  }
  if constexpr (Decoder::ENABLED) {
    if (th.subgroup >= CONSUMERS) {
      const int tile = th.workgroup / D::SPLITS;
      if (th.subgroup >= COPIERS) decoder.template copy<S, D>(tile, rank, th.subgroup - COPIERS, th.lane);
      else decoder.template decode<S, D>(ring, tile, rank, th.subgroup - CONSUMERS, th.lane);
      return;
    }
  }
  if constexpr (D::FEWER_REGISTERS > 0) more_registers<D::MORE_REGISTERS>();
  if constexpr (D::HEAD > 0) epilogue.template begin<D::TILE_M * 2>(th.tid, 1 + D::TILE_M / 64);
  pdl_wait();
  if constexpr (D::OVERLAP) {
    overlapped_tiles<S>(ring, epilogue, scale, columns, th);
    return;
  }
  RingPosition<D::STAGES> at = {0, 0};
  ReleaseResults<D> release = {ring, th.tid, -1};
  int turn = 0;
  for (int t = th.workgroup / D::SPLITS; t < D::TILES; t += D::STEP, turn++) {
    const TileIndex tile = tile_index<D>(t);
    const TileRows row = {tile.m * D::TILE_M + th.subgroup * 16 + (th.lane >> 2)};
    const int row0 = D::BATCH > 1 ? tile.batch * D::M : 0, column0 = first_column<D>(tile.n);
    TileC<D> acc;
    ColumnFactors<D, Columns> factors_of_columns;
    factors_of_columns.read(columns, column0, th.tid);
    if constexpr (D::SPLITS > 1) {
      typedef Share<D, E> Vector;
      typename E::Ahead ahead[Vector::VECTORS];
      ShareFactors<D, Scale> factors;
      factors.read(scale, tile, rank, th.tid);
      if constexpr (D::READ_AHEAD) {
#pragma unroll
        for (int i = 0; i < Vector::VECTORS; i++) {
          const Vector v(i, th.tid, rank, tile);
          if (v.inside()) epilogue.read_ahead(row0 + v.m, v.n / D::PRODUCTS, ahead[i]);
        }
      }
      multiply_stages<S>(acc, ring, at, rank, th, release);
      if constexpr (D::LIMBS) replace_nan<D>(acc, operands, tile, rank, row, th.lane);
      factors_of_columns.apply(columns, acc, turn, th);
      factors.find(scale, (float*)parts, th.tid);
      store_share<D, E, Scale>(epilogue, acc, parts, sent, ahead, tile, rank, th, row_sums);
    } else {
      constexpr int GROUPS = D::TILE_N / (32 * D::PRODUCTS);
      constexpr int AHEAD = D::HEAD ? D::PAIRS_AHEAD : D::READ_AHEAD ? 2 * GROUPS : 1;
      typename E::Ahead ahead[AHEAD];
      if constexpr (D::HEAD > 0) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) read_pair<D>(epilogue, row, row0, column0, th.lane, i, ahead[i]);
      } else if constexpr (D::READ_AHEAD) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int m = row(h), n = column0 + g * (32 * D::PRODUCTS) + (th.lane & 3) * (8 * D::PRODUCTS);
            if (m < D::M && n < D::N) epilogue.read_ahead(row0 + m, n / D::PRODUCTS, ahead[2 * g + h]);
          }
      }
      RowFactors<Scale> factors;
      factors.read(scale, row, th.lane);
      KeptPairs<D> kept;
      if constexpr (Before::ENABLED) {
        multiply_stages<typename decltype(before.operands)::S>(acc, ring, at, rank, th, release);
        keep_pairs<D>(before.epilogue, acc, row, column0, th.lane, kept);
        release.held = -1;
      }
      multiply_stages<S>(acc, ring, at, rank, th, release);
      if constexpr (D::LIMBS) replace_nan<D>(acc, operands, tile, rank, row, th.lane);
      factors_of_columns.apply(columns, acc, turn, th);
      factors.find(scale);
      float sums[2] = {};
      if constexpr (D::RESULT_STAGES > 0) {
        release.held = at.slot;
        ResultStages<D>::template store<0>(epilogue, acc, factors, row, ring, at, tile, to, th,
                                           &kept, sums);
      } else if constexpr (D::HEAD > 0) {
        store_heads<D>(epilogue, acc, factors, row, row0, column0, th.lane, ahead);
      } else {
        store_tile<D>(epilogue, acc, factors, row, row0, column0, th.lane, ahead, nullptr, sums);
      }
      if constexpr (D::SUM_ROWS > 0) store_row_sums<D>(row_sums, sums, row, tile.n, th.lane);
    }
  }
  if (D::RESULT_STAGES && th.tid % 128 == 0) tma_store_wait_read();
}
