// Sorts along one dim. Short rows are sorted by a network. Long rows: sections are sorted and then merged pairwise, one
// kernel per round. Top-k of a small k: k rounds of selection. All kernels are stable.
//
// Types: T, the storage of an element; R, the register in which it is compared; X, Y and P, the positions in memory of
// the rows of the input, of the results and of their places: row(n), the offset of row n in elements, and STEP, the
// stride along a row.
#pragma once

// The order of a sort: NaN is the largest value.
template <class T> INLINE bool sorts_before(T a, T b) { return a < b || (b != b && a == a); }
template <class T> INLINE bool sorts_after(T a, T b) { return a > b || (a != a && b == b); }

// Whether element a at place i precedes element b at place j. Equal elements keep their order. A negative place means
// that there is no element.
template <bool DESCENDING, class T> INLINE bool precedes(T a, int i, T b, int j) {
  if (i < 0 || j < 0) return j < 0 && i >= 0;
  if (DESCENDING ? sorts_after(a, b) : sorts_before(a, b)) return true;
  return i < j && !(DESCENDING ? sorts_after(b, a) : sorts_before(b, a));
}
template <bool DESCENDING, class T> INLINE void subgroup_first(THREAD T& value, THREAD int& at) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    const T other = subgroup_xor(value, m);
    const int place = subgroup_xor(at, m);
    if (precedes<DESCENDING>(other, place, value, at)) { value = other; at = place; }
  }
}

// Stores a value and its place in the input as element `to` of a row.
template <class C>
INLINE void put(DEVICE typename C::T* y, DEVICE typename C::Place* places, int row, int to, typename C::R value,
                int64_t from) {
  y[C::Y::row(row) + (int64_t)to * C::Y::STEP] = narrow<typename C::T>(value);
  places[C::P::row(row) + (int64_t)to * C::P::STEP] = (typename C::Place)from;
}

template <class C, class R> INLINE bool before(R a, R b) {
  return C::DESCENDING ? sorts_after(a, b) : sorts_before(a, b);
}

// An integer in the order of x: NaN is the largest, and both zeros are equal.
INLINE int sort_key(int x) { return x; }
INLINE int64_t sort_key(int64_t x) { return x; }
INLINE int sort_key(float x) {
  const int bits = (int)bits_of_f32(x == 0 ? 0.0f : x);
  return x != x ? 0x7fffffff : bits ^ (bits >> 31 & 0x7fffffff);
}
#ifdef HAS_DOUBLE
INLINE int64_t sort_key(double x) {
  const int64_t bits = bits_of_f64(x == 0 ? 0.0 : x);
  return x != x ? 0x7fffffffffffffff : bits ^ (bits >> 63 & 0x7fffffffffffffff);
}
#endif

// An Item holds the key and the place of an element, in one integer if both fit. The keys of 16-bit floats leave the low
// PLACE_BITS free; small integers are shifted by so many bits.
struct WideItem {
  int64_t key;
  int place;
};
enum { PLACE_BITS = 13 };
INLINE void make_item(THREAD int& item, int key, int place) { item = (key >> PLACE_BITS << PLACE_BITS) | place; }
INLINE void make_item(THREAD int64_t& item, int key, int place) { item = (int64_t)key << 32 | place; }
INLINE void make_item(THREAD WideItem& item, int64_t key, int place) { item.key = key; item.place = place; }
INLINE int place_of(int item) { return item & ((1 << PLACE_BITS) - 1); }
INLINE int place_of(int64_t item) { return (int)item; }
INLINE int place_of(WideItem item) { return item.place; }
INLINE bool follows(int a, int b) { return a > b; }
INLINE bool follows(int64_t a, int64_t b) { return a > b; }
INLINE bool follows(WideItem a, WideItem b) { return a.key > b.key || (a.key == b.key && a.place > b.place); }
INLINE WideItem subgroup_xor(WideItem x, int mask) { return {subgroup_xor(x.key, mask), subgroup_xor(x.place, mask)}; }

