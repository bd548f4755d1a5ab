// Depthwise convolution, NHWC, one filter per channel (C == K == G), vectorised over channels.
// Dimensions D and the epilogue are those of conv2d. Weights are [R][S][C] in any float type.
#pragma once
#include "gemm.h"

namespace npu {

constexpr int DEPTHWISE_TILE = 8;  // neighbouring outputs of a row that share the loaded weights

// Computes T neighbouring outputs of a row for one vector of channels. Taps r0 .. r1 - 1 and s0 .. s1 - 1 are inside
// the image.
template <class D, int T, class TX, class TW, class Epi, class L>
NPU_INLINE void depthwise_tile(const TX* x, const TW* w, long r0, long r1, long s0, long s1, long row, long c, L lanes,
                               Epi& epi) {
  using V = vec<TX>;
  V acc[T] = {};
  for (long r = r0; r < r1; r++) {
    for (long s = s0; s < s1; s++) {
      const V wv = ld(w + (r * D::S + s) * D::C + c, lanes);
      const TX* from = x + (r * D::dil_h * D::W + s * D::dil_w) * D::C + c;
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) acc[t] = fma(ld(from + t * D::stride_w * D::C, lanes), wv, acc[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) epi(acc[t], row + t, c, lanes);
}

template <class D, int T, class TX, class TW, class Epi>
NPU_INLINE void depthwise_channels(const TX* x, const TW* w, long r0, long r1, long s0, long s1, long row, Epi& epi) {
  long c = 0;
  for (; c + VL <= D::C; c += VL) depthwise_tile<D, T>(x, w, r0, r1, s0, s1, row, c, Full{}, epi);
  if (D::C % VL) depthwise_tile<D, T>(x, w, r0, r1, s0, s1, row, c, (int)(D::C % VL), epi);
}

template <class D, class TX, class TW, class Epi>
NPU_NOINLINE void depthwise(const TX* x, const TW* w, Epi& epi, Thread& th, int* counter) {
  static_assert(D::G == D::C && D::K == D::C, "depthwise: one filter per channel");
  constexpr long ROWS = D::N * D::OH;
  constexpr long BY_WORK = ceil_div(CHUNK_MACS / 8, D::OW * D::R * D::S * D::C), BY_COUNT = ceil_div(ROWS, CHUNKS);
  constexpr long CHUNK_ROWS = max_of(1, min_of(BY_WORK, BY_COUNT));
  constexpr long COUNT = ceil_div(ROWS, CHUNK_ROWS);
  for (long i, part = 0; (i = own_chunk(th, counter, COUNT, part)) < COUNT;) {
    const long end = min_of(ROWS, (i + 1) * CHUNK_ROWS);
    for (long line = i * CHUNK_ROWS; line < end; line++) {
      const long ih = line % D::OH * D::stride_h - D::pad_t;
      const TapRange r = taps_inside(ih, ih, D::H, D::R, D::dil_h);
      const TX* image = x + line / D::OH * D::H * D::W * D::C;
      for (long ow = 0; ow < D::OW;) {
        const long iw = ow * D::stride_w - D::pad_l, row = line * D::OW + ow;
        const TX* from = image + (ih * D::W + iw) * D::C;
        const long span = (DEPTHWISE_TILE - 1) * D::stride_w + (D::S - 1) * D::dil_w;
        if (iw >= 0 && iw + span < D::W && ow + DEPTHWISE_TILE <= D::OW) {
          depthwise_channels<D, DEPTHWISE_TILE>(from, w, r.begin, r.end, 0, D::S, row, epi);
          ow += DEPTHWISE_TILE;
        } else {
          const TapRange s = taps_inside(iw, iw, D::W, D::S, D::dil_w);
          depthwise_channels<D, 1>(from, w, r.begin, r.end, s.begin, s.end, row, epi);
          ow++;
        }
      }
    }
  }
}

}  // namespace npu
