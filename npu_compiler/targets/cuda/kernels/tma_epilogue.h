// The epilogue of products on Hopper. Constants of D: READ_AHEAD: residuals are read before the main loop; SHARED:
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
        mine[i] = n < D::TILE_N && column0 + n < D::N ? scale(column0 + n) : 0.0f;
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

// -- stores by threads: lanes exchange results until each has neighbouring ones
template <class D, class E>
INLINE void store_vectors(const E& epilogue, const typename D::Sum* x, int row0, int m, int n, const typename E::Ahead& ahead,
                          const typename E::Shared& shared, float& sum) {
#pragma unroll
  for (int first = 0; first < 8 * D::PRODUCTS; first += E::WIDTH * D::PRODUCTS) {
    if (m < D::M && n + first < D::N) {
      const float part = epilogue.store(row0 + m, (n + first) / D::PRODUCTS, x + first, ahead, shared);
      if (D::SUM_ROWS) sum += part;
    }
  }
}

// `row0`: the first row of the batch. `kept`: the shared vectors of each piece, or null if they must be loaded.
template <class D, class E, class Rows, class Factors>
INLINE void store_tile(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                       int row0, int column0, int lane, const typename E::Ahead* ahead, const typename E::Shared* kept,
                       float* sums) {
  constexpr int L = D::PRODUCTS, PIECES = D::TILE_N / (32 * L);
#pragma unroll
  for (int g = 0; g < PIECES; g++) {
    const int n = column0 + g * (32 * L) + (lane & 3) * (8 * L);
    typename E::Shared shared;
    if constexpr (D::SHARED) {
      if (kept != nullptr) shared = kept[g];
      else epilogue.read_shared(n, shared);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = row(h);
      if constexpr (D::MERGED) {
        typename D::Sum x[16];
        float y[8], z[8];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = factors.times(acc.v[32 * g + 4 * (i / 2) + 2 * h + i % 2], h);
        epilogue.compute(m, n / 2, x, y, nullptr, typename E::Ahead(), shared);
        quad_transpose<1>(y, lane);
#pragma unroll
        for (int i = 0; i < 8; i++) z[i] = y[i % 4 * 2 + i / 4];
        if (m < D::M && n < D::N) epilogue.put(row0 + m, n / 2, z);
      } else {
        typename D::Sum x[8 * L];
#pragma unroll
        for (int i = 0; i < 8 * L; i++) x[i] = factors.times(acc.v[16 * L * g + i / 2 * 4 + 2 * h + i % 2], h);
        quad_transpose<L>(x, lane);
        store_vectors<D>(epilogue, x, row0, m, n, ahead[D::READ_AHEAD ? 2 * g + h : 0], shared, sums[h]);
      }
    }
  }
  if constexpr (D::TILE_N % (32 * L) != 0) {  // the rest of a row
#pragma unroll
    for (int g = PIECES * 4 * L; g < D::TILE_N / 8; g++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const typename D::Sum x[2] = {factors.times(acc.v[4 * g + 2 * h], h), factors.times(acc.v[4 * g + 2 * h + 1], h)};
        const int m = row(h), n = column0 + g * 8 + (lane & 3) * 2;
#pragma unroll
        for (int first = 0; first < 2; first += E::REST * L) {
          if (m < D::M && n + first < D::N) {
            const float sum = epilogue.store_rest(row0 + m, (n + first) / L, x + first);
            if (D::SUM_ROWS) sums[h] += sum;
          }
        }
      }
    }
  }
}

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

// -- split-K in a cluster: each block adds up the partial sums of its share of the rows
template <class D, class E> struct Share {
  static constexpr int ROWS = D::TILE_M / D::SPLITS, LD = D::TILE_N + 16;  // padded to avoid bank conflicts
  static constexpr int VALUES = E::WIDTH * D::PRODUCTS, PER_ROW = D::TILE_N / VALUES, THREADS = D::TILE_M * 2;
  static constexpr int VECTORS = (ROWS * PER_ROW + THREADS - 1) / THREADS;  // of a thread
  int r, n0, m, n;

  INLINE Share(int i, int tid, int rank, TileIndex tile) {
    const int c = tid + i * THREADS;
    r = c / PER_ROW;
    n0 = c % PER_ROW * VALUES;
    m = tile.m * D::TILE_M + rank * ROWS + r;
    n = tile.n * D::TILE_N + n0;
  }
  INLINE bool inside() const { return r < ROWS && m < D::M && n < D::N; }
};

