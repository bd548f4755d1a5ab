// Reader of weights in block formats for gemv.h that multiplies 32 rows at a time on the matrix unit, in integers. Each
// quad of lanes has a group of four rows, which fills a row of the left fragment, and all quads of a subgroup have the
// same columns, so that every lane of a quad gets sums of all four rows. It takes fewer instructions than
// gemv_blocks_mma.h: a code becomes a byte instead of a half, sums of more columns are scaled at once, the lanes of a
// quad share that work, and no sums of quads have to be added up.
//
// The columns of a subgroup consist of RUNS that share a sub-block. The elements of x in a run become integers of 15 bits
// times a power of two, and these become two digits of a byte. So the largest elements of a run keep more bits than
// those of bf16, and the others have its error. The right fragment has the high digits of a run in an even column, the
// low ones in the next, and zeros in the columns of other runs: one run of one or two is in all pairs of columns, one of
// four in one pair, and two of eight in one, where they have different accumulators. So a lane gets the sums of
// LANE_RUNS runs, multiplies them by the scales, and adds up those of a row.
//
// Constants of C are those of gemv_blocks.h. ROWS is 32, VECTORS 8, THREADS the pieces of a row, and LEFT_VECTORS 1.
// Sub-blocks have at least 32 columns, and blocks with a head at least those of a subgroup.
#pragma once
#include "gemv_blocks.h"

