// Weights in a block format (blocks.h) for tma_decoder.h. A warp cannot both copy and decode: the fence between a decoded
// stage and wgmma waits for the copies of its warp, also for later ones.
#pragma once
#include "blocks.h"
#include "tma_decoder.h"

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

// FOURS: groups of four rows of the weights; PIECES of eight columns in a row; WORDS of a piece and its scales; CHUNK:
// pieces that a lane decodes together.
template <class Format, int FOURS, int PIECES, int WORDS, int CHUNK> struct BlockCodes {
  static constexpr int COPIERS = 2, ARRIVALS = 32;  // of each lane that copies
  typedef Piece<Format, PIECES, 8> P;
  static_assert(WORDS == P::BITS + P::SUBS * P::SCALE + P::HEAD, "the parts of a piece");
  static INLINE constexpr int bytes(int columns) { return columns / 4 * 8 * WORDS * 4; }
  template <class D> struct Tile {
    static constexpr int ROW = D::TILE_K / 8, COUNT = D::TILE_N / 4 * ROW;  // pieces of a row, and of all
    static_assert(ROW == 8, "bytes()");
  };
  const uint8_t* weights;

  template <class D> INLINE void copy(char* slot, int64_t* full, int tile, int k, int lane) const {
    constexpr int ROW = Tile<D>::ROW, COUNT = Tile<D>::COUNT, STEP = 32 / ROW;
    const int four = first_column<D>(tile) / 4 + lane / ROW, piece = k / 8 + lane % ROW;
    const uint8_t* const from = weights + (int64_t)four * P::NBYTES;
#pragma unroll
    for (int i = 0; i < (COUNT + 31) / 32; i++) {
      const int next = column_offset<D>(i * (STEP * 4)) / 4;
      const bool exists = four + next < FOURS && piece < PIECES;
      CopyParts<COUNT> parts = {slot, i * 32 + lane, exists};
      P none;
      if (COUNT % 32 == 0 || parts.n < COUNT)
        none.move_all(exists ? from + next * P::NBYTES : weights, exists ? piece : 0, parts);
    }
    copy_async_arrive(full);
  }

  template <class D> INLINE void begin(Tile<D>&, int, int, int) const {}

  template <class D>
  INLINE void decode(typename D::T* to, const char* slot, Tile<D>&, int, int, int member, int lane) const {
    constexpr int ROW = Tile<D>::ROW, COUNT = Tile<D>::COUNT, STEP = D::TEAM * 32;
#pragma unroll 1
    for (int first = member * 32 + lane; first < COUNT; first += CHUNK * STEP) {
      P pieces[CHUNK];
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        ReadParts<COUNT> parts = {slot, first + i * STEP};
        if (parts.n < COUNT) pieces[i].move_all(weights, 0, parts);
      }
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const int n = first + i * STEP;
        if (n < COUNT) {
#pragma unroll
          for (int r = 0; r < 4; r++)
            *(Vec<typename D::T, 8>*)(to + swizzle_128(n / ROW * 4 + r, n % ROW)) =
                decoded_row<typename D::T>(pieces[i], r);
        }
      }
    }
  }
};
