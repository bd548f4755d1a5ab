// Reader of weights in block formats for gemv.h that multiplies on the matrix unit, with fragments filled from
// registers. Four lanes, a quad, have 32 columns: a row of the left fragment from their codes, and a column of the right
// fragment from the elements of x at the same columns. The sums of the quads are therefore on the diagonal of the
// result, where one lane of each quad multiplies them by the scales. Codes may be raised by constants, whose products are
// subtracted from the sums.
//
// Constants of C in addition to those of gemv_blocks.h: HALVES, whether fragments are of float16 if that takes fewer
// instructions for each tile, but more in front of the first; DECODED: pieces that are decoded before pdl_wait().
#pragma once
#include "gemv_blocks.h"

// Elements of the left operand are bfloat16, also if they are computed.
INLINE uint bf16_pair(float low, float high) { return pack_pair(low, high, (THREAD bf16*)nullptr); }
INLINE uint bf16_pair(bf16 low, bf16 high) { return bits_of_f32(to_f32(low)) >> 16 | bits_of_f32(to_f32(high)); }
template <class C> INLINE void bf16_pairs(THREAD uint (&pairs)[C::VECTORS][4], THREAD const GemvLeft<C>& x) {
#pragma unroll
  for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[v][i] = bf16_pair(x.x[0][v].v[2 * i], x.x[0][v].v[2 * i + 1]);
}

// The elements of x of a quad's pieces as pairs of type T. `restored` divides sums by the power of two that they are
// multiplied by. float16 has fewer exponents than bfloat16: the largest element becomes less than 2^14, and only
// elements below 2^-26 of it are rounded.
template <class C, class Codes, class T> struct QuadRange {
  INLINE void pairs_of(THREAD uint (&pairs)[C::VECTORS][4], THREAD const GemvLeft<C>& x) { bf16_pairs<C>(pairs, x); }
  INLINE float restored(float sum) const { return sum; }
};
template <class C, class Codes> struct QuadRange<C, Codes, f16> {
  float inverse;
  INLINE void pairs_of(THREAD uint (&pairs)[C::VECTORS][4], THREAD const GemvLeft<C>& x) {
    bf16_pairs<C>(pairs, x);
    uint largest = 0;
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) largest = pair_max_magnitude(largest, pairs[v][i]);
    const float both = m_max(f32_of_bits(largest << 16), f32_of_bits(largest & 0xffff0000u));
    uint exponent = bits_of_f32(frag_row_max(both)) >> 23;  // biased by 127
    exponent = exponent < 15u ? 15u : exponent;
    inverse = f32_of_bits((exponent - 13) << 23);
    const float factor = f32_of_bits((2 * 127 + 13 - exponent) << 23);
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float f = factor * Codes::factor(i), low = f32_of_bits(pairs[v][i] << 16);
        pairs[v][i] = pack_pair(low * f, f32_of_bits(pairs[v][i] & 0xffff0000u) * f, (THREAD f16*)nullptr);
      }
  }
  INLINE float restored(float sum) const { return sum * inverse; }
};

template <class Codes_, bool HALVES> struct FragmentCodes {
  typedef Codes_ Codes;
};
template <class Codes_> struct FragmentCodes<Codes_, true> {
  typedef typename Codes_::Halves Codes;
};

