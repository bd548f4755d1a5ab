// Two 1x1 convolutions in a row (back to back) on Hopper: the results of the first, which TMA stores, are the left operand
// of the second while they are in shared memory.
//
// All filters stay in shared memory. A warpgroup has buffers of its own, so that its loads, products and stores overlap
// with those of other warpgroups: the pixels of a tile, then the results of the second convolution; and the residual,
// then the results of the first one, which wgmma reads as TMA stores them, in pieces of 128 bytes a row.
//
// Constants of D, in addition to those of tma_epilogue.h: PIXELS of all images; WARPGROUPS; BUFFERS of each warpgroup;
// TILES of 64 pixels; STEP: warpgroups of the launch; K: two-byte units of a pixel; COLUMNS, FINAL: results of the first
// and the second convolution; TILE_N: columns of the first that are computed at once.
#pragma once
#include "tma_gemm.h"

// The second product.
template <class D> struct FinalProduct : D {
  static constexpr int N = D::FINAL, TILE_N = D::FINAL;
  static constexpr bool KEEPS = false, RESIDUAL = false;
};

template <class D> struct B2bMemory {
  typedef Piece<D> P;
  typedef Piece<FinalProduct<D>> Q;
  static constexpr int PIECES = D::COLUMNS / P::COLUMNS;
  static constexpr int PIXELS = PIECE * D::K > Q::SIZE ? PIECE * D::K : Q::SIZE;  // units of a tile's pixels
  static constexpr int EACH = PIXELS + PIECES * P::SIZE;                          // of a buffer
  static constexpr int FILTERS = D::COLUMNS * D::K, FINAL = D::FINAL * P::UNITS;  // FINAL: for one piece of results
};

// Computes the sums of one tile of pixels, whose channels are all in shared memory.
template <class D> INLINE void multiply_once(TileC<D>& acc, const typename D::T* pixels, const typename D::T* filters) {
  wgmma_fence();
  wgmma<D::K>(acc, pixels, filters, 0);
  wgmma_commit();
  wgmma_finish(acc);
}

// Stores the results of the second product from piece N on, one after the other through the same memory.
template <class D, int N, class E>
INLINE void store_final(const E& epilogue, const TileC<D>& sums, const TileRows& row, typename D::T* memory,
                        const TensorMap& to, int y, const Thread& th) {
  typedef Piece<D> Q;
  if (N > 0) {
    if (th.tid % 128 == 0) tma_store_wait_read();
    named_barrier(1 + th.subgroup / 4, 128);
  }
  fill_pieces<D, N, N + 1, Q::SIZE, false>(epilogue, sums, RowFactors<NoRowScale>(), row, 0, th, memory, nullptr, nullptr,
                                           nullptr);
  if (th.tid % 128 == 0) {
    tma_store(to, memory, N * Q::UNITS, y, 0);
    tma_store_commit();
  }
  if constexpr (N + 1 < Q::COUNT) store_final<D, N + 1>(epilogue, sums, row, memory, to, y, th);
}

