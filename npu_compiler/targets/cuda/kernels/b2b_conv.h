// Two 1x1 convolutions in a row (back to back) on Hopper: the results of the first, which TMA stores, are the left operand
// of the second while they are in shared memory.
//
// All filters stay in shared memory. Warpgroups work on tiles of their own, so that products, epilogues and stores of
// one overlap with those of others. A tile's results are computed in subtiles of 128 bytes a row. Every subtile passes
// through a slot of shared memory, where TMA may have put the residual before: a warpgroup overwrites it with results,
// which TMA stores and wgmma multiplies with the filters of the second convolution. The last subtiles of a tile are the
// results of that. A slot is free one subtile later, and TMA fills it for the next tile while this one is computed.
//
// Constants of D, in addition to those of tma_epilogue.h: PIXELS of all images; WARPGROUPS; PIXEL_SLOTS: tiles of pixels
// of each warpgroup in shared memory; SLOTS for subtiles of each warpgroup; TILES of 64 pixels; STEP: warpgroups of the
// launch; K: b16 elements of a pixel; COLUMNS, FINAL: results of the first and the second convolution; SUBTILE_N: columns
// of a subtile; TILE_N: those that are computed at once.
#pragma once
#include "tma_gemm.h"

// The second product.
template <class D> struct FinalProduct : D {
  static constexpr int N = D::FINAL, TILE_N = D::FINAL;
  static constexpr bool KEEPS = false, RESIDUAL = false;
};

// Sizes count b16 elements.
template <class D> struct B2bMemory {
  typedef ResultSubtile<D, D::SUBTILE_N> P;
  typedef ResultSubtile<FinalProduct<D>> Q;
  static constexpr int PARTS = D::SUBTILE_N / D::TILE_N;
  static constexpr int SUBTILES = D::COLUMNS / P::COLUMNS, USES = SUBTILES + Q::COUNT;  // USES: slots that a tile passes through
  static constexpr int KINDS = D::KEEPS ? 2 : 1, PIXELS = SUBTILE * D::K;
  static constexpr int EACH = D::PIXEL_SLOTS * KINDS * PIXELS + D::SLOTS * P::SIZE;  // of a warpgroup
  static constexpr int FILTERS = D::COLUMNS * D::K, FINAL = D::FINAL * P::ROW_B16;  // FINAL: of one subtile of results
};

// The pixels of a warpgroup's tiles. Only the leader, one thread, calls load().
template <class D, class S, class Before> struct PixelSlots {
  typedef B2bMemory<D> Memory;
  typename D::T* memory;
  int64_t* loaded;
  const Operands<S>& operands;
  const Before& before;
  RingPosition<D::PIXEL_SLOTS> at;

  INLINE typename D::T* pixels(int slot) const { return memory + slot * (Memory::KINDS * Memory::PIXELS); }
  INLINE void load(int tile, int slot) const {
    if (tile >= D::TILES) return;
    mbarrier_expect_bytes(loaded + slot, Memory::KINDS * Memory::PIXELS * 2);
    tma_load(pixels(slot), operands.left, loaded + slot, 0, tile * SUBTILE, 0);
    if constexpr (Before::ENABLED)
      tma_load(pixels(slot) + Memory::PIXELS, before.operands.left, loaded + slot, 0, tile * SUBTILE, 0);
  }
};

// The slots of a warpgroup through which subtiles pass in turn.
template <class D> struct SubtileSlots {
  typedef B2bMemory<D> Memory;
  typedef typename Memory::P P;
  typename D::T* memory;
  int64_t* ready;
  const TileOutputs& to;
  int tile, use;  // for which the next slot is requested
  RingPosition<D::SLOTS> at;

  // Lets TMA fill a free slot with the residual of its next subtile, if that has one. Only the leader calls this.
  INLINE void request(int slot) {
    if (tile >= D::TILES) return;
    if (D::RESIDUAL && use < Memory::SUBTILES) {
      mbarrier_expect_bytes(ready + slot, P::SIZE * 2);
      tma_load(memory + slot * P::SIZE, *to.residual, ready + slot, use * P::ROW_B16, tile * SUBTILE, 0);
    } else {
      mbarrier_arrive(ready + slot);
    }
    if (++use == Memory::USES) {
      use = 0;
      tile += D::STEP;
    }
  }
  INLINE typename D::T* subtile() const { return memory + at.slot * P::SIZE; }
  INLINE void wait() const { mbarrier_wait(ready + at.slot, at.phase); }
  // Stores the subtile in the present slot, and frees the slot before it, whose product has been computed.
  INLINE void store(const TensorMap& map, int x, int y, bool leader, bool first) {
    if (leader) {
      tma_store(map, subtile(), x, y, 0);
      tma_store_commit();
      if (!first) {
        tma_store_wait_read<1>();
        request(at.slot == 0 ? D::SLOTS - 1 : at.slot - 1);
      }
    }
    at.next();
  }
};

