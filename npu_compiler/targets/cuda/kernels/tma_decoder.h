// Weights in a format as the right operand of a product: warps decode them into the stages of the ring buffer. COPIERS
// warps copy the codes of stages to slots in shared memory; they do not depend on preceding kernels, so these warps start
// at once. DECODERS warps decode them: teams of TEAM warps, each of which has every so many-th stage.
//
// Codes, those of a format, defines
//   COPIERS, ARRIVALS             warps that copy, and arrivals at the mbarrier of a slot
//   bytes(columns)                of the codes of a stage of so many columns
//   copy<D>(slot, full, tile, k, lane)              starts the copy of the tile's codes for TILE_K elements from k on
//   Tile<D>, begin(of, tile, member, lane)          what warp `member` of a team keeps for a tile
//   decode(to, slot, of, tile, k, member, lane)     decodes its share of them to the right operand of a stage
#pragma once
#include "tma_mainloop.h"

// SLOTS for the codes of a stage. An mbarrier only tells neighbouring phases apart, so each copier uses slots of its own,
// and no team may be further ahead than there are stages and slots.
template <class Codes, int SLOTS> struct Decoder {
  static constexpr bool ENABLED = true;
  static constexpr int COPIERS = Codes::COPIERS;
  static_assert(SLOTS % COPIERS == 0, "each copier has slots of its own");
  Codes codes;
  char* slots;     // [SLOTS, codes of a stage]
  int64_t* full;   // [SLOTS] of the codes
  int64_t* empty;  // [SLOTS]

  template <class D> INLINE void init() const {
    for (int i = 0; i < SLOTS; i++) {
      mbarrier_init(full + i, Codes::ARRIVALS);
      mbarrier_init(empty + i, D::TEAM);
    }
  }

  // Copies the codes of all tiles of a thread block, whose first one is `t`.
  template <class S, class D> INLINE void copy(int t, int rank, int warp, int lane) const {
    const Range range = k_tiles<D, S>(rank);
    const int steps = range.last - range.first, last = stages<D>(t, steps);
#pragma unroll 1
    for (int stage = warp; stage < last; stage += COPIERS) {
      const int slot = stage % SLOTS;
      mbarrier_wait(empty + slot, (stage / SLOTS & 1) ^ 1);
      codes.template copy<D>(slots + slot * Codes::bytes(D::TILE_N), full + slot,
                             tile_index<D>(t + stage / steps * D::STEP).n, (range.first + stage % steps) * D::TILE_K, lane);
    }
  }

  // Decodes them.
  template <class S, class D> INLINE void decode(const Ring<D>& ring, int t, int rank, int warp, int lane) const {
    constexpr int TEAMS = D::DECODERS / D::TEAM;
    static_assert(TEAMS <= D::STAGES && TEAMS <= SLOTS, "teams stay in neighbouring phases");
    const Range range = k_tiles<D, S>(rank);
    const int steps = range.last - range.first, last = stages<D>(t, steps), member = warp % D::TEAM;
    typename Codes::template Tile<D> of;
    int begun = -1;
#pragma unroll 1
    for (int stage = warp / D::TEAM; stage < last; stage += TEAMS) {
      const int at = stage % D::STAGES, slot = stage % SLOTS, turn = stage / steps;
      const int n = tile_index<D>(t + turn * D::STEP).n;
      if (turn != begun) codes.begin(of, n, member, lane);
      begun = turn;
      mbarrier_wait(ring.empty + at, (stage / D::STAGES & 1) ^ 1);
      mbarrier_wait(full + slot, stage / SLOTS & 1);
      codes.decode(ring.stage(at) + D::TILE_M * D::TILE_K, slots + slot * Codes::bytes(D::TILE_N), of, n,
                   (range.first + stage % steps) * D::TILE_K, member, lane);
      fence_async_shared();
      subgroup_barrier();
      if (lane == 0) {
        mbarrier_arrive(ring.full + at);
        mbarrier_arrive(empty + slot);
      }
    }
  }

 private:
  // The stages of all tiles of a thread block.
  template <class D> static INLINE int stages(int t, int steps) {
    return t < D::TILES ? ((D::TILES - 1 - t) / D::STEP + 1) * steps : 0;
  }
};
