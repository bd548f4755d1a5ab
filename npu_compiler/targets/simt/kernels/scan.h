// Running reductions along rows: a thread runs along a row, or a workgroup shares a long one.
//
// Types: T and Out, the storage of input and output; R, the register of the running total; X, Y: where rows lie (sort.h);
// Fold: of(a, b), one step of the reduction, and start(), what it begins with. Constants: ROWS; N, elements of a row.
#pragma once

// In order; each of THREADS a workgroup has a row.
template <class C>
INLINE void scan_rows(DEVICE const typename C::T* x, DEVICE typename C::Out* y, Thread at) {
  const int row = at.gid * C::THREADS + at.tid;
  if (row >= C::ROWS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  DEVICE typename C::Out* const to = y + C::Y::row(row);
  typename C::R total = C::Fold::start();
#pragma unroll 8
  for (int i = 0; i < C::N; i++) {
    total = C::Fold::of(total, (typename C::R)widen(from[(int64_t)i * C::X::STEP]));
    to[(int64_t)i * C::Y::STEP] = narrow<typename C::Out>(total);
  }
}

// Piece by piece of THREADS * EACH elements: each thread runs along EACH neighbours, learns what comes before them
// (Hillis and Steele, "Data parallel algorithms", 1986), and adds that. totals: [2, THREADS].
template <class C>
INLINE void scan_long_row(
    DEVICE const typename C::T* x, DEVICE typename C::Out* y, SMEM typename C::R* totals, Thread at) {
  typedef typename C::R R;
  typedef typename C::Fold Fold;
  DEVICE const typename C::T* const from = x + C::X::row(at.gid);
  DEVICE typename C::Out* const to = y + C::Y::row(at.gid);
  R before = Fold::start();
  for (int first = at.tid * C::EACH; first - at.tid * C::EACH < C::N; first += C::THREADS * C::EACH) {
    R v[C::EACH];
#pragma unroll
    for (int e = 0; e < C::EACH; e++)
      v[e] = first + e < C::N ? (R)widen(from[(int64_t)(first + e) * C::X::STEP]) : Fold::start();
#pragma unroll
    for (int e = 1; e < C::EACH; e++) v[e] = Fold::of(v[e - 1], v[e]);
    SMEM R* seen = totals;
    SMEM R* next = totals + C::THREADS;
    barrier();  // all have read what the piece before left
    seen[at.tid] = v[C::EACH - 1];
    for (int apart = 1; apart < C::THREADS; apart *= 2) {
      barrier();
      next[at.tid] = at.tid < apart ? seen[at.tid] : Fold::of(seen[at.tid - apart], seen[at.tid]);
      SMEM R* const other = seen;
      seen = next;
      next = other;
    }
    barrier();
    const R mine = at.tid ? Fold::of(before, seen[at.tid - 1]) : before;
    before = Fold::of(before, seen[C::THREADS - 1]);
#pragma unroll
    for (int e = 0; e < C::EACH; e++)
      if (first + e < C::N) to[(int64_t)(first + e) * C::Y::STEP] = narrow<typename C::Out>(Fold::of(mine, v[e]));
  }
}
