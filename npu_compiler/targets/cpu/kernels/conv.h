// Direct convolution, NHWC: out[n][oh][ow][k] = epi(sum over r, s, c of x[n][ih][iw][c] * w[r][s][c][k]),
// ih = oh * stride_h - pad_t + r * dil_h, zero outside the image.
//
//   struct D { static constexpr long N, H, W, C, K, R, S, stride_h, stride_w, pad_t, pad_l, dil_h, dil_w, OH, OW, G; };
//   conv2d<D>(x, w, epi, th, counter)
//
// Weights of each of the G groups are [ceil(K/G/32)][R][S][C/G][32] float, f16 or double, or [..][R][S][ceil(C/G/2)][32][2]
// bf16, or [..][R][S][ceil(C/G/4)][32][4] int8 for uint8 images; if C is not a multiple of 4, G is 1 and dil_w is 1, they
// are [ceil(K/32)][R][ceil(S*C/4)][32][4] (BYTE_ROWS). The epilogue receives row = (n * OH + oh) * OW + ow and col =
// output channel. Padding at the bottom and right follows from OH and OW.
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

// Copies n pixels, whose size is a multiple of MOVE_BYTES. They are moved inline: a call of memcpy for each takes as long
// again as the move.
constexpr long MOVE_BYTES = 128;
NPU_INLINE void move_pixels(const char* from, long from_step, char* to, long to_step, long bytes, long n) {
  for (; n > 0; n--, from += from_step, to += to_step)
    for (long at = 0; at < bytes; at += MOVE_BYTES) memcpy(to + at, from + at, MOVE_BYTES);
}