// Starts the product of a tile of pixels, whose channels are all in shared memory, and the filters of TILE_N columns.
template <class D>
INLINE void start_product(TileC<D>& acc, const typename D::T* pixels, const typename D::T* filters, int part) {
  wgmma<D::K>(acc, pixels, filters + part * (D::TILE_N * D::K), 0);
}

// Writes TILE_N columns to their place in a subtile.
template <class D, int PART = 0, class E>
INLINE void write_part(const E& epilogue, const TileC<D>& acc, const TileRows& row, int part, const Thread& th,
                       typename D::T* to, const KeptPairs<D>* kept) {
  typedef B2bMemory<D> Memory;
  if (part % Memory::PARTS == PART) {
    constexpr int BLOCKS = D::TILE_N / 16, FROM = PART * BLOCKS;
    write_blocks<D, typename Memory::P, FROM, FROM + BLOCKS, FROM, Memory::P::SIZE, D::RESIDUAL>(
        epilogue, acc, RowFactors<NoRowScale>(), row, part / Memory::PARTS * D::SUBTILE_N, th, to, kept, nullptr, nullptr);
  } else if constexpr (PART + 1 < Memory::PARTS) {
    write_part<D, PART + 1>(epilogue, acc, row, part, th, to, kept);
  }
}

// Stores the results of the second product from subtile N on.
template <class D, int N, class Slots, class E>
INLINE void store_final(Slots& slots, const E& epilogue, const TileC<D>& sums, const TileRows& row, int y, bool leader,
                        const Thread& th) {
  typedef ResultSubtile<D> Q;
  slots.wait();
  fill_subtiles<D, N, N + 1, Q::SIZE, false>(epilogue, sums, RowFactors<NoRowScale>(), row, 0, th, slots.subtile(), nullptr,
                                           nullptr, nullptr);
  slots.store(*slots.to.second, N * Q::ROW_B16, y, leader, false);
  if constexpr (N + 1 < Q::COUNT) store_final<D, N + 1>(slots, epilogue, sums, row, y, leader, th);
}

// Computes the results of the first convolution for a tile and stores them, and adds up those of the second. `filters`: of
// the first convolution, of the one whose results are added, and of the second. `first`: whether it is the warpgroup's
// first tile.
template <class D, class In, class E, class Before>
INLINE void compute_tile(TileC<FinalProduct<D>>& sums, const In& in, SubtileSlots<D>& slots, const typename D::T* filters,
                         const E& epilogue, const Before& before, int tile, bool first, bool leader, const Thread& th) {
  typedef B2bMemory<D> Memory;
  typedef typename Memory::P P;
  // The next product is computed during an epilogue, if registers suffice for both tiles of accumulators.
  constexpr bool AHEAD = !D::KEEPS && D::WARPGROUPS <= 3;
  constexpr int PARTS = Memory::SUBTILES * Memory::PARTS;
  const typename D::T *const pixels = in.pixels(in.at.slot), *const last = filters + Memory::KINDS * Memory::FILTERS;
  const TileRows row = {tile * SUBTILE + th.subgroup % 4 * 16 + (th.lane >> 2)};
  TileC<D> acc[AHEAD ? 2 : 1], other;  // other: of the convolution whose results are added
  const auto start = [&](int part) {
    wgmma_fence();
    if constexpr (D::KEEPS) start_product<D>(other, pixels + Memory::PIXELS, filters + Memory::FILTERS, part);
    start_product<D>(acc[AHEAD ? part % 2 : 0], pixels, filters, part);
    wgmma_commit();
  };
  mbarrier_wait(in.loaded + in.at.slot, in.at.phase);
  if constexpr (AHEAD) start(0);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const int subtile = part / Memory::PARTS;
    const bool begins = part % Memory::PARTS == 0, ends = (part + 1) % Memory::PARTS == 0;
    TileC<D>& c = acc[AHEAD ? part % 2 : 0];
    KeptPairs<D> kept;
    if constexpr (!AHEAD) start(part);
    if (AHEAD && part > 0 && begins) wgmma_wait<1>();  // a product with the filters of the second convolution is later
    else wgmma_wait<0>();
    wgmma_here(c);
    if constexpr (AHEAD)
      if (part + 1 < PARTS) start(part + 1);
    if constexpr (D::KEEPS) {
      wgmma_here(other);
      keep_pairs<D>(before.epilogue, other, row, part * D::TILE_N, th.lane, kept);
    }
    const typename D::T* const place = slots.subtile();
    if (begins) slots.wait();
    write_part<D>(epilogue, c, row, part, th, slots.subtile(), &kept);
    if (!ends) continue;
    if (AHEAD && part + 1 < PARTS) wgmma_wait<1>();
    else wgmma_wait<0>();
    fence_async_shared();
    named_barrier(1 + th.subgroup / 4, 128);
    if (leader && part == PARTS - 1) in.load(tile + D::PIXEL_SLOTS * D::STEP, in.at.slot);
    slots.store(*slots.to.first, subtile * P::ROW_B16, tile * SUBTILE, leader, first && subtile == 0);
    wgmma_fence();
    wgmma<P::ROW_B16>(sums, place, last + subtile * Memory::FINAL, subtile > 0);
    wgmma_commit();
  }
  wgmma_finish(sums);
}

