// Scatters with data-dependent places: which updates are overwritten, and which are made by a thread.
//
// Places: a rendered functor. of(update) returns the place of an update, or the index that alone determines it.
#pragma once

// Whether a later one of the UPDATES has the same `place` as `update`: the last update of a place wins. The THREADS
// threads of a subgroup or of a workgroup search together. hit: [THREADS / 32], for a workgroup.
template <uint UPDATES, int THREADS, class Places>
INLINE bool is_overwritten(Places places, int64_t place, uint update, SMEM int* hit, Thread at) {
  int again = 0;
#pragma unroll 4
  for (uint later = update + 1u + (uint)(THREADS > 32 ? at.tid : at.lane); later < UPDATES; later += (uint)THREADS)
    if (places.of(later) == place) again = 1;
  for (int m = 16; m > 0; m >>= 1) again |= subgroup_xor(again, m);
  if (THREADS > 32) {
    if (at.lane == 0) hit[at.subgroup] = again;
    barrier();
    for (int i = 0; i < THREADS / 32; i++) again |= hit[i];
  }
  return again != 0;
}

// The same for one thread, which searches alone.
template <uint UPDATES, class Places> INLINE bool is_overwritten(Places places, uint update) {
  const int64_t place = places.of(update);
#pragma unroll 1
  for (uint later = update + 1u; later < UPDATES; later++)
    if (places.of(later) == place) return true;
  return false;
}

// Whether places do not ascend, as far as one of the THREADS threads compares them. If they do, none is overwritten.
template <uint UPDATES, int THREADS, class Places> INLINE bool is_unordered(Places places, int tid) {
  bool found = false;
#pragma unroll 8
  for (uint n = (uint)tid; n + 1u < UPDATES; n += (uint)THREADS) found |= places.of(n + 1u) <= places.of(n);
  return found;
}

// Distributes places over SHARES by a multiplicative hash (D. Knuth, The Art of Computer Programming, 6.4). Returns one
// bit for each of the N updates from `first` on, set if its place is in `share`. The places are loaded together,
// without checks, because checks would serialise the loads.
template <uint UPDATES, uint SHARES, uint N, class Places>
INLINE uint updates_of_share(Places places, uint first, uint share) {
  uint mine = 0;
#pragma unroll
  for (uint j = 0; j < N; j++)
    if (first + j < UPDATES) mine |= (uint)(((uint)places.of(first + j) * 2654435761u >> 16) % SHARES == share) << j;
  return mine;
}
