// Threads store the results of a product whose columns are heads, and whose epilogue needs both of two columns HEAD / 2
// apart: rotary embeddings (rotary_gemm.py). A tile has both in the sums of one lane, in two groups of 32 columns.
//
//   struct Epilogue {
//     WIDTH                                              8
//     struct Ahead                                       operands of a pair of vectors
//     template <THREADS> void begin(tid, barrier)        called by all THREADS that store, before preceding kernels end
//     void read_ahead(row, column, Ahead&)
//     void store(row, column, const Sum* near, const Sum* far, const Ahead&)
//   };
//
// `near` holds the sums of WIDTH columns from `column` on, `far` those HEAD / 2 behind them.
#pragma once
#include "tma_epilogue.h"

// The columns of a tile between the two vectors of a pair.
template <class D> INLINE constexpr int columns_apart() { return in_halves<D>() ? 32 : D::HEAD / 2; }

// The pairs of vectors of a lane, in an order in which all heads of a tile read the same operands one after the other.
template <class D> struct HeadPairs {
  static constexpr int APART = columns_apart<D>(), HEADS = D::TILE_N / (2 * APART), COUNT = D::TILE_N / 32;

  static INLINE constexpr int column(int i) { return i % HEADS * (2 * APART) + i / HEADS / 2 * 32; }  // of the tile
  static INLINE constexpr int row(int i) { return i / HEADS % 2; }
};

// Reads the operands of a lane's i-th pair.
template <class D, class E, class Rows>
INLINE void read_pair(const E& epilogue, const Rows& row, int row0, int column0, int lane, int i, typename E::Ahead& to) {
  typedef HeadPairs<D> P;
  const int m = row(P::row(i)), n = column0 + P::column(i) + (lane & 3) * 8;
  if (i < P::COUNT && m < D::M && n < D::N) epilogue.read_ahead(row0 + m, n, to);
}

// Stores a tile. `ahead`: the operands of the first PAIRS_AHEAD pairs; those of later ones are read so many pairs before.
template <class D, class E, class Rows, class Factors>
INLINE void store_heads(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row, int row0,
                        int column0, int lane, typename E::Ahead* ahead) {
  typedef HeadPairs<D> P;
#pragma unroll
  for (int i = 0; i < P::COUNT; i++) {
    const typename E::Ahead read = ahead[i % D::PAIRS_AHEAD];
    read_pair<D>(epilogue, row, row0, column0, lane, i + D::PAIRS_AHEAD, ahead[i % D::PAIRS_AHEAD]);
    const int h = P::row(i), near0 = P::column(i) / 2, far0 = near0 + P::APART / 2;  // the first sums of a group
    typename D::Sum near[8], far[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      near[e] = factors.times(acc.v[near0 + e / 2 * 4 + 2 * h + e % 2], h);
      far[e] = factors.times(acc.v[far0 + e / 2 * 4 + 2 * h + e % 2], h);
    }
    quad_transpose<1>(near, lane);
    quad_transpose<1>(far, lane);
    const int m = row(h), n = column0 + P::column(i) + (lane & 3) * 8;
    if (m < D::M && n < D::N) epilogue.store(row0 + m, n, near, far, read);
  }
}
