// Winograd convolution F(M x M, 3 x 3), M = 2 or 4: 3x3 filters, stride 1, no dilation, one group; NHWC, fp32 arithmetic.
// Dimensions D and the epilogue are those of conv2d. Weights come from winograd_weights() in winograd.py:
// [ceil(K/32)][(M+2)^2][C][32] float. Source: Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks" (2016).
//
//   conv2d_winograd<D, M>(x, u, epi, th, counter)
//
// A chunk transforms the inputs of a block of tiles to [(M+2)^2][tiles][C], multiplies them with the weight panels
// (one matrix product for each of the (M+2)^2 points), and transforms the products back, 14 tiles x 32 channels at once.
#pragma once
#include "conv.h"

namespace npu {

// One-dimensional transforms, in place: input() is B^T, output() is A^T.
template <int M> struct WinogradTile;

template <> struct WinogradTile<2> {
  NPU_INLINE void input(vf& d0, vf& d1, vf& d2, vf& d3) {
    const vf a = d0 - d2, b = d1 + d2, c = d2 - d1;
    d3 = d1 - d3, d0 = a, d1 = b, d2 = c;
  }
  NPU_INLINE void input(vf (&d)[4]) { input(d[0], d[1], d[2], d[3]); }
  NPU_INLINE void output(const vf (&m)[4], vf (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] - m[3];
  }
};

template <> struct WinogradTile<4> {  // points 0, +-A, +-B, infinity
  static constexpr float A = 0.75f, B = 1.5f, AA = A * A, BB = B * B;
  NPU_INLINE void input(vf (&d)[6]) {
    const vf even_a = d[4] - BB * d[2], odd_a = d[3] - BB * d[1];
    const vf even_b = d[4] - AA * d[2], odd_b = d[3] - AA * d[1];
    const vf zero = AA * BB * d[0] + (d[4] - (AA + BB) * d[2]);
    d[5] = AA * BB * d[1] + (d[5] - (AA + BB) * d[3]);
    d[0] = zero;
    d[1] = even_a + A * odd_a;
    d[2] = even_a - A * odd_a;
    d[3] = even_b + B * odd_b;
    d[4] = even_b - B * odd_b;
  }
  NPU_INLINE void output(const vf (&m)[6], vf (&y)[4]) {
    const vf even_a = m[1] + m[2], odd_a = m[1] - m[2], even_b = m[3] + m[4], odd_b = m[3] - m[4];
    y[0] = m[0] + even_a + even_b;
    y[1] = A * odd_a + B * odd_b;
    y[2] = AA * even_a + BB * even_b;
    y[3] = A * AA * odd_a + (B * BB * odd_b + m[5]);
  }
};

constexpr long WINOGRAD_AHEAD = 16 << 10;  // bytes between use and prefetch of the weights
constexpr int WINOGRAD_SEGMENT = 16;         // see SEGMENT_F32: the transforms leave less room for rounding

template <class D, int M> struct WinogradPlan {
  static_assert(D::R == 3 && D::S == 3 && D::G == 1 && D::stride_h == 1 && D::stride_w == 1 && D::dil_h == 1 &&
                    D::dil_w == 1,
                "Winograd needs 3x3 filters, stride 1, no dilation, one group");
  static constexpr int SIDE = M + 2, POINTS = SIDE * SIDE;
  static constexpr long TH = ceil_div(D::OH, M), TW = ceil_div(D::OW, M), TILES = D::N * TH * TW;
  static constexpr long NP = ceil_div(D::K, PANEL);
  static constexpr long ROW_BYTES = D::C * 4 + (D::C % 128 == 0 ? 64 : 0);  // apart in the L1 cache
  static constexpr long PANEL_BYTES = POINTS * D::C * PANEL * 4;

  // Tiles of a block: one register tile is enough, more where channels are few. A few blocks become an even number of
  // equal ones.
  static constexpr long tiles_of_block() {
    const long fit = max_of(1, (160 << 10) / (POINTS * ROW_BYTES * TILE_ROWS)) * TILE_ROWS;
    const long blocks = ceil_div(TILES, fit);
    if (blocks > 4) return fit;
    return TILES < TILE_ROWS ? TILES : ceil_div(TILES, (blocks + 1) / 2 * 2);
  }
  static constexpr long T = tiles_of_block(), BLOCKS = ceil_div(TILES, T), T_LAST = TILES - (BLOCKS - 1) * T;
  static constexpr long GROUPS_WANTED = min_of(NP, ceil_div(CHUNKS, BLOCKS));
  static constexpr long PG = ceil_div(NP, GROUPS_WANTED), GROUPS = ceil_div(NP, PG), COUNT = BLOCKS * GROUPS;

  // An odd number of cache lines: the transform of one tile writes to all points, which must not share cache sets.
  static constexpr long POINT_BYTES = (ceil_div(T * ROW_BYTES, 64) | 1) * 64;
  static constexpr long TRANSFORMED = POINTS * POINT_BYTES, PRODUCT = POINTS * TILE_ROWS * PANEL * 4;
  static constexpr long ZEROS = align64(D::C * 4) + 64, OFFSETS = align64(T * 4);
  static constexpr long BYTES = TRANSFORMED + PRODUCT + ZEROS + OFFSETS;
};

template <class D, int M> constexpr long winograd_scratch_bytes() { return WinogradPlan<D, M>::BYTES; }

// VL channels of one input tile: pixels are pointers to its SIDE x SIDE pixels, outputs lie point_bytes apart.
template <int M, class TX, class L>
NPU_INLINE void winograd_input(const TX* const* pixels, long c, char* out, long point_bytes, L lanes) {
  constexpr int SIDE = M + 2;
  vf d[SIDE][SIDE];
#pragma GCC unroll 6
  for (int j = 0; j < SIDE; j++) {
    vf column[SIDE];
#pragma GCC unroll 6
    for (int i = 0; i < SIDE; i++) column[i] = ld(pixels[i * SIDE + j] + c, lanes);
    WinogradTile<M>::input(column);
#pragma GCC unroll 6
    for (int i = 0; i < SIDE; i++) d[i][j] = column[i];
  }
#pragma GCC unroll 6
  for (int i = 0; i < SIDE; i++) {
    WinogradTile<M>::input(d[i]);
#pragma GCC unroll 6
    for (int j = 0; j < SIDE; j++) st((float*)(out + (i * SIDE + j) * point_bytes) + c, d[i][j], lanes);
  }
}

// Transforms `count` tiles from number `tile` on; every image has TH x TW of them.
struct WinogradInput { long H, W, C, pad_t, pad_l, TH, TW, row_bytes, point_bytes; };
template <int M, class TX>
NPU_NOINLINE void winograd_inputs(const TX* x, long tile, long count, char* out, const TX* zeros,
                                  const WinogradInput& d) {
  constexpr int SIDE = M + 2;
  for (long t = tile; t < tile + count; t++, out += d.row_bytes) {
    const long ih = t / d.TW % d.TH * M - d.pad_t, iw = t % d.TW * M - d.pad_l;
    const TX* image = x + t / (d.TH * d.TW) * d.H * d.W * d.C;
    const TX* pixels[SIDE * SIDE];
    for (int i = 0; i < SIDE; i++)
      for (int j = 0; j < SIDE; j++) {
        const bool inside = ih + i >= 0 && ih + i < d.H && iw + j >= 0 && iw + j < d.W;
        pixels[i * SIDE + j] = inside ? image + ((ih + i) * d.W + iw + j) * d.C : zeros;
      }
    long c = 0;
    for (; c + VL <= d.C; c += VL) winograd_input<M>(pixels, c, out, d.point_bytes, Full{});
    if (c < d.C) winograd_input<M>(pixels, c, out, d.point_bytes, (int)(d.C - c));
  }
}

// VL output channels of one tile, from products [SIDE * SIDE][TILE_ROWS][PANEL].
template <class D, int M, class Epi, class L>
NPU_INLINE void winograd_output(const float* product, long n, long oh, long ow, long col, L lanes, Epi& epi) {
  constexpr int SIDE = M + 2;
  vf half[M][SIDE];
#pragma GCC unroll 6
  for (int j = 0; j < SIDE; j++) {
    vf column[SIDE], y[M];
#pragma GCC unroll 6
    for (int i = 0; i < SIDE; i++) column[i] = load_bytes<vf>(product + (i * SIDE + j) * TILE_ROWS * PANEL);
    WinogradTile<M>::output(column, y);
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) half[i][j] = y[i];
  }
  const long row = (n * D::OH + oh) * D::OW + ow;
#pragma GCC unroll 4
  for (int i = 0; i < M; i++) {
    vf y[M];
    WinogradTile<M>::output(half[i], y);
    if (D::OH % M && oh + i >= D::OH) break;
#pragma GCC unroll 4
    for (int j = 0; j < M; j++)
      if (D::OW % M == 0 || ow + j < D::OW) epi(y[j], row + i * D::OW + j, col, lanes);
  }
}