template <class Kind, class TX> NPU_NOINLINE void copy_rows(const TX* x, char* out, const RowCopy& d) {
  const bool dense = d.step == 1 && d.pixel_bytes * Kind::X_PER_UNIT == d.c * Kind::UNIT &&
                     (d.groups == 1 || d.c / d.groups % Kind::X_PER_UNIT == 0);
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
#if NPU_AMX && NPU_AVX512
      if (d.step == 1 && d.pixel_bytes == 8) {  // eight pixels at once
        const __m512i spread = _mm512_set_epi16(0, 23, 22, 21, 0, 20, 19, 18, 0, 17, 16, 15, 0, 14, 13, 12,  //
                                                0, 11, 10, 9, 0, 8, 7, 6, 0, 5, 4, 3, 0, 2, 1, 0);
        for (; p + 11 <= last; p += 8) {
          const __m512i pixels = _mm512_loadu_si512(from + p * 3);
          _mm512_storeu_si512(out + p * 8, _mm512_maskz_permutexvar_epi16(0x77777777, spread, pixels));
        }
      }
#endif
      for (; p + 1 < last; p++) {
        uint64_t pixel;
        memcpy(&pixel, from + p * d.step * 3, 8);
        pixel &= 0xffffffffffff;
        memcpy(out + p * d.pixel_bytes, &pixel, 8);
      }
    }
    if (is_same<Kind, BF16P>::value && d.groups == 1 && d.c * 2 % MOVE_BYTES == 0) {
      move_pixels((const char*)(from + p * d.step * d.c), d.step * d.c * 2, out + p * d.pixel_bytes, d.pixel_bytes,
                  d.c * 2, last - p);
      continue;
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

// Weights in pairs have a zero at the end of each tap if the number of channels is odd, so they stay in pairs.
template <class TX, class TW, bool ODD> struct ConvOperands : Operands<TX, TW> {};
template <> struct ConvOperands<bf16, bf16, true> : PairOperands {};

// Units in one chain of additions (see SEGMENT_F32), of several taps no more than of 16 channels: libraries add up the
// taps of 16 channels at a time.
constexpr int conv_segment(int segment, long taps) {
  return segment == SEGMENT_F32 && taps > 1 ? (int)min_of(16 * taps, SEGMENT_F32) : segment;
}

template <class D, class TX, class TW> struct ConvPlan {
  using Types = ConvOperands<TX, TW, D::C / D::G % 2 != 0>;
  using Kind = typename Types::Kind;
  using Stored = typename Types::Stored;
  static constexpr long G = D::G, CG = D::C / G, N = D::K / G, NP = ceil_div(N, PANEL), IMAGES = D::N;
  static constexpr long CU = ceil_div(CG, Kind::X_PER_UNIT);  // units of a pixel in a group
  static constexpr bool POINTWISE = D::R == 1 && D::S == 1;   // the copy then has only the pixels that are read
  static constexpr long SH = POINTWISE ? 1 : D::stride_h, SW = POINTWISE ? 1 : D::stride_w;
  static constexpr long SPAN_H = (D::OH - 1) * D::stride_h + (D::R - 1) * D::dil_h + 1;
  static constexpr long SPAN_W = (D::OW - 1) * D::stride_w + (D::S - 1) * D::dil_w + 1;
  static constexpr bool PADDED = D::pad_t > 0 || D::pad_l > 0 || SPAN_H - D::pad_t > D::H || SPAN_W - D::pad_l > D::W;
  static constexpr bool COPY = Types::WIDEN || PADDED || CG % Kind::X_PER_UNIT != 0 ||
                               D::C * D::stride_w * (long)sizeof(TX) % 4096 == 0;
  // Geometry of the input that the tiles read: the image or its copy.
  // Elements of neighbouring pixels stay neighbours: a row of taps is one tap, whose last unit may read the next pixel.
  static constexpr bool BYTE_ROWS = Kind::INTEGERS && G == 1 && D::dil_w == 1 && CG % 4 != 0;
  static constexpr long DENSE_PIXEL = BYTE_ROWS ? CG * Kind::UNIT / 4 : G * CU * Kind::UNIT;
  static constexpr long PIXEL = !COPY ? D::C * (long)sizeof(TX) : DENSE_PIXEL + (DENSE_PIXEL * SW % 4096 == 0 ? 64 : 0);
  static constexpr long WIDTH = !COPY ? D::W : POINTWISE ? D::OW : SPAN_W;
  static constexpr long STEP_H = COPY ? SH : D::stride_h, STEP_W = COPY ? SW : D::stride_w;
  static constexpr bool ROW_TAPS = G == 1 && D::dil_w == 1 && PIXEL == DENSE_PIXEL;  // a row of taps is contiguous
  static constexpr int NTAPS = (int)(ROW_TAPS ? D::R : D::R * D::S);
  static constexpr int LEN = (int)(BYTE_ROWS ? ceil_div(D::S * CG, 4) : ROW_TAPS ? D::S * CU : CU);
  static constexpr int SEGMENT = conv_segment(Types::SEGMENT, D::R * D::S);
  static constexpr bool DUAL = false;
  static constexpr long UNITS = (long)NTAPS * LEN, GROUP_BYTES = CU * Kind::UNIT, W_IMAGE_BYTES = 0;

  static constexpr long quantum_rows() {  // the fewest output rows that fill whole tiles, or nearly
    for (long rows = 1; rows < D::OH; rows++)
      if (rows * D::OW % TILE_ROWS == 0 || rows * D::OW >= 4 * TILE_ROWS) return rows;
    return D::OH;
  }
  static constexpr BlockLimits LIMITS = VECTOR_LIMITS.with_blocks(576 << 10);  // the images of late layers in one block
  static constexpr Blocking BLOCKING =
      choose_blocking(LIMITS, D::N, D::OH, quantum_rows(), STEP_H * WIDTH * PIXEL, !POINTWISE, G * NP,
                      Stored::panel_bytes(UNITS), D::OW * D::R * D::S * CG * PANEL);
  static constexpr bool RESIDENT = G * NP * Stored::panel_bytes(UNITS) <= LIMITS.resident_bytes;
  static constexpr Division ROWS = divide(D::OH, quantum_rows(), BLOCKING.block_rows, RESIDENT);
  static constexpr long BLOCKS = ROWS.blocks, BH = ROWS.largest();
  static constexpr long PG =
      choose_chunk(LIMITS, BLOCKS * D::N, G * NP, BH * D::OW * D::R * D::S * CG * PANEL);
  static constexpr long Q = BH * D::OW, Q_FIRST = ROWS.size(0) * D::OW, Q_LAST = ROWS.size(BLOCKS - 1) * D::OW;
  static constexpr long IN_ROWS = (BH - 1) * SH + (D::R - 1) * D::dil_h + 1;
  static constexpr long COPY_BYTES = COPY ? IN_ROWS * WIDTH * PIXEL + (BYTE_ROWS ? Kind::UNIT : 0) : 0;
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
  static long positions(long block) { return ROWS.size(block) * D::OW; }
  static long first_row(long image, long block) { return (image * D::OH + ROWS.begin(block)) * D::OW; }
  // Rows of taps that are above or below the image for all positions are left out.
  static TapRange inner_taps(long block, long position, long count) {
    if (!PADDED || D::R == 1) return {0, NTAPS};
    const long first = (ROWS.begin(block) + position / D::OW) * D::stride_h - D::pad_t;
    const long last = (ROWS.begin(block) + (position + count - 1) / D::OW) * D::stride_h - D::pad_t;
    const TapRange rows = taps_inside(first, last, D::H, D::R, D::dil_h);
    constexpr long EACH = NTAPS / D::R;
    return rows.begin < rows.end ? TapRange{rows.begin * EACH, rows.end * EACH} : TapRange{0, NTAPS};
  }
  static const char* prepare(const TX* x, long image, long block, char* copy) {
    x += image * D::H * D::W * D::C;
    const long ih = ROWS.begin(block) * D::stride_h - D::pad_t, rows = ROWS.size(block);
    if (!COPY) return (const char*)(x + ih * D::W * D::C);
    copy_rows<Kind>(x, copy,
                    RowCopy{D::H, D::W, D::C, G, ih, (rows - 1) * SH + (D::R - 1) * D::dil_h + 1,
                            POINTWISE ? D::stride_h : 1, -D::pad_l, WIDTH, POINTWISE ? D::stride_w : 1, PIXEL, GROUP_BYTES});
    return copy;
  }
};

#if NPU_AMX
// A convolution as a product of matrices: a row has the channels of all taps of one position.
template <class D> struct ConvDims : GemmDims {
  static constexpr long CU = ceil_div(D::C, 2), M = D::N * D::OH * D::OW, N = D::K, K = D::R * D::S * CU * 2, lda = K;
  static constexpr bool POINTWISE = D::R == 1 && D::S == 1 && D::stride_h == 1 && D::stride_w == 1 && D::OH == D::H &&
                                    D::OW == D::W && D::C % 2 == 0;
};
template <class D> struct ConvRows {
  using Dims = ConvDims<D>;
  static constexpr long QUANTUM = 2 * AMX_ROWS;
  static constexpr bool COPY = !Dims::POINTWISE || MatrixRows<Dims>::COPY;
  static void copy(const bf16* x, long, long row, long rows, char* out, long pitch) {
    constexpr long UNITS = Dims::K / 2;
    constexpr bool TAPS_TOUCH = D::dil_w == 1 && D::C % 2 == 0;  // a row of taps is contiguous in the image
    for (long q = row; q < row + rows; q++, out += pitch) {
      const long n = q / (D::OH * D::OW), ih = q / D::OW % D::OH * D::stride_h - D::pad_t;
      const long iw = q % D::OW * D::stride_w - D::pad_l;
      const bf16* image = x + n * D::H * D::W * D::C;
      char* to = out;
      for (long r = 0; r < D::R; r++) {
        const long h = ih + r * D::dil_h;
        const bool inside = h >= 0 && h < D::H;
        if (TAPS_TOUCH && inside && iw >= 0 && iw + D::S <= D::W) {
          memcpy(to, image + (h * D::W + iw) * D::C, (size_t)(D::S * D::C * 2));
          to += D::S * D::C * 2;
          continue;
        }
        for (long s = 0; s < D::S; s++, to += Dims::CU * 4) {
          const long w = iw + s * D::dil_w;
          if (inside && w >= 0 && w < D::W) copy_units<BF16P>(to, image + (h * D::W + w) * D::C, D::C);
          else memset(to, 0, (size_t)(Dims::CU * 4));
        }
      }
      if constexpr (amx_steps(UNITS).padded) memset(out + UNITS * 4, 0, (size_t)(pitch - UNITS * 4));
    }
  }
};

// A convolution whose tiles read a padded copy of the input: 16 neighbouring positions of the copy, of which those
// between two output rows are dropped. A block has rows of one image, or whole images.
//
// With a stride, the copy of an image has one image for each phase: pixels whose coordinates have the same remainders
// of the strides. Positions that are neighbours in the output are then neighbours in each phase. DIVIDE: whether the
// copy may have phases, and the channels slices.
template <class D, class TW, bool DIVIDE = true> struct AmxConvPlan {
  using Stored = Plain<BF16P>;
  static constexpr long G = D::G, CG = D::C / G, CU = ceil_div(CG, 2), N = D::K / G, NP = ceil_div(N, PANEL);
  static constexpr long IMAGES = 1;
  static constexpr bool DUAL = false;
  static constexpr int LIMBS = 1;
  static constexpr bool ROWS_FIRST = false;
  static constexpr bool WHOLE_STEPS = DIVIDE && CU % AMX_UNITS == 0 && D::R * D::S > 1;
  // Without phases, rows of the output begin a tile: phases are worth their copy if these are less than 4/5 full.
  static constexpr bool PHASED = WHOLE_STEPS && 5 * D::OW < 4 * AMX_ROWS * ceil_div(D::OW, AMX_ROWS);
  static constexpr long PHASES_H = PHASED ? D::stride_h : 1, PHASES_W = PHASED ? D::stride_w : 1;
  static constexpr long PHASES = PHASES_H * PHASES_W;
  static constexpr long SH = D::stride_h / PHASES_H, SW = D::stride_w / PHASES_W;  // of positions in the copy
  static constexpr long WIDTH = ceil_div((D::OW - 1) * D::stride_w + (D::S - 1) * D::dil_w + 1, PHASES_W);
  static constexpr long DENSE_PIXEL = G * CU * 4;
  // Channels are divided into slices if L1 does not hold the pixels of a phase that a pair of tiles reads.
  static constexpr long NEAR_PIXELS = 2 * AMX_ROWS * SW + (D::R - 1) * D::dil_h / PHASES_H * WIDTH +
                                      (D::S - 1) * D::dil_w / PHASES_W;
  static constexpr bool SLICED = WHOLE_STEPS && G == 1 && NEAR_PIXELS * DENSE_PIXEL > 36 << 10;
  static constexpr long PIXEL =
      DENSE_PIXEL + (DENSE_PIXEL * SW % 4096 == 0 || (SLICED && DENSE_PIXEL % 128 == 0) ? 64 : 0);
  static constexpr bool ROW_TAPS = G == 1 && D::dil_w == 1 && PIXEL == DENSE_PIXEL && PHASES == 1 && !SLICED &&
                                   !amx_steps(D::S * CU).padded;
  static constexpr int NTAPS = (int)(ROW_TAPS ? D::R : D::R * D::S);
  static constexpr long LEN = ROW_TAPS ? D::S * CU : CU, UNITS = NTAPS * LEN;
  static constexpr AmxSteps STEPS = amx_steps(LEN);
  static constexpr long SLICE =
      SLICED ? ceil_div(STEPS.count, ceil_div(NEAR_PIXELS * DENSE_PIXEL, 28 << 10)) : STEPS.count;
  static constexpr long SLICES = ceil_div(STEPS.count, SLICE);
  static constexpr long PAIR_BYTES = NEAR_PIXELS * DENSE_PIXEL / SLICES;
  static constexpr long PITCH = SW * PIXEL, GROUP_BYTES = CU * 4, W_IMAGE_BYTES = 0;

  struct Block { long image, images, row, rows; };
  // Calls visit(tile, whether it begins, pixel of the copy, position of the tile, row) for all positions of a block,
  // whose images have `height` rows in the copy. Returns the number of tiles, which have `tall` positions.
  template <class Visit>
  static constexpr long visit_tiles(const Block& b, long height, long tall, Visit visit) {
    long tiles = 0, start = 0, row = 0;
    for (long n = 0; n < b.images; n++)
      for (long oh = 0; oh < b.rows; oh++)
        for (long ow = 0; ow < D::OW; ow++, row++) {
          const long pixel = (n * height + oh * SH) * WIDTH + ow * SW, distance = pixel - start;
          const bool begins = tiles == 0 || distance % SW != 0 || distance / SW >= tall;
          if (begins) tiles++, start = pixel;
          visit(tiles - 1, begins, pixel, (pixel - start) / SW, row);
        }
    return tiles;
  }
  static constexpr long count_tiles(const Block& b, long height, long tall = AMX_ROWS) {
    return visit_tiles(b, height, tall, [](long, bool, long, long, long) {});
  }
  static constexpr long quantum_rows() {  // the fewest output rows that fill pairs of tiles, or nearly
    for (long rows = 1; rows < D::OH; rows++) {
      const long tiles = count_tiles({0, 1, 0, rows}, 0);
      if (tiles % 2 == 0 && tiles >= 4 && 8 * rows * D::OW >= 7 * tiles * AMX_ROWS) return rows;
    }
    return D::OH;
  }
  static constexpr long image_rows(long rows) { return (rows - 1) * D::stride_h + (D::R - 1) * D::dil_h + 1; }
  static constexpr Blocking BLOCKING =
      choose_blocking(AMX_COPY_LIMITS, D::N, D::OH, quantum_rows(), PHASES * SH * WIDTH * PIXEL, true, G * NP,
                      UNITS * BF16P::W_BYTES, D::OW * D::R * D::S * CG * PANEL);
  // An even number of equal blocks instead of an odd one, as in AmxGemmPlan: two threads would both copy the block in
  // the middle.
  static constexpr long block_rows() {
    const long blocks = ceil_div(D::OH, BLOCKING.block_rows);
    for (long even = blocks - 1; D::N * blocks % 2 == 1 && 2 * even > blocks; even -= 2)
      if (D::OH % even == 0 && D::OH / even * PHASES * SH * WIDTH * PIXEL <= AMX_COPY_LIMITS.block_bytes)
        return D::OH / even;
    return BLOCKING.block_rows;
  }
  static constexpr long BH = block_rows(), ROW_BLOCKS = ceil_div(D::OH, BH);
  static constexpr long IN_ROWS = ceil_div(image_rows(BH), PHASES_H), PHASE_BYTES = IN_ROWS * WIDTH * PIXEL;
  static constexpr long IMAGE_BYTES = PHASES * PHASE_BYTES;
  static constexpr bool RESIDENT = G * NP * UNITS * BF16P::W_BYTES <= AMX_LIMITS.resident_bytes;
  // Weights that leave the cache are read once for as many images as fit.
  static constexpr long FIT = RESIDENT || ROW_BLOCKS > 1 ? 1 : max_of(1, AMX_LIMITS.block_bytes / IMAGE_BYTES);
  static constexpr long BN = ceil_div(D::N, ceil_div(D::N, FIT)), BLOCKS = ceil_div(D::N, BN) * ROW_BLOCKS;
  static constexpr long PG =
      choose_chunk(AMX_COPY_LIMITS, BLOCKS, G * NP, BN * BH * D::OW * D::R * D::S * CG * PANEL);
  static constexpr long COPY_BYTES = BN * IMAGE_BYTES + AMX_ROWS * PITCH;

  static constexpr Block block_of(long block) {
    const long image = block / ROW_BLOCKS * BN, row = block % ROW_BLOCKS * BH;
    return {image, min_of(BN, D::N - image), row, min_of(BH, D::OH - row)};
  }
  static constexpr long TILES = count_tiles(block_of(0), PHASES * IN_ROWS);
  static constexpr long least_height() {  // with as many tiles: products of fewer rows take less time
    long tall = AMX_ROWS;
    while (tall > AMX_LEAST_ROWS && count_tiles(block_of(0), PHASES * IN_ROWS, tall - 1) == TILES) tall--;
    return tall;
  }
  static constexpr long HEIGHT = least_height();

  // Taps of one phase follow each other, so that its pixels stay in L1.
  static void tap_offsets(AmxTap* taps) {
    for (long phase = 0; phase < PHASES; phase++)
      for (long t = 0; t < NTAPS; t++) {
        const long h = (ROW_TAPS ? t : t / D::S) * D::dil_h, w = (ROW_TAPS ? 0 : t % D::S) * D::dil_w;
        if (h % PHASES_H * PHASES_W + w % PHASES_W != phase) continue;
        *taps++ = {phase * PHASE_BYTES + (h / PHASES_H * WIDTH + w / PHASES_W) * PIXEL, t};
      }
  }
  static long positions(long block) {
    const Block b = block_of(block);
    return b.images * b.rows * D::OW;
  }
  static int tiles(long block, int32_t* first, int32_t* rows) {
    memset(rows, 255, TILES * AMX_ROWS * 4);
    return (int)visit_tiles(block_of(block), PHASES * IN_ROWS, HEIGHT,
                            [&](long tile, bool begins, long pixel, long position, long row) {
                              if (begins) first[tile] = (int32_t)(pixel * PIXEL);
                              rows[tile * AMX_ROWS + position] = (int32_t)row;
                            });
  }
  static long first_row(long, long block) {
    const Block b = block_of(block);
    return (b.image * D::OH + b.row) * D::OW;
  }
  static const char* prepare(const bf16* x, long, long block, char* copy) {
    const Block b = block_of(block);
    char* to = copy;
    for (long n = 0; n < b.images; n++)
      for (long phase = 0; phase < PHASES; phase++, to += PHASE_BYTES) {
        const long h = phase / PHASES_W, w = phase % PHASES_W;
        const RowCopy rows = {D::H, D::W, D::C, G, b.row * D::stride_h - D::pad_t + h,
                              ceil_div(image_rows(b.rows) - h, PHASES_H), PHASES_H,
                              w - D::pad_l, WIDTH, PHASES_W, PIXEL, CU * 4};
        copy_rows<BF16P>(x + (b.image + n) * D::H * D::W * D::C, to, rows);
      }
    return copy;
  }
};
template <class D, class TW> using PixelsPlan = AmxConvPlan<D, TW, false>;

// The plan with which a convolution takes least time: tiles of positions in memory order waste positions between rows,
// and rows with the channels of all taps take longer to copy.
template <class D, class TW> struct AmxConv {
  using Dims = ConvDims<D>;
  using Raster = AmxConvPlan<D, TW>;
  using Rows = AmxGemmPlan<Dims, TW, ConvRows<D>>;
  static constexpr long COPY_CYCLES = 8;    // of 64 bytes, and of the cache lines that they displace
  static constexpr long PANEL_CYCLES = 32;  // of a step of a tile with a panel
  static constexpr long COPIES = Raster::RESIDENT ? 1 : 2;  // threads that share a block
  static constexpr double raster_cycles() {
    const double blocks = (double)D::N * D::OH / (Raster::BN * Raster::BH);
    return blocks * (Raster::TILES * Raster::NTAPS * Raster::STEPS.count * PANEL_CYCLES * (double)(D::G * Raster::NP) +
                     COPIES * COPY_CYCLES * Raster::COPY_BYTES / 64.0);
  }
  static constexpr double rows_cycles() {
    // Every panel reads a copy anew that L2 does not hold beside the weights.
    const long passes = COPIES + (Rows::COPY_BYTES > AMX_L2_BYTES / 2 ? Rows::NP : 0);
    return (double)ceil_div(Dims::M, AMX_ROWS) * Rows::STEPS.count * PANEL_CYCLES * Rows::NP +
           (Rows::COPY ? (double)(passes * COPY_CYCLES) * Dims::M * Rows::PITCH / 64 : 0);
  }
  static constexpr bool BY_ROWS = D::G == 1 && (Raster::STEPS.padded || rows_cycles() < raster_cycles());
  static constexpr bool RUNS = BY_ROWS || !Raster::STEPS.padded;
  template <bool ROWS, class = void> struct Choice { using Plan = Raster; };
  template <class Unused> struct Choice<true, Unused> { using Plan = Rows; };
  using Plan = typename Choice<BY_ROWS>::Plan;
};
template <class D, class TX, class TW> constexpr bool conv2d_on_amx() {
  if constexpr (amx_runs<TX, TW>(D::N * D::OH * D::OW)) return AmxConv<D, TW>::RUNS;
  else return false;
}
template <class D> using AmxByteConv = AmxConv<ConvInPairs<D>, bf16>;
template <class D, class TX, class TW> constexpr bool conv2d_bytes_on_amx() {
  if constexpr (conv2d_of_bytes<D, TX, TW>()) return AmxByteConv<D>::RUNS;
  else return false;
}

// A convolution of half or float numbers in limbs; one of 1 x 1 is a product of matrices.
template <class D> struct PixelRows : GemmDims {
  static constexpr long M = D::N * D::OH * D::OW, N = D::K, K = D::C, lda = D::C;
  template <class T> static const T* at(const T* x, long, long row) {
    const long n = row / (D::OH * D::OW), h = row / D::OW % D::OH * D::stride_h, w = row % D::OW * D::stride_w;
    return x + ((n * D::H + h) * D::W + w) * D::C;
  }
};
template <class D> constexpr bool one_tap() {  // the bottom and right edges are not padded either, if so
  return D::R * D::S == 1 && D::pad_t == 0 && D::pad_l == 0 && (D::OH - 1) * D::stride_h < D::H &&
         (D::OW - 1) * D::stride_w < D::W;
}
template <class D, class TX, class TW = TX, bool ONE_TAP = one_tap<D>()> struct LimbConv {
  using Plan = LimbConvPlan<D, TX, PixelsPlan, TW>;
};
template <class D, class TX, class TW> struct LimbConv<D, TX, TW, true> {
  using Plan = LimbGemmPlan<PixelRows<D>, TX, AmxGemmPlan, PixelRows<D>, TW>;
};
template <class D, class TX, class TW> constexpr bool conv2d_in_limbs() {
  if constexpr (!has_limbs<TX, TW>() || D::G != 1) return false;
  else return limbs_are_faster<typename LimbConv<D, TX>::Plan, TX>(D::N * D::OH * D::OW, D::R * D::S * D::C);
}
#endif

template <class D, class TX, class TW> constexpr long conv2d_scratch_bytes() {
#if NPU_AMX
  if constexpr (is_same<TW, limbs<TX>>::value) return AmxScratch<typename LimbConv<D, TX, TW>::Plan>::END;
  else if constexpr (conv2d_bytes_on_amx<D, TX, TW>()) return AmxScratch<Integers<typename AmxByteConv<D>::Plan>>::END;
  else if constexpr (conv2d_on_amx<D, TX, TW>()) return AmxScratch<typename AmxConv<D, TW>::Plan>::END;
  else if constexpr (conv2d_in_limbs<D, TX, TW>()) return AmxScratch<typename LimbConv<D, TX>::Plan>::END;
  else
#endif
    return blocked_scratch_bytes<ConvPlan<D, TX, TW>>();
}

template <class D, class TX, class TW, class Epi>
NPU_NOINLINE void conv2d(const TX* x, const TW* w, Epi& epi, Thread& th, int* counter) {
#if NPU_AMX
  if constexpr (is_same<TW, limbs<TX>>::value)
    amx_blocked<typename LimbConv<D, TX, TW>::Plan>(x, w, epi, th, counter);
  else if constexpr (conv2d_bytes_on_amx<D, TX, TW>())
    amx_blocked<Integers<typename AmxByteConv<D>::Plan>>((const bf16*)x, (const bf16*)w, epi, th, counter);
  else if constexpr (conv2d_on_amx<D, TX, TW>()) amx_blocked<typename AmxConv<D, TW>::Plan>(x, w, epi, th, counter);
  else if constexpr (conv2d_in_limbs<D, TX, TW>())
    amx_blocked<typename LimbConv<D, TX>::Plan>(x, w, epi, th, counter);
  else
#endif
    blocked<ConvPlan<D, TX, TW>>(x, w, epi, th, counter);
}

}  // namespace npu
