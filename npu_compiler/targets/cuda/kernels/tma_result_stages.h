// TMA stores the results of a tile: warpgroups write subtiles of them to shared memory, in the order of wgmma's
// accumulators. The subtiles are the last stages of the ring, which TMA may fill with the residual before.
#pragma once
#include "tma_epilogue.h"

constexpr int SUBTILE = 64;  // rows

// Subtiles of tiles of N columns have rows of 128 bytes, swizzled, or of 64 bytes if those do not divide a row of the tile.
template <class D, int N = D::TILE_N> struct ResultSubtile {
  typedef typename D::R R;
  static constexpr int WIDEST = 128 / sizeof(R), COLUMNS = N % WIDEST ? 64 : WIDEST;
  static constexpr int ROW = COLUMNS * sizeof(R), COUNT = N / COLUMNS;  // bytes of a row; subtiles of a tile
  static constexpr int SIZE = SUBTILE * ROW / 2, ROW_B16 = ROW / 2;  // b16 elements of a subtile and of a row
  static constexpr int BLOCKS = COLUMNS / 16;                                   // blocks of 16 columns

  // The address of the n-th 16 bytes of a row.
  static INLINE char* place(typename D::T* subtile, int row, int n) {
    return (char*)subtile + row * ROW + ((n ^ (ROW == 128 ? row & 7 : row >> 1 & 3)) * 16);
  }
};

// Pairs of results of another product, which stay in registers: the i-th pair of 16 columns. Those of 8 bits are
// floats, whose bits get() returns as integer sums: packing and converting them would be a third of the kernel's
// instructions. Those of narrow tiles are floats, too.
template <class D> struct KeptPairs {
  typedef typename D::R R;
  static constexpr bool FLOATS = sizeof(R) == 1 || D::TILE_N <= 64;
  uint v[D::TILE_N / (FLOATS ? 2 : 4)];

  INLINE void put(int i, float left, float right) {
    if constexpr (FLOATS) {
      v[2 * i] = bits_of_f32(left);
      v[2 * i + 1] = bits_of_f32(right);
    } else {
      v[i] = pack_pair(left, right, (R*)nullptr);
    }
  }
  INLINE Vec<typename D::Sum, 2> get(int i) const {
    if constexpr (sizeof(R) == 1) return {{(int)v[2 * i], (int)v[2 * i + 1]}};
    else if constexpr (FLOATS) return {{f32_of_bits(v[2 * i]), f32_of_bits(v[2 * i + 1])}};
    else {
      const Vec<R, 2> pair = unpack_pair<R>(v[i]);
      return {{to_f32(pair.v[0]), to_f32(pair.v[1])}};
    }
  }
};

// Computes the results of the q-th 16 columns of the tile, for half j of the columns and half h of the rows, and passes
// each pair of neighbours to use(output, 2 * j + h, left, right). `other`: results of another product, which are its
// second accumulator; or null.
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
      use(0, 2 * j + h, y[0], y[1]);
      if (D::OUTPUTS > 1) use(D::OUTPUTS - 1, 2 * j + h, y1[0], y1[1]);
      if (D::SUM_ROWS) sums[h] += sum;
    }
  }
}

// Writes blocks FROM to TO - 1, of 16 columns each, to subtiles P of 64 rows; `to` is the subtile of the first one. Subtiles are
// APART b16 elements apart; the subtile of a second output follows that of the first. If RESIDUAL, the subtiles hold the
// residual before. `acc` and `other` begin with block Q0.
template <class D, class P, int FROM, int TO, int Q0, int APART, bool RESIDUAL, class E, class Rows, class Factors>
INLINE void write_blocks(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                         int column0, const Thread& th, typename D::T* to, const KeptPairs<D>* other,
                         const typename E::Shared* kept, float* sums) {
  typedef typename D::R R;
  const int row0 = th.subgroup % 4 * 16;
#pragma unroll
  for (int q = FROM; q < TO; q++) {
    typename D::T* const subtile = to + (q / P::BLOCKS - FROM / P::BLOCKS) * (D::OUTPUTS * APART);
    typename E::Ahead ahead[4];
    if constexpr (sizeof(R) == 1) {  // a block is 16 bytes, of which each lane has two pairs in two rows
      const auto place = [&](int i) {  // rows are aligned, so that the block is a part of the address
        const uint row = shared_address(P::place(subtile, row0 + (th.lane >> 2) + 8 * (i & 1), 0));
        return ((row + (th.lane & 3) * 2) ^ (q % P::BLOCKS * 16)) + (i >> 1) * 8;
      };
      if constexpr (RESIDUAL) {
#pragma unroll
        for (int i = 0; i < 4; i++) ahead[i].v0 = unpack_bytes(shared_load2(place(i)));
      }
      const auto write = [&](int n, int i, typename E::Result left, typename E::Result right) {
        shared_store2(place(i) + n * (APART * 2), pack_pair(left, right, (R*)nullptr));
      };
      compute_pairs<D>(epilogue, acc, factors, row, column0 + Q0 * 16, th.lane, q - Q0, other, ahead, kept, write, sums);
    } else {
      char* const place = P::place(subtile, row0 + (th.lane & 15), q % P::BLOCKS * 2 + (th.lane >> 4));
      if constexpr (RESIDUAL) {
        uint v[4];
        ldmatrix_x4(v, place);
#pragma unroll
        for (int i = 0; i < 4; i++) ahead[i].v0 = unpack_pair<R>(v[i]);
      }
      uint pairs[D::OUTPUTS][4];
      const auto keep = [&](int n, int i, float left, float right) {
        pairs[n][i] = pack_pair(left, right, (R*)nullptr);
      };
      compute_pairs<D>(epilogue, acc, factors, row, column0 + Q0 * 16, th.lane, q - Q0, other, ahead, kept, keep, sums);
#pragma unroll
      for (int n = 0; n < D::OUTPUTS; n++) stmatrix_x4(place + n * (APART * 2), pairs[n]);
    }
  }
}

