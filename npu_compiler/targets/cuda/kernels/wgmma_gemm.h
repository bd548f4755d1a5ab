// Matrix products and convolutions by wgmma whose operands are copied by threads (gemm.h): wgmma reads both from shared
// memory while copies fill later stages.
#pragma once
#include "gemm.h"
#include "tma.h"
#include "wgmma.h"

struct SwizzledRows {
  static INLINE int at(int row, int k) { return swizzle_128(row, k / 8); }
};

template <class D, class Left, class Right, class E>
INLINE void wgmma_gemm(Left, const typename D::T* a, Right, const typename D::T* b, int* memory, const E& epilogue,
                       Thread th) {
  typedef typename D::T T;
  ASSUME(th.tid >= 0 && th.tid < D::THREADS);
  constexpr int STAGE = (D::TILE_M + D::TILE_N) * D::TILE_K, AHEAD = D::STAGES - 2;
  constexpr int STEPS = ((D::K + D::TILE_K - 1) / D::TILE_K + D::SPLITS - 1) / D::SPLITS;
  const GemmTile tile = gemm_tile<D>(th.workgroup);
  T* const ring = (T*)memory;
  const int first = tile.split * (STEPS * D::TILE_K);
  StageCopy<D, SwizzledRows, Left, D::TILE_M> left;
  StageCopy<D, SwizzledRows, Right, D::TILE_N> right;
  left.setup(tile.m * D::TILE_M, tile.batch, th.tid);
  right.setup(tile.n * D::TILE_N, tile.batch, th.tid);
  WgmmaC<D::TILE_N, typename D::Sum> acc;
  wgmma_zero(acc);
#pragma unroll
  for (int n = 0; n < AHEAD; n++) {
    if (n < STEPS) {
      left.load(ring, n * STAGE, a, first + n * D::TILE_K, th.tid);
      right.load(ring, n * STAGE + D::TILE_M * D::TILE_K, b, first + n * D::TILE_K, th.tid);
    }
    copy_async_commit();
  }
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    copy_async_wait<AHEAD - 1>();
    fence_async_shared();
    barrier();
    const T* const as = ring + step % D::STAGES * STAGE;
    wgmma_fence();
    wgmma(acc, as + th.subgroup / 4 * (64 * D::TILE_K), as + D::TILE_M * D::TILE_K);
    wgmma_commit();
    wgmma_wait<1>();  // the stage that is filled next is no longer read
    const int ahead = step + AHEAD;
    if (ahead < STEPS) {
      left.load(ring, ahead % D::STAGES * STAGE, a, first + ahead * D::TILE_K, th.tid);
      right.load(ring, ahead % D::STAGES * STAGE + D::TILE_M * D::TILE_K, b, first + ahead * D::TILE_K, th.tid);
    }
    copy_async_commit();
  }
  wgmma_finish(acc);
  copy_async_wait<0>();
  barrier();
  typename D::Sum* const results = (typename D::Sum*)memory;
  wgmma_store(results + th.subgroup * (16 * (D::TILE_N + 4)), D::TILE_N + 4, acc, th.lane);
  barrier();
  store_results<D>(epilogue, results, tile, th.tid);
}
