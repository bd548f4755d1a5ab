// Direct convolution, NHWC: out[n][oh][ow][k] = epi(sum over r, s, c of x[n][ih][iw][c] * w[r][s][c][k]),
// ih = oh * stride_h - pad_t + r * dil_h, zero outside the image.
//
//   struct D { static constexpr long N, H, W, C, K, R, S, stride_h, stride_w, pad_t, pad_l, dil_h, dil_w, OH, OW, G; };
//   conv2d<D>(x, w, epi, th, counter)
//
// Weights of each of the G groups are [ceil(K/G/32)][R][S][C/G][32] float or f16, or [..][R][S][ceil(C/G/2)][32][2]
// bf16. The epilogue receives row = (n * OH + oh) * OW + ow and col = output channel. Padding at the bottom and right
// follows from OH and OW.
#pragma once
#include "gemm.h"

namespace npu {

// A copy of the input rows that one block of output rows reads, with padding and in units (storage.h).
struct RowCopy {
  long h, w, c, groups;           // height, width, channels and groups of the image
  long ih, rows, row_step;        // first image row, number of rows, image rows between two of them
  long iw, width, step;           // first image column, number of pixels, image columns between two of them
  long pixel_bytes, group_bytes;  // sizes of a pixel and of a group's channels in the copy
};

template <class Kind, class TX> NPU_NOINLINE void copy_rows(const TX* x, char* out, const RowCopy& d) {
  const bool dense = d.step == 1 && d.pixel_bytes == d.c * 4 / Kind::X_PER_UNIT &&
                     (d.groups == 1 || d.c / d.groups % Kind::X_PER_UNIT == 0) && d.c % Kind::X_PER_UNIT == 0;
  const long cg = d.c / d.groups;
  // Pixels first .. last - 1 of a row are inside the image.
  const long first = min_of(d.width, max_of(0, ceil_div(-d.iw, d.step)));
  const long last = d.iw >= d.w ? first : max_of(first, min_of(d.width, (d.w - 1 - d.iw) / d.step + 1));
  for (long r = 0; r < d.rows; r++, out += d.width * d.pixel_bytes) {
    const long ih = d.ih + r * d.row_step;
    if (ih < 0 || ih >= d.h) {
      memset(out, 0, (size_t)(d.width * d.pixel_bytes));
      continue;
    }
    memset(out, 0, (size_t)(first * d.pixel_bytes));
    memset(out + last * d.pixel_bytes, 0, (size_t)((d.width - last) * d.pixel_bytes));
    const TX* from = x + (ih * d.w + d.iw) * d.c;
    if (dense) {
      copy_units<Kind>(out + first * d.pixel_bytes, from + first * d.c, (last - first) * d.c);
      continue;
    }
    long p = first;
    if (is_same<Kind, BF16P>::value && d.c == 3 && d.groups == 1) {  // RGB: 8-byte reads, except for the last pixel
      for (; p + 1 < last; p++) {
        uint64_t pixel;
        memcpy(&pixel, from + p * d.step * 3, 8);
        pixel &= 0xffffffffffff;
        memcpy(out + p * d.pixel_bytes, &pixel, 8);
      }
    }
    for (; p < last; p++) {
      const TX* pixel = from + p * d.step * d.c;
      char* to = out + p * d.pixel_bytes;
      if (d.groups == 1 || cg % Kind::X_PER_UNIT == 0) {
        copy_units<Kind>(to, pixel, d.c);
      } else {
        for (long g = 0; g < d.groups; g++) copy_units<Kind>(to + g * d.group_bytes, pixel + g * cg, cg);
      }
    }
  }
}

template <class D, class TX, class TW> struct ConvPlan {
  using Kind = typename Operands<TX, TW>::Kind;
  using Stored = Plain<Kind>;
  static constexpr long G = D::G, CG = D::C / G, N = D::K / G, NP = ceil_div(N, PANEL), IMAGES = D::N;
  static constexpr long CU = ceil_div(CG, Kind::X_PER_UNIT);  // units of a pixel in a group
  static constexpr bool POINTWISE = D::R == 1 && D::S == 1;   // the copy then has only the pixels that are read
  static constexpr long SH = POINTWISE ? 1 : D::stride_h, SW = POINTWISE ? 1 : D::stride_w;
  static constexpr long SPAN_H = (D::OH - 1) * D::stride_h + (D::R - 1) * D::dil_h + 1;
  static constexpr long SPAN_W = (D::OW - 1) * D::stride_w + (D::S - 1) * D::dil_w + 1;
  static constexpr bool PADDED = D::pad_t > 0 || D::pad_l > 0 || SPAN_H - D::pad_t > D::H || SPAN_W - D::pad_l > D::W;
  static constexpr bool COPY = Operands<TX, TW>::WIDEN || PADDED || CG % Kind::X_PER_UNIT != 0 ||
                               D::C * D::stride_w * (long)sizeof(TX) % 4096 == 0;
  // Geometry of the input that the tiles read: the image or its copy.
  static constexpr long DENSE_PIXEL = G * CU * 4;
  static constexpr long PIXEL = !COPY ? D::C * (long)sizeof(TX) : DENSE_PIXEL + (DENSE_PIXEL * SW % 4096 == 0 ? 64 : 0);
  static constexpr long WIDTH = !COPY ? D::W : POINTWISE ? D::OW : SPAN_W;
  static constexpr long STEP_H = COPY ? SH : D::stride_h, STEP_W = COPY ? SW : D::stride_w;
  static constexpr bool ROW_TAPS = G == 1 && D::dil_w == 1 && PIXEL == DENSE_PIXEL;  // a row of taps is contiguous
  static constexpr int NTAPS = (int)(ROW_TAPS ? D::R : D::R * D::S), LEN = (int)(ROW_TAPS ? D::S * CU : CU);
  static constexpr int SEGMENT = Operands<TX, TW>::SEGMENT;
  static constexpr bool DUAL = false;
  static constexpr long UNITS = (long)NTAPS * LEN, GROUP_BYTES = CU * 4, W_IMAGE_BYTES = 0;

  static constexpr long quantum_rows() {  // the fewest output rows that fill whole tiles, or nearly
    for (long rows = 1; rows < D::OH; rows++)
      if (rows * D::OW % TILE_ROWS == 0 || rows * D::OW >= 4 * TILE_ROWS) return rows;
    return D::OH;
  }
  static constexpr Blocking BLOCKING =
      choose_blocking(D::N, D::OH, quantum_rows(), STEP_H * WIDTH * PIXEL, !POINTWISE, G * NP, UNITS * Kind::W_BYTES,
                      D::OW * D::R * D::S * CG * PANEL);
  static constexpr long BH = BLOCKING.block_rows, BLOCKS = ceil_div(D::OH, BH), PG = BLOCKING.chunk_panels;
  static constexpr long Q = BH * D::OW, Q_LAST = (D::OH - (BLOCKS - 1) * BH) * D::OW;
  static constexpr long IN_ROWS = (BH - 1) * SH + (D::R - 1) * D::dil_h + 1;
  static constexpr long COPY_BYTES = COPY ? IN_ROWS * WIDTH * PIXEL : 0;
  static_assert(Q * STEP_H * WIDTH * PIXEL < (1l << 31) * D::OW, "a block of input exceeds 2 GB");

  static void tables(int32_t* off, long* taps) {
    for (long oh = 0; oh < BH; oh++)
      for (long ow = 0; ow < D::OW; ow++)
        off[oh * D::OW + ow] = (int32_t)((oh * STEP_H * WIDTH + ow * STEP_W) * PIXEL);
    for (long t = 0; t < NTAPS; t++) {
      const long r = ROW_TAPS ? t : t / D::S, s = ROW_TAPS ? 0 : t % D::S;
      taps[t] = (r * D::dil_h * WIDTH + s * D::dil_w) * PIXEL;
    }
  }
  static long first_row(long image, long block) { return (image * D::OH + block * BH) * D::OW; }
  static const char* prepare(const TX* x, long image, long block, char* copy) {
    x += image * D::H * D::W * D::C;
    const long ih = block * BH * D::stride_h - D::pad_t, rows = min_of(BH, D::OH - block * BH);
    if (!COPY) return (const char*)(x + ih * D::W * D::C);
    copy_rows<Kind>(x, copy,
                    RowCopy{D::H, D::W, D::C, G, ih, (rows - 1) * SH + (D::R - 1) * D::dil_h + 1,
                            POINTWISE ? D::stride_h : 1, -D::pad_l, WIDTH, POINTWISE ? D::stride_w : 1, PIXEL, CU * 4});
    return copy;
  }
};

template <class D, class TX, class TW> constexpr long conv2d_scratch_bytes() {
  return blocked_scratch_bytes<ConvPlan<D, TX, TW>>();
}

template <class D, class TX, class TW, class Epi>
NPU_NOINLINE void conv2d(const TX* x, const TW* w, Epi& epi, Thread& th, int* counter) {
  blocked<ConvPlan<D, TX, TW>>(x, w, epi, th, counter);
}

}  // namespace npu
