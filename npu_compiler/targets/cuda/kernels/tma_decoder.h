// Weights in a block format (blocks.h) as the right operand of a product: warps decode them into the stages of the ring
// buffer. COPIERS warps copy the codes and scales of stages to shared memory; they do not depend on preceding kernels, so
// these warps start at once. DECODERS warps decode them, each warp every DECODERS-th stage. A warp cannot do both: the
// fence between a decoded stage and wgmma waits for the copies of its warp, also for later ones.
#pragma once
#include "blocks.h"
#include "tma_mainloop.h"

// Copies the parts of piece `n` of COUNT to shared memory, or zeros if it does not exist.
template <int COUNT> struct CopyParts {
  char* to;
  int n;
  bool exists;

  template <int N> INLINE void move(uint*, const uint8_t* from) {
    constexpr int EACH = N % 4 == 0 ? 16 : N == 2 ? 8 : 4;
#pragma unroll
    for (int at = 0; at < 4 * N; at += EACH) {
      copy_async<EACH>(to + n * EACH, from + at, exists);
      to += COUNT * EACH;
    }
  }
};
template <int COUNT> struct ReadParts {
  const char* from;
  int n;

  template <int N> INLINE void move(uint* words, const uint8_t*) {
    constexpr int EACH = N % 4 == 0 ? 4 : N == 2 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < N; i += EACH) {
      *(Vec<uint, EACH>*)(words + i) = *(const Vec<uint, EACH>*)(from + n * (EACH * 4));
      from += COUNT * (EACH * 4);
    }
  }
};

// FOURS: groups of four rows of the weights; PIECES of eight columns in a row; WORDS of a piece and its scales; SLOTS for
// the codes of a stage, an even number that is not less than STAGES, as an mbarrier only tells neighbouring phases apart;
// CHUNK: pieces that a lane decodes together.
template <class Format, int FOURS, int PIECES, int WORDS, int SLOTS, int CHUNK> struct BlockDecoder {
  static constexpr bool ENABLED = true;
  static constexpr int COPIERS = 2;
  typedef Piece<Format, PIECES, 8> P;
  static_assert(WORDS == P::BITS + P::SUBS * P::SCALE + P::HEAD, "the parts of a piece");
  const uint8_t* weights;
  char* codes;     // [SLOTS, pieces of a stage, WORDS]
  int64_t* full;   // [SLOTS] of the codes
  int64_t* empty;  // [SLOTS]

  INLINE void init() const {
    for (int i = 0; i < SLOTS; i++) {
      mbarrier_init(full + i, 32);  // each lane that copies
      mbarrier_init(empty + i, 1);
    }
  }

  template <class D> static INLINE int stages(int tile, int steps) {
    return tile < D::TILES ? ((D::TILES - 1 - tile) / D::STEP + 1) * steps : 0;
  }

  // Copies the codes of all tiles of a thread block, whose first one is `tile`.
  template <class S, class D> INLINE void copy(int tile, int rank, int warp, int lane) const {
    constexpr int ROW = D::TILE_K / 8, COUNT = D::TILE_N / 4 * ROW, STEP = 32 / ROW;
    const Range range = k_tiles<D, S>(rank);
    const int steps = range.last - range.first, last = stages<D>(tile, steps);
#pragma unroll 1
    for (int stage = warp; stage < last; stage += COPIERS) {
      const int slot = stage % SLOTS, four = tile_index<D>(tile + stage / steps * D::STEP).n * (D::TILE_N / 4) + lane / ROW;
      const int piece = (range.first + stage % steps) * ROW + lane % ROW;
      const uint8_t* const from = weights + (int64_t)four * P::NBYTES;
      mbarrier_wait(empty + slot, (stage / SLOTS & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < (COUNT + 31) / 32; i++) {
        const bool exists = four + i * STEP < FOURS && piece < PIECES;
        CopyParts<COUNT> parts = {codes + slot * (COUNT * WORDS * 4), i * 32 + lane, exists};
        P none;
        if (COUNT % 32 == 0 || parts.n < COUNT)
          none.move_all(exists ? from + i * (STEP * P::NBYTES) : weights, exists ? piece : 0, parts);
      }
      copy_async_arrive(full + slot);
    }
  }

  // Decodes them.
  template <class S, class D> INLINE void decode(const Ring<D>& ring, int tile, int rank, int warp, int lane) const {
    constexpr int ROW = D::TILE_K / 8, COUNT = D::TILE_N / 4 * ROW;
    const Range range = k_tiles<D, S>(rank);
    const int last = stages<D>(tile, range.last - range.first);
#pragma unroll 1
    for (int stage = warp; stage < last; stage += D::DECODERS) {
      const int at = stage % D::STAGES, slot = stage % SLOTS;
      typename D::T* const to = ring.stage(at) + D::TILE_M * D::TILE_K;
      const char* const from = codes + slot * (COUNT * WORDS * 4);
      mbarrier_wait(ring.empty + at, (stage / D::STAGES & 1) ^ 1);
      mbarrier_wait(full + slot, stage / SLOTS & 1);
#pragma unroll 1
      for (int first = lane; first < COUNT; first += CHUNK * 32) {
        P pieces[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
          ReadParts<COUNT> parts = {from, first + i * 32};
          if (parts.n < COUNT) pieces[i].move_all(weights, 0, parts);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
          const int n = first + i * 32;
          if (n < COUNT) {
#pragma unroll
            for (int r = 0; r < 4; r++)
              *(Vec<typename D::T, 8>*)(to + swizzle_128(n / ROW * 4 + r, n % ROW)) =
                  decoded_row<typename D::T>(pieces[i], r);
          }
        }
      }
      fence_async_shared();
      subgroup_barrier();
      if (lane == 0) {
        mbarrier_arrive(ring.full + at);
        mbarrier_arrive(empty + slot);
      }
    }
  }
};
