// Threads store the results of a tile: lanes exchange them until each has neighbouring ones. With split-K in a cluster,
// each block first adds up the partial sums of its share of the rows.
#pragma once
#include "tma_head_stores.h"

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

// Stores the g-th 32 columns (of each of PRODUCTS) of a lane's row h. `row0`: the first row of the batch. `kept`: the
// shared vectors, or null if they must be loaded.
template <class D, class E, class Rows, class Factors>
INLINE void store_part(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row, int row0,
                       int column0, int lane, const typename E::Ahead& ahead, const typename E::Shared& shared, float* sums,
                       int g, int h) {
  constexpr int L = D::PRODUCTS;
  const int m = row(h), n = column0 + g * (32 * L) + (lane & 3) * (8 * L);
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
    store_vectors<D>(epilogue, x, row0, m, n, ahead, shared, sums[h]);
  }
}

template <class D, class E, class Rows, class Factors>
INLINE void store_tile(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                       int row0, int column0, int lane, const typename E::Ahead* ahead, const typename E::Shared* kept,
                       float* sums) {
  constexpr int L = D::PRODUCTS, GROUPS = D::TILE_N / (32 * L);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    typename E::Shared shared;
    if constexpr (D::SHARED) {
      if (kept != nullptr) shared = kept[g];
      else epilogue.read_shared(column0 + g * (32 * L) + (lane & 3) * (8 * L), shared);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
      store_part<D>(epilogue, acc, factors, row, row0, column0, lane, ahead[D::READ_AHEAD ? 2 * g + h : 0], shared, sums, g, h);
  }
  if constexpr (D::TILE_N % (32 * L) != 0) {  // the rest of a row
#pragma unroll
    for (int g = GROUPS * 4 * L; g < D::TILE_N / 8; g++) {
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

// -- split-K in a cluster
constexpr int PARTS_PAD = 16;  // floats behind a row of partial sums, to avoid bank conflicts

// The rows that a block adds up, in vectors. With heads, a thread has pairs of vectors APART columns from each other.
template <class D, class E> struct Share {
  static constexpr int ROWS = D::TILE_M / D::SPLITS, LD = D::TILE_N + PARTS_PAD;
  static constexpr int VALUES = E::WIDTH * D::PRODUCTS, EACH = D::HEAD ? 2 : 1, THREADS = D::TILE_M * 2;
  static constexpr int PER_ROW = D::TILE_N / VALUES / EACH, APART = D::HEAD ? columns_apart<D>() : D::TILE_N;
  static constexpr int VECTORS = (ROWS * PER_ROW + THREADS - 1) / THREADS;  // of a thread
  int r, n0, m, n;

  INLINE Share(int i, int tid, int rank, TileIndex tile) {
    const int c = tid + i * THREADS, at = c % PER_ROW * VALUES;
    r = c / PER_ROW;
    n0 = at / APART * (EACH * APART) + at % APART;
    m = tile.m * D::TILE_M + rank * ROWS + r;
    n = first_column<D>(tile.n) + n0;
  }
  INLINE bool inside() const { return r < ROWS && m < D::M && n < D::N; }
};

// The row norm's factors of a block's share of the rows. The lanes that read a row's sums follow one another. In front of
// the main loop they are only requested.
template <class D, class Scale> struct ShareFactors {
  static constexpr int LANES = 2 * D::SPLITS, EACH = (Scale::TILES + LANES - 1) / LANES;
  float sums[Scale::ENABLED ? EACH : 1];

  INLINE void read(const Scale& scale, TileIndex tile, int rank, int tid) {
    if constexpr (Scale::ENABLED) {
      const int m = tile.m * D::TILE_M + rank * (D::TILE_M / D::SPLITS) + tid / LANES;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int part = i * LANES + tid % LANES;
        sums[i] = part < Scale::TILES && m < Scale::ROWS ? scale.sums[part * Scale::ROWS + m] : 0.0f;
      }
    }
  }
  // Puts the factor of each row into the padding behind the partial sums of that row in `parts`.
  INLINE void find(const Scale& scale, float* parts, int tid) {
    if constexpr (Scale::ENABLED) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; i++) total += sums[i];
#pragma unroll
      for (int m = 1; m < LANES; m *= 2) total += subgroup_xor(total, m);
      if (tid % LANES == 0) parts[tid / LANES * (D::TILE_N + PARTS_PAD) + D::TILE_N] = scale.factor(total);
    }
  }
};

