// Sorts along one dim: short rows by counting what comes before an element, long ones as sections that are merged two by
// two, a kernel a round. The first few of a row are looked for one after another. Every kernel is stable.
//
// Types: T, the storage of an element; R, the register it is compared in; X, Y and P, where rows of the input, of the
// results and of their places lie: row(n), the offset of row n in elements, and STEP, the stride along the row.
#pragma once

// The order of a sort: NaN comes last, in a descending one first.
template <class T> INLINE bool sorts_before(T a, T b) { return a < b || (b != b && a == a); }
template <class T> INLINE bool sorts_after(T a, T b) { return a > b || (a != a && b == b); }

// Whether a at place i comes before b at place j; of equals, the first. A place below 0 is none.
template <bool DESCENDING, class T> INLINE bool comes_first(T a, int i, T b, int j) {
  if (i < 0 || j < 0) return j < 0 && i >= 0;
  if (DESCENDING ? sorts_after(a, b) : sorts_before(a, b)) return true;
  return i < j && !(DESCENDING ? sorts_after(b, a) : sorts_before(b, a));
}
template <bool DESCENDING, class T> INLINE void subgroup_first(THREAD T& value, THREAD int& at) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    const T other = subgroup_xor(value, m);
    const int place = subgroup_xor(at, m);
    if (comes_first<DESCENDING>(other, place, value, at)) { value = other; at = place; }
  }
}

// Stores a value and its place in the input as element `to` of a row.
template <class C>
INLINE void put(DEVICE typename C::T* y, DEVICE typename C::Place* places, int row, int to, typename C::R value, int64_t from) {
  y[C::Y::row(row) + (int64_t)to * C::Y::STEP] = narrow<typename C::T>(value);
  places[C::P::row(row) + (int64_t)to * C::P::STEP] = (typename C::Place)from;
}

template <class C, class R> INLINE bool before(R a, R b) { return C::DESCENDING ? sorts_after(a, b) : sorts_before(a, b); }

// A thread counts how many elements of its row, or of its SECTION of it, come before its own: that is its place. Constants:
// ROWS; N, elements of a row; SECTION; KEPT, the first of a section that are stored, section by section; THREADS.
template <class C>
INLINE void sort_sections(
    DEVICE const typename C::T* x, DEVICE typename C::T* y, DEVICE typename C::Place* places, Thread at) {
  typedef typename C::R R;
  const int n = at.gid * C::THREADS + at.tid;
  if (n >= C::ROWS * C::N) return;
  const int i = n % C::N, row = n / C::N, begin = i / C::SECTION * C::SECTION;
  const int end = begin + C::SECTION < C::N ? begin + C::SECTION : C::N;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  const R mine = (R)widen(from[(int64_t)i * C::X::STEP]);
  int place = 0;
  for (int j = begin; j < end; j++) {
    const R other = (R)widen(from[(int64_t)j * C::X::STEP]);
    place += (int)(before<C>(other, mine) || (!before<C>(mine, other) && j < i));
  }
  if (place < C::KEPT) put<C>(y, places, row, begin / C::SECTION * C::KEPT + place, mine, i);
}

// Rows [ROWS, N] of sorted runs of RUN elements to rows of half as many runs, of which KEPT elements stay: a thread finds
// by bisection how many elements of the other run come before its own. Of equals, those of the left run are first.
template <class C>
INLINE void sort_merge(
    DEVICE const typename C::T* x, DEVICE const int* origins, DEVICE typename C::T* y, DEVICE typename C::Place* places,
    Thread at) {
  typedef typename C::R R;
  const int n = at.gid * C::THREADS + at.tid;
  if (n >= C::ROWS * C::N) return;
  const int i = n % C::N, row = n / C::N, run = i / C::RUN, begin = (run ^ 1) * C::RUN;
  DEVICE const typename C::T* const from = x + (int64_t)row * C::N;
  const R mine = (R)widen(from[i]);
  int low = 0, high = C::N - begin < C::RUN ? C::N - begin : C::RUN;
  while (low < high) {
    const int middle = (low + high) / 2;
    const R other = (R)widen(from[begin + middle]);
    const bool first = run & 1 ? !before<C>(mine, other) : before<C>(other, mine);
    low = first ? middle + 1 : low;
    high = first ? high : middle;
  }
  const int place = i % C::RUN + low;
  if (place < C::KEPT) put<C>(y, places, row, run / 2 * C::KEPT + place, mine, origins[(int64_t)row * C::N + i]);
}