// A bitonic network sorts SECTION items, a power of two: thread t of a TEAM has items t * EACH .. of the order. It
// exchanges them between its registers, between lanes and, through shared memory, between subgroups. No two items are
// equal, because their places differ, so that the sort is stable.
//
// (K. Batcher, "Sorting networks and their applications", 1968.)
template <class C> struct Bitonic {
  typedef typename C::Item Item;
  CONSTANTS int EACH = C::EACH, TEAM = C::SECTION / C::EACH;
  Item item[EACH];

  // Orders pairs of registers whose distances are `distance` and all smaller powers of two. Items whose numbers have
  // bit `size` are in descending order.
  INLINE void within(int t, int distance, int size) {
#pragma unroll
    for (int d = EACH / 2; d > 0; d >>= 1) {
      if (d > distance) continue;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        if (e & d) continue;
        const bool ascends = ((t * EACH + e) & size) == 0;
        const Item low = item[e], high = item[e | d];
        const bool swap = follows(low, high) == ascends;
        item[e] = swap ? high : low;
        item[e | d] = swap ? low : high;
      }
    }
  }

  // Keeps one of this thread's item e and the same item of its partner.
  INLINE void keep(int e, Item other, bool first) { item[e] = follows(item[e], other) == first ? other : item[e]; }

  INLINE void between_lanes(int mask, bool first) {
#pragma unroll
    for (int e = 0; e < EACH; e++) keep(e, subgroup_xor(item[e], mask), first);
  }
  INLINE void between_subgroups(int mask, bool first, SMEM Item* items, int tid) {
#pragma unroll
    for (int e = 0; e < EACH; e++) items[e * C::THREADS + tid] = item[e];
    barrier();
#pragma unroll
    for (int e = 0; e < EACH; e++) keep(e, items[e * C::THREADS + (tid ^ mask)], first);
    barrier();
  }

  INLINE void sort(SMEM Item* items, int tid) {
    const int t = tid % TEAM;
#pragma unroll
    for (int size = 2; size <= EACH; size <<= 1) within(t, size / 2, size);
    for (int size = 2 * EACH; size <= C::SECTION; size <<= 1) {
      const bool ascends = (t * EACH & size) == 0;
      for (int mask = size / EACH / 2; mask > 0; mask >>= 1) {
        const bool first = ((t & mask) == 0) == ascends;
        if (TEAM > 32 && mask >= 32) between_subgroups(mask, first, items, tid);
        else between_lanes(mask, first);
      }
      within(t, EACH / 2, size);
    }
  }
};

// Sorts the sections of SECTION elements of rows of N, and stores the first KEPT elements of each. items: [THREADS *
// EACH] if several subgroups sort a section together. SHIFTED: keys are small integers. Constants: ROWS N SECTION KEPT
// EACH THREADS SHIFTED LAST DESCENDING.
template <class C>
INLINE void sort_sections(
    DEVICE const typename C::T* x, DEVICE typename C::T* y, DEVICE typename C::Place* origins,
    SMEM typename C::Item* items, Thread at) {
  constexpr int SECTIONS = (C::N + C::SECTION - 1) / C::SECTION, TEAM = C::SECTION / C::EACH;
  const int job = (at.workgroup * C::THREADS + at.tid) / TEAM, row = job / SECTIONS, section = job % SECTIONS;
  const int t = at.tid % TEAM, begin = section * C::SECTION, count = row < C::ROWS ? C::N - begin : 0;
  DEVICE const typename C::T* const from = x + C::X::row(row) + (int64_t)begin * C::X::STEP;
  Bitonic<C> b;
#pragma unroll
  for (int e = 0; e < C::EACH; e++) {
    const int i = e * TEAM + t;  // elements that are not there have the largest key and the last places
    typename C::Key key = C::LAST;
    if (i < count) {
      const typename C::Key found = sort_key((typename C::R)widen(from[(int64_t)i * C::X::STEP]));
      key = (C::DESCENDING ? ~found : found) << (C::SHIFTED ? PLACE_BITS : 0);
    }
    make_item(b.item[e], key, i);
  }
  b.sort(items, at.tid);
#pragma unroll
  for (int e = 0; e < C::EACH; e++) {
    const int to = t * C::EACH + e, place = place_of(b.item[e]);
    if (to < count && to < C::KEPT)
      put<C>(y, origins, row, section * C::KEPT + to, (typename C::R)widen(from[(int64_t)place * C::X::STEP]),
             begin + place);
  }
}