template <class D, int M, class TX, class Epi>
NPU_NOINLINE void conv2d_winograd(const TX* x, const float* u, Epi& epi, Thread& th, int* counter) {
  using Plan = WinogradPlan<D, M>;
  constexpr int SEGMENT = is_same<TX, float>::value ? WINOGRAD_SEGMENT : SEGMENT_16;
  char* transformed = th.scratch;
  float* product = (float*)(transformed + Plan::TRANSFORMED);
  TX* zeros = (TX*)((char*)product + Plan::PRODUCT);
  int32_t* off = (int32_t*)((char*)zeros + Plan::ZEROS);
  static const long no_tap = 0;
  long i = next_chunk(th, counter), prepared = -1;
  if (i >= Plan::COUNT) return;
  memset(zeros, 0, Plan::ZEROS);
  for (long t = 0; t < Plan::T; t++) off[t] = (int32_t)(t * Plan::ROW_BYTES);
  const Tiling full = tiling<F32, Plan::T, true>(), last = tiling<F32, Plan::T_LAST, true>();
  for (; i < Plan::COUNT; i = next_chunk(th, counter)) {
    // Blocks vary fastest: two threads on two blocks transform each input once.
    const long block = i % Plan::BLOCKS, begin = i / Plan::BLOCKS * Plan::PG, end = min_of(begin + Plan::PG, Plan::NP);
    const bool is_last = block == Plan::BLOCKS - 1;
    constexpr long POINT_BYTES = Plan::POINT_BYTES;
    if (prepared != block) {
      winograd_inputs<M>(x, block * Plan::T, is_last ? Plan::T_LAST : Plan::T, transformed, (const TX*)zeros,
                         {D::H, D::W, D::C, D::pad_t, D::pad_l, Plan::TH, Plan::TW, Plan::ROW_BYTES, POINT_BYTES});
      prepared = block;
    }
    const Tiling& tiles = is_last ? last : full;
    for (long pn = begin; pn < end; pn++) {
      const long col = pn * PANEL;
      const int parts = (int)min_of(PANEL / TILE_COLS, ceil_div(D::K - col, TILE_COLS));
      for (int t = 0, first = 0; t < tiles.count; t++) {
        const int rows = tiles.rows + (t < tiles.tall);
        TileArgs a{transformed, off + first, &no_tap, 1, (int)D::C, nullptr, nullptr, SEGMENT, nullptr, 0};
        for (int point = 0; point < Plan::POINTS; point++, a.x += POINT_BYTES) {
          const char* w = (const char*)u + pn * Plan::PANEL_BYTES + point * D::C * PANEL * 4;
          a.prefetch = t == 0 ? w + WINOGRAD_AHEAD : w;
          for (int part = 0; part < parts; part++) {
            a.w = w + part * TILE_COLS * 4;
            a.acc = product + point * TILE_ROWS * PANEL + part * TILE_COLS;
            (t < tiles.tall ? tiles.tall_fn : tiles.fn)(a);
          }
        }
        for (int r = 0; r < rows; r++) {
          const long tile = block * Plan::T + first + r;
          const long n = tile / (Plan::TH * Plan::TW), oh = tile / Plan::TW % Plan::TH * M, ow = tile % Plan::TW * M;
          for (int v = 0; v < PANEL && col + v < D::K; v += VL) {
            const float* from = product + r * PANEL + v;
            if (D::K % VL == 0 || col + v + VL <= D::K) winograd_output<D, M>(from, n, oh, ow, col + v, Full{}, epi);
            else winograd_output<D, M>(from, n, oh, ow, col + v, (int)(D::K - col - v), epi);
          }
        }
        first += rows;
      }
    }
  }
}

}  // namespace npu
