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

// The loop over K: a ring of STAGES in shared memory holds stages of both operands, and `products` adds the product of
// each: add(as, bs, lane).
template <class D, class Left, class Right> struct MmaLoop {
  typedef typename D::T T;
  CONSTANTS int STAGE = (D::TILE_M + D::TILE_N) * D::LD;
  CONSTANTS int STEPS = ((D::K + D::TILE_K - 1) / D::TILE_K + D::SPLITS - 1) / D::SPLITS;
  DEVICE const T* a;
  DEVICE const T* b;
  SMEM T* ring;
  int first;  // of this part's terms
  StageCopy<D, PaddedRows<D::LD>, Left, D::TILE_M> left;
  StageCopy<D, PaddedRows<D::LD>, Right, D::TILE_N> right;

  INLINE void setup(THREAD const GemmTile& tile, int tid) {
    first = tile.split * (STEPS * D::TILE_K);
    left.setup(tile.m * D::TILE_M, tile.batch, tid);
    right.setup(tile.n * D::TILE_N, tile.batch, tid);
  }
  INLINE void load(int step, int tid) const {
    left.load(ring, step % D::STAGES * STAGE, a, first + step * D::TILE_K, tid);
    right.load(ring, step % D::STAGES * STAGE + D::TILE_M * D::LD, b, first + step * D::TILE_K, tid);
  }
  template <class P> INLINE void run(THREAD P& products, Thread th) const {
#pragma unroll
    for (int n = 0; n < D::STAGES - 1; n++) {
      load(n, th.tid);
      copy_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
      copy_async_wait<D::STAGES - 2>();
      barrier();
      if (step + D::STAGES - 1 < STEPS) load(step + D::STAGES - 1, th.tid);
      copy_async_commit();
      SMEM const T* const as = ring + step % D::STAGES * STAGE;
      products.add(as, as + D::TILE_M * D::LD, th.lane);
    }
    copy_async_wait<0>();
    barrier();
  }
};

// A subgroup's results, in fragments.
template <class D> struct MmaResults {
  CONSTANTS int ROWS = D::TILE_M / D::SUBGROUPS_M, COLUMNS = D::TILE_N / D::SUBGROUPS_N;
  CONSTANTS int TILES_M = ROWS / D::FRAG_M, TILES_N = COLUMNS / D::FRAG_N;
  int row0, column0;
  typename D::Frag acc[TILES_M][TILES_N];

  INLINE void setup(int subgroup) {
    row0 = subgroup / D::SUBGROUPS_N * ROWS;
    column0 = subgroup % D::SUBGROUPS_N * COLUMNS;
#pragma unroll
    for (int i = 0; i < TILES_M; i++)
#pragma unroll
      for (int j = 0; j < TILES_N; j++) frag_zero(acc[i][j]);
  }
  // Applies the epilogue to the results of all subgroups, which pass through shared memory.
  template <class E>
  INLINE void store(THREAD const E& epilogue, SMEM int* memory, THREAD const GemmTile& tile, Thread th) const {
    SMEM typename D::Sum* const results = (SMEM typename D::Sum*)memory;
    const int ld = D::TILE_N + 4;
#pragma unroll
    for (int i = 0; i < TILES_M; i++)
#pragma unroll
      for (int j = 0; j < TILES_N; j++)
        frag_store(results + (row0 + i * D::FRAG_M) * ld + column0 + j * D::FRAG_N, ld, acc[i][j], th.lane);
    barrier();
    store_results<D>(epilogue, results, tile, th.tid);
  }
};

template <class D> struct MmaProducts {
  typedef typename D::T T;
  typedef MmaResults<D> R;
  R results;

  INLINE void add(SMEM const T* as, SMEM const T* bs, int lane) {
#pragma unroll
    for (int k = 0; k < D::TILE_K; k += D::FRAG_K) {
      FragA<T> x[R::TILES_M];
      FragB<T> y[R::TILES_N];
#pragma unroll
      for (int i = 0; i < R::TILES_M; i++)
        frag_load_a(x[i], as + (results.row0 + i * D::FRAG_M) * D::LD + k, D::LD, lane);
#pragma unroll
      for (int j = 0; j < R::TILES_N; j++)
        frag_load_b(y[j], bs + (results.column0 + j * D::FRAG_N) * D::LD + k, D::LD, lane);
#pragma unroll
      for (int i = 0; i < R::TILES_M; i++)
#pragma unroll
        for (int j = 0; j < R::TILES_N; j++) frag_mma(results.acc[i][j], x[i], y[j]);
    }
  }
};

template <class D, class Left, class Right, class E>
INLINE void mma_gemm(Left, DEVICE const typename D::T* a, Right, DEVICE const typename D::T* b, SMEM int* memory,
                     THREAD const E& epilogue, Thread th) {
  ASSUME(th.tid >= 0 && th.tid < D::THREADS);
  const GemmTile tile = gemm_tile<D>(th.workgroup);
  MmaLoop<D, Left, Right> loop;
  loop.a = a; loop.b = b; loop.ring = (SMEM typename D::T*)memory;
  loop.setup(tile, th.tid);
  MmaProducts<D> products;
  products.results.setup(th.subgroup);
  loop.run(products, th);
  products.results.store(epilogue, memory, tile, th);
}