// Sends a warp's 16 rows from `row` on to the blocks of the cluster that add them up, whose `sums` are [rank, SHARE,
// LD]. Two neighbouring lanes exchange pairs of two blocks of 8 columns, so that each stores four neighbours: the even
// lane those of the first block, the odd lane those of the second.
template <int SHARE, int LD, int N, class Sum>
INLINE void cluster_send(Sum* sums, int rank, const WgmmaC<N, Sum>& c, int row, int lane) {
  const bool odd = lane & 1;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = row + (lane >> 2) + 8 * h;
    const uint to = cluster_address(sums + (rank * SHARE + r % SHARE) * LD, r / SHARE);
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
      const Sum* left = c.v + 4 * j + 2 * h;
      const Sum* right = left + 4;
      const Sum x = subgroup_xor(odd ? left[0] : right[0], 1), y = subgroup_xor(odd ? left[1] : right[1], 1);
      const uint at = to + (j + (odd ? 1 : 0)) * 32 + (lane & 2) * 8;
      if (odd) cluster_store(at, x, y, right[0], right[1]);
      else cluster_store(at, left[0], left[1], x, y);
    }
    if (N / 8 % 2)
      cluster_store(to + (N / 8 - 1) * 32 + (lane & 3) * 8, c.v[N / 2 - 4 + 2 * h], c.v[N / 2 - 3 + 2 * h]);
  }
}

// `parts`: shared memory for the partial sums of all blocks. `factor`: the row norm's factor of each vector.
template <class D, class E, class Scale>
INLINE void store_share(const E& epilogue, const TileC<D>& acc, typename D::Sum* parts, const float* factor,
                        const typename E::Ahead* ahead, TileIndex tile, int rank, const Thread& th, float* row_sums) {
  typedef Share<D, E> S;
  cluster_send<S::ROWS, S::LD>(parts, rank, acc, th.subgroup * 16, th.lane);
  cluster_barrier();
#pragma unroll
  for (int i = 0; i < S::VECTORS; i++) {
    const S s(i, th.tid, rank, tile);
    if (s.inside()) {
      typename D::Sum x[S::VALUES] = {};
#pragma unroll
      for (int part = 0; part < D::SPLITS; part++)
#pragma unroll
        for (int e = 0; e < S::VALUES; e++) x[e] += parts[(part * S::ROWS + s.r) * S::LD + s.n0 + e];
      if constexpr (Scale::ENABLED) {
#pragma unroll
        for (int e = 0; e < S::VALUES; e++) x[e] *= factor[i];
      }
      const int row0 = D::BATCH > 1 ? tile.batch * D::M : 0;
      const float sum = epilogue.store(row0 + s.m, s.n / D::PRODUCTS, x, ahead[D::READ_AHEAD ? i : 0], typename E::Shared());
      if (D::SUM_ROWS) parts[s.r * S::LD + s.n0] = sum;  // only this thread has read this place
    }
  }
  if constexpr (D::SUM_ROWS > 0) {
    named_barrier(1, S::THREADS);
    for (int r = th.tid; r < S::ROWS; r += S::THREADS) {
      const int m = tile.m * D::TILE_M + rank * S::ROWS + r;
      float total = 0.0f;
      for (int n0 = 0; n0 < D::TILE_N; n0 += E::WIDTH)
        if (tile.n * D::TILE_N + n0 < D::N) total += parts[r * S::LD + n0];
      if (m < D::M) row_sums[tile.n * D::SUM_ROWS + m] = total;
    }
  }
}

// -- stores by TMA: warpgroups write pieces of results to shared memory, in the order of wgmma's accumulators
constexpr int PIECE = 64;  // rows

// Pieces have rows of 128 bytes, swizzled, or of 64 bytes if those do not divide a row of the tile.
template <class D> struct Piece {
  typedef typename D::R R;
  static constexpr int WIDEST = 128 / sizeof(R), COLUMNS = D::TILE_N % WIDEST ? 64 : WIDEST;
  static constexpr int ROW = COLUMNS * sizeof(R), COUNT = D::TILE_N / COLUMNS;  // bytes of a row; pieces of a tile
  static constexpr int SIZE = PIECE * ROW / 2, UNITS = ROW / 2;                 // of two bytes, in a piece and in a row
  static constexpr int BLOCKS = COLUMNS / 16;                                   // blocks of 16 columns

  // The address of the n-th 16 bytes of a row.
  static INLINE char* place(typename D::T* piece, int row, int n) {
    return (char*)piece + row * ROW + ((n ^ (ROW == 128 ? row & 7 : row >> 1 & 3)) * 16);
  }
};

// Pairs of results of another product, which stay in registers: the i-th pair of 16 columns.
template <class D> struct KeptPairs {
  typedef typename D::R R;
  static constexpr int PER_REGISTER = sizeof(R) == 1 ? 2 : 1;
  uint v[D::TILE_N / 4 / PER_REGISTER];

  INLINE void put(int i, uint pair) {
    uint& to = v[i / PER_REGISTER];
    if (i % PER_REGISTER) to = byte_permute(to, pair, 0x5410);
    else to = pair;
  }
  INLINE Vec<typename D::Sum, 2> get(int i) const {
    if constexpr (sizeof(R) == 1) {
      const uint pair = v[i / 2] >> (i % 2 * 16);
      return {{(int)(pair & 255u), (int)(pair >> 8 & 255u)}};
    } else {
      const Vec<R, 2> pair = unpack_pair<R>(v[i]);
      return {{to_f32(pair.v[0]), to_f32(pair.v[1])}};
    }
  }
};