// Sends a warp's 16 rows from `row` on to the blocks of the cluster that add them up, whose `sums` are [rank, SHARE,
// LD] and whose mbarriers `sent` count their bytes. Two neighbouring lanes exchange pairs of two blocks of 8 columns, so
// that each stores four neighbours: the even lane those of the first block, the odd lane those of the second.
template <int SHARE, int LD, int N, class Sum>
INLINE void cluster_send(Sum* sums, int64_t* sent, int rank, const WgmmaC<N, Sum>& c, int row, int lane) {
  const bool odd = lane & 1;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = row + (lane >> 2) + 8 * h;
    const bool own = r / SHARE == rank;
    const Sum* const place = sums + (rank * SHARE + r % SHARE) * LD;
    const uint to = own ? shared_address(place) : cluster_address(place, r / SHARE);
    const uint full = cluster_address(sent, r / SHARE);
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
      const Sum* left = c.v + 4 * j + 2 * h;
      const Sum* right = left + 4;
      const Sum x = subgroup_xor(odd ? left[0] : right[0], 1), y = subgroup_xor(odd ? left[1] : right[1], 1);
      const uint at = to + (j + (odd ? 1 : 0)) * 32 + (lane & 2) * 8;
      cluster_store(own, at, full, odd ? x : left[0], odd ? y : left[1], odd ? right[0] : x, odd ? right[1] : y);
    }
    if (N / 8 % 2)
      cluster_store(own, to + (N / 8 - 1) * 32 + (lane & 3) * 8, full, c.v[N / 2 - 4 + 2 * h], c.v[N / 2 - 3 + 2 * h]);
  }
}

// Adds up the sums x from column n0 of row r of a block's share on.
template <class D, class S, class Scale>
INLINE void add_parts(typename D::Sum* x, const typename D::Sum* parts, int r, int n0) {
#pragma unroll
  for (int e = 0; e < S::VALUES; e++) x[e] = 0;
#pragma unroll
  for (int part = 0; part < D::SPLITS; part++)
#pragma unroll
    for (int e = 0; e < S::VALUES; e++) x[e] += parts[(part * S::ROWS + r) * S::LD + n0 + e];
  if constexpr (Scale::ENABLED) {
#pragma unroll
    for (int e = 0; e < S::VALUES; e++) x[e] *= parts[r * S::LD + D::TILE_N];
  }
}

// `parts`: shared memory for the partial sums of all blocks. The mbarrier `sent` counts the bytes of the others.
template <class D, class E, class Scale>
INLINE void store_share(const E& epilogue, const TileC<D>& acc, typename D::Sum* parts, int64_t* sent,
                        const typename E::Ahead* ahead, TileIndex tile, int rank, const Thread& th, float* row_sums) {
  typedef Share<D, E> S;
  cluster_send<S::ROWS, S::LD>(parts, sent, rank, acc, th.subgroup * 16, th.lane);
  named_barrier(1 + D::TILE_M / 64, S::THREADS);  // the warpgroups' own barriers have the numbers before
  cluster_wait(sent, 0);
#pragma unroll
  for (int i = 0; i < S::VECTORS; i++) {
    const S s(i, th.tid, rank, tile);
    if (s.inside()) {
      typename D::Sum x[S::VALUES];
      add_parts<D, S, Scale>(x, parts, s.r, s.n0);
      const int row0 = D::BATCH > 1 ? tile.batch * D::M : 0;
      if constexpr (D::HEAD > 0) {
        typename D::Sum far[S::VALUES];
        add_parts<D, S, Scale>(far, parts, s.r, s.n0 + S::APART);
        epilogue.store(row0 + s.m, s.n, x, far, ahead[i]);
      } else {
        const float sum = epilogue.store(row0 + s.m, s.n / D::PRODUCTS, x, ahead[D::READ_AHEAD ? i : 0], typename E::Shared());
        if (D::SUM_ROWS) parts[s.r * S::LD + s.n0] = sum;  // only this thread has read this place
      }
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
