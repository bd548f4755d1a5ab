// Matrix products and convolutions: C = epilogue(A B^T), where A is [BATCH, M, K] or an image, B [BATCH or 1, N, K].
//
// A workgroup computes a tile of TILE_M x TILE_N results, TILE_K terms at a time. mma_gemm uses the matrix unit, with a
// ring buffer of STAGES in shared memory for the operands; simple_gemm.h has the kernel in float arithmetic.
//
// Constants of D: M, N, K; BATCH of products, or of the groups of a convolution (GROUPED), whose results are side by
// side along the columns; SPLITS: parts of K, whose results are separate outputs; PRODUCTS 2: columns alternate between
// two products, which the epilogue combines; TILE_M, TILE_N, TILE_K. For mma_gemm: T, of the operands; SUBGROUPS_M,
// SUBGROUPS_N: subgroups along the tile; STAGES; LD: elements between rows in shared memory; FRAG_M, FRAG_N, FRAG_K:
// the size of a fragment. Types of D: T, of the operands on the matrix unit (u8s8: pairs of 8-bit integers, of which K
// counts the pairs); Sum, of the accumulators, float or int; Frag, a fragment of these.
//
// An operand is a struct, Matrix<O> or Image<O>. row(r, batch) returns the position of row r; has(row, k) whether
// element k exists; at(row, k) its offset. Constants of O: T; ROWS, K; ALONG_K: neighbouring threads read neighbours
// along K; VECTORS: 16 bytes of neighbours along K are read at once; and those named below.
//
// The epilogue is a rendered functor (epilogue.py): WIDTH, and store(row, column, const Sum* acc), which stores WIDTH
// neighbours. The sums of two products alternate in acc.
#pragma once

// -- operands
struct MatrixRow {
  bool exists;
  int64_t at;
};
// Constants: ROW, STEP, BATCH: elements between rows, between neighbours along K, and between matrices.
template <class O_> struct Matrix {
  typedef O_ O;
  typedef MatrixRow Row;
  static INLINE Row row(int r, int batch) {
    Row result;
    result.exists = r < O::ROWS;
    result.at = (int64_t)batch * O::BATCH + (int64_t)(r < O::ROWS ? r : 0) * O::ROW;
    return result;
  }
  static INLINE bool has(THREAD const Row& row, int k) { return row.exists && k < O::K; }
  static INLINE int64_t at(THREAD const Row& row, int k) { return row.at + (int64_t)k * O::STEP; }
};

struct ImageRow {
  bool exists;
  int64_t at;
  int y, x;  // coordinates of the first tap
};
// Rows are pixels of the result [.., OH, OW]; K runs over taps and CHANNELS of a group. Constants: H, W; IMAGE, LINE,
// PIXEL: elements between images, lines, pixels; KERNEL_W; STRIDE_*, PAD_TOP, PAD_LEFT, DILATION_*; PLAIN: a 1x1
// convolution that reads every pixel.
template <class O_> struct Image {
  typedef O_ O;
  typedef ImageRow Row;
  static INLINE Row row(int r, int group) {
    Row result;
    result.exists = r < O::ROWS;
    const uint m = r < O::ROWS ? (uint)r : 0u;
    if (O::PLAIN) {
      result.at = (int64_t)m * O::PIXEL + group * O::CHANNELS;
    } else {
      result.y = (int)(m / (uint)O::OW % (uint)O::OH) * O::STRIDE_H - O::PAD_TOP;
      result.x = (int)(m % (uint)O::OW) * O::STRIDE_W - O::PAD_LEFT;
      result.at = (int64_t)(m / (uint)(O::OH * O::OW)) * O::IMAGE + group * O::CHANNELS;
    }
    return result;
  }
  static INLINE int tap(int k) { return (int)((uint)k / (uint)O::CHANNELS); }
  static INLINE int y(THREAD const Row& row, int k) { return row.y + tap(k) / O::KERNEL_W * O::DILATION_H; }
  static INLINE int x(THREAD const Row& row, int k) { return row.x + tap(k) % O::KERNEL_W * O::DILATION_W; }
  static INLINE bool has(THREAD const Row& row, int k) {
    if (O::PLAIN) return row.exists && k < O::K;
    const int down = y(row, k), over = x(row, k);
    return row.exists && k < O::K && down >= 0 && down < O::H && over >= 0 && over < O::W;
  }
  static INLINE int64_t at(THREAD const Row& row, int k) {
    if (O::PLAIN) return row.at + k;
    return row.at + y(row, k) * O::LINE + x(row, k) * O::PIXEL + (k - tap(k) * O::CHANNELS);
  }
};

