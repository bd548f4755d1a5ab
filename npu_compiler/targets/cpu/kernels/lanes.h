// Loops over the lanes of vectors, and the lanes that are active in the last one.
//
// A loop body takes (position of lane 0, lanes L, number u of the vector), where L is Full or an int below VL.
#pragma once
#include "math.h"

#define NPU_BODY __attribute__((always_inline))

namespace npu {

template <int N> struct Count { constexpr operator int() const { return N; } };

// Calls f for [LO, HI) in vectors: unrolled by U, then single vectors, then the tail.
template <int U, long LO, long HI, class F> NPU_INLINE void lanes(F f) {
  long i = LO;
  if constexpr (U > 1 && HI - LO >= U * VL)
    for (; i + U * VL <= HI; i += U * VL) {
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) f(i + u * VL, Full{}, u);
    }
  if constexpr (U > 1 ? (HI - LO) % (U * VL) >= VL : HI - LO >= VL)
    for (; i + VL <= HI; i += VL) f(i, Full{}, 0);
  if constexpr ((HI - LO) % VL > 0) f(i, (int)((HI - LO) % VL), 0);
}
template <int U, class F> NPU_INLINE void lanes(long lo, long hi, F f) {
  long i = lo;
  if constexpr (U > 1)
    for (; i + U * VL <= hi; i += U * VL) {
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) f(i + u * VL, Full{}, u);
    }
  for (; i + VL <= hi; i += VL) f(i, Full{}, 0);
  if (i < hi) f(i, (int)(hi - i), 0);
}

// Calls f for [LO, HI) in tiles of N vectors, then single vectors, then the tail. f receives the number of vectors as a
// Count.
template <int N, long LO, long HI, class F> NPU_INLINE void tiles(F f) {
  long i = LO;
  if constexpr (N > 1 && HI - LO >= N * VL)
    for (; i + N * VL <= HI; i += N * VL) f(i, Full{}, Count<N>{});
  if constexpr (N > 1 ? (HI - LO) % (N * VL) >= VL : HI - LO >= VL)
    for (; i + VL <= HI; i += VL) f(i, Full{}, Count<1>{});
  if constexpr ((HI - LO) % VL > 0) f(i, (int)((HI - LO) % VL), Count<1>{});
}
template <int N, class F> NPU_INLINE void tiles(long lo, long hi, F f) {
  long i = lo;
  if constexpr (N > 1)
    for (; i + N * VL <= hi; i += N * VL) f(i, Full{}, Count<N>{});
  for (; i + VL <= hi; i += VL) f(i, Full{}, Count<1>{});
  if (i < hi) f(i, (int)(hi - i), Count<1>{});
}

template <class V> NPU_INLINE V lane_index(long i) { return splat<V>((lane_t<V>)i) + iota<V>(); }

// The mask of the active lanes: all, or the first n.
NPU_INLINE vi32 active(Full) { return vi32{} - 1; }
NPU_INLINE vi32 active(int n) { return iota<vi32>() < splat<vi32>(n); }
// x in the active lanes, `other` in the rest.
template <class V> NPU_INLINE V select_active(V x, V, Full) { return x; }
template <class V> NPU_INLINE V select_active(V x, V other, int n) { return select(active(n), x, other); }

}  // namespace npu
