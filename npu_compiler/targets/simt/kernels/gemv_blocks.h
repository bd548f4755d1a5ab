// Reader of weights in block formats for gemv.h: groups of four rows (blocks.h), decoded in registers. It multiplies in
// float arithmetic.
//
// Constants of C in addition to those of gemv.h: F, the format; AHEAD: pieces that are loaded before pdl_wait(); EXACT:
// whether each element is computed, for operands of float32, where subtracting sums would show. ROWS is 4, M 1, ITEM 8.
#pragma once
#include "blocks.h"
#include "gemv.h"

// The pieces of a thread, each with the scales of COLUMNS columns. If a whole row shares a scale, they are in `whole`.
template <class C, int COLUMNS> struct BlockPieces {
  typedef typename C::F F;
  typedef Piece<F, C::PIECES, COLUMNS> P;
  CONSTANTS bool HAS_BASE = F::Scale::HAS_BASE, WHOLE = F::SUB_BLOCK == 0;
  DEVICE const uint8_t* weights;
  DEVICE const uint8_t* four;  // the weights of the tile
  P pieces[C::VECTORS], whole;

  INLINE void load(int begin, int end, Thread at) {
#pragma unroll
    for (int v = begin; v < end; v++) {
      const int piece = v * C::THREADS + at.tid;
      if (C::VECTORS * C::THREADS != C::PIECES) pieces[v].zero();
      if (C::VECTORS * C::THREADS == C::PIECES || piece < C::PIECES) {
        pieces[v].load_codes(four, piece);
        if (!WHOLE) pieces[v].load_scales(four, piece);
      }
    }
  }
  INLINE void load_first(int tile, Thread at) {
    four = weights + (int64_t)tile * P::NBYTES;
    load(0, C::AHEAD, at);
    if (WHOLE) whole.load_scales(four, 0);
  }
  INLINE void load_rest(Thread at) { load(C::AHEAD, C::VECTORS, at); }
  INLINE void settle() const {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) await_load(pieces[v].codes.low[0]);
  }
  // Adds a sum over sub-block i of piece v to that of row r. `left`: the sum of the same elements of x.
  INLINE void add(THREAD float (&sum)[1][4], float dot, float left, int v, int i, int r) const {
    sum[0][r] += WHOLE ? dot : dot * pieces[v].scale(i, r);
    if (!WHOLE && HAS_BASE) sum[0][r] += left * pieces[v].base(i, r);
  }
  // Applies the scales of whole rows. `left`: the sums of x of all pieces.
  INLINE void finish(THREAD float (&sum)[1][4], float left) const {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      if (WHOLE) sum[0][r] *= whole.scale(0, r);
      if (WHOLE && HAS_BASE) sum[0][r] += left * whole.base(0, r);
    }
  }
};

template <class C> INLINE void reduce_fours(THREAD float (&sum)[1][4], SMEM float* part, Thread at) {
  const float total = subgroup_sum4(sum[0][0], sum[0][1], sum[0][2], sum[0][3], at.lane);
  if (at.lane < 4) part[at.lane] = total;
}

template <class C> struct BlockWeights {
  struct Operand {
    float sums[C::VECTORS];  // of the elements of x of each piece
    template <class Left>
    INLINE void make(THREAD const BlockWeights&, THREAD Left&, THREAD const GemvLeft<C>& x, Thread) {
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        sums[v] = 0.0f;
        for (int e = 0; e < C::ITEM; e++) sums[v] += to_f32(x.x[0][v].v[e]);
      }
    }
  };
  typedef BlockPieces<C, 8> W;
  W w;
  INLINE void load(int tile, Thread at) { w.load_first(tile, at); }
  INLINE void load_rest(Thread at) { w.load_rest(at); }
  INLINE void settle() const { w.settle(); }
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][4], THREAD Left&, THREAD const GemvLeft<C>& x,
                       THREAD const Operand& operand, Thread) {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float y[C::ITEM], dot = 0.0f;
        unpack(w.pieces[v].pairs(r), y, (THREAD bf16*)nullptr);
        if (C::EXACT && W::HAS_BASE) {
          const float scale = W::WHOLE ? w.whole.scale(0, r) : w.pieces[v].scale(0, r);
          const float base = W::WHOLE ? w.whole.base(0, r) : w.pieces[v].base(0, r);
          for (int e = 0; e < C::ITEM; e++) y[e] = y[e] * scale + base;
        }
#pragma unroll
        for (int e = 0; e < C::ITEM; e++) dot += to_f32(x.x[0][v].v[e]) * y[e];
        if (C::EXACT && W::HAS_BASE) sum[0][r] += dot;
        else w.add(sum, dot, operand.sums[v], v, 0, r);
      }
    if (C::EXACT && W::HAS_BASE) return;
    float left = 0.0f;
    for (int v = 0; v < C::VECTORS; v++) left += operand.sums[v];
    w.finish(sum, left);
  }
  INLINE void reduce(THREAD float (&sum)[1][4], SMEM float* part, Thread at) { reduce_fours<C>(sum, part, at); }
};
