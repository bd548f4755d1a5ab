// Reader of weights in bf16c12 for gemv.h: groups of four rows (weights/formats/bf16c12/rows4.py), decoded in
// registers.
//
// Constants of C in addition to those of gemv.h: PLANES, bytes of the codes and low bytes of a group, which come first
// for all groups; EXTRAS, bytes of the scales and outliers of a group; MAX_OUTLIERS; PLACES: outliers of a thread; AHEAD: pieces that are loaded before pdl_wait(). ROWS is 4, M 1, ITEM 8.
#pragma once
#include "gemv.h"

template <class C> struct Rows4 {
  DEVICE const uint8_t* weights;
  DEVICE const uint8_t* group;  // the weights of the tile
  uint4 codes[C::VECTORS], low[C::VECTORS][2];
  uint outliers[C::PLACES];
  Vec<uint, 2> scales;

  INLINE void load_pieces(int begin, int end, Thread at) {
#pragma unroll
    for (int v = begin; v < end; v++) {
      const int piece = v * C::THREADS + at.tid;
      if (C::VECTORS * C::THREADS != C::PIECES) codes[v] = low[v][0] = low[v][1] = zero16();
      if (C::VECTORS * C::THREADS == C::PIECES || piece < C::PIECES) {
        codes[v] = stream16(group + piece * 16);
        low[v][0] = stream16(group + 16 * C::PIECES + piece * 16);
        low[v][1] = stream16(group + 32 * C::PIECES + piece * 16);
      }
    }
  }
  INLINE void load(int tile, Thread at) {
    group = weights + (int64_t)tile * C::PLANES;
    load_pieces(0, C::AHEAD, at);
    DEVICE const uint8_t* const extras = weights + (int64_t)C::TILES * C::PLANES + (int64_t)tile * C::EXTRAS;
    scales = *(DEVICE const Vec<uint, 2>*)extras;
#pragma unroll
    for (int n = 0; n < C::PLACES; n++) {
      const int place = n * C::THREADS + at.tid;
      outliers[n] = 0;
      if (place < C::MAX_OUTLIERS) outliers[n] = *(DEVICE const uint*)(extras + 8 + place * 4);
    }
  }
  INLINE void load_rest(Thread at) { load_pieces(C::AHEAD, C::VECTORS, at); }
  INLINE void settle() const {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) await_load(codes[v].x ^ low[v][0].x ^ low[v][1].x);
  }

  // Returns row r of piece v as bfloat16, without its scale.
  INLINE uint4 row(int v, int r) const {
    const uint4 l = low[v][r / 2], c = codes[v];
    return rows4_decode(r % 2 ? l.z : l.x, r % 2 ? l.w : l.y, r == 0 ? c.x : r == 1 ? c.y : r == 2 ? c.z : c.w);
  }

  // Loads the elements of x that the outliers are multiplied by, before the sums need them.
  template <class Left> INLINE void load_outlier_x(THREAD float (&outlier_x)[C::PLACES], THREAD Left& left) const {
#pragma unroll
    for (int n = 0; n < C::PLACES; n++) outlier_x[n] = left.element(outliers[n] >> 16 & 0x3fffu);
  }
  // Multiplies the sums by the rows' scales, then adds the outliers, which are not scaled.
  INLINE void finish(THREAD float (&sum)[1][4], THREAD const float (&outlier_x)[C::PLACES]) const {
#pragma unroll
    for (int r = 0; r < 4; r++)
      sum[0][r] *= f32_of_bits(r % 2 ? scales.v[r / 2] & 0xffff0000u : scales.v[r / 2] << 16);
#pragma unroll
    for (int n = 0; n < C::PLACES; n++) {
      const uint outlier = outliers[n];
      const float y = (outlier << 17) != 0 ? outlier_x[n] * f32_of_bits(outlier << 16) : 0.0f;
#pragma unroll
      for (int r = 0; r < 4; r++) sum[0][r] += outlier >> 30 == (uint)r ? y : 0.0f;
    }
  }
};

template <class C> INLINE void reduce_rows4(THREAD float (&sum)[1][4], SMEM float* part, Thread at) {
  const float total = subgroup_sum4(sum[0][0], sum[0][1], sum[0][2], sum[0][3], at.lane);
  if (at.lane < 4) part[at.lane] = total;
}

// Multiplies in float arithmetic.
template <class C> struct Rows4Weights {
  struct Operand {
    template <class Left>
    INLINE void make(THREAD const Rows4Weights&, THREAD Left& left, THREAD const GemvLeft<C>& x, Thread at) {
      if (!Left::PUTS) return;
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        const int piece = v * C::THREADS + at.tid;
        if (C::VECTORS * C::THREADS == C::PIECES || piece < C::PIECES)
          for (int e = 0; e < C::ITEM; e++) left.put(piece * C::ITEM + e, to_f32(x.x[0][v].v[e]));
      }
      barrier();
    }
  };
  Rows4<C> w;
  INLINE void load(int tile, Thread at) { w.load(tile, at); }
  INLINE void load_rest(Thread at) { w.load_rest(at); }
  INLINE void settle() const { w.settle(); }
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][4], THREAD Left& left, THREAD const GemvLeft<C>& x, THREAD const Operand&,
                       Thread) {
    float outlier_x[C::PLACES];
    w.load_outlier_x(outlier_x, left);
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float y[C::ITEM];
        unpack(w.row(v, r), y, (THREAD bf16*)nullptr);
#pragma unroll
        for (int e = 0; e < C::ITEM; e++) sum[0][r] += to_f32(x.x[0][v].v[e]) * y[e];
      }
    w.finish(sum, outlier_x);
  }
  INLINE void reduce(THREAD float (&sum)[1][4], SMEM float* part, Thread at) { reduce_rows4<C>(sum, part, at); }
};
