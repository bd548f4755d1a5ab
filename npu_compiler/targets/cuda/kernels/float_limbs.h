// Products of float32 operands on the matrix unit: each is the sum of three bfloat16 numbers, its limbs, which hold all
// of its 24 bits. Of the nine products of limbs, the six largest are computed; the others are below 2^-24 of the result.
// Warps of their own split the right operand in shared memory, each warpgroup splits the left one in registers.
//
// The matrix unit truncates sums. It therefore adds up only a stage's products, the small ones first. Float additions
// add up the sums of stages. On average these are still 6e-8 too small, which adds up in deep networks: every other one
// grows by a unit in the last place. An infinite operand has a limb that is NaN: if a result is NaN, its thread
// computes it again in float arithmetic. Limbs of numbers below 2^-110 lose bits, as bfloat16 has no smaller numbers than
// 2^-133.
// Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations" (2019), https://arxiv.org/abs/1904.06376.
#pragma once
#include "tma.h"
#include "wgmma.h"

constexpr int LIMB_FLOATS = 32;   // terms of a stage
constexpr int SPLIT_BARRIER = 8;  // of the first team of warps that split right operands

// Two floats: each member holds a limb of both.
struct LimbPair {
  uint high, middle, low;
  INLINE LimbPair(float x, float y) {
    high = limb(x, y);
    middle = limb(x, y);
    low = pack_pair(x, y, (bf16*)nullptr);
  }
  // Rounds both to bfloat16 and subtracts these numbers.
  static INLINE uint limb(float& x, float& y) {
    const uint pair = pack_pair(x, y, (bf16*)nullptr);
    x -= f32_of_bits(pair << 16);
    y -= f32_of_bits(pair & 0xffff0000u);
    return pair;
  }
};

// A split right operand of N rows: rows of 128 bytes, swizzled, with the high limbs of 32 floats and then the middle
// ones; behind them rows of 64 bytes, swizzled, with the low limbs. Of 8 floats, limbs of the first and the last four
// alternate, as ldmatrix delivers those of the left operand. Each of WARPS splits every so many-th block of 8 rows in
// place.
template <int N, int WARPS, class T> INLINE void split_rows(T* right, int warp, int lane) {
  constexpr int UNROLLED = (N / 8 + WARPS - 1) / WARPS < 4 ? (N / 8 + WARPS - 1) / WARPS : 4;
  const int j = lane & 3;  // the 8 floats of this lane
#pragma unroll UNROLLED
  for (int n = warp * 8 + (lane >> 2); n < N; n += WARPS * 8) {
    T* const row = right + n * 64;
    const int turn = n & 7;
    const Vec<float, 4> x = *(const Vec<float, 4>*)(row + ((2 * j) ^ turn) * 8);
    const Vec<float, 4> y = *(const Vec<float, 4>*)(row + ((2 * j + 1) ^ turn) * 8);
    Vec<uint, 4> high, middle, low;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const LimbPair limbs(x.v[i], y.v[i]);
      high.v[i] = limbs.high, middle.v[i] = limbs.middle, low.v[i] = limbs.low;
    }
    subgroup_barrier();  // other lanes have read the row
    const bool odd = n & 1;  // odd rows store their limbs in another order, to avoid bank conflicts
    Vec<uint, 4> first, second;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      first.v[i] = odd ? middle.v[i] : high.v[i];
      second.v[i] = odd ? high.v[i] : middle.v[i];
    }
    *(Vec<uint, 4>*)(row + ((odd * 4 + j) ^ turn) * 8) = first;
    *(Vec<uint, 4>*)(row + ((4 - odd * 4 + j) ^ turn) * 8) = second;
    *(Vec<uint, 4>*)(right + N * 64 + n * 32 + (j ^ (n >> 1 & 3)) * 8) = low;
  }
}

// The 16 rows of a warp of a stage's left operand [64, 32] of floats.
struct LimbRows {
  FragA<bf16> high[2], middle[2], low[2];

  template <class T> INLINE void load(const T* rows, int lane) {
    const int row = lane & 15, turn = row & 7;  // of the swizzle
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint x[4];
      ldmatrix_x4(x, rows + row * 64 + ((2 * k + (lane >> 4)) ^ turn) * 8);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const LimbPair limbs(f32_of_bits(x[i]), f32_of_bits(x[i + 2]));
        const int at = k % 2 * 2 + i;
        high[k / 2].v[at] = limbs.high, middle[k / 2].v[at] = limbs.middle, low[k / 2].v[at] = limbs.low;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {  // not between products, which the compiler would then serialise
      defined_here(high[i / 4].v[i % 4]);
      defined_here(middle[i / 4].v[i % 4]);
      defined_here(low[i / 4].v[i % 4]);
    }
  }
  // C [64, N] = A B [N, 32]^T; `right` was split by split_rows().
  template <int N, class T> INLINE void multiply(WgmmaC<N>& c, const T* right) const {
    const uint64_t b = wgmma_descriptor<64>(right), b_low = wgmma_descriptor<32>(right + N * 64);
    const auto add = [&](const FragA<bf16>* a, uint64_t limbs, int accumulate) {
#pragma unroll
      for (int k = 0; k < 2; k++) wgmma_k16(c, a[k], limbs + 2 * k, k > 0 ? 1 : accumulate);
    };
    add(low, b, 0);
    add(high, b_low, 1);
    add(middle, b + 4, 1);
    add(middle, b, 1);
    add(high, b + 4, 1);
    add(high, b, 1);
  }
};

// Adds the sum of stage `step` to that of those before.
INLINE float add_stage(float total, float sum, int step) { return fmaf(sum, step % 2 ? 1.00000012f : 1.0f, total); }
