// The main loop of products on Hopper: a producer warp issues TMA loads of both operands into a ring buffer in shared
// memory; each warpgroup multiplies 64 rows of a tile. The epilogue is in tma_epilogue.h.
//
// Types of D: T, a b16 element of the operands; Sum, of the accumulators; R, of the results. Constants: M, N; BATCH of
// products, each with its own right operand if BATCHED_RIGHT; FOURS: the right operand consists of groups of four rows
// (weights/block_rows.py); N_MAJOR: the right operand is [K, N], loaded in tiles of 64 columns; ROUNDED: elements are
// floats, and the left ones are rounded to TF32; LIMBS: elements are floats that are split (float_limbs.h), the right
// ones by SPLITTERS warps, SPLIT_TEAM of them each stage; HEAD: columns of a head if a thread needs both of two columns
// HEAD / 2 apart (tma_head_stores.h), else 0; TILE_M, TILE_N, TILE_K, which counts b16 elements; STAGES of the ring;
// TILES of the result, of which a block processes every STEP-th; SPLITS: blocks of a cluster that share a tile, each
// with a part of K (split-K); PRIMED: stages whose right operand, weights, is loaded before preceding kernels end;
// DECODERS: warps that decode the right operand, TEAM of them each stage (tma_decoder.h); PRODUCTS 2: columns alternate
// between two products, which the epilogue combines.
//
// Constants of S, a product of the kernel: K_TILES; IM2COL: rows of the left operand are pixels of the result, and K
// runs over taps and channels; then OH, OW, KERNEL_W, STRIDE_H, STRIDE_W, PAD_TOP, PAD_LEFT, DILATION_H, DILATION_W,
// CHANNELS, and CHANNEL_TILES of K in each tap. If LIMBS, those of tma_float_sums.h, too.
#pragma once
#include "float_limbs.h"
#include "tma.h"
#include "wgmma.h"

// -- tiles of the result, in bands of rows, so that concurrent thread blocks share operands in the L2 cache
constexpr int BAND = 16;

struct TileIndex {
  int m, n, batch;
};

template <class D> INLINE TileIndex tile_index(int t) {
  constexpr int TILES_M = (D::M + D::TILE_M - 1) / D::TILE_M, TILES_N = (D::N + D::TILE_N - 1) / D::TILE_N;
  const int batch = D::BATCH > 1 ? t / (TILES_M * TILES_N) : 0;
  const int inner = D::BATCH > 1 ? t % (TILES_M * TILES_N) : t;
  if (TILES_M <= BAND) return {inner % TILES_M, inner / TILES_M, batch};
  const int band = inner / (BAND * TILES_N) * BAND, inside = inner % (BAND * TILES_N);
  const int high = TILES_M - band < BAND ? TILES_M - band : BAND;
  return {band + inside % high, inside / high, batch};
}

// -- the columns of a tile. If it is narrower than a head, it consists of 32 columns and those HEAD / 2 behind them.
template <class D> INLINE constexpr bool in_halves() { return D::HEAD > D::TILE_N; }
template <class D> INLINE int first_column(int tile_n) {
  if constexpr (in_halves<D>()) {
    static_assert(D::TILE_N == 64, "two halves of 32 columns");
    constexpr int TILES = D::HEAD / D::TILE_N;
    return tile_n / TILES * D::HEAD + tile_n % TILES * 32;
  }
  return tile_n * D::TILE_N;
}
// What follows first_column() to the column of a tile's c-th one.
template <class D> INLINE constexpr int column_offset(int c) { return in_halves<D>() && c >= 32 ? c + D::HEAD / 2 - 32 : c; }

template <class D> using TileC = WgmmaC<D::TILE_N, typename D::Sum>;  // the sums of a thread

