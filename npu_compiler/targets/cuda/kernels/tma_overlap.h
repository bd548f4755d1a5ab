// Products whose threads store the results of a tile while the next one is multiplied (OVERLAP): a thread has the sums of
// both. Each part of the results is computed behind the start of a stage's products.
#pragma once
#include "tma_thread_stores.h"

// The sums of a tile, and where its results belong.
template <class D, class Scale, class Columns> struct OpenTile {
  TileC<D> acc;
  RowFactors<Scale> factors;
  ColumnFactors<D, Columns> factors_of_columns;
  TileRows row;
  int row0, column0;

  INLINE void begin(const Scale& scale, const Columns& columns, int t, const Thread& th) {
    const TileIndex tile = tile_index<D>(t);
    row = {tile.m * D::TILE_M + th.subgroup * 16 + (th.lane >> 2)};
    row0 = D::BATCH > 1 ? tile.batch * D::M : 0;
    column0 = tile.n * D::TILE_N;
    factors_of_columns.read(columns, column0, th.tid);
    factors.read(scale, row, th.lane);
  }
  INLINE void end(const Scale& scale, const Columns& columns, int turn, const Thread& th) {
    factors_of_columns.apply(columns, acc, turn, th);
    factors.find(scale);
  }
};

// Stores one of the STORE_PARTS of a tile's results: 32 columns of each product for one of a lane's two rows.
template <class D, class E, class Scale, class Columns>
INLINE void store_open_part(const E& epilogue, const OpenTile<D, Scale, Columns>& tile, int lane, int part) {
  typename E::Ahead ahead;
  typename E::Shared shared;
  float sums[2];
  if constexpr (D::SHARED) epilogue.read_shared(tile.column0 + part / 2 * (32 * D::PRODUCTS) + (lane & 3) * (8 * D::PRODUCTS), shared);
  store_part<D>(epilogue, tile.acc, tile.factors, tile.row, tile.row0, tile.column0, lane, ahead, shared, sums, part / 2, part % 2);
}

// Multiplies the first stages of a tile into `acc`; meanwhile stores a part of `last` behind each, if `stores`.
template <int PART, class D, class E, class Scale, class Columns>
INLINE void first_stages(TileC<D>& acc, const OpenTile<D, Scale, Columns>& last, bool stores, const Ring<D>& ring,
                         RingPosition<D::STAGES>& at, int& slot, const E& epilogue, const Thread& th) {
  multiply_stage(acc, ring, at, PART > 0, PART > 0, slot, th, [&] {
    if (stores) store_open_part<D>(epilogue, last, th.lane, PART);
  });
  if constexpr (PART + 1 < D::STORE_PARTS) first_stages<PART + 1>(acc, last, stores, ring, at, slot, epilogue, th);
}

// Multiplies tile `t` into `next`; meanwhile stores `last` if `stores`.
template <class S, class D, class E, class Scale, class Columns>
INLINE void multiply_and_store(OpenTile<D, Scale, Columns>& next, const OpenTile<D, Scale, Columns>& last, bool stores, int t,
                               int turn, const Ring<D>& ring, RingPosition<D::STAGES>& at, const E& epilogue,
                               const Scale& scale, const Columns& columns, const Thread& th) {
  next.begin(scale, columns, t, th);
  int slot = 0;
  first_stages<0>(next.acc, last, stores, ring, at, slot, epilogue, th);
#pragma unroll 1
  for (int step = D::STORE_PARTS; step < S::K_TILES; step++) multiply_stage(next.acc, ring, at, true, true, slot, th, [] {});
  wgmma_finish(next.acc);
  if (th.tid % 128 == 0) mbarrier_arrive(ring.empty + slot);
  next.end(scale, columns, turn, th);
}

template <class S, class D, class E, class Scale, class Columns>
INLINE void overlapped_tiles(const Ring<D>& ring, const E& epilogue, const Scale& scale, const Columns& columns,
                             const Thread& th) {
  RingPosition<D::STAGES> at = {0, 0};
  OpenTile<D, Scale, Columns> even, odd;
  bool stores = false;
  for (int t = th.workgroup;; t += D::STEP) {
    multiply_and_store<S>(even, odd, stores, t, 0, ring, at, epilogue, scale, columns, th);
    t += D::STEP;
    if (t >= D::TILES) break;
    multiply_and_store<S>(odd, even, true, t, 1, ring, at, epilogue, scale, columns, th);
    stores = true;
    if (t + D::STEP >= D::TILES) {
      even = odd;
      break;
    }
  }
#pragma unroll
  for (int part = 0; part < D::STORE_PARTS; part++) store_open_part<D>(epilogue, even, th.lane, part);
}
