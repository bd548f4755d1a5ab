// Scatters whose places come from data: which updates are overwritten, and which are a thread's own.
//
// Places: a rendered functor; of(update) says where an update goes, or what alone decides that.
#pragma once

// Whether a later one of UPDATES goes to `mine`, the place of `update`: the last one counts. The threads of a subgroup or of
// a workgroup, THREADS of them, look together. hit: [THREADS / 32], for a workgroup.
template <uint UPDATES, int THREADS, class Places>
INLINE bool is_overwritten(Places places, int64_t mine, uint update, SMEM int* hit, Thread at) {
  int again = 0;
#pragma unroll 4
  for (uint later = update + 1u + (uint)(THREADS > 32 ? at.tid : at.lane); later < UPDATES; later += (uint)THREADS)
    if (places.of(later) == mine) again = 1;
  for (int m = 16; m > 0; m >>= 1) again |= subgroup_xor(again, m);
  if (THREADS > 32) {
    if (at.lane == 0) hit[at.sid] = again;
    barrier();
    for (int i = 0; i < THREADS / 32; i++) again |= hit[i];
  }
  return again != 0;
}

// Places are spread over SHARES by a multiplicative hash (D. Knuth, The Art of Computer Programming, 6.4). A bit for each of
// the next N of UPDATES from `first` on, set if its place is in `share`. Places are read together, and not checked, which
// would put them in order.
template <uint UPDATES, uint SHARES, uint N, class Places> INLINE uint updates_of_share(Places places, uint first, uint share) {
  uint mine = 0;
#pragma unroll
  for (uint j = 0; j < N; j++)
    if (first + j < UPDATES) mine |= (uint)(((uint)places.of(first + j) * 2654435761u >> 16) % SHARES == share) << j;
  return mine;
}
