// Reader of weights in block formats for gemv.h that multiplies on the matrix unit, with fragments filled from
// registers. Four lanes, a quad, have 32 columns: a row of the left fragment from their codes, and a column of the right
// fragment from the elements of x at the same columns. The sums of the quads are therefore on the diagonal of the
// result, where one lane of each quad multiplies them by the scales. Codes may be raised by a constant, which is
// subtracted from the sums.
#pragma once
#include "gemv_blocks.h"

template <class C> struct BlockFragments {
  CONSTANTS int QUAD = 32, SUBS = Piece<typename C::F, C::PIECES, QUAD>::SUBS;  // sub-blocks of a quad
  CONSTANTS int RAISE = C::F::Codes::RAISE;
  CONSTANTS bool HAS_SUMS = C::F::Scale::HAS_BASE || RAISE != 0;

  // Both halves of a piece of x, for each sub-block of the quad: zero in the lanes of other sub-blocks.
  struct Operand {
    FragB<bf16> b[C::VECTORS][SUBS][2];
    float sums[C::VECTORS][SUBS];  // of the elements of x; in the lanes on the diagonal
    template <class Left> INLINE void make(THREAD Left&, THREAD const GemvLeft<C>& x, Thread at) {
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
          const bool own = SUBS == 1 || (at.lane & 3) * SUBS / 4 == s;
#pragma unroll
          for (int h = 0; h < 2; h++)
            frag_b_from(b[v][s][h], own ? pair(x, v, 4 * h) : 0u, own ? pair(x, v, 4 * h + 2) : 0u, at.lane);
          if (HAS_SUMS) {
            const uint ones = 0x3f803f80u;
            FragA<bf16> one;
            FragC acc;
            frag_zero(acc);
            frag_a_from(one, ones, ones, ones, ones, at.lane);
            frag_mma(acc, one, b[v][s][0]);
            frag_mma(acc, one, b[v][s][1]);
            sums[v][s] = diagonal(acc, 0, at.lane);
          }
        }
    }
    INLINE uint pair(THREAD const GemvLeft<C>& x, int v, int e) const {
      return pair_of(x.x[0][v].v[e], x.x[0][v].v[e + 1]);
    }
    static INLINE uint pair_of(float low, float high) { return pack_pair(low, high, (THREAD bf16*)nullptr); }
    static INLINE uint pair_of(bf16 low, bf16 high) {
      return bits_of_f32(to_f32(low)) >> 16 | bits_of_f32(to_f32(high));
    }
  };
  BlockPieces<C, QUAD> w;
  // The sum of the quad for the lower or upper half of the rows, in the lanes on the diagonal.
  static INLINE float diagonal(THREAD const FragC& acc, int half, int lane) {
    return (lane & 4) != 0 ? acc.v[2 * half + 1] : acc.v[2 * half];
  }
  INLINE void load(int unit, Thread at) { w.load_first(unit, at); }
  INLINE void load_rest(Thread at) { w.load_rest(at); }
  INLINE void settle() const { w.settle(); }
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][4], THREAD Left&, THREAD const GemvLeft<C>&, THREAD const Operand& operand,
                       Thread at) {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const uint4 x = w.pieces[v].raised(2 * q), y = w.pieces[v].raised(2 * q + 1);
        FragA<bf16> left_half, right_half;
        frag_a_from(left_half, x.x, y.x, x.y, y.y, at.lane);
        frag_a_from(right_half, x.z, y.z, x.w, y.w, at.lane);
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
          FragC acc;
          frag_zero(acc);
          frag_mma(acc, left_half, operand.b[v][s][0]);
          frag_mma(acc, right_half, operand.b[v][s][1]);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float left = HAS_SUMS ? operand.sums[v][s] : 0.0f, dot = diagonal(acc, h, at.lane);
            w.add(sum, RAISE != 0 ? dot - RAISE * left : dot, left, v, s, 2 * q + h);
          }
        }
      }
    float left = 0.0f;
    if (C::F::Scale::HAS_BASE)
      for (int v = 0; v < C::VECTORS; v++) left += operand.sums[v][0];
    w.finish(sum, left);
    if ((at.lane & 3) != at.lane >> 3)
      for (int r = 0; r < 4; r++) sum[0][r] = 0.0f;
  }
  INLINE void reduce(THREAD float (&sum)[1][4], SMEM float* part, Thread at) { reduce_fours<C>(sum, part, at); }
};