// Merges pairs of sorted runs of RUN elements in rows [ROWS, N], and keeps the first KEPT elements of each merged run.
// A thread finds by binary search how many elements of the other run precede its own. Of equal elements, those of the
// left run come first.
template <class C>
INLINE void sort_merge(
    DEVICE const typename C::T* x, DEVICE const int* origins, DEVICE typename C::T* y, DEVICE typename C::Place* places,
    Thread at) {
  typedef typename C::R R;
  const int n = at.workgroup * C::THREADS + at.tid;
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

// Selects the first K elements of a row in K rounds; each round finds the first element after the last one selected.
// Every thread has every STEP-th element of the row and remembers the first of those that are left. When this one is
// selected, the thread searches for its next one. If a workgroup has a row (BY_WORKGROUP) instead of a subgroup, the
// thread's subgroup searches together. IN_REGISTERS: a thread's elements, at most EACH, are kept in registers.
template <class C> struct TopK {
  typedef typename C::R R;
  DEVICE const typename C::T* from;
  R held[C::IN_REGISTERS ? C::EACH : 1];
  R mine, last;    // the first of the thread's elements that are left; the element selected last
  int own, place;  // their places; negative: none

  INLINE R read(int i) const { return i < C::N ? (R)widen(from[(int64_t)i * C::X::STEP]) : (R)0; }

  // Finds the first element after the last one selected, among every `by`-th of the elements of thread `owner`.
  INLINE void search(int owner, int begin, int by) {
    own = -1;
    if (C::IN_REGISTERS) {
#pragma unroll
      for (int e = begin; e < C::EACH; e += by) consider(held[C::IN_REGISTERS ? e : 0], owner + e * C::STEP);
    } else {
#pragma unroll 8
      for (int e = begin; e < C::EACH; e += by) consider(read(owner + e * C::STEP), owner + e * C::STEP);
    }
  }
  INLINE void consider(R other, int i) {
    const bool behind = place < 0 || precedes<C::DESCENDING>(last, place, other, i);
    if (i < C::N && behind && precedes<C::DESCENDING>(other, i, mine, own)) {
      mine = other;
      own = i;
    }
  }

  // If the last round selected an element of a thread of this subgroup, the subgroup searches for that thread's next
  // one.
  INLINE void replace(Thread at) {
    if (place >= 0 && place % C::STEP / 32 == at.subgroup) {
      const R kept = mine;
      const int kept_at = own;
      search(place % C::STEP, at.lane, 32);
      subgroup_first<C::DESCENDING>(mine, own);
      if (place % 32 != at.lane) {
        mine = kept;
        own = kept_at;
      }
    }
  }
};

// firsts, places: [2, 32], the selections of a workgroup's subgroups, double-buffered. Constants: ROWS N K STEP EACH
// IN_REGISTERS BY_WORKGROUP DESCENDING.
template <class C>
INLINE void sort_topk(
    DEVICE const typename C::T* x, DEVICE typename C::T* y, DEVICE typename C::Place* origins,
    SMEM typename C::R* firsts, SMEM int* places, Thread at) {
  const int row = C::BY_WORKGROUP ? at.workgroup : at.workgroup * (C::THREADS / 32) + at.subgroup;
  const int me = C::BY_WORKGROUP ? at.tid : at.lane;
  if (!C::BY_WORKGROUP && row >= C::ROWS) return;
  TopK<C> f;
  f.from = x + C::X::row(row);
  if (C::IN_REGISTERS) {
#pragma unroll
    for (int e = 0; e < C::EACH; e++) f.held[C::IN_REGISTERS ? e : 0] = f.read(at.lane + e * C::STEP);
  }
  f.mine = f.last = 0;
  f.own = f.place = -1;
  if (C::BY_WORKGROUP) f.search(at.tid, 0, 1);
  for (int r = 0; r < C::K; r++) {
    if (C::BY_WORKGROUP) f.replace(at);
    else if (f.own == f.place) f.search(at.lane, 0, 1);
    f.last = f.mine;
    f.place = f.own;
    subgroup_first<C::DESCENDING>(f.last, f.place);
    if (C::BY_WORKGROUP) {
      const int side = (r & 1) * 32;
      if (at.lane == 0) {
        firsts[side + at.subgroup] = f.last;
        places[side + at.subgroup] = f.place;
      }
      barrier();
      f.last = firsts[side + at.lane];
      f.place = places[side + at.lane];
      subgroup_first<C::DESCENDING>(f.last, f.place);
    }
    if (me == 0) put<C>(y, origins, row, r, f.last, f.place);
  }
}