template <class C> struct RowFragments {
  typedef typename C::F F;
  typedef typename F::Codes Codes;
  typedef Piece<F, C::PIECES, 32> P;
  CONSTANTS int COLUMNS = C::VECTORS * 32, FOURS = (C::N + 3) / 4;
  CONSTANTS bool HAS_BASE = F::Scale::HAS_BASE;
  CONSTANTS int RUN = P::SUB_BLOCK >= COLUMNS ? C::VECTORS : P::SUB_BLOCK / 32;  // 32 columns each
  CONSTANTS int RUNS = C::VECTORS / RUN, LANE_RUNS = RUNS <= 2 ? RUNS : RUNS / 4;
  CONSTANTS int DIGITS = 2 * COLUMNS, SCALES = 2 * RUNS;  // of the left operand of a subgroup

  // A run of x that multiplies the lane's sums: `factor`, the power of two, and the sum of the elements.
  struct Run {
    float factor, sum;
  };
  struct Operand {
    FragB<u8s8> b[C::VECTORS];
    Run runs[LANE_RUNS];
    template <class Left>
    INLINE void make(THREAD const RowFragments& weights, THREAD Left&, THREAD const GemvLeft<C>& x, Thread at) {
      SMEM uint8_t* const digits = weights.digits + at.subgroup * DIGITS;
      SMEM float* const scales = weights.scales_of_x + at.subgroup * SCALES;
      store_digits(digits, scales, x, at.lane);
      subgroup_barrier();
      const int column = at.lane >> 2, pair = column >> 1, first = RUNS <= 2 ? 0 : (at.lane & 3) * LANE_RUNS;
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        const bool own = RUNS <= 2 || v / RUN / LANE_RUNS == pair;
        SMEM const uint* const from =
            (SMEM const uint*)(digits + (column & 1) * COLUMNS + (v * 4 + (at.lane & 3)) * C::ITEM);
        frag_b_from(b[v], own ? from[0] : 0u, own ? from[1] : 0u, at.lane);
      }
      for (int i = 0; i < LANE_RUNS; i++) {
        runs[i].factor = scales[2 * (first + i)];
        runs[i].sum = scales[2 * (first + i) + 1];
      }
    }
    // Every lane has a piece of x: the bytes of its digits, high ones first, and the scale of its run.
    static INLINE void store_digits(SMEM uint8_t* digits, SMEM float* scales, THREAD const GemvLeft<C>& x, int lane) {
      float y[C::ITEM], sum = 0.0f;
      int largest = 0;  // as bits, whose order is that of magnitudes, and NaN is the largest
#pragma unroll
      for (int e = 0; e < C::ITEM; e++) {
        y[e] = to_f32(x.x[0][0].v[e]);
        sum += y[e];
        const int magnitude = (int)(bits_of_f32(y[e]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
      }
#pragma unroll
      for (int m = 1; m < 4 * RUN; m <<= 1) {
        const int other = subgroup_xor(largest, m);
        largest = other > largest ? other : largest;
        sum += subgroup_xor(sum, m);
      }
      uint exponent = (uint)largest >> 23;  // biased by 127
      exponent = exponent < 15u ? 15u : exponent;
      const float factor = f32_of_bits((2 * 127 + 13 - exponent) << 23);  // makes the largest less than 2^14
      uint high[2], low[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint z[4];
        for (int i = 0; i < 4; i++) z[i] = raised(y[Codes::element(4 * h + i)] * factor);
        const uint left = byte_permute(z[0], z[1], 0x5140u), right = byte_permute(z[2], z[3], 0x5140u);
        low[h] = byte_permute(left, right, 0x5410u) ^ 0x80808080u;
        high[h] = byte_permute(left, right, 0x7632u);
      }
      SMEM uint* const to = (SMEM uint*)(digits + lane * C::ITEM);
      to[0] = high[0], to[1] = high[1];
      to[COLUMNS / 4] = low[0], to[COLUMNS / 4 + 1] = low[1];
      if (lane % (4 * RUN) == 0) {
        SMEM float* const scale = scales + lane / (4 * RUN) * 2;
        scale[0] = f32_of_bits(exponent == 255u ? 0x7fc00000u : (exponent - 13) << 23);  // NaN if x is not finite
        scale[1] = sum;
      }
    }
    // The low bits of the result are an integer plus 128: its low digit is the low byte less 128, and the high digit is
    // the next byte.
    static INLINE uint raised(float x) { return bits_of_f32(x + (12582912.0f + 128.0f)); }
  };

  DEVICE const uint8_t* weights;
  SMEM uint8_t* digits;      // [THREADS / 32, 2, COLUMNS]: of the left operand
  SMEM float* scales_of_x;   // [THREADS / 32, RUNS, 2]
  PieceCodes<P::BITS> codes[C::VECTORS];
  uint scales[LANE_RUNS * P::SCALE], head[P::HEAD == 0 ? 1 : P::HEAD];

  INLINE void load(int tile, Thread at) {
    const int own = tile * 8 + (at.lane >> 2), group = C::N % 32 == 0 || own < FOURS ? own : FOURS - 1;
    const int begin = at.subgroup * COLUMNS, first = RUNS <= 2 ? 0 : (at.lane & 3) * LANE_RUNS;  // run of the lane
    DEVICE const uint8_t* const four = weights + (int64_t)group * P::NBYTES;
    StreamWords how;
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
      codes[v].load(four, C::PIECES, (at.subgroup * C::VECTORS + v) * 4 + (at.lane & 3), how);
    stream_words<LANE_RUNS * P::SCALE>(scales, four + P::PLANES + (begin / P::SUB_BLOCK + first) * (4 * P::SCALE));
    if (P::HEAD != 0)
      stream_words<P::HEAD == 0 ? 1 : P::HEAD>(head, four + P::HEADS + begin / P::BLOCK * (4 * P::HEAD));
  }
  INLINE void load_rest(Thread) {}
  INLINE void settle() const {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) await_load(codes[v].low[0]);
  }
  // The sum of row r in run i of the lane, from the sums of codes times digits.
  INLINE float scaled(int sum, THREAD const Run& run, int i, int r) const {
    THREAD const uint* const own = scales + i * P::SCALE;
    float dot = run.factor * (float)sum;
    if (Codes::ZERO != 0) dot -= Codes::ZERO * run.sum;
    dot *= F::Scale::scale(own, head, r);
    return HAS_BASE ? dot + run.sum * F::Scale::base(own, head, r) : dot;
  }
  // The sum of both digits for one of two rows.
  static INLINE int joined(THREAD const FragI& acc, int row) { return acc.v[2 * row] * 256 + acc.v[2 * row + 1]; }
  // Only the first sum is used: that of row lane % 4 of the quad.
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][32], THREAD Left&, THREAD const GemvLeft<C>&,
                       THREAD const Operand& operand, Thread at) {
    FragI acc[LANE_RUNS][2];  // of rows 0 and 1, and 2 and 3
#pragma unroll
    for (int n = 0; n < 2 * LANE_RUNS; n++) frag_zero(acc[n / 2][n % 2]);
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const uint2 x = Codes::bytes(codes[v], 2 * q), y = Codes::bytes(codes[v], 2 * q + 1);
        FragA<u8s8> a;
        frag_a_from(a, x.x, y.x, x.y, y.y, at.lane);
        frag_mma(acc[v / RUN % LANE_RUNS][q], a, operand.b[v]);
      }
    const bool odd = (at.lane & 1) != 0, second = (at.lane & 2) != 0;
    float total = 0.0f, rows[4] = {};
    if (RUNS <= 2) {
#pragma unroll
      for (int i = 0; i < LANE_RUNS; i++) {
        const int low = odd ? joined(acc[i][0], 1) : joined(acc[i][0], 0);
        const int high = odd ? joined(acc[i][1], 1) : joined(acc[i][1], 0);
        total += scaled(second ? high : low, operand.runs[i], i, at.lane & 3);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int i = 0; i < LANE_RUNS; i++) rows[r] += scaled(joined(acc[i][r / 2], r % 2), operand.runs[i], i, r);
      total = quad_sum4(rows[0], rows[1], rows[2], rows[3], at.lane);
    }
    sum[0][0] = total;
  }
  INLINE void reduce(THREAD float (&sum)[1][32], SMEM float* part, Thread at) { part[at.lane] = sum[0][0]; }
};
