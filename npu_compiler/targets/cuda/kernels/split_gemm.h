// Products of float32 operands on the matrix unit: each is the sum of two TF32 numbers, `high` and `low`, which hold 22 of
// its 24 bits. The product is (low high + high low) + high high.
//
// The matrix unit truncates sums. Float additions therefore add up the sums of TERMS terms, and these begin with the small
// products. On average they are still 6e-8 too small, which adds up in deep networks: every other sum grows by a unit
// in the last place. Infinite operands have a `low` that is NaN: if a result is NaN, the workgroup multiplies once more without the
// small products, which gives the infinity or NaN of float arithmetic.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from tensor cores while surpassing the FP32
// theoretical peak performance" (2022), https://arxiv.org/abs/2203.03341.
// Constants: those of mma_gemm, and SMALL: there are small products; otherwise operands are rounded to TF32.
#pragma once
#include "gemm.h"

template <class D, bool SMALL> struct SplitProducts {
  typedef tf32x2 T;
  typedef MmaResults<D> R;
  CONSTANTS int TERMS = 16, PARTS = TERMS / D::FRAG_K;
  R& results;

  INLINE void add(const T* as, const T* bs, int lane) {
#pragma unroll
    for (int k = 0; k < D::TILE_K; k += TERMS) {
      FragB<T> y[PARTS][R::TILES_N];
#pragma unroll
      for (int e = 0; e < PARTS; e++)
#pragma unroll
        for (int j = 0; j < R::TILES_N; j++)
          frag_load_b(y[e][j], bs + (results.column0 + j * D::FRAG_N) * D::LD + k + e * D::FRAG_K, D::LD, lane, SMALL);
#pragma unroll
      for (int i = 0; i < R::TILES_M; i++) {
        FragA<T> x[PARTS];
        FragC sum[R::TILES_N];
#pragma unroll
        for (int e = 0; e < PARTS; e++)
          frag_load_a(x[e], as + (results.row0 + i * D::FRAG_M) * D::LD + k + e * D::FRAG_K, D::LD, lane, SMALL);
#pragma unroll
        for (int j = 0; j < R::TILES_N; j++) frag_zero(sum[j]);
        if (SMALL) {
#pragma unroll
          for (int e = 0; e < PARTS; e++)
#pragma unroll
            for (int j = 0; j < R::TILES_N; j++) frag_mma_small(sum[j], x[e], y[e][j]);
        }
#pragma unroll
        for (int e = 0; e < PARTS; e++)
#pragma unroll
          for (int j = 0; j < R::TILES_N; j++) frag_mma(sum[j], x[e].high, y[e][j].high);
#pragma unroll
        for (int j = 0; j < R::TILES_N; j++)
#pragma unroll
          for (int n = 0; n < 4; n++) {
            if (k / TERMS % 2 == 0) results.acc[i][j].v[n] += sum[j].v[n];
            else results.acc[i][j].v[n] = fmaf(sum[j].v[n], 1.00000012f, results.acc[i][j].v[n]);
          }
      }
    }
  }
};

template <class D, class Left, class Right, class E>
INLINE void split_gemm(Left, const tf32x2* a, Right, const tf32x2* b, int* memory, const E& epilogue, Thread th) {
  typedef MmaResults<D> R;
  ASSUME(th.tid >= 0 && th.tid < D::THREADS);
  const GemmTile tile = gemm_tile<D>(th.workgroup);
  MmaLoop<D, Left, Right> loop;
  loop.a = a; loop.b = b; loop.ring = (tf32x2*)memory;
  loop.setup(tile, th.tid);
  R results;
  results.setup(th.subgroup);
  SplitProducts<D, D::SMALL> products = {results};
  loop.run(products, th);
  bool found = false;
#pragma unroll
  for (int i = 0; i < R::TILES_M; i++)
#pragma unroll
    for (int j = 0; j < R::TILES_N; j++)
#pragma unroll
      for (int n = 0; n < 4; n++) found = found || isnan(results.acc[i][j].v[n]);
  if (D::SMALL && __syncthreads_or(found)) {
    volatile float kept[R::TILES_M][R::TILES_N][4];  // not in registers, which the other path needs
#pragma unroll
    for (int i = 0; i < R::TILES_M; i++)
#pragma unroll
      for (int j = 0; j < R::TILES_N; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) kept[i][j][n] = results.acc[i][j].v[n];
    results.setup(th.subgroup);
    SplitProducts<D, false> large = {results};
    loop.run(large, th);
#pragma unroll
    for (int i = 0; i < R::TILES_M; i++)
#pragma unroll
      for (int j = 0; j < R::TILES_N; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float x = kept[i][j][n];
          if (!isnan(x)) results.acc[i][j].v[n] = x;
        }
  }
  results.store(epilogue, memory, tile, th);
}
