// Reader of weights in block formats for gemv.h that multiplies 32 rows at a time on the matrix unit. Each quad of
// lanes has a group of four rows, which fills a row of the left fragment, and all quads of a subgroup have the same
// columns, so that every lane of a quad gets sums of all four rows. It takes fewer instructions than
// gemv_blocks_mma.h: sums of more columns are scaled at once, the lanes of a quad share that work, and no sums of quads
// have to be added up.
//
// The columns of a subgroup consist of RUNS that share a sub-block. The elements of x in a run are in one or more
// columns of the right fragment, which have zeros elsewhere: one run is in all columns, one of two in every second one,
// one of four in two neighbours, and one of eight in one. So a lane gets the sums of LANE_RUNS runs, multiplies them by
// the scales, and adds up those of a row.
//
// Constants of C are those of gemv_blocks.h. ROWS is 32, ALONG an eighth of THREADS, VECTORS 8, and all pieces exist; X
// is bf16. Sub-blocks have at least 32 columns, and blocks with a head at least those of a subgroup.
#pragma once
#include "gemv_blocks_mma.h"

template <class C> struct RowFragments {
  typedef typename C::F F;
  typedef typename F::Codes Codes;
  typedef Piece<F, C::PIECES, 32> P;
  CONSTANTS int COLUMNS = C::VECTORS * 32, FOURS = (C::N + 3) / 4;
  CONSTANTS bool HAS_BASE = F::Scale::HAS_BASE;
  CONSTANTS int RUN = P::SUB_BLOCK >= COLUMNS ? C::VECTORS : P::SUB_BLOCK / 32;  // pieces of a run
  CONSTANTS int RUNS = C::VECTORS / RUN, LANE_RUNS = RUNS <= 2 ? RUNS : RUNS / 4;

  struct Operand {
    FragB<bf16> b[C::VECTORS][2];
    float sums[LANE_RUNS];  // of the elements of x of a lane's runs, if something is added to products of codes
    template <class Left> INLINE void make(THREAD Left&, THREAD const GemvLeft<C>& x, Thread at) {
      const int column = at.lane >> 2, run = RUNS == 1 ? 0 : RUNS == 2 ? column % 2 : RUNS == 4 ? column / 2 : column;
      FragA<bf16> ones;
      FragC acc[2];
      const uint one = pack_pair(1.0f, 1.0f, (THREAD bf16*)nullptr);
      frag_a_from(ones, one, one, one, one, at.lane);
      frag_zero(acc[0]);
      frag_zero(acc[1]);
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        const uint4 pairs = run == v / RUN ? *(THREAD const uint4*)&x.x[0][v] : zero16();
        frag_b_from(b[v][0], pairs.x, pairs.y, at.lane);
        frag_b_from(b[v][1], pairs.z, pairs.w, at.lane);
        if (HAS_BASE || Codes::RAISED) {
          frag_mma(acc[0], ones, b[v][0]);
          frag_mma(acc[1], ones, b[v][1]);
        }
      }
      for (int i = 0; i < LANE_RUNS; i++) sums[i] = acc[0].v[i] + acc[1].v[i];
    }
  };

  DEVICE const uint8_t* weights;
  PieceCodes<P::BITS> codes[C::VECTORS];
  uint scales[LANE_RUNS * P::SCALE], head[P::HEAD == 0 ? 1 : P::HEAD];

  INLINE void load(int unit, Thread at) {
    const int own = unit * 8 + (at.lane >> 2), group = C::N % 32 == 0 || own < FOURS ? own : FOURS - 1;
    const int begin = at.subgroup * COLUMNS, first = RUNS <= 2 ? 0 : (at.lane & 3) * LANE_RUNS;  // run of the lane
    DEVICE const uint8_t* const four = weights + (int64_t)group * P::NBYTES;
    StreamWords how;
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) codes[v].load(four, C::PIECES, piece_of<C>(v, at), how);
    stream_words<LANE_RUNS * P::SCALE>(scales, four + P::PLANES + (begin / P::SUB_BLOCK + first) * (4 * P::SCALE));
    if (P::HEAD != 0)
      stream_words<P::HEAD == 0 ? 1 : P::HEAD>(head, four + P::HEADS + begin / P::BLOCK * (4 * P::HEAD));
  }
  INLINE void load_rest(Thread) {}
  INLINE void settle() const {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) await_load(codes[v].low[0]);
  }
  // The sum of row r times its scale, in run i of the lane.
  INLINE float scaled(float sum, THREAD const Operand& operand, int i, int r) const {
    THREAD const uint* const own = scales + i * P::SCALE;
    const float dot = sum * F::Scale::scale(own, head, r);
    return HAS_BASE ? dot + operand.sums[i] * F::Scale::base(own, head, r) : dot;
  }
  // Only the first sum is used: that of row lane % 4 of the quad.
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][32], THREAD Left&, THREAD const GemvLeft<C>&,
                       THREAD const Operand& operand, Thread at) {
    FragC acc[2];  // of rows 0 and 1, and 2 and 3
#pragma unroll
    for (int i = 0; i < 4; i++)
      acc[0].v[i] = acc[1].v[i] = Codes::RAISED ? -(Codes::RAISE * operand.sums[i % LANE_RUNS]) : 0.0f;
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const uint4 x = Codes::raised(codes[v], 2 * q), y = Codes::raised(codes[v], 2 * q + 1);
        FragA<bf16> left_half, right_half;
        frag_a_from(left_half, x.x, y.x, x.y, y.y, at.lane);
        frag_a_from(right_half, x.z, y.z, x.w, y.w, at.lane);
        frag_mma(acc[q], left_half, operand.b[v][0]);
        frag_mma(acc[q], right_half, operand.b[v][1]);
      }
    const bool odd = (at.lane & 1) != 0, second = (at.lane & 2) != 0;
    float total = 0.0f, rows[4] = {};
    if (RUNS <= 2) {
#pragma unroll
      for (int i = 0; i < LANE_RUNS; i++) {
        const float low = odd ? acc[0].v[2 + i] : acc[0].v[i], high = odd ? acc[1].v[2 + i] : acc[1].v[i];
        total += scaled(second ? high : low, operand, i, at.lane & 3);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int i = 0; i < LANE_RUNS; i++) rows[r] += scaled(acc[r / 2].v[r % 2 * 2 + i], operand, i, r);
      total = quad_sum4(rows[0], rows[1], rows[2], rows[3], at.lane);
    }
    sum[0][0] = total;
  }
  INLINE void reduce(THREAD float (&sum)[1][32], SMEM float* part, Thread at) { part[at.lane] = sum[0][0]; }
};