// -- the ring buffer
template <class D> struct Ring {
  static constexpr int LOADED = (D::TILE_M + D::TILE_N) * D::TILE_K;  // elements of the left, then of the right operand
  static constexpr int STAGE = LOADED + (D::LIMBS ? D::TILE_N * LIMB_FLOATS : 0);
  typename D::T* slots;
  int64_t *full, *empty, *loaded;  // `loaded`, by TMA, is `full`, unless warps split the right operand before
  INLINE typename D::T* stage(int slot) const { return slots + slot * STAGE; }
};

template <class D> INLINE void init_ring(const Ring<D>& ring) {
  for (int i = 0; i < D::STAGES; i++) {
    mbarrier_init(ring.full + i, D::DECODERS ? 1 + D::TEAM : 1);  // TMA's bytes, and the warp that decodes weights
    mbarrier_init(ring.empty + i, D::TILE_M / 64);
    if (D::LIMBS) mbarrier_init(ring.loaded + i, 1);
  }
  mbarrier_init_fence();
}

// -- operands
template <class S_> struct Operands {
  typedef S_ S;
  const TensorMap &left, &right;
  const float *left_floats, *right_floats;  // if LIMBS
};

struct Range {
  int first, last;
};
template <class D, class S> INLINE Range k_tiles(int rank) {
  if (D::SPLITS == 1) return {0, S::K_TILES};
  return {rank * S::K_TILES / D::SPLITS, (rank + 1) * S::K_TILES / D::SPLITS};
}

// The first b16 element of a step along K. Channels that do not fill the last tile of a tap are zeros in the left operand.
template <class D, class S> INLINE int first_element(int step) {
  if constexpr (S::IM2COL) {
    if (S::CHANNELS < S::CHANNEL_TILES * D::TILE_K)
      return step / S::CHANNEL_TILES * S::CHANNELS + step % S::CHANNEL_TILES * D::TILE_K;
  }
  return step * D::TILE_K;
}

template <class D, class S>
INLINE void load_right(const Ring<D>& ring, const Operands<S>& from, int slot, int step, TileIndex tile) {
  typename D::T* const to = ring.stage(slot) + D::TILE_M * D::TILE_K;
  const int k = first_element<D, S>(step), first = first_column<D>(tile.n), batch = D::BATCHED_RIGHT ? tile.batch : 0;
  constexpr int COLUMNS = D::N_MAJOR ? 64 : in_halves<D>() ? 32 : D::TILE_N;  // of a load
#pragma unroll
  for (int i = 0; i < D::TILE_N; i += COLUMNS) {
    const int n = first + column_offset<D>(i);
    if (D::FOURS) tma_load(to + i * D::TILE_K, from.right, ring.loaded + slot, k, 0, n / 4);
    else if (D::N_MAJOR) tma_load(to + i * D::TILE_K, from.right, ring.loaded + slot, n, k, batch);
    else tma_load(to + i * D::TILE_K, from.right, ring.loaded + slot, k, n, batch);
  }
}

// Loads the first PRIMED stages of weights, which do not depend on preceding kernels.
template <class D, class S> INLINE void prime(const Ring<D>& ring, const Operands<S>& from, TileIndex tile, int rank) {
  for (int i = 0; i < D::PRIMED; i++) {
    mbarrier_expect_bytes(ring.loaded + i, Ring<D>::LOADED * 2);
    load_right(ring, from, i, k_tiles<D, S>(rank).first + i, tile);
  }
}

