// The epilogue of products on Hopper. Either threads store the results (tma_thread_stores.h) or TMA does
// (tma_result_stages.h). Constants of D: READ_AHEAD: residuals are read before the main loop; SHARED:
// vectors that all rows share are read once for both rows of a thread; MERGED, for PRODUCTS 2: results are computed
// before lanes exchange them; RESULT_STAGES: stages of the ring through which TMA stores the results of a tile (0:
// threads store them); RESIDUAL: TMA also loads a residual into these; OUTPUTS that TMA stores; SUM_ROWS: rows of the
// matrix of row sums, 0: there are no row sums; KEEPS: the results of an earlier product are second accumulators.
//
// An epilogue is a rendered functor (epilogue.py):
//
//   struct Epilogue {
//     WIDTH, REST                                    neighbouring columns of a vector; of one at the end of a row
//     struct Ahead, Shared                           operands that are loaded early: by row and column, by column
//     void read_ahead(row, column, Ahead&); void read_shared(column, Shared&);
//     float store(row, column, const Sum* acc, Ahead, Shared), store_rest(row, column, acc);
//     Result                                         float, or int for results that are integers (of 8-bit ones, only
//                                                    the low byte counts)
//     float compute(row, column, acc, Result* y, Result* y1, Ahead, Shared); void put(row, column, const float* y);
//   };
//
// `acc` holds the sums of WIDTH results; those of two products alternate. compute() returns results that are not yet
// rounded to R, those of the first output in y and those of the second in y1. The returned float is the vector's part of
// the row's sum (SUM_ROWS).
#pragma once
#include "tma_mainloop.h"

// -- the factors of a row norm (split_rms_norm), from the sums that the previous product computed per row and tile
struct NoRowScale {
  static constexpr bool ENABLED = false;
  static constexpr int TILES = 0, ROWS = 0;
};

// `factor` of a thread's two rows.
template <class Scale> struct RowFactors {
  float sums[2][(Scale::TILES + 3) / 4 + 1], factor[2];

  template <class Rows> INLINE void read(const Scale& scale, const Rows& row, int lane) {
    if constexpr (Scale::ENABLED) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = row(h);
#pragma unroll
        for (int i = 0; i < (Scale::TILES + 3) / 4; i++) {  // each of the four lanes of a row reads a quarter
          const int part = i * 4 + (lane & 3);
          sums[h][i] = part < Scale::TILES && m < Scale::ROWS ? scale.sums[part * Scale::ROWS + m] : 0.0f;
        }
      }
    }
  }
  INLINE void find(const Scale& scale) {
    if constexpr (Scale::ENABLED) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < (Scale::TILES + 3) / 4; i++) total += sums[h][i];
        total += subgroup_xor(total, 1);
        total += subgroup_xor(total, 2);
        factor[h] = scale.factor(total);
      }
    }
  }
  template <class Sum> INLINE Sum times(Sum x, int h) const {
    if constexpr (Scale::ENABLED) return x * factor[h];
    return x;
  }
};

// -- the scales of the columns of a product, which are the rows of a right operand in groups of four
struct NoColumnScale {
  static constexpr bool ENABLED = false;
};
// A group has NBYTES, of which the scales follow SCALES bytes of codes.
template <int NBYTES, int SCALES> struct FourScales {
  static constexpr bool ENABLED = true;
  const uint8_t* weights;
  float* shared;  // [2, TILE_M / 64, TILE_N]: of this tile and the next, for each warpgroup
  INLINE float operator()(int column) const {
    return *(const float*)(weights + (int64_t)(column / 4) * NBYTES + SCALES + column % 4 * 4);
  }
};

// The scales of a tile. Each warpgroup loads them before the main loop, and shares them behind it. Tiles take turns in
// shared memory, so that no warp overwrites scales that another one still reads.
template <class D, class Columns> struct ColumnFactors {
  static constexpr int EACH = (D::TILE_N + 127) / 128;
  float mine[EACH];

  INLINE void read(const Columns& scale, int column0, int tid) {
    if constexpr (Columns::ENABLED) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int n = tid % 128 + 128 * i;
        const int column = column0 + column_offset<D>(n);
        mine[i] = n < D::TILE_N && column < D::N ? scale(column) : 0.0f;
      }
    }
  }
  INLINE void apply(const Columns& scale, TileC<D>& acc, int turn, const Thread& th) const {
    if constexpr (Columns::ENABLED) {
      float* const own = scale.shared + (turn % 2 * (D::TILE_M / 64) + th.subgroup / 4) * D::TILE_N;
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (th.tid % 128 + 128 * i < D::TILE_N) own[th.tid % 128 + 128 * i] = mine[i];
      named_barrier(1 + th.subgroup / 4, 128);
#pragma unroll
      for (int j = 0; j < D::TILE_N / 8; j++) {
        const Vec<float, 2> s = *(const Vec<float, 2>*)(own + j * 8 + (th.lane & 3) * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) acc.v[4 * j + i] *= s.v[i % 2];
      }
    }
  }
};

// Copies a vector to shared memory.
template <class T> INLINE void hold(T* to, const T* from, int count, int tid, int threads) {
#pragma unroll 1
  for (int i = tid; i < count; i += threads) to[i] = from[i];
}

// Row `h` (0 or 1) of the two rows of the product whose sums a lane has.
struct TileRows {
  int first;
  INLINE int operator()(int h) const { return first + 8 * h; }
};

// Stores the row sums of this tile. Each of the four lanes of a row has the sum of a quarter.
template <class D, class Rows>
INLINE void store_row_sums(float* out, float* sums, const Rows& row, int tile_n, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sums[h] += subgroup_xor(sums[h], 1);
    sums[h] += subgroup_xor(sums[h], 2);
    const int m = row(h);
    if ((lane & 3) == 0 && m < D::SUM_ROWS) out[tile_n * D::SUM_ROWS + m] = sums[h];
  }
}