// `filters`: those of the first convolution (and of the one whose results are added: `Before`), then of the second;
// `buffers` follow. `full`: mbarriers of all slots of pixels and of subtiles, then that of the filters.
template <class D, class S, class E, class F, class Before>
INLINE void b2b_conv(const Operands<S>& operands, const TensorMap& final_filters, typename D::T* filters,
                     typename D::T* buffers, int64_t* full, const E& epilogue, const F& final_epilogue,
                     const TileOutputs& to, const Before& before, const Thread& th) {
  typedef B2bMemory<D> Memory;
  typedef typename Memory::P P;
  typedef FinalProduct<D> Final;
  typedef typename D::T T;
  constexpr int BARRIERS = D::PIXEL_SLOTS + D::SLOTS;
  ASSUME(th.tid >= 0 && th.tid < D::WARPGROUPS * 128);
  const int warpgroup = th.subgroup / 4;
  const bool leader = th.tid % 128 == 0;
  int64_t *const own = full + warpgroup * BARRIERS, *const ready = full + D::WARPGROUPS * BARRIERS;
  if (th.tid == 0) {
    for (int i = 0; i <= D::WARPGROUPS * BARRIERS; i++) mbarrier_init(full + i, 1);
    mbarrier_init_fence();
    mbarrier_expect_bytes(ready, (Memory::KINDS * Memory::FILTERS + Memory::SUBTILES * Memory::FINAL) * 2);
    tma_load(filters, operands.right, ready, 0, 0, 0);
    if constexpr (Before::ENABLED) tma_load(filters + Memory::FILTERS, before.operands.right, ready, 0, 0, 0);
    T* const last = filters + Memory::KINDS * Memory::FILTERS;
    for (int n = 0; n < Memory::SUBTILES; n++)
      tma_load(last + n * Memory::FINAL, final_filters, ready, n * P::ROW_B16, 0, 0);
  }
  barrier();
  pdl_wait();
  const int first = th.workgroup * D::WARPGROUPS + warpgroup;
  T* const memory = buffers + warpgroup * Memory::EACH;
  PixelSlots<D, S, Before> in = {memory + D::SLOTS * P::SIZE, own + D::SLOTS, operands, before, {0, 0}};
  SubtileSlots<D> slots = {memory, own, to, first, 0, {0, 0}};
  if (leader) {
    fence_async_global();
    for (int slot = 0; slot < D::PIXEL_SLOTS; slot++) in.load(first + slot * D::STEP, slot);
    for (int slot = 0; slot < D::SLOTS; slot++) slots.request(slot);
  }
  mbarrier_wait(ready, 0);
  for (int tile = first; tile < D::TILES; tile += D::STEP) {
    TileC<Final> sums;
    compute_tile<D>(sums, in, slots, filters, epilogue, before, tile, tile == first, leader, th);
    in.at.next();
    const TileRows row = {tile * SUBTILE + th.subgroup % 4 * 16 + (th.lane >> 2)};
    store_final<Final, 0>(slots, final_epilogue, sums, row, tile * SUBTILE, leader, th);
  }
  if (leader) tma_store_wait_read();
}