// Writes subtiles FIRST to LAST - 1 of a tile.
template <class D, int FIRST, int LAST, int APART, bool RESIDUAL, class E, class Rows, class Factors>
INLINE void write_subtiles(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                         int column0, const Thread& th, typename D::T* to, const KeptPairs<D>* other,
                         const typename E::Shared* kept, float* sums) {
  typedef ResultSubtile<D> P;
  write_blocks<D, P, FIRST * P::BLOCKS, LAST * P::BLOCKS, 0, APART, RESIDUAL>(epilogue, acc, factors, row, column0, th, to,
                                                                              other, kept, sums);
}

// Writes subtiles like write_subtiles(). Then one thread of the warpgroup may let TMA store them.
template <class D, int FIRST, int LAST, int APART, bool RESIDUAL, class E, class Rows, class Factors>
INLINE void fill_subtiles(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                        int column0, const Thread& th, typename D::T* to, const KeptPairs<D>* other,
                        const typename E::Shared* kept, float* sums) {
  write_subtiles<D, FIRST, LAST, APART, RESIDUAL>(epilogue, acc, factors, row, column0, th, to, other, kept, sums);
  fence_async_shared();
  named_barrier(1 + th.subgroup / 4, 128);
}

struct TileOutputs {
  const TensorMap *first, *second, *residual;
};

// The last RESULT_STAGES stages of a tile: the producer pre-fills them with the residual; the warpgroups overwrite them
// with results, which TMA then stores. They are free when TMA has read them.
template <class D> struct ResultStages {
  typedef ResultSubtile<D> P;
  static constexpr int WARPGROUPS = D::TILE_M / 64, SLOTS = D::RESULT_STAGES;
  static constexpr int PER_SLOT = SLOTS ? (P::COUNT + SLOTS - 1) / SLOTS : 0;
  static INLINE constexpr int last(int slot) { return (slot + 1) * PER_SLOT < P::COUNT ? (slot + 1) * PER_SLOT : P::COUNT; }

  // The address of subtile `at` of a slot, for one warpgroup.
  static INLINE typename D::T* place(const Ring<D>& ring, int slot, int at, int warpgroup, int output = 0) {
    return ring.stage(slot) + (at * D::OUTPUTS + output) * WARPGROUPS * P::SIZE + warpgroup * P::SIZE;
  }
  // The first b16 element of subtile n in a row of the result.
  static INLINE int column(TileIndex tile, int n) { return tile.n * (P::COUNT * P::ROW_B16) + n * P::ROW_B16; }

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
                   column(tile, n), tile.m * D::TILE_M + warpgroup * SUBTILE, 0);
    }
    at.next();
    if constexpr (S + 1 < SLOTS) prefill<S + 1>(ring, at, tile, to);
  }

  template <int S, class E, class Rows, class Factors>
  static INLINE void store(const E& epilogue, const TileC<D>& acc, const Factors& factors, const Rows& row,
                           const Ring<D>& ring, RingPosition<D::STAGES>& at, TileIndex tile, const TileOutputs& to,
                           const Thread& th, const KeptPairs<D>* other, float* sums) {
    mbarrier_wait(ring.full + at.slot, at.phase);
    fill_subtiles<D, S * PER_SLOT, last(S), WARPGROUPS * P::SIZE, D::RESIDUAL>(
        epilogue, acc, factors, row, tile.n * D::TILE_N, th, place(ring, at.slot, 0, th.subgroup / 4), other, nullptr,
        sums);
    if (th.tid % 128 == 0) {
#pragma unroll
      for (int n = S * PER_SLOT; n < last(S); n++) {
        const int x = column(tile, n), y = tile.m * D::TILE_M + th.subgroup / 4 * SUBTILE;
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