// Computes the results of the q-th 16 columns of the tile, for half j of the columns and half h of the rows, and passes
// each pair of neighbours to use(output, 2 * j + h, y). `other`: results of another product, which are its second
// accumulator; or null.
template <class D, class E, class Rows, class Factors, class Use>
INLINE void compute_pairs(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                          int column0, int lane, int q, const KeptPairs<D>* other, const typename E::Ahead* ahead,
                          const typename E::Shared* kept, const Use& use, float* sums) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int n = column0 + q * 16 + j * 8 + (lane & 3) * 2;
    typename E::Shared shared;
    if (kept != nullptr) shared = kept[2 * q + j];
    else epilogue.read_shared(n, shared);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      typename D::Sum x[4];
      typename E::Result y[2], y1[2];
      const typename D::Sum left = factors.times(acc.v[8 * q + 4 * j + 2 * h], h);
      const typename D::Sum right = factors.times(acc.v[8 * q + 4 * j + 2 * h + 1], h);
      x[0] = left;
      if constexpr (D::KEEPS) {
        const Vec<typename D::Sum, 2> before = other->get(4 * q + 2 * j + h);
        x[1] = before.v[0];
        x[2] = right;
        x[3] = before.v[1];
      } else {
        x[1] = right;
      }
      const float sum = epilogue.compute(row(h), n, x, y, y1, ahead[2 * j + h], shared);
      use(0, 2 * j + h, pack_pair(y[0], y[1], (typename D::R*)nullptr));
      if (D::OUTPUTS > 1) use(D::OUTPUTS - 1, 2 * j + h, pack_pair(y1[0], y1[1], (typename D::R*)nullptr));
      if (D::SUM_ROWS) sums[h] += sum;
    }
  }
}

// Writes pieces FIRST to LAST - 1 of 64 rows to `to`, APART units apart; the piece of a second output follows that of
// the first. If RESIDUAL, the pieces hold the residual before.
template <class D, int FIRST, int LAST, int APART, bool RESIDUAL, class E, class Rows, class Factors>
INLINE void write_pieces(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                         int column0, const Thread& th, typename D::T* to, const KeptPairs<D>* other,
                         const typename E::Shared* kept, float* sums) {
  typedef typename D::R R;
  typedef Piece<D> P;
  const int row0 = th.subgroup % 4 * 16;
#pragma unroll
  for (int q = FIRST * P::BLOCKS; q < LAST * P::BLOCKS; q++) {
    typename D::T* const piece = to + (q / P::BLOCKS - FIRST) * (D::OUTPUTS * APART);
    typename E::Ahead ahead[4];
    if constexpr (sizeof(R) == 1) {  // a block is 16 bytes, of which each lane has two pairs in two rows
      const auto place = [&](int i) {  // rows are aligned, so that the block is a part of the address
        const uint row = shared_address(P::place(piece, row0 + (th.lane >> 2) + 8 * (i & 1), 0));
        return ((row + (th.lane & 3) * 2) ^ (q % P::BLOCKS * 16)) + (i >> 1) * 8;
      };
      if constexpr (RESIDUAL) {
#pragma unroll
        for (int i = 0; i < 4; i++) ahead[i].v0 = unpack_bytes(shared_load2(place(i)));
      }
      const auto write = [&](int n, int i, uint pair) { shared_store2(place(i) + n * (APART * 2), pair); };
      compute_pairs<D>(epilogue, acc, factors, row, column0, th.lane, q, other, ahead, kept, write, sums);
    } else {
      char* const place = P::place(piece, row0 + (th.lane & 15), q % P::BLOCKS * 2 + (th.lane >> 4));
      if constexpr (RESIDUAL) {
        uint v[4];
        ldmatrix_x4(v, place);
#pragma unroll
        for (int i = 0; i < 4; i++) ahead[i].v0 = unpack_pair<R>(v[i]);
      }
      uint pairs[D::OUTPUTS][4];
      const auto keep = [&](int n, int i, uint pair) { pairs[n][i] = pair; };
      compute_pairs<D>(epilogue, acc, factors, row, column0, th.lane, q, other, ahead, kept, keep, sums);
#pragma unroll
      for (int n = 0; n < D::OUTPUTS; n++) stmatrix_x4(place + n * (APART * 2), pairs[n]);
    }
  }
}

