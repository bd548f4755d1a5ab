// Reader of weights in bf16c12 for gemv.h that multiplies on the matrix unit, with fragments filled from registers.
// Four lanes form a row of the left fragment from their columns of the weights, and a column of the right fragment from
// the elements of x at the same columns. The sums are therefore on the diagonal of the result.
#pragma once
#include "gemv_bf16c12.h"

template <class C> struct Rows4Fragments {
  struct Operand {
    FragB<bf16> b[C::VECTORS][2];
    template <class Left>
    INLINE void make(THREAD const Rows4Fragments&, THREAD Left& left, THREAD const GemvLeft<C>& x, Thread at) {
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        const int piece = v * C::THREADS + at.tid;
        uint4 pairs;
        pairs.x = pair(x, v, 0);
        pairs.y = pair(x, v, 2);
        pairs.z = pair(x, v, 4);
        pairs.w = pair(x, v, 6);
        frag_b_from(b[v][0], pairs.x, pairs.y, at.lane);
        frag_b_from(b[v][1], pairs.z, pairs.w, at.lane);
        if (Left::PUTS && (C::VECTORS * C::THREADS == C::PIECES || piece < C::PIECES)) left.put(piece * C::ITEM, pairs);
      }
      if (Left::PUTS) barrier();
    }
    INLINE uint pair(THREAD const GemvLeft<C>& x, int v, int e) const {
      return pack_pair(to_f32(x.x[0][v].v[e]), to_f32(x.x[0][v].v[e + 1]), (THREAD bf16*)nullptr);
    }
  };
  Rows4<C> w;
  INLINE void load(int tile, Thread at) { w.load(tile, at); }
  INLINE void load_rest(Thread at) { w.load_rest(at); }
  INLINE void settle() const { w.settle(); }
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][4], THREAD Left& left, THREAD const GemvLeft<C>&,
                       THREAD const Operand& operand, Thread at) {
    float outlier_x[C::PLACES];
    w.load_outlier_x(outlier_x, left);
    FragC acc[2];
    frag_zero(acc[0]);
    frag_zero(acc[1]);
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const uint4 x = w.row(v, 2 * q), y = w.row(v, 2 * q + 1);
        FragA<bf16> left_half, right_half;
        frag_a_from(left_half, x.x, y.x, x.y, y.y, at.lane);
        frag_a_from(right_half, x.z, y.z, x.w, y.w, at.lane);
        frag_mma(acc[q], left_half, operand.b[v][0]);
        frag_mma(acc[q], right_half, operand.b[v][1]);
      }
    if ((at.lane & 3) == at.lane >> 3) {
#pragma unroll
      for (int r = 0; r < 4; r++)
        sum[0][r] = (at.lane & 4) != 0 ? acc[r / 2].v[2 * (r % 2) + 1] : acc[r / 2].v[2 * (r % 2)];
    }
    w.finish(sum, outlier_x);
  }
  INLINE void reduce(THREAD float (&sum)[1][4], SMEM float* part, Thread at) { reduce_rows4<C>(sum, part, at); }
};