// The first K of many: round by round, the first of those behind the last one. Every thread remembers the first of its own
// elements, every THREADS-th of the row; when that was taken, the thread looks for the next, or its subgroup does if WHOLE
// workgroups take a row and not subgroups. HELD: a thread's elements, EACH at most, stay in registers.
template <class C> struct FirstFew {
  typedef typename C::R R;
  DEVICE const typename C::T* from;
  R held[C::HELD ? C::EACH : 1];
  R mine, last;    // the first of the thread's elements that are left; the last one stored
  int own, place;  // where they are; below 0: nowhere

  INLINE R read(int i) const { return i < C::N ? (R)widen(from[(int64_t)i * C::X::STEP]) : (R)0; }

  // The first behind the last one of every `by`-th of the elements of thread `owner`.
  INLINE void look(int owner, int begin, int by) {
    own = -1;
    if (C::HELD) {
#pragma unroll
      for (int e = begin; e < C::EACH; e += by) consider(held[C::HELD ? e : 0], owner + e * C::STEP);
    } else {
#pragma unroll 8
      for (int e = begin; e < C::EACH; e += by) consider(read(owner + e * C::STEP), owner + e * C::STEP);
    }
  }
  INLINE void consider(R other, int i) {
    const bool behind = place < 0 || comes_first<C::DESCENDING>(last, place, other, i);
    if (i < C::N && behind && comes_first<C::DESCENDING>(other, i, mine, own)) {
      mine = other;
      own = i;
    }
  }

  // Round r of a workgroup: the subgroup that lost its element to the last round looks for its next one.
  INLINE void replace(Thread at) {
    if (place >= 0 && place % C::STEP / 32 == at.sid) {
      const R kept = mine;
      const int kept_at = own;
      look(place % C::STEP, at.lane, 32);
      subgroup_first<C::DESCENDING>(mine, own);
      if (place % 32 != at.lane) {
        mine = kept;
        own = kept_at;
      }
    }
  }
};

// firsts and places of a workgroup's subgroups: [2, 32], in turns. Constants: ROWS N K STEP EACH HELD WHOLE DESCENDING.
template <class C>
INLINE void sort_few(
    DEVICE const typename C::T* x, DEVICE typename C::T* y, DEVICE typename C::Place* origins,
    SMEM typename C::R* firsts, SMEM int* places, Thread at) {
  const int row = C::WHOLE ? at.gid : at.gid * (C::THREADS / 32) + at.sid, me = C::WHOLE ? at.tid : at.lane;
  if (!C::WHOLE && row >= C::ROWS) return;
  FirstFew<C> f;
  f.from = x + C::X::row(row);
  if (C::HELD) {
#pragma unroll
    for (int e = 0; e < C::EACH; e++) f.held[C::HELD ? e : 0] = f.read(at.lane + e * C::STEP);
  }
  f.mine = f.last = 0;
  f.own = f.place = -1;
  if (C::WHOLE) f.look(at.tid, 0, 1);
  for (int r = 0; r < C::K; r++) {
    if (C::WHOLE) f.replace(at);
    else if (f.own == f.place) f.look(at.lane, 0, 1);
    f.last = f.mine;
    f.place = f.own;
    subgroup_first<C::DESCENDING>(f.last, f.place);
    if (C::WHOLE) {
      const int side = (r & 1) * 32;
      if (at.lane == 0) {
        firsts[side + at.sid] = f.last;
        places[side + at.sid] = f.place;
      }
      barrier();
      f.last = firsts[side + at.lane];
      f.place = places[side + at.lane];
      subgroup_first<C::DESCENDING>(f.last, f.place);
    }
    if (me == 0) put<C>(y, origins, row, r, f.last, f.place);
  }
}
