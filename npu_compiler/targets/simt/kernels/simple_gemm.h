// The products of gemm.h in the arithmetic of the sums, without the matrix unit.
//
// A thread computes ROWS x COLUMNS results of a tile, in blocks of 4 x 4 that are spread over the tile, so that the
// threads of a subgroup read neighbours from shared memory. Two buffers hold TILE_K terms of the operands, transposed;
// while one is multiplied, the next terms are loaded into registers.
//
// Constants of D in addition to those of gemm.h: ROWS, COLUMNS.
#pragma once
#include "gemm.h"

// One thread's share of TILE_K terms of TILE rows of an operand.
template <class D, class S, int TILE> struct SimpleCopy {
  typedef typename S::O O;
  typedef typename O::T T;
  CONSTANTS int EACH = O::VECTORS ? 16 / (int)sizeof(T) : 1, PER_ROW = D::TILE_K / EACH;
  CONSTANTS int CHUNKS = TILE * PER_ROW, COUNT = (CHUNKS + D::THREADS - 1) / D::THREADS;
  CONSTANTS int POSITIONS = O::ALONG_K || D::THREADS % TILE != 0 ? COUNT : 1;  // different rows
  CONSTANTS int PITCH = TILE + 4;                                                // elements between two terms
  typename S::Row rows[POSITIONS];
  Vec<T, EACH> values[COUNT];

  static INLINE int row(int chunk) { return O::ALONG_K ? chunk / PER_ROW : chunk % TILE; }
  static INLINE int term(int chunk) { return (O::ALONG_K ? chunk % PER_ROW : chunk / TILE) * EACH; }
  INLINE void setup(int first, int batch, int tid) {
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) rows[i] = S::row(first + row(tid + i * D::THREADS), batch);
  }
  INLINE void load(DEVICE const T* from, int k0, int tid) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int chunk = tid + i * D::THREADS, k = k0 + term(chunk), n = POSITIONS == 1 ? 0 : i;
      const bool exists = (CHUNKS % D::THREADS == 0 || chunk < CHUNKS) && S::has(rows[n], k);
      Vec<T, EACH> v = {};
      if (exists) v = *(DEVICE const Vec<T, EACH>*)(from + S::at(rows[n], k));
      values[i] = v;
    }
  }
  template <class Sum> INLINE void store(SMEM Sum* to, int tid) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int chunk = tid + i * D::THREADS;
      if (CHUNKS % D::THREADS == 0 || chunk < CHUNKS) {
#pragma unroll
        for (int e = 0; e < EACH; e++) to[(term(chunk) + e) * PITCH + row(chunk)] = (Sum)widen(values[i].v[e]);
      }
    }
  }
};

// The position in a tile of `size` rows of row i of `count` that thread number `at` along this side has.
INLINE int simple_place(int size, int count, int at, int i) { return i / 4 * (size / (count / 4)) + at * 4 + i % 4; }

template <class D, class Left, class Right, class E>
INLINE void simple_gemm(Left, DEVICE const typename Left::O::T* a, Right, DEVICE const typename Right::O::T* b,
                        SMEM typename D::Sum* as, SMEM typename D::Sum* bs, THREAD const E& epilogue, Thread th) {
  typedef typename D::Sum Sum;
  ASSUME(th.tid >= 0 && th.tid < D::THREADS);
  SimpleCopy<D, Left, D::TILE_M> left;
  SimpleCopy<D, Right, D::TILE_N> right;
  const int left_size = D::TILE_K * (D::TILE_M + 4), right_size = D::TILE_K * (D::TILE_N + 4);  // of a buffer
  const GemmTile tile = gemm_tile<D>(th.workgroup);
  const int steps = (D::K + D::TILE_K * D::SPLITS - 1) / (D::TILE_K * D::SPLITS);
  const int first = tile.split * steps * D::TILE_K;
  const int tx = th.tid % (D::TILE_N / D::COLUMNS), ty = th.tid / (D::TILE_N / D::COLUMNS);
  left.setup(tile.m * D::TILE_M, tile.batch, th.tid);
  right.setup(tile.n * D::TILE_N, tile.batch, th.tid);
  left.load(a, first, th.tid);
  right.load(b, first, th.tid);
  left.store(as, th.tid);
  right.store(bs, th.tid);
  barrier();
  Sum acc[D::ROWS][D::COLUMNS] = {};
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const int next = first + (step + 1) * D::TILE_K;
    if (step + 1 < steps) {
      left.load(a, next, th.tid);
      right.load(b, next, th.tid);
    }
    SMEM const Sum* const xs = as + step % 2 * left_size;
    SMEM const Sum* const ys = bs + step % 2 * right_size;
    Sum sum[D::ROWS][D::COLUMNS] = {};  // partial sums reduce the rounding error
#pragma unroll
    for (int k = 0; k < D::TILE_K; k++) {
      Sum x[D::ROWS], y[D::COLUMNS];
#pragma unroll
      for (int i = 0; i < D::ROWS; i++) x[i] = xs[k * (D::TILE_M + 4) + simple_place(D::TILE_M, D::ROWS, ty, i)];
#pragma unroll
      for (int j = 0; j < D::COLUMNS; j++) y[j] = ys[k * (D::TILE_N + 4) + simple_place(D::TILE_N, D::COLUMNS, tx, j)];
#pragma unroll
      for (int i = 0; i < D::ROWS; i++)
#pragma unroll
        for (int j = 0; j < D::COLUMNS; j++) sum[i][j] += x[i] * y[j];
    }
#pragma unroll
    for (int i = 0; i < D::ROWS; i++)
#pragma unroll
      for (int j = 0; j < D::COLUMNS; j++) acc[i][j] += sum[i][j];
    if (step + 1 < steps) {
      left.store(as + (step + 1) % 2 * left_size, th.tid);
      right.store(bs + (step + 1) % 2 * right_size, th.tid);
    }
    barrier();
  }
#pragma unroll
  for (int i = 0; i < D::ROWS; i++) {
    const int m = tile.m * D::TILE_M + simple_place(D::TILE_M, D::ROWS, ty, i);
    if (m >= D::M) continue;
#pragma unroll
    for (int j = 0; j < D::COLUMNS; j += E::WIDTH * D::PRODUCTS) {
      const int n = tile.n * D::TILE_N + simple_place(D::TILE_N, D::COLUMNS, tx, j);
      if (n < D::N) epilogue.store(gemm_row<D>(tile, m), gemm_column<D>(tile, n), acc[i] + j);
    }
  }
}