// -- results
struct GemmTile {
  int m, n, batch, split;
};
template <class D> INLINE GemmTile gemm_tile(int workgroup) {
  const int tiles_m = (D::M + D::TILE_M - 1) / D::TILE_M, tiles_n = (D::N + D::TILE_N - 1) / D::TILE_N;
  GemmTile tile;
  tile.m = workgroup % tiles_m;
  tile.n = workgroup / tiles_m % tiles_n;
  tile.batch = workgroup / (tiles_m * tiles_n) % D::BATCH;
  tile.split = D::SPLITS > 1 ? workgroup / (tiles_m * tiles_n * D::BATCH) : 0;
  return tile;
}
// The row and column of the output for result (m, n) of the tile's product.
template <class D> INLINE int gemm_row(THREAD const GemmTile& tile, int m) {
  const int parts = D::SPLITS > 1 ? tile.split * (D::M * (D::GROUPED ? 1 : D::BATCH)) : 0;
  return parts + (D::BATCH > 1 && !D::GROUPED ? tile.batch * D::M : 0) + m;
}
template <class D> INLINE int gemm_column(THREAD const GemmTile& tile, int n) {
  return D::BATCH > 1 && D::GROUPED ? tile.batch * D::N + n : n / D::PRODUCTS;
}

// -- the matrix unit
template <int LD> struct PaddedRows {
  static INLINE int at(int row, int k) { return row * LD + k; }
};

// One thread's share of a stage of ROWS rows of an operand, in chunks of 16 bytes.
template <class D, class Layout, class S, int ROWS> struct StageCopy {
  typedef typename S::O O;
  typedef typename D::T T;
  CONSTANTS int EACH = 16 / (int)sizeof(T), PER_ROW = D::TILE_K / EACH, COUNT = ROWS * PER_ROW;
  CONSTANTS int CHUNKS = (COUNT + D::THREADS - 1) / D::THREADS;
  typename S::Row rows[CHUNKS];

  static INLINE int row(int chunk) { return O::ALONG_K ? chunk / PER_ROW : chunk % ROWS; }
  static INLINE int term(int chunk) { return (O::ALONG_K ? chunk % PER_ROW : chunk / ROWS) * EACH; }
  INLINE void setup(int first, int batch, int tid) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) rows[i] = S::row(first + row(tid + i * D::THREADS), batch);
  }
  // Loads the terms from k0 on into the stage that is `start` elements after `ring`.
  INLINE void load(SMEM T* ring, int start, DEVICE const T* from, int k0, int tid) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int chunk = tid + i * D::THREADS;
      if (COUNT % D::THREADS == 0 || chunk < COUNT) {
        const int k = k0 + term(chunk);
        SMEM T* const place = ring + Layout::at(row(chunk), term(chunk)) + start;
        if (O::VECTORS) {
          const bool valid = S::has(rows[i], k);
          copy_async16(place, from + (valid ? S::at(rows[i], k) : 0), valid);
        } else {
          Vec<T, EACH> v;
#pragma unroll
          for (int e = 0; e < EACH; e++)
            v.v[e] = S::has(rows[i], k + e) ? from[S::at(rows[i], k + e)] : T();
          *(SMEM Vec<T, EACH>*)place = v;
        }
      }
    }
  }
};

// Applies the epilogue to sums in shared memory [TILE_M, TILE_N + 4]. Neighbouring threads store neighbouring columns.
template <class D, class E>
INLINE void store_results(THREAD const E& epilogue, SMEM const typename D::Sum* results, THREAD const GemmTile& tile,
                          int tid) {
  typedef typename D::Sum Sum;
  const int ld = D::TILE_N + 4, values = E::WIDTH * D::PRODUCTS, per_row = D::TILE_N / values;
  for (int c = tid; c < D::TILE_M * per_row; c += D::THREADS) {
    const int m = c / per_row, n = c % per_row * values;
    if (tile.m * D::TILE_M + m < D::M && tile.n * D::TILE_N + n < D::N) {
      Sum acc[values];
      if (E::WIDTH % 4 == 0) {
#pragma unroll
        for (int e = 0; e < values; e += 4) {
          const Vec<Sum, 4> v = *(SMEM const Vec<Sum, 4>*)(results + m * ld + n + e);
#pragma unroll
          for (int i = 0; i < 4; i++) acc[e + i] = v.v[i];
        }
      } else {
        for (int e = 0; e < values; e++) acc[e] = results[m * ld + n + e];
      }
      epilogue.store(gemm_row<D>(tile, tile.m * D::TILE_M + m), gemm_column<D>(tile, tile.n * D::TILE_N + n), acc);
    }
  }
}