// `filters`: those of the first convolution (and of the one whose results are added: `Before`), then of the second;
// `buffers` follow. `full`: mbarriers of all buffers, then that of the filters.
template <class D, class S, class E, class F, class Before>
INLINE void b2b_conv(const Operands<S>& operands, const TensorMap& final_filters, typename D::T* filters,
                     typename D::T* buffers, int64_t* full, const E& epilogue, const F& final_epilogue,
                     const TileOutputs& to, const Before& before, const Thread& th) {
  typedef B2bMemory<D> Memory;
  typedef typename Memory::P P;
  typedef typename Memory::Q Q;
  typedef FinalProduct<D> Final;
  typedef typename D::T T;
  ASSUME(th.tid >= 0 && th.tid < D::WARPGROUPS * 128);
  constexpr int KINDS = Before::ENABLED ? 2 : 1;
  const int warpgroup = th.subgroup / 4;
  const bool leader = th.tid % 128 == 0;
  int64_t* const loaded = full + warpgroup * D::BUFFERS;
  int64_t* const ready = full + D::WARPGROUPS * D::BUFFERS;
  T* const last = filters + KINDS * Memory::FILTERS;
  T* const own = buffers + warpgroup * (D::BUFFERS * Memory::EACH);
  if (th.tid == 0) {
    for (int i = 0; i <= D::WARPGROUPS * D::BUFFERS; i++) mbarrier_init(full + i, 1);
    mbarrier_init_fence();
    mbarrier_expect_bytes(ready, (KINDS * Memory::FILTERS + Memory::PIECES * Memory::FINAL) * 2);
    tma_load(filters, operands.right, ready, 0, 0, 0);
    if constexpr (Before::ENABLED) tma_load(filters + Memory::FILTERS, before.operands.right, ready, 0, 0, 0);
    for (int n = 0; n < Memory::PIECES; n++) tma_load(last + n * Memory::FINAL, final_filters, ready, n * P::UNITS, 0, 0);
  }
  barrier();
  pdl_wait();
  const auto load = [&](int tile, int slot) {  // the pixels of the added convolution are in the place of the last piece
    if (tile >= D::TILES) return;
    T* const pixels = own + slot * Memory::EACH;
    const int y = tile * PIECE;
    mbarrier_expect_bytes(loaded + slot, (KINDS * PIECE * D::K + (D::RESIDUAL ? Memory::PIECES * P::SIZE : 0)) * 2);
    tma_load(pixels, operands.left, loaded + slot, 0, y, 0);
    if constexpr (Before::ENABLED)
      tma_load(pixels + Memory::PIXELS + (Memory::PIECES - 1) * P::SIZE, before.operands.left, loaded + slot, 0, y, 0);
    if constexpr (D::RESIDUAL) {
#pragma unroll
      for (int n = 0; n < Memory::PIECES; n++)
        tma_load(pixels + Memory::PIXELS + n * P::SIZE, *to.residual, loaded + slot, n * P::UNITS, y, 0);
    }
  };
  const int first = th.workgroup * D::WARPGROUPS + warpgroup;
  if (leader) {
    fence_async_proxy();
    for (int slot = 0; slot < D::BUFFERS; slot++) load(first + slot * D::STEP, slot);
  }
  mbarrier_wait(ready, 0);
  RingPosition<D::BUFFERS> at = {0, 0};
  for (int tile = first; tile < D::TILES; tile += D::STEP) {
    T *const pixels = own + at.slot * Memory::EACH, *const pieces = pixels + Memory::PIXELS;
    const int y = tile * PIECE;
    const TileRows row = {y + th.subgroup % 4 * 16 + (th.lane >> 2)};
    mbarrier_wait(loaded + at.slot, at.phase);
#pragma unroll
    for (int half = 0; half < D::COLUMNS / D::TILE_N; half++) {
      TileC<D> acc;
      KeptPairs<D> kept;
      if constexpr (Before::ENABLED) {
        multiply_once<D>(acc, pieces + (Memory::PIECES - 1) * P::SIZE, filters + Memory::FILTERS + half * (D::TILE_N * D::K));
        keep_pairs<D>(before.epilogue, acc, row, half * D::TILE_N, th.lane, kept);
      }
      multiply_once<D>(acc, pixels, filters + half * (D::TILE_N * D::K));
      if (Before::ENABLED && half == D::COLUMNS / D::TILE_N - 1) named_barrier(1 + warpgroup, 128);
      write_pieces<D, 0, P::COUNT, P::SIZE, D::RESIDUAL>(epilogue, acc, RowFactors<NoRowScale>(), row, half * D::TILE_N, th,
                                                         pieces + half * (P::COUNT * P::SIZE), &kept, nullptr, nullptr);
      if (D::BUFFERS > 1 && half == 0 && leader && tile != first) {
        tma_store_wait_read();
        load(tile + D::STEP * (D::BUFFERS - 1), (at.slot + D::BUFFERS - 1) % D::BUFFERS);
      }
    }
    fence_async_shared();
    named_barrier(1 + warpgroup, 128);
    if (leader) {
#pragma unroll
      for (int n = 0; n < Memory::PIECES; n++) tma_store(*to.first, pieces + n * P::SIZE, n * P::UNITS, y, 0);
      tma_store_commit();
    }
    TileC<Final> sums;
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < Memory::PIECES; n++) wgmma<P::UNITS>(sums, pieces + n * P::SIZE, last + n * Memory::FINAL, n > 0);
    wgmma_commit();
    wgmma_finish(sums);
    store_final<Final, 0>(final_epilogue, sums, row, pixels, *to.second, y, th);
    if (D::BUFFERS == 1 && leader) {
      tma_store_wait_read();
      load(tile + D::STEP, 0);
    }
    at.next();
  }
  if (leader) tma_store_wait_read();
}
