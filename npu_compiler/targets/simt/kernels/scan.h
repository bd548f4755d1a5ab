// Scans along rows. If rows are contiguous, subgroups scan tiles of them (scan_tiles); if neighbouring rows are
// neighbours in memory, each thread has a row (scan_columns).
//
// Few long rows are scanned in sections (reduce-then-scan; Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016, compare the forms): one kernel reduces all sections, the next one scans each of them from
// the reduction of those before it. Results do not depend on the order in which workgroups run, unlike those of
// decoupled look-back.
//
// Types: T, Out and Total, the storage of inputs, results and totals; R, the register of the running total; X, Y: the
// positions of rows in memory (sort.h); Op: of(a, b) and its identity element start(). Constants: ROWS; N, elements of a
// row; SECTIONS of a row, and SECTION, their elements; THREADS of a workgroup. totals: [ROWS, SECTIONS].
#pragma once

// Returns the total of the sections of a row before `section`. The lanes of a subgroup share the work.
template <class C>
INLINE typename C::R total_before(DEVICE const typename C::Total* totals, int row, int section, int lane) {
  typedef typename C::R R;
  DEVICE const typename C::Total* const of_row = totals + (int64_t)row * C::SECTIONS;
  R total = C::Op::start();
  for (int s = lane; s < section; s += 32) total = C::Op::of(total, (R)widen(of_row[s]));
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) total = C::Op::of(total, subgroup_xor(total, m));
  return total;
}