template <class C> struct BlockFragments {
  CONSTANTS int QUAD = 32, SUBS = Piece<typename C::F, C::PIECES, QUAD>::SUBS;  // sub-blocks of a quad
  typedef typename FragmentCodes<typename C::F::Codes, C::HALVES || C::F::Codes::HALVES_PAY>::Codes Codes;
  typedef typename Codes::Value T;
  CONSTANTS bool HAS_BASE = C::F::Scale::HAS_BASE;
  CONSTANTS bool HAS_RAISES = Codes::RAISED && !(HAS_BASE && Codes::RAISE != 0);

  // Both halves of a piece of x, for each sub-block of the quad: zero in the lanes of other sub-blocks.
  struct Operand {
    FragB<T> b[C::VECTORS][SUBS][2];
    float sums[C::VECTORS][SUBS];    // of the elements of x, if the format has a base; in the lanes on the diagonal
    float raises[C::VECTORS][SUBS];  // what raised codes add to sums of products, unless it is RAISE times `sums`
    QuadRange<C, Codes, T> range;
    template <class Left>
    INLINE void make(THREAD const BlockFragments&, THREAD Left&, THREAD const GemvLeft<C>& x, Thread at) {
      uint pairs[C::VECTORS][4];
      range.pairs_of(pairs, x);
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
          const bool own = SUBS == 1 || (at.lane & 3) * SUBS / 4 == s;
#pragma unroll
          for (int h = 0; h < 2; h++)
            frag_b_from(b[v][s][h], own ? pairs[v][2 * h] : 0u, own ? pairs[v][2 * h + 1] : 0u, at.lane);
          if (HAS_BASE) sums[v][s] = product(one(0), one(1), v, s, at);
          if (HAS_RAISES) raises[v][s] = product(Codes::raise(0), Codes::raise(1), v, s, at);
        }
    }
    INLINE float raise(int v, int s) const {
      return HAS_RAISES ? raises[v][s] : Codes::RAISED ? Codes::RAISE * sums[v][s] : 0.0f;
    }
    static INLINE uint one(int i) {
      return pack_pair(1.0f / Codes::factor(i), 1.0f / Codes::factor(i), (THREAD T*)nullptr);
    }
    // The sum of the quad's elements of x, in even and odd pairs times those of `even` and `odd`.
    INLINE float product(uint even, uint odd, int v, int s, Thread at) const {
      FragA<T> a;
      FragC acc;
      frag_zero(acc);
      frag_a_from(a, even, even, odd, odd, at.lane);
      frag_mma(acc, a, b[v][s][0]);
      frag_mma(acc, a, b[v][s][1]);
      return diagonal(acc, 0, at.lane);
    }
  };
  typedef BlockPieces<C, QUAD> W;
  CONSTANTS bool ONE_SCALE = W::WHOLE && SUBS == 1;
  W w;
  uint4 decoded[C::DECODED > 0 ? C::DECODED : 1][4];  // rows of the first pieces
  // The sum of the quad for the lower or upper half of the rows, in the lanes on the diagonal.
  static INLINE float diagonal(THREAD const FragC& acc, int half, int lane) {
    return (lane & 4) != 0 ? acc.v[2 * half + 1] : acc.v[2 * half];
  }
  INLINE void load(int tile, Thread at) { w.load_first(tile, at); }
  INLINE void load_rest(Thread at) { w.load_rest(at); }
  // The compiler would move the decoding behind pdl_wait() if nothing in front of it read the result.
  INLINE void settle() {
    w.settle();
#pragma unroll
    for (int v = 0; v < C::DECODED; v++) {
      uint all = 0;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        decoded[v][r] = Codes::raised(w.pieces[v].codes, r);
        all ^= decoded[v][r].x ^ decoded[v][r].y ^ decoded[v][r].z ^ decoded[v][r].w;
      }
      await_load(all);
    }
  }
  INLINE uint4 row(int v, int r) const { return v < C::DECODED ? decoded[v][r] : Codes::raised(w.pieces[v].codes, r); }
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[1][4], THREAD Left&, THREAD const GemvLeft<C>&,
                       THREAD const Operand& operand, Thread at) {
    FragC total[2];  // of rows 0 and 1, and 2 and 3, if they have one scale
    frag_zero(total[0]);
    frag_zero(total[1]);
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const uint4 x = row(v, 2 * q), y = row(v, 2 * q + 1);
        FragA<T> left_half, right_half;
        frag_a_from(left_half, x.x, y.x, x.y, y.y, at.lane);
        frag_a_from(right_half, x.z, y.z, x.w, y.w, at.lane);
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
          FragC part;
          frag_zero(part);
          THREAD FragC& acc = ONE_SCALE ? total[q] : part;
          frag_mma(acc, left_half, operand.b[v][s][0]);
          frag_mma(acc, right_half, operand.b[v][s][1]);
#pragma unroll
          for (int h = 0; h < 2; h++)
            if (!ONE_SCALE) {
              const float dot = diagonal(acc, h, at.lane);
              w.add(sum, dot - operand.raise(v, s), HAS_BASE ? operand.sums[v][s] : 0.0f, v, s, 2 * q + h);
            }
        }
      }
    float left = 0.0f, raise = 0.0f;
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) {
      if (HAS_BASE && ONE_SCALE) left += operand.sums[v][0];
      if (ONE_SCALE) raise += operand.raise(v, 0);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      if (ONE_SCALE) sum[0][r] = diagonal(total[r / 2], r % 2, at.lane) - raise;
      sum[0][r] = operand.range.restored(sum[0][r]);
    }
    w.finish(sum, operand.range.restored(left));
    if ((at.lane & 3) != at.lane >> 3)
      for (int r = 0; r < 4; r++) sum[0][r] = 0.0f;
  }
  INLINE void reduce(THREAD float (&sum)[1][4], SMEM float* part, Thread at) { reduce_fours<C>(sum, part, at); }
};
