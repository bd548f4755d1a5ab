// Scans along rows. If rows are contiguous, subgroups scan tiles of them (scan_tiles); if neighbouring rows are
// neighbours in memory, each thread has a row (scan_columns) or a part of one (scan_column_tiles).
//
// Few long rows are scanned in sections (reduce-then-scan; Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016, compare the forms): one kernel reduces all sections, the next one scans each of them from
// the reduction of those before it. Results do not depend on the order in which workgroups run, unlike those of
// decoupled look-back.
//
// Types: T, Out and Total, the storage of inputs, results and totals; R, the register of the running total; X, Y: the
// positions of rows in memory (sort.h); Op: of(a, b), where b follows a, merge(a, b) in any order, and start(), the
// identity element. Constants: ROWS; N, elements of a row; SECTIONS of a row, and SECTION, their elements; THREADS of a
// workgroup; PLACES: R is an extreme with its position in the row, a second result (P: the positions of its rows in
// memory). totals: [ROWS, SECTIONS].
#pragma once

// An element and its position in the row; a position of -1 stands for no element.
template <class V> struct Placed { V value; int place; };

template <class V> INLINE Placed<V> subgroup_xor(Placed<V> x, int mask) {
  Placed<V> y;
  y.value = subgroup_xor(x.value, mask), y.place = subgroup_xor(x.place, mask);
  return y;
}

// Returns the extreme one of a and the later b; `wins`: b is as extreme as a. The identity may win against elements that
// equal it, and has no position; but every element that follows wins against it.
template <class V> INLINE Placed<V> later_extreme(Placed<V> a, Placed<V> b, bool wins) {
  wins = wins || b.value != b.value;
  Placed<V> y;
  y.value = wins ? b.value : a.value, y.place = wins ? b.place : a.place;
  return y;
}

// Returns the extreme one in any order, the later one of two that are equal or NaN. `beyond`: b is more extreme than a.
template <class V> INLINE Placed<V> extreme(Placed<V> a, Placed<V> b, bool beyond) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value, tie = a_nan ? b_nan : b.value == a.value;
  return (tie ? b.place > a.place : beyond || b_nan) ? b : a;
}

// Running totals are made from elements and stored as results and as totals of sections. `from`, `to`: the row's first
// element.
template <class C, bool PLACES = C::PLACES> struct Running {
  typedef typename C::R R;
  typedef typename C::Total Total;
  typedef typename C::Out Out;
  static INLINE R of(typename C::T x, int) { return (R)widen(x); }
  static INLINE Out value(R x) { return narrow<Out>(x); }
  static INLINE int64_t place(R) { return 0; }
  static INLINE Total total(R x) { return narrow<Total>(x); }
  static INLINE R restore(Total x, DEVICE const typename C::T*) { return (R)widen(x); }
  static INLINE DEVICE int64_t* places(DEVICE int64_t*, int) { return nullptr; }
  static INLINE void put(R x, DEVICE Out* to, DEVICE int64_t*, int i) { to[(int64_t)i * C::Y::STEP] = value(x); }
};

template <class C> struct Running<C, true> {
  typedef typename C::R R;
  typedef typename C::Out Out;
  static INLINE R of(typename C::T x, int i) {
    R y;
    y.value = widen(x), y.place = i;
    return y;
  }
  static INLINE Out value(R x) { return narrow<Out>(x.value); }
  static INLINE int64_t place(R x) { return x.place; }
  static INLINE int total(R x) { return x.place; }
  static INLINE R restore(int i, DEVICE const typename C::T* from) { return of(from[(int64_t)i * C::X::STEP], i); }
  static INLINE DEVICE int64_t* places(DEVICE int64_t* p, int row) { return p + C::P::row(row); }
  static INLINE void put(R x, DEVICE Out* to, DEVICE int64_t* places, int i) {
    to[(int64_t)i * C::Y::STEP] = value(x);
    places[(int64_t)i * C::P::STEP] = x.place;
  }
};

// Returns the total of the sections of a row before `section`. The lanes of a subgroup share the work.
template <class C>
INLINE typename C::R total_before(
    DEVICE const typename C::T* from, DEVICE const typename C::Total* totals, int row, int section, int lane) {
  typedef typename C::R R;
  DEVICE const typename C::Total* const of_row = totals + (int64_t)row * C::SECTIONS;
  R total = C::Op::start();
  for (int s = lane; s < section; s += 32) total = C::Op::merge(total, Running<C>::restore(of_row[s], from));
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) total = C::Op::merge(total, subgroup_xor(total, m));
  return total;
}