// Loads the stages of a product. `count`: the stages loaded so far; the right operand of the first PRIMED was loaded by
// prime().
template <int PRIMED, class D, class S>
INLINE void load_stages(const Ring<D>& ring, const Operands<S>& from, RingPosition<D::STAGES>& at, int& count,
                        TileIndex tile, int rank) {
  const Range range = k_tiles<D, S>(rank);
  const int row = tile.m * D::TILE_M;
  int image = 0, y0 = 0, x0 = 0;
  if constexpr (S::IM2COL) {
    image = row / (S::OH * S::OW);
    y0 = row / S::OW % S::OH * S::STRIDE_H - S::PAD_TOP;
    x0 = row % S::OW * S::STRIDE_W - S::PAD_LEFT;
  }
  for (int step = range.first; step < range.last; step++) {
    if (PRIMED == 0 || count >= PRIMED) {
      mbarrier_wait(ring.empty + at.slot, at.phase);
      mbarrier_expect_bytes(ring.loaded + at.slot, D::DECODERS ? D::TILE_M * D::TILE_K * 2 : Ring<D>::LOADED * 2);
      if (!D::DECODERS) load_right(ring, from, at.slot, step, tile);
    }
    if constexpr (S::IM2COL) {
      const int tap = step / S::CHANNEL_TILES, c = step % S::CHANNEL_TILES * D::TILE_K;
      tma_load_im2col(ring.stage(at.slot), from.left, ring.loaded + at.slot, c, x0, y0, image,
                      tap % S::KERNEL_W * S::DILATION_W, tap / S::KERNEL_W * S::DILATION_H);
    } else {
      tma_load(ring.stage(at.slot), from.left, ring.loaded + at.slot, step * D::TILE_K, row,
               D::BATCH > 1 ? tile.batch : 0);
    }
    count++;
    at.next();
  }
}

// Splits right operands of a thread block, whose first tile is `t`. Each team of SPLIT_TEAM warps splits every so many-th
// stage. An mbarrier only tells neighbouring phases apart, and loads may end in any order: a team waits until the stage
// before in a slot is free, or it could take that one's load for its own.
template <class D, class S> INLINE void split_stages(const Ring<D>& ring, int t, int rank, int warp, int lane) {
  constexpr int TEAM = D::SPLIT_TEAM, TEAMS = D::SPLITTERS / TEAM;
  static_assert(TEAMS <= D::STAGES, "teams stay in neighbouring phases");
  static_assert(D::RESULT_STAGES == 0, "all stages are split");
  const Range range = k_tiles<D, S>(rank);
  const int steps = range.last - range.first, last = t < D::TILES ? ((D::TILES - 1 - t) / D::STEP + 1) * steps : 0;
  const int team = warp / TEAM, member = warp % TEAM;
  if (team >= TEAMS) return;
#pragma unroll 1
  for (int step = team; step < last; step += TEAMS) {
    const int slot = step % D::STAGES, phase = step / D::STAGES & 1;
    mbarrier_wait(ring.empty + slot, phase ^ 1);
    mbarrier_wait(ring.loaded + slot, phase);
    split_rows<D::TILE_N, TEAM>(ring.stage(slot) + D::TILE_M * D::TILE_K, member, lane);
    fence_async_shared();
    if (TEAM > 1) named_barrier(SPLIT_BARRIER + team, TEAM * 32);
    else subgroup_barrier();
    if (member == 0 && lane == 0) mbarrier_arrive(ring.full + slot);
  }
}

// -- products
// Starts the products of one stage and calls meanwhile(). Then the stage before, `slot`, is free if this tile used it. If
// ROUNDED, it is free before: the products of the stage before have to end before registers hold other left operands.
template <class D, class F>
INLINE void multiply_stage(TileC<D>& acc, const Ring<D>& ring, RingPosition<D::STAGES>& at, bool accumulate, bool release,
                           int& slot, const Thread& th, const F& meanwhile) {
  const auto release_last = [&] {
    if (release && th.tid % 128 == 0) mbarrier_arrive(ring.empty + slot);
  };
  mbarrier_wait(ring.full + at.slot, at.phase);
  typename D::T* const left = ring.stage(at.slot);
  const typename D::T *const rows = left + th.subgroup / 4 * (64 * D::TILE_K), *const right = left + D::TILE_M * D::TILE_K;
  if constexpr (D::ROUNDED) {
    wgmma_wait<0>();
    release_last();
    RoundedRows<D::TILE_K> rounded;
    rounded.load(rows + th.subgroup % 4 * (16 * D::TILE_K), th.lane);
    wgmma_fence();
    rounded.multiply(acc, right, accumulate);
  } else {
    wgmma_fence();
    if constexpr (D::N_MAJOR) wgmma_n_major<D::TILE_K>(acc, rows, right, accumulate);
    else wgmma<D::TILE_K>(acc, rows, right, accumulate);
  }
  wgmma_commit();
  meanwhile();
  if constexpr (!D::ROUNDED) {
    wgmma_wait<1>();
    release_last();
  }
  slot = at.slot;
  at.next();
}