// Writes pieces like write_pieces(). Then one thread of the warpgroup may let TMA store them.
template <class D, int FIRST, int LAST, int APART, bool RESIDUAL, class E, class Rows, class Factors>
INLINE void fill_pieces(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                        int column0, const Thread& th, typename D::T* to, const KeptPairs<D>* other,
                        const typename E::Shared* kept, float* sums) {
  write_pieces<D, FIRST, LAST, APART, RESIDUAL>(epilogue, acc, factors, row, column0, th, to, other, kept, sums);
  fence_async_shared();
  named_barrier(1 + th.subgroup / 4, 128);
}

struct TileOutputs {
  const TensorMap *first, *second, *residual;
};

// The last RESULT_STAGES stages of a tile: the producer pre-fills them with the residual; the warpgroups overwrite them
// with results, which TMA then stores. They are free when TMA has read them.
template <class D> struct ResultStages {
  typedef Piece<D> P;
  static constexpr int WARPGROUPS = D::TILE_M / 64, SLOTS = D::RESULT_STAGES;
  static constexpr int PER_SLOT = SLOTS ? (P::COUNT + SLOTS - 1) / SLOTS : 0;
  static INLINE constexpr int last(int slot) { return (slot + 1) * PER_SLOT < P::COUNT ? (slot + 1) * PER_SLOT : P::COUNT; }

  // The address of piece `at` of a slot, for one warpgroup.
  static INLINE typename D::T* place(const Ring<D>& ring, int slot, int at, int warpgroup, int output = 0) {
    return ring.stage(slot) + (at * D::OUTPUTS + output) * WARPGROUPS * P::SIZE + warpgroup * P::SIZE;
  }
  // The first unit of piece n in a row of the result.
  static INLINE int column(TileIndex tile, int n) { return tile.n * (P::COUNT * P::UNITS) + n * P::UNITS; }

  template <int S> static INLINE void prefill(const Ring<D>& ring, RingPosition<D::STAGES>& at, TileIndex tile,
                                                const TileOutputs& to) {
    mbarrier_wait(ring.empty + at.slot, at.phase);
    if (!D::RESIDUAL) mbarrier_arrive(ring.full + at.slot);
    else {
      mbarrier_expect_bytes(ring.full + at.slot, (last(S) - S * PER_SLOT) * WARPGROUPS * P::SIZE * 2);
#pragma unroll
      for (int n = S * PER_SLOT; n < last(S); n++)
#pragma unroll
        for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++)
          tma_load(place(ring, at.slot, n - S * PER_SLOT, warpgroup), *to.residual, ring.full + at.slot,
                   column(tile, n), tile.m * D::TILE_M + warpgroup * PIECE, 0);
    }
    at.next();
    if constexpr (S + 1 < SLOTS) prefill<S + 1>(ring, at, tile, to);
  }

  template <int S, class E, class Rows, class Factors>
  static INLINE void store(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                           const Ring<D>& ring, RingPosition<D::STAGES>& at, TileIndex tile, const TileOutputs& to,
                           const Thread& th, const KeptPairs<D>* other, float* sums) {
    mbarrier_wait(ring.full + at.slot, at.phase);
    fill_pieces<D, S * PER_SLOT, last(S), WARPGROUPS * P::SIZE, D::RESIDUAL>(
        epilogue, acc, factors, row, tile.n * D::TILE_N, th, place(ring, at.slot, 0, th.subgroup / 4), other, nullptr,
        sums);
    if (th.tid % 128 == 0) {
#pragma unroll
      for (int n = S * PER_SLOT; n < last(S); n++) {
        const int x = column(tile, n), y = tile.m * D::TILE_M + th.subgroup / 4 * PIECE;
        tma_store(*to.first, place(ring, at.slot, n - S * PER_SLOT, th.subgroup / 4), x, y, 0);
        if (D::OUTPUTS > 1) tma_store(*to.second, place(ring, at.slot, n - S * PER_SLOT, th.subgroup / 4, 1), x, y, 0);
      }
      tma_store_commit();
    }
    at.next();
    if constexpr (S + 1 < SLOTS) store<S + 1>(epilogue, acc, factors, row, ring, at, tile, to, th, other, sums);
  }
};

// Frees the result stages of the previous tile during the first product of a tile.
template <class D> struct ReleaseResults {
  const Ring<D>& ring;
  int tid, held;  // held: the first of these stages; -1: none
  INLINE void operator()(bool first) const {
    if (D::RESULT_STAGES && first && held >= 0 && tid % 128 == 0) {
      tma_store_wait_read();
      mbarrier_arrive(ring.empty + held);
#pragma unroll
      for (int n = 1; n < D::RESULT_STAGES; n++) mbarrier_arrive(ring.empty + (held + n) % D::STAGES);
    }
  }
};