// -- a thread per row
template <class C>
INLINE void scan_columns(
    DEVICE const typename C::T* x, DEVICE const typename C::Total* totals, DEVICE typename C::Out* y, DEVICE int64_t* p,
    Thread at) {
  const int n = at.workgroup * C::THREADS + at.tid, row = n % C::ROWS, section = n / C::ROWS;
  if (section >= C::SECTIONS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  DEVICE typename C::Out* const to = y + C::Y::row(row);
  DEVICE int64_t* const places = Running<C>::places(p, row);
  typename C::R total = C::Op::start();
#pragma unroll 8
  for (int s = 0; s < section; s++)
    total = C::Op::of(total, Running<C>::restore(totals[(int64_t)row * C::SECTIONS + s], from));
  const int begin = section * C::SECTION, end = C::N - begin < C::SECTION ? C::N : begin + C::SECTION;
#pragma unroll 8
  for (int i = begin; i < end; i++) {
    total = C::Op::of(total, Running<C>::of(from[(int64_t)i * C::X::STEP], i));
    Running<C>::put(total, to, places, i);
  }
}

// A thread has a column of EACH elements of a tile: the lanes of a subgroup, neighbouring rows, and the subgroups, parts
// of these rows one after another. shared: [2, SUBGROUPS, 32].
template <class C>
INLINE void scan_column_tiles(
    DEVICE const typename C::T* x, DEVICE typename C::Out* y, DEVICE int64_t* p, SMEM typename C::R* shared, Thread at) {
  typedef typename C::R R;
  const int row = at.workgroup * 32 + at.lane;
  const bool inside = row < C::ROWS;
  DEVICE const typename C::T* const from = x + C::X::row(inside ? row : 0);
  DEVICE typename C::Out* const to = y + C::Y::row(inside ? row : 0);
  DEVICE int64_t* const places = Running<C>::places(p, inside ? row : 0);
  R before = C::Op::start();
  int side = 0;
  for (int i = 0; i < C::N; i += C::EACH * C::SUBGROUPS) {
    const int first = i + at.subgroup * C::EACH;
    R v[C::EACH];
#pragma unroll
    for (int e = 0; e < C::EACH; e++)
      v[e] = inside && first + e < C::N ? Running<C>::of(from[(int64_t)(first + e) * C::X::STEP], first + e)
                                        : C::Op::start();
#pragma unroll
    for (int e = 1; e < C::EACH; e++) v[e] = C::Op::of(v[e - 1], v[e]);
    shared[(side + at.subgroup) * 32 + at.lane] = v[C::EACH - 1];
    barrier();  // the other side is written next, so that no subgroup has to wait for readers
    R own = before;
#pragma unroll
    for (int s = 0; s < C::SUBGROUPS; s++) {
      if (s == at.subgroup) own = before;
      before = C::Op::of(before, shared[(side + s) * 32 + at.lane]);
    }
    side = C::SUBGROUPS - side;
#pragma unroll
    for (int e = 0; e < C::EACH; e++)
      if (inside && first + e < C::N) Running<C>::put(C::Op::of(own, v[e]), to, places, first + e);
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
  for (int i = begin; i < end; i++) total = C::Op::of(total, Running<C>::of(from[(int64_t)i * C::X::STEP], i));
  totals[(int64_t)row * C::SECTIONS + section] = Running<C>::total(total);
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
          for (int e = 0; e < C::WIDTH; e++) v[n][e] = Running<C>::of(x.v[e], i + e);
        } else {
#pragma unroll
          for (int e = 0; e < C::WIDTH; e++) v[n][e] = C::Op::start();
        }
      } else {
#pragma unroll
        for (int e = 0; e < C::WIDTH; e++)
          v[n][e] = i + e < end ? Running<C>::of(from[(int64_t)(i + e) * C::X::STEP], i + e) : C::Op::start();
      }
    }
  }

  // Stores what the tile's elements are after `before`.
  INLINE void store(
      DEVICE typename C::Out* to, DEVICE int64_t* places, int first, int end, R before, int lane) const {
#pragma unroll
    for (int n = 0; n < C::VECTORS; n++) {
      const int i = first + n * VECTOR + lane * C::WIDTH;
      if (C::STORES) {
        Vec<typename C::Out, C::WIDTH> y;
        Vec<int64_t, C::PLACES ? C::WIDTH : 1> p;
#pragma unroll
        for (int e = 0; e < C::WIDTH; e++) {
          const R total = C::Op::of(before, v[n][e]);
          y.v[e] = Running<C>::value(total);
          if (C::PLACES) p.v[e] = Running<C>::place(total);
        }
        if (i >= end) continue;
        *(DEVICE Vec<typename C::Out, C::WIDTH>*)(to + i) = y;
        if (C::PLACES) *(DEVICE Vec<int64_t, C::PLACES ? C::WIDTH : 1>*)(places + i) = p;
      } else {
#pragma unroll
        for (int e = 0; e < C::WIDTH; e++)
          if (i + e < end) Running<C>::put(C::Op::of(before, v[n][e]), to, places, i + e);
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
    DEVICE const typename C::T* x, DEVICE const typename C::Total* totals, DEVICE typename C::Out* y, DEVICE int64_t* p,
    SMEM typename C::R* shared, Thread at) {
  typedef typename C::R R;
  const int worker = C::SUBGROUPS > 1 ? at.workgroup : at.workgroup * (C::THREADS / 32) + at.subgroup;
  const int row = worker / C::SECTIONS, section = worker % C::SECTIONS, member = C::SUBGROUPS > 1 ? at.subgroup : 0;
  if (C::SUBGROUPS == 1 && row >= C::ROWS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  DEVICE typename C::Out* const to = y + C::Y::row(row);
  DEVICE int64_t* const places = Running<C>::places(p, row);
  const int begin = section * C::SECTION, end = C::N - begin < C::SECTION ? C::N : begin + C::SECTION;
  R before = C::SECTIONS > 1 ? total_before<C>(from, totals, row, section, at.lane) : C::Op::start();
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
    tile.store(to, places, first, end, own, at.lane);
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
      for (int e = 0; e < C::WIDTH; e++) total = C::Op::merge(total, tile.v[n][e]);
  }
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) total = C::Op::merge(total, subgroup_xor(total, m));
  if (at.lane == 0) shared[at.subgroup] = total;
  barrier();
  if (at.tid == 0) {
    for (int s = 1; s < C::SUBGROUPS; s++) total = C::Op::merge(total, shared[s]);
    totals[at.workgroup] = Running<C>::total(total);
  }
}