// -- a thread per row
template <class C>
INLINE void scan_columns(
    DEVICE const typename C::T* x, DEVICE const typename C::Total* totals, DEVICE typename C::Out* y, Thread at) {
  const int n = at.workgroup * C::THREADS + at.tid, row = n % C::ROWS, section = n / C::ROWS;
  if (section >= C::SECTIONS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  DEVICE typename C::Out* const to = y + C::Y::row(row);
  typename C::R total = C::Op::start();
#pragma unroll 8
  for (int s = 0; s < section; s++)
    total = C::Op::of(total, (typename C::R)widen(totals[(int64_t)row * C::SECTIONS + s]));
  const int begin = section * C::SECTION, end = C::N - begin < C::SECTION ? C::N : begin + C::SECTION;
#pragma unroll 8
  for (int i = begin; i < end; i++) {
    total = C::Op::of(total, (typename C::R)widen(from[(int64_t)i * C::X::STEP]));
    to[(int64_t)i * C::Y::STEP] = narrow<typename C::Out>(total);
  }
}

template <class C>
INLINE void scan_column_totals(DEVICE const typename C::T* x, DEVICE typename C::Total* totals, Thread at) {
  const int n = at.workgroup * C::THREADS + at.tid, row = n % C::ROWS, section = n / C::ROWS;
  if (section >= C::SECTIONS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  typename C::R total = C::Op::start();
  const int begin = section * C::SECTION, end = C::N - begin < C::SECTION ? C::N : begin + C::SECTION;
#pragma unroll 8
  for (int i = begin; i < end; i++) total = C::Op::of(total, (typename C::R)widen(from[(int64_t)i * C::X::STEP]));
  totals[(int64_t)row * C::SECTIONS + section] = narrow<typename C::Total>(total);
}

// -- subgroups per row
// A tile has VECTORS vectors of WIDTH neighbours for each lane of a subgroup; SUBGROUPS scan a section together. Loads
// and stores are vectors if LOADS and STORES.
template <class C> struct ScanTile {
  typedef typename C::R R;
  CONSTANTS int VECTOR = 32 * C::WIDTH, TILE = VECTOR * C::VECTORS;
  R v[C::VECTORS][C::WIDTH];

  // Loads the tile that begins at element `first`; elements from `end` on are the identity.
  INLINE void load(DEVICE const typename C::T* from, int first, int end, int lane) {
#pragma unroll
    for (int n = 0; n < C::VECTORS; n++) {
      const int i = first + n * VECTOR + lane * C::WIDTH;
      if (C::LOADS) {
        if (i < end) {
          const Vec<typename C::T, C::WIDTH> x = *(DEVICE const Vec<typename C::T, C::WIDTH>*)(from + i);
#pragma unroll
          for (int e = 0; e < C::WIDTH; e++) v[n][e] = (R)widen(x.v[e]);
        } else {
#pragma unroll
          for (int e = 0; e < C::WIDTH; e++) v[n][e] = C::Op::start();
        }
      } else {
#pragma unroll
        for (int e = 0; e < C::WIDTH; e++)
          v[n][e] = i + e < end ? (R)widen(from[(int64_t)(i + e) * C::X::STEP]) : C::Op::start();
      }
    }
  }

  // Stores what the tile's elements are after `before`.
  INLINE void store(DEVICE typename C::Out* to, int first, int end, R before, int lane) const {
#pragma unroll
    for (int n = 0; n < C::VECTORS; n++) {
      const int i = first + n * VECTOR + lane * C::WIDTH;
      if (C::STORES) {
        Vec<typename C::Out, C::WIDTH> y;
#pragma unroll
        for (int e = 0; e < C::WIDTH; e++) y.v[e] = narrow<typename C::Out>(C::Op::of(before, v[n][e]));
        if (i < end) *(DEVICE Vec<typename C::Out, C::WIDTH>*)(to + i) = y;
      } else {
#pragma unroll
        for (int e = 0; e < C::WIDTH; e++)
          if (i + e < end) to[(int64_t)(i + e) * C::Y::STEP] = narrow<typename C::Out>(C::Op::of(before, v[n][e]));
      }
    }
  }

  // Scans the tile and returns its total.
  INLINE R scan(int lane) {
    R total = C::Op::start();
#pragma unroll
    for (int n = 0; n < C::VECTORS; n++) {
#pragma unroll
      for (int e = 1; e < C::WIDTH; e++) v[n][e] = C::Op::of(v[n][e - 1], v[n][e]);
      R before = C::Op::start(), all = v[n][C::WIDTH - 1];  // of the lanes before this one; of a block of lanes
#pragma unroll
      for (int m = 1; m < 32; m <<= 1) {
        const R other = subgroup_xor(all, m);
        const bool second = (lane & m) != 0;
        before = second ? C::Op::of(other, before) : before;
        all = second ? C::Op::of(other, all) : C::Op::of(all, other);
      }
      before = C::Op::of(total, before);
      total = C::Op::of(total, all);
#pragma unroll
      for (int e = 0; e < C::WIDTH; e++) v[n][e] = C::Op::of(before, v[n][e]);
    }
    return total;
  }
};

// shared: [2, SUBGROUPS].
template <class C>
INLINE void scan_tiles(
    DEVICE const typename C::T* x, DEVICE const typename C::Total* totals, DEVICE typename C::Out* y,
    SMEM typename C::R* shared, Thread at) {
  typedef typename C::R R;
  const int worker = C::SUBGROUPS > 1 ? at.workgroup : at.workgroup * (C::THREADS / 32) + at.subgroup;
  const int row = worker / C::SECTIONS, section = worker % C::SECTIONS, member = C::SUBGROUPS > 1 ? at.subgroup : 0;
  if (C::SUBGROUPS == 1 && row >= C::ROWS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  DEVICE typename C::Out* const to = y + C::Y::row(row);
  const int begin = section * C::SECTION, end = C::N - begin < C::SECTION ? C::N : begin + C::SECTION;
  R before = C::SECTIONS > 1 ? total_before<C>(totals, row, section, at.lane) : C::Op::start();
  int side = 0;
  for (int i = begin; i < end; i += ScanTile<C>::TILE * C::SUBGROUPS) {
    const int first = i + member * ScanTile<C>::TILE;
    ScanTile<C> tile;
    tile.load(from, first, end, at.lane);
    const R total = tile.scan(at.lane);
    R own = before;
    if (C::SUBGROUPS > 1) {
      if (at.lane == 0) shared[side + member] = total;
      barrier();  // the other side is written next, so that no subgroup has to wait for readers
#pragma unroll
      for (int s = 0; s < C::SUBGROUPS; s++) {
        own = s == member ? before : own;
        before = C::Op::of(before, shared[side + s]);
      }
      side = C::SUBGROUPS - side;
    } else {
      before = C::Op::of(before, total);
    }
    tile.store(to, first, end, own, at.lane);
  }
}

// shared: [SUBGROUPS].
template <class C>
INLINE void scan_tile_totals(
    DEVICE const typename C::T* x, DEVICE typename C::Total* totals, SMEM typename C::R* shared, Thread at) {
  typedef typename C::R R;
  const int row = at.workgroup / C::SECTIONS, section = at.workgroup % C::SECTIONS;
  const int begin = section * C::SECTION, end = C::N - begin < C::SECTION ? C::N : begin + C::SECTION;
  R total = C::Op::start();
  for (int i = begin; i < end; i += ScanTile<C>::TILE * C::SUBGROUPS) {
    ScanTile<C> tile;
    tile.load(x + C::X::row(row), i + at.subgroup * ScanTile<C>::TILE, end, at.lane);
#pragma unroll
    for (int n = 0; n < C::VECTORS; n++)
#pragma unroll
      for (int e = 0; e < C::WIDTH; e++) total = C::Op::of(total, tile.v[n][e]);
  }
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) total = C::Op::of(total, subgroup_xor(total, m));
  if (at.lane == 0) shared[at.subgroup] = total;
  barrier();
  if (at.tid == 0) {
    for (int s = 1; s < C::SUBGROUPS; s++) total = C::Op::of(total, shared[s]);
    totals[at.workgroup] = narrow<typename C::Total>(total);
  }
}