// Computes the sums of the stages of a tile from `range.first` to `range.last`; `slot` is the last one that was used.
template <class S, class D, class F>
INLINE void multiply_range(TileC<D>& acc, const Ring<D>& ring, RingPosition<D::STAGES>& at, Range range, int first,
                           int& slot, const Thread& th, const F& meanwhile) {
#pragma unroll 1
  for (int step = range.first; step < range.last; step++)
    multiply_stage(acc, ring, at, step > range.first, step > first, slot, th, [&] { meanwhile(step == first); });
  wgmma_finish(acc);
}

// Computes the sums of a tile of floats: those of each stage are added up in float32.
template <class D, class F>
INLINE void multiply_floats(TileC<D>& acc, const Ring<D>& ring, RingPosition<D::STAGES>& at, Range range, const Thread& th,
                            const F& meanwhile) {
  wgmma_zero(acc);
#pragma unroll 1
  for (int step = range.first; step < range.last; step++) {
    typename D::T* const left = ring.stage(at.slot);
    mbarrier_wait(ring.loaded + at.slot, at.phase);
    mbarrier_wait(ring.full + at.slot, at.phase);
    LimbRows rows;
    rows.load(left + th.subgroup * (16 * D::TILE_K), th.lane);
    TileC<D> sum;
    wgmma_fence();
    rows.multiply(sum, left + D::TILE_M * D::TILE_K);
    wgmma_commit();
    meanwhile(step == range.first);
    wgmma_finish(sum);
    if (th.tid % 128 == 0) mbarrier_arrive(ring.empty + at.slot);
#pragma unroll
    for (int i = 0; i < D::TILE_N / 2; i++) acc.v[i] = add_stage(acc.v[i], sum.v[i], step);
    at.next();
  }
}

// Computes the sums of a tile. `meanwhile(first)` is called during each product. Afterwards all of the tile's stages
// are free, except for the last one if SPLITS > 1. If PROMOTED, sums of so many stages are added up in float32, because
// the matrix unit adds products of 8-bit floats with about 14 bits.
template <class S, class D, class F>
INLINE void multiply_stages(TileC<D>& acc, const Ring<D>& ring, RingPosition<D::STAGES>& at, int rank,
                            const Thread& th, const F& meanwhile) {
  const Range range = k_tiles<D, S>(rank);
  int slot = 0;
  if constexpr (D::LIMBS) {
    multiply_floats(acc, ring, at, range, th, meanwhile);
  } else if constexpr (D::PROMOTED > 0) {
    wgmma_zero(acc);
#pragma unroll 1
    for (int step = range.first; step < range.last; step += D::PROMOTED) {
      const int end = step + D::PROMOTED;
      TileC<D> sum;
      multiply_range<S>(sum, ring, at, {step, end < range.last ? end : range.last}, range.first, slot, th, meanwhile);
#pragma unroll
      for (int i = 0; i < D::TILE_N / 2; i++) acc.v[i] += sum.v[i];
    }
  } else {
    multiply_range<S>(acc, ring, at, range, range.first, slot, th, meanwhile);
  }
  if (!D::LIMBS && D::SPLITS == 1 && th.tid % 128 == 0) mbarrier_arrive(ring.empty + slot);
}
