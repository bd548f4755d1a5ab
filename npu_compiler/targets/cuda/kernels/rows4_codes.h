// Weights in bf16c12 (weights/formats/bf16c12/rows4.py) for tma_decoder.h. TMA copies the codes and low bytes.
#pragma once
#include "tma_decoder.h"

// FOURS: groups of four rows; EXTRAS: bytes of the scales and outliers of a group, of which it has up to MAX_OUTLIERS;
// CHUNK: pieces that a lane decodes together.
template <int FOURS, int EXTRAS, int MAX_OUTLIERS, int CHUNK> struct Rows4Codes {
  static constexpr int COPIERS = 1, ARRIVALS = 1;
  static constexpr int PLANE = 128, GROUP = 3 * PLANE;  // bytes of a stage: codes, and the low bytes of two rows each
  static INLINE constexpr int bytes(int columns) { return columns / 4 * GROUP; }
  template <class D> struct Tile {
    static constexpr int GROUPS = D::TILE_N / 4, OWN = (GROUPS + 31) / 32;
    static constexpr int COUNT = GROUPS * 8, STEP = D::TEAM * 32, PIECES = (COUNT + STEP - 1) / STEP;  // of eight columns
    Vec<uint, 2> scales[PIECES];
    uint outlier[OWN];  // the next one of each of the lane's groups, in the order of columns; 0: none
    int place[OWN];
  };
  const TensorMap& planes;
  const uint8_t* extras;  // [FOURS, EXTRAS]

  template <class D> INLINE void copy(char* slot, int64_t* full, int tile, int k, int lane) const {
    static_assert(D::TILE_K == 64, "PLANE");
    if (lane == 0) {
      mbarrier_expect_bytes(full, bytes(D::TILE_N));
      constexpr int COLUMNS = in_halves<D>() ? 32 : D::TILE_N;  // of a load
#pragma unroll
      for (int i = 0; i < D::TILE_N; i += COLUMNS)
        tma_load(slot + bytes(i), planes, full, k, 0, (first_column<D>(tile) + column_offset<D>(i)) / 4);
    }
    subgroup_barrier();
  }

  // The tile's n-th group of four rows.
  template <class D> static INLINE int group_of(int tile, int n) {
    return (first_column<D>(tile) + column_offset<D>(4 * n)) / 4;
  }
  INLINE uint outlier(int group, int place) const {
    if (group >= FOURS || place >= MAX_OUTLIERS) return 0;
    return *(const uint*)(extras + (int64_t)group * EXTRAS + 8 + place * 4);
  }
  template <class D> INLINE void begin(Tile<D>& of, int tile, int member, int lane) const {
    typedef Tile<D> Of;
#pragma unroll
    for (int i = 0; i < Of::PIECES; i++) {
      const int group = group_of<D>(tile, (i * Of::STEP + member * 32 + lane) / 8);
      of.scales[i].v[0] = of.scales[i].v[1] = 0;
      if (group < FOURS) of.scales[i] = *(const Vec<uint, 2>*)(extras + (int64_t)group * EXTRAS);
    }
#pragma unroll
    for (int i = 0; i < Of::OWN; i++) {
      const int n = i * 32 + lane;
      of.place[i] = 0;
      of.outlier[i] = n < Of::GROUPS && n / 4 % D::TEAM == member ? outlier(group_of<D>(tile, n), 0) : 0;
    }
  }

  template <class D>
  INLINE void decode(typename D::T* to, const char* slot, Tile<D>& of, int tile, int k, int member, int lane) const {
    typedef Tile<D> Of;
#pragma unroll
    for (int first = 0; first < Of::PIECES; first += CHUNK) {
      uint4 codes[CHUNK], low[CHUNK][2];
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const int n = (first + i) * Of::STEP + member * 32 + lane;
        if (first + i >= Of::PIECES || (Of::COUNT % Of::STEP && n >= Of::COUNT)) continue;
        const uint4* const from = (const uint4*)(slot + n / 8 * GROUP) + n % 8;
        codes[i] = from[0], low[i][0] = from[PLANE / 16], low[i][1] = from[2 * PLANE / 16];
      }
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const int n = (first + i) * Of::STEP + member * 32 + lane;
        if (first + i >= Of::PIECES || (Of::COUNT % Of::STEP && n >= Of::COUNT)) continue;
        store_piece<D>(to, n, codes[i], low[i], of.scales[first + i]);
      }
    }
    subgroup_barrier();
    replace(to, of, tile, k, lane);
  }

  template <class D>
  static INLINE void store_piece(typename D::T* to, int n, uint4 codes, const uint4 (&low)[2], Vec<uint, 2> scales) {
    const uint code[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint4 l = low[r / 2];
      const uint scale = byte_permute(scales.v[r / 2], 0u, r % 2 ? 0x3232u : 0x1010u);
      uint4 row = rows4_decode(r % 2 ? l.z : l.x, r % 2 ? l.w : l.y, code[r]);
      row.x = pair_multiply(row.x, scale), row.y = pair_multiply(row.y, scale);
      row.z = pair_multiply(row.z, scale), row.w = pair_multiply(row.w, scale);
      *(uint4*)(to + swizzle_128(n / 8 * 4 + r, n % 8)) = row;
    }
  }

  // Stores the outliers among the elements from k on.
  template <class D> INLINE void replace(typename D::T* to, Tile<D>& of, int tile, int k, int lane) const {
#pragma unroll
    for (int i = 0; i < Tile<D>::OWN; i++) {
      for (;;) {
        const uint x = of.outlier[i];
        const int column = (int)(x >> 16 & 0x3fffu) - k, row = (i * 32 + lane) * 4 + (int)(x >> 30);
        if (x << 17 == 0 || column >= D::TILE_K) break;
        if (column >= 0) ((uint16_t*)to)[swizzle_128(row, column / 8) + column % 8] = (uint16_t)(x & 0xffffu);
        of.outlier[i] = outlier(group_of<D>(tile, i * 32 + lane), ++of.place[i]);
      }
    }
  }
};