template <class D, class Left, class Right, class E>
INLINE void mma_gemm(Left, DEVICE const typename D::T* a, Right, DEVICE const typename D::T* b, SMEM int* memory,
                     THREAD const E& epilogue, Thread th) {
  typedef typename D::T T;
  ASSUME(th.tid >= 0 && th.tid < D::THREADS);
  const int rows = D::TILE_M / D::SUBGROUPS_M, columns = D::TILE_N / D::SUBGROUPS_N;  // of a subgroup
  const int tiles_m = rows / D::FRAG_M, tiles_n = columns / D::FRAG_N, stage = (D::TILE_M + D::TILE_N) * D::LD;
  const int steps = ((D::K + D::TILE_K - 1) / D::TILE_K + D::SPLITS - 1) / D::SPLITS;
  const GemmTile tile = gemm_tile<D>(th.workgroup);
  SMEM T* const ring = (SMEM T*)memory;
  const int first = tile.split * (steps * D::TILE_K), row0 = th.subgroup / D::SUBGROUPS_N * rows;
  const int column0 = th.subgroup % D::SUBGROUPS_N * columns;
  StageCopy<D, PaddedRows<D::LD>, Left, D::TILE_M> left;
  StageCopy<D, PaddedRows<D::LD>, Right, D::TILE_N> right;
  left.setup(tile.m * D::TILE_M, tile.batch, th.tid);
  right.setup(tile.n * D::TILE_N, tile.batch, th.tid);
  typename D::Frag acc[tiles_m][tiles_n];
#pragma unroll
  for (int i = 0; i < tiles_m; i++)
#pragma unroll
    for (int j = 0; j < tiles_n; j++) frag_zero(acc[i][j]);
#pragma unroll
  for (int n = 0; n < D::STAGES - 1; n++) {
    left.load(ring, n * stage, a, first + n * D::TILE_K, th.tid);
    right.load(ring, n * stage + D::TILE_M * D::LD, b, first + n * D::TILE_K, th.tid);
    copy_async_commit();
  }
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    copy_async_wait<D::STAGES - 2>();
    barrier();
    const int ahead = step + D::STAGES - 1;
    if (ahead < steps) {
      left.load(ring, ahead % D::STAGES * stage, a, first + ahead * D::TILE_K, th.tid);
      right.load(ring, ahead % D::STAGES * stage + D::TILE_M * D::LD, b, first + ahead * D::TILE_K, th.tid);
    }
    copy_async_commit();
    SMEM const T* const as = ring + step % D::STAGES * stage;
    SMEM const T* const bs = as + D::TILE_M * D::LD;
#pragma unroll
    for (int k = 0; k < D::TILE_K; k += D::FRAG_K) {
      FragA<T> x[tiles_m];
      FragB<T> y[tiles_n];
#pragma unroll
      for (int i = 0; i < tiles_m; i++) frag_load_a(x[i], as + (row0 + i * D::FRAG_M) * D::LD + k, D::LD, th.lane);
#pragma unroll
      for (int j = 0; j < tiles_n; j++) frag_load_b(y[j], bs + (column0 + j * D::FRAG_N) * D::LD + k, D::LD, th.lane);
#pragma unroll
      for (int i = 0; i < tiles_m; i++)
#pragma unroll
        for (int j = 0; j < tiles_n; j++) frag_mma(acc[i][j], x[i], y[j]);
    }
  }
  copy_async_wait<0>();
  barrier();
  SMEM typename D::Sum* const results = (SMEM typename D::Sum*)memory;
  const int ld = D::TILE_N + 4;
#pragma unroll
  for (int i = 0; i < tiles_m; i++)
#pragma unroll
    for (int j = 0; j < tiles_n; j++)
      frag_store(results + (row0 + i * D::FRAG_M) * ld + column0 + j * D::FRAG_N, ld, acc[i][j], th.lane);
  barrier();
  store_results<D>(epilogue, results, tile, th.tid);
}
