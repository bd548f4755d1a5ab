// Results of split float32 operands that are NaN: an infinite operand makes them so (float_limbs.h). They are computed
// again in float arithmetic, from memory.
//
// Constants of S for it: K, terms in all; floats between rows of the left operand and between those of the right one,
// LEFT_ROW and RIGHT_ROW, and between matrices, LEFT_BATCH and RIGHT_BATCH. If IM2COL, the left operand is an image
// instead: its H and W, and the floats between images, lines and pixels, IMAGE, LINE and PIXEL.
#pragma once
#include "tma_mainloop.h"

// The floats of row `m` of the left operand in a stage; null: they are zeros, because the pixel is in the padding.
template <class D, class S> INLINE const float* left_floats(const Operands<S>& from, int batch, int m, int step) {
  if constexpr (S::IM2COL) {
    const int tap = step / S::CHANNEL_TILES, pixel = m % (S::OH * S::OW);
    const int y = pixel / S::OW * S::STRIDE_H - S::PAD_TOP + tap / S::KERNEL_W * S::DILATION_H;
    const int x = pixel % S::OW * S::STRIDE_W - S::PAD_LEFT + tap % S::KERNEL_W * S::DILATION_W;
    if (y < 0 || y >= S::H || x < 0 || x >= S::W) return nullptr;
    return from.left_floats + (int64_t)(m / (S::OH * S::OW)) * S::IMAGE + (int64_t)y * S::LINE + (int64_t)x * S::PIXEL +
           step % S::CHANNEL_TILES * LIMB_FLOATS;
  } else {
    return from.left_floats + (int64_t)batch * S::LEFT_BATCH + (int64_t)m * S::LEFT_ROW + step * LIMB_FLOATS;
  }
}

// The terms of the sum from a step on; with IM2COL, of its tap.
template <class D, class S> INLINE int floats_left(int step) {
  if constexpr (S::IM2COL) return S::CHANNELS / 2 - step % S::CHANNEL_TILES * LIMB_FLOATS;
  else return S::K - step * LIMB_FLOATS;
}

// The sum of the stages in `range` of result [m, n].
template <class D, class S> INLINE float float_sum(const Operands<S>& from, int batch, int m, int n, Range range) {
  const float* const right =
      from.right_floats + (D::BATCHED_RIGHT ? (int64_t)batch * S::RIGHT_BATCH : 0) + (int64_t)n * S::RIGHT_ROW;
  float sum = 0.0f;
#pragma unroll 1
  for (int step = range.first; step < range.last && !isnan(sum); step++) {
    const float* const left = left_floats<D>(from, batch, m, step);
    const int k = first_element<D, S>(step) / 2, rest = floats_left<D, S>(step);
    const int count = rest < LIMB_FLOATS ? rest : LIMB_FLOATS;
#pragma unroll 1
    for (int i = 0; i < count; i++) sum = fmaf(left == nullptr ? 0.0f : left[i], right[k + i], sum);
  }
  return sum;
}

template <class D, class S, class Rows>
INLINE void replace_nan(TileC<D>& acc, const Operands<S>& from, TileIndex tile, int rank, const Rows& row, int lane) {
  constexpr int COUNT = D::TILE_N / 2;
  bool found = false;
#pragma unroll
  for (int i = 0; i < COUNT; i++) found = found || isnan(acc.v[i]);
  if (!found) return;
  volatile float sums[COUNT];  // not in registers, whose number must be a constant
#pragma unroll
  for (int i = 0; i < COUNT; i++) sums[i] = acc.v[i];
#pragma unroll 1
  for (int i = 0; i < COUNT; i++) {
    const int m = row(i / 2 % 2), n = tile.n * D::TILE_N + i / 4 * 8 + (lane & 3) * 2 + i % 2;
    if (isnan(sums[i]) && m < D::M && n < D::N) sums[i] = float_sum<D>(from, tile.batch, m, n, k_tiles<D, S>(rank));
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) acc.v[i] = sums[i];
}
