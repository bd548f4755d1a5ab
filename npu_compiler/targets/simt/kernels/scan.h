// Scans along rows: one thread per row, or one workgroup per long row.
//
// Types: T and Out, the storage of input and output; R, the register of the running total; X, Y: the positions of rows
// in memory (sort.h); Op: of(a, b) and its identity element start(). Constants: ROWS; N, elements of a row.
#pragma once

// Sequential scans; each of the THREADS threads of a workgroup has a row.
template <class C>
INLINE void scan_rows(DEVICE const typename C::T* x, DEVICE typename C::Out* y, Thread at) {
  const int row = at.workgroup * C::THREADS + at.tid;
  if (row >= C::ROWS) return;
  DEVICE const typename C::T* const from = x + C::X::row(row);
  DEVICE typename C::Out* const to = y + C::Y::row(row);
  typename C::R total = C::Op::start();
#pragma unroll 8
  for (int i = 0; i < C::N; i++) {
    total = C::Op::of(total, (typename C::R)widen(from[(int64_t)i * C::X::STEP]));
    to[(int64_t)i * C::Y::STEP] = narrow<typename C::Out>(total);
  }
}

// A row in pieces of THREADS * EACH elements. Each thread scans EACH neighbours, computes the total before them (Hillis
// and Steele, "Data parallel algorithms", 1986), and adds it. totals: [2, THREADS].
template <class C>
INLINE void scan_long_row(
    DEVICE const typename C::T* x, DEVICE typename C::Out* y, SMEM typename C::R* totals, Thread at) {
  typedef typename C::R R;
  typedef typename C::Op Op;
  DEVICE const typename C::T* const from = x + C::X::row(at.workgroup);
  DEVICE typename C::Out* const to = y + C::Y::row(at.workgroup);
  R before = Op::start();
  for (int first = at.tid * C::EACH; first - at.tid * C::EACH < C::N; first += C::THREADS * C::EACH) {
    R v[C::EACH];
#pragma unroll
    for (int e = 0; e < C::EACH; e++)
      v[e] = first + e < C::N ? (R)widen(from[(int64_t)(first + e) * C::X::STEP]) : Op::start();
#pragma unroll
    for (int e = 1; e < C::EACH; e++) v[e] = Op::of(v[e - 1], v[e]);
    SMEM R* current = totals;
    SMEM R* next = totals + C::THREADS;
    barrier();  // all threads have read the totals of the previous piece
    current[at.tid] = v[C::EACH - 1];
    for (int apart = 1; apart < C::THREADS; apart *= 2) {
      barrier();
      next[at.tid] = at.tid < apart ? current[at.tid] : Op::of(current[at.tid - apart], current[at.tid]);
      SMEM R* const other = current;
      current = next;
      next = other;
    }
    barrier();
    const R prefix = at.tid ? Op::of(before, current[at.tid - 1]) : before;
    before = Op::of(before, current[C::THREADS - 1]);
#pragma unroll
    for (int e = 0; e < C::EACH; e++)
      if (first + e < C::N) to[(int64_t)(first + e) * C::Y::STEP] = narrow<typename C::Out>(Op::of(prefix, v[e]));
  }
}
