// Winograd convolution F(M x M, 3 x 3), M = 2 or 4: 3x3 filters, stride 1, or 2 if M is 2, no dilation, one group; NHWC,
// float32 arithmetic. Dimensions D and the epilogue are those of conv2d. Weights are transformed at load time
// (schedule/contractions.py) to [ceil(K/32)][SIDE^2][C][32] float; SIDE is M + 2, or 5 if the stride is 2. Source:
// Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks" (2016).
//
//   conv2d_winograd<D, M, CHANNELS>(x, u, epi, th, counter)
//
// Sums of float32 have segments; those of CHANNELS channels are added to one sum, of further channels to another one.
//
// A chunk transforms the inputs of a block of tiles to [SIDE^2][tiles][C], multiplies them with the weight panels (one
// matrix product for each of the SIDE^2 points), and transforms the products back, 14 tiles x 32 channels at once.
//
// With stride 2, pixels in even and odd places are two convolutions, whose results are added: one of two taps, F(2, 2)
// with 3 products, and one of one tap, with 2 products.
//
// The transforms add every input of a tile to every output and cancel the terms that an output does not depend on. A
// large value leaves its rounding error in such outputs, and an infinite one NaN. Tiles with such values
// (winograd_needs_direct) are computed by the direct sum.
#pragma once
#include "conv.h"

namespace npu {

// One-dimensional transforms: input() is B^T, in place; output() is A^T. filter() with sign -1 is the left inverse of
// G; with sign 1 it sums the magnitudes of its terms. M: outputs of a tile. SIDE: its inputs, and its points.
template <int OUTPUTS, int STEP> struct WinogradSizes {
  static constexpr int M = OUTPUTS, STRIDE = STEP, SIDE = (M - 1) * STRIDE + 3;
};
template <int M, int STRIDE> struct WinogradTransform;

template <> struct WinogradTransform<2, 1> : WinogradSizes<2, 1> {
  NPU_INLINE void input(vf& d0, vf& d1, vf& d2, vf& d3) {
    const vf a = d0 - d2, b = d1 + d2, c = d2 - d1;
    d3 = d1 - d3, d0 = a, d1 = b, d2 = c;
  }
  NPU_INLINE void input(vf (&d)[4]) { input(d[0], d[1], d[2], d[3]); }
  NPU_INLINE void output(const vf (&m)[4], vf (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] - m[3];
  }
  NPU_INLINE void filter(const vf (&u)[4], vf (&g)[3], float sign) {
    g[0] = u[0], g[1] = u[1] + sign * u[2], g[2] = u[3];
  }
};

template <> struct WinogradTransform<2, 2> : WinogradSizes<2, 2> {
  NPU_INLINE void input(vf (&d)[5]) {
    const vf odd = d[3];
    d[0] = d[0] - d[2], d[3] = d[4] - d[2], d[4] = odd;
  }
  NPU_INLINE void output(const vf (&m)[5], vf (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[3] + m[4] + m[2];
  }
  NPU_INLINE void filter(const vf (&u)[5], vf (&g)[3], float) { g[0] = u[0], g[1] = u[1], g[2] = u[3]; }
};

template <> struct WinogradTransform<4, 1> : WinogradSizes<4, 1> {  // interpolation points 0, +-A, +-B, infinity
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
  NPU_INLINE void filter(const vf (&u)[6], vf (&g)[3], float sign) {
    g[0] = AA * BB * u[0], g[1] = A * (AA - BB) * (u[1] + sign * u[2]), g[2] = u[5];
  }
};

// A tile: its image and the position of its first output.
struct WinogradTile { long n, oh, ow; };

struct WinogradTiles {
  long H, W, C, OH, OW, pad_t, pad_l, TH, TW, row_bytes, point_bytes;
  template <int M> NPU_INLINE WinogradTile at(const WinogradTiles& d, long t) {
    return {t / (d.TH * d.TW), t / d.TW % d.TH * M, t % d.TW * M};
  }
};

constexpr long WINOGRAD_PREFETCH_DISTANCE = 16 << 10;  // in bytes of weights
constexpr int WINOGRAD_SEGMENT = 16;  // see SEGMENT_F32; shorter, because the transforms have rounding errors, too

template <class D, int M> struct WinogradPlan {
  static_assert(D::R == 3 && D::S == 3 && D::G == 1 && D::stride_h == D::stride_w && D::dil_h == 1 && D::dil_w == 1,
                "Winograd needs 3x3 filters, equal strides, no dilation, one group");
  using F = WinogradTransform<M, D::stride_h>;
  static constexpr int POINTS = F::SIDE * F::SIDE;
  static constexpr long TH = ceil_div(D::OH, M), TW = ceil_div(D::OW, M), TILES = D::N * TH * TW;
  static constexpr long NP = ceil_div(D::K, PANEL);
  static constexpr long ROW_BYTES = D::C * 4 + (D::C % 128 == 0 ? 64 : 0);  // rows in different L1 sets
  static constexpr long PANEL_BYTES = POINTS * D::C * PANEL * 4;

  // Winograd tiles of a block: one register tile, or more if there are few channels. Up to four blocks are rounded to
  // an even number.
  static constexpr long blocks() {
    const long fit = max_of(1, (160 << 10) / (POINTS * ROW_BYTES * TILE_ROWS)) * TILE_ROWS;
    const long blocks = ceil_div(TILES, fit);
    return blocks > 4 || TILES < TILE_ROWS ? blocks : (blocks + 1) / 2 * 2;
  }
  static constexpr Division ROWS = {TILES, 1, blocks()};
  static constexpr long BLOCKS = ROWS.blocks, T = ROWS.largest(), T_FIRST = ROWS.size(0);
  static constexpr long GROUPS_WANTED = min_of(NP, ceil_div(CHUNKS, BLOCKS));
  static constexpr long PG = ceil_div(NP, GROUPS_WANTED), GROUPS = ceil_div(NP, PG), COUNT = BLOCKS * GROUPS;

  // An odd number of cache lines: the transform of one tile writes to all points, which must be in different cache
  // sets.
  static constexpr long POINT_BYTES = (ceil_div(T * ROW_BYTES, 64) | 1) * 64;
  static constexpr long SUMS = POINTS * TILE_ROWS * PANEL;  // and those of one point's next part
  static constexpr long TRANSFORMED = POINTS * POINT_BYTES, PRODUCT = (SUMS + TILE_ROWS * PANEL) * 4;
  static constexpr long ZEROS = align64(D::C * 4) + 64, OFFSETS = align64(T * 4), NEEDS_DIRECT = align64(T);
  static constexpr long TILE_TABLE = T * (long)sizeof(WinogradTile);
  static constexpr long BYTES = TRANSFORMED + PRODUCT + ZEROS + OFFSETS + NEEDS_DIRECT + TILE_TABLE;
};

template <class D, int M> constexpr long winograd_scratch_bytes() { return WinogradPlan<D, M>::BYTES; }

// Transforms VL channels of one input tile, whose pixel in row i and column j is at pixel(i, j). The results are
// point_bytes apart. Adds the squares of the inputs to `squares`.
template <class F, class Pixel, class L>
NPU_INLINE void winograd_input(const Pixel& pixel, long c, char* out, long point_bytes, vf& squares, L lanes) {
  constexpr int SIDE = F::SIDE;
  vf d[SIDE][SIDE];
#pragma GCC unroll 6
  for (int j = 0; j < SIDE; j++) {
    vf column[SIDE];
#pragma GCC unroll 6
    for (int i = 0; i < SIDE; i++) column[i] = ld(pixel(i, j) + c, lanes);
    vf sum = column[0] * column[0];
#pragma GCC unroll 6
    for (int i = 1; i < SIDE; i++) sum = fma(column[i], column[i], sum);
    squares += sum;
    F::input(column);
#pragma GCC unroll 6
    for (int i = 0; i < SIDE; i++) d[i][j] = column[i];
  }
#pragma GCC unroll 6
  for (int i = 0; i < SIDE; i++) {
    F::input(d[i]);
#pragma GCC unroll 6
    for (int j = 0; j < SIDE; j++) st((float*)(out + (i * SIDE + j) * point_bytes) + c, d[i][j], lanes);
  }
}

// The bound on (largest magnitude in a tile) / (largest magnitude that one of its outputs depends on) up to which
// rounding errors of the transforms are smaller than that of the output. F(2x2) needs no bound: an output only adds
// terms of inputs that it depends on.
template <class TX> constexpr float WINOGRAD_RANGE = is_same<TX, bf16>::value ? 32768 : 4096;

// The magnitude as an integer, which has the same order.
NPU_INLINE vi32 magnitude(vf x) { return (vi32)x & 0x7fffffff; }

template <class TX> NPU_INLINE float largest_of(const TX* x, long n) {
  vi32 found = {};
  long c = 0;
  for (; c + VL <= n; c += VL) found = MaxOp{}(found, magnitude(ld(x + c, Full{})));
  if (c < n) found = MaxOp{}(found, magnitude(ld(x + c, (int)(n - c))));
  return bitcast<float>(hmax(found));
}
NPU_INLINE vf square(vf x) { return x * x; }

// Whether a tile of rows x cols outputs has values beyond WINOGRAD_RANGE, given the sum of its squares.
template <class F, class TX>
NPU_NOINLINE bool winograd_has_outlier(const TX* const* pixels, long channels, long rows, long cols, float squares) {
  constexpr int SIDE = F::SIDE;
  constexpr float RANGE = WINOGRAD_RANGE<TX>;
  if (!(squares < __builtin_inff())) return true;  // the squares of all lanes are finite, their sum is not
  if (squares == 0) return false;
  // Every output depends on one of the four pixels in the middle. Usually some channel is large enough in all four.
  const int top = rows <= 2 ? 1 : 2, bottom = rows <= 3 ? top : 3;
  const int left = cols <= 2 ? 1 : 2, right = cols <= 3 ? left : 3;
  const TX *a = pixels[top * SIDE + left], *b = pixels[top * SIDE + right];
  const TX *c = pixels[bottom * SIDE + left], *d = pixels[bottom * SIDE + right];
  const float enough = squares / (RANGE * RANGE);
  vf found = {};
  for (long k = 0; k + VL <= min_of(channels, 4 * VL); k += VL) {
    const vf ab = MinOp{}(square(ld(a + k, Full{})), square(ld(b + k, Full{})));
    const vf cd = MinOp{}(square(ld(c + k, Full{})), square(ld(d + k, Full{})));
    found = MaxOp{}(found, MinOp{}(ab, cd));
  }
  if (enough > __FLT_MIN__ && any(found >= enough)) return false;
  float largest[SIDE * SIDE], all = 0;
  for (int p = 0; p < SIDE * SIDE; p++) {
    largest[p] = largest_of(pixels[p], channels);
    all = all > largest[p] ? all : largest[p];
  }
  for (long i = 0; i < min_of(F::M, rows); i++)
    for (long j = 0; j < min_of(F::M, cols); j++) {
      float largest_input = 0;
      for (int p = 0; p < 9; p++) {
        const float x = largest[(i + p / 3) * SIDE + j + p % 3];
        largest_input = largest_input > x ? largest_input : x;
      }
      if (all > RANGE * largest_input) return true;
    }
  return false;
}

// Collects the pixels of a tile; those outside the image point to `zeros`.
template <class F, class TX>
NPU_INLINE void winograd_pixels(const TX* x, WinogradTile tile, const TX* zeros, const WinogradTiles& d,
                                const TX** pixels) {
  constexpr int SIDE = F::SIDE;
  const long ih = tile.oh * F::STRIDE - d.pad_t, iw = tile.ow * F::STRIDE - d.pad_l;
  const TX* image = x + tile.n * d.H * d.W * d.C;
  for (int i = 0; i < SIDE; i++)
    for (int j = 0; j < SIDE; j++) {
      const bool inside = ih + i >= 0 && ih + i < d.H && iw + j >= 0 && iw + j < d.W;
      pixels[i * SIDE + j] = inside ? image + ((ih + i) * d.W + iw + j) * d.C : zeros;
    }
}

// Transforms `count` tiles from number `first` on; every image has TH x TW tiles. Sets tiles[t] and needs_direct[t] for
// the t-th.
template <class F, class TX>
NPU_NOINLINE void winograd_inputs(const TX* x, long first, long count, char* out, WinogradTile* tiles,
                                  bool* needs_direct, const TX* zeros, const WinogradTiles& d) {
  constexpr int SIDE = F::SIDE;
  WinogradTile tile = WinogradTiles::at<F::M>(d, first);
  for (long t = 0; t < count; t++, out += d.row_bytes) {
    tiles[t] = tile;
    const long ih = tile.oh * F::STRIDE - d.pad_t, iw = tile.ow * F::STRIDE - d.pad_l, row = d.W * d.C;
    vf squares = {};
    auto transform = [&](auto pixel) __attribute__((always_inline)) {
      long c = 0;
      for (; c + VL <= d.C; c += VL) winograd_input<F>(pixel, c, out, d.point_bytes, squares, Full{});
      if (c < d.C) winograd_input<F>(pixel, c, out, d.point_bytes, squares, (int)(d.C - c));
    };
    const TX* pixels[SIDE * SIDE];
    const bool inside = ih >= 0 && iw >= 0 && ih + SIDE <= d.H && iw + SIDE <= d.W;
    if (inside) {
      const TX* corner = x + ((tile.n * d.H + ih) * d.W + iw) * d.C;
      transform([=](int i, int j) __attribute__((always_inline)) { return corner + i * row + j * d.C; });
    } else {
      winograd_pixels<F>(x, tile, zeros, d, pixels);
      transform([&](int i, int j) __attribute__((always_inline)) { return pixels[i * SIDE + j]; });
    }
    // NaN, infinite, or beyond the root of the largest float.
    needs_direct[t] = any(~(vi32)(squares < __builtin_inff()));
    if (F::M > 2 && !needs_direct[t]) {
      if (inside) winograd_pixels<F>(x, tile, zeros, d, pixels);
      needs_direct[t] = winograd_has_outlier<F>(pixels, d.C, d.OH - tile.oh, d.OW - tile.ow, hsum(squares));
    }
    tile.ow += F::M;
    if (tile.ow >= d.OW) tile.ow = 0, tile.oh += F::M;
    if (tile.oh >= d.OH) tile.oh = 0, tile.n++;
  }
}

// A tile, and VL channels of its outputs from `col` on.
template <class L> struct WinogradOutput : WinogradTile { long col; L lanes; };

// Applies the epilogue to row i of a tile's outputs.
template <class D, class F, class Epi, class L>
NPU_INLINE void winograd_row(const vf (&y)[F::M], int i, const WinogradOutput<L>& at, Epi& epi) {
  if (D::OH % F::M && at.oh + i >= D::OH) return;
  const long row = (at.n * D::OH + at.oh + i) * D::OW + at.ow;
#pragma GCC unroll 4
  for (int j = 0; j < F::M; j++)
    if (D::OW % F::M == 0 || at.ow + j < D::OW) epi(y[j], row + j, at.col, at.lanes);
}

// Transforms the products [SIDE * SIDE][TILE_ROWS][PANEL] of a tile to its outputs.
template <class D, class F, class Epi, class L>
NPU_INLINE void winograd_output(const float* product, const WinogradOutput<L>& at, Epi& epi) {
  constexpr int SIDE = F::SIDE, M = F::M;
  vf half[M][SIDE];
#pragma GCC unroll 6
  for (int j = 0; j < SIDE; j++) {
    vf column[SIDE], y[M];
#pragma GCC unroll 6
    for (int i = 0; i < SIDE; i++) column[i] = load_bytes<vf>(product + (i * SIDE + j) * TILE_ROWS * PANEL);
    F::output(column, y);
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) half[i][j] = y[i];
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++) {
    vf y[M];
    F::output(half[i], y);
    winograd_row<D, F>(y, i, at, epi);
  }
}

// Recovers VL filters of one channel from their transforms u, which are point_floats apart. A weight of 0 comes back as
// a rounding error and is reset to 0, because the error times an infinite input would be infinite instead of NaN.
template <class F> NPU_INLINE void winograd_filter(const float* u, long point_floats, vf (&g)[3][3]) {
  constexpr int SIDE = F::SIDE;
  constexpr float ROUNDING = 1.0f / (1 << 20);
  vf value[3][SIDE], size[3][SIDE];
  for (int j = 0; j < SIDE; j++) {
    vf column[SIDE], sizes[SIDE], v[3], s[3];
    for (int i = 0; i < SIDE; i++) column[i] = load_bytes<vf>(u + (i * SIDE + j) * point_floats);
    for (int i = 0; i < SIDE; i++) sizes[i] = (vf)magnitude(column[i]);
    F::filter(column, v, -1);
    F::filter(sizes, s, 1);
    for (int i = 0; i < 3; i++) value[i][j] = v[i], size[i][j] = s[i];
  }
  for (int i = 0; i < 3; i++) {
    vf s[3];
    F::filter(value[i], g[i], -1);
    F::filter(size[i], s, 1);
    for (int j = 0; j < 3; j++) {
      const vi32 is_error = (vf)magnitude(g[i][j]) <= ROUNDING * (vf)magnitude(s[j]);
      g[i][j] = select(is_error, vf{}, g[i][j]);
    }
  }
}

// Computes a tile by the direct sum over its pixels. u: the transforms of the filters of these outputs.
template <class D, class F, class TX, class Epi, class L>
NPU_NOINLINE void winograd_direct(const TX* const* pixels, const float* u, const WinogradOutput<L>& at, Epi& epi) {
  constexpr int SIDE = F::SIDE, M = F::M, STRIDE = F::STRIDE;
  vf y[M][M] = {};
  for (long first = 0; first < D::C; first += WINOGRAD_SEGMENT) {
    vf sum[M][M] = {};
    for (long c = first; c < min_of(D::C, first + WINOGRAD_SEGMENT); c++) {
      vf g[3][3];
      winograd_filter<F>(u + c * PANEL, D::C * PANEL, g);
      for (int p = 0; p < SIDE * SIDE; p++) {
        const vf x = ld_splat(pixels[p] + c);
        for (int r = 0; r < 3; r++)
          for (int s = 0; s < 3; s++) {
            const int down = p / SIDE - r, right = p % SIDE - s, i = down / STRIDE, j = right / STRIDE;
            const bool read = down >= 0 && right >= 0 && down % STRIDE == 0 && right % STRIDE == 0;
            if (read && i < M && j < M) sum[i][j] = fma(g[r][s], x, sum[i][j]);
          }
      }
    }
    for (int i = 0; i < M * M; i++) y[i / M][i % M] += sum[i / M][i % M];
  }
  for (int i = 0; i < M; i++) winograd_row<D, F>(y[i], i, at, epi);
}

// Computes a tile of the products of one point, of up to PART of C channels at once, whose transformed images begin at x.
// Sums of later parts are computed in `buffer`, and added.
template <long C, long PART>
NPU_INLINE void winograd_product(TileFn compute, const char* x, const int32_t* off, const char* w, float* sums,
                                 const char* ahead, int segment, int rows, float* buffer) {
  static const long no_tap = 0;
  for (long first = 0; first < C; first += PART) {
    const TileArgs a{x + first * 4, &no_tap, 1, (int)min_of(PART, C - first), segment};
    const long done = first * PANEL * 4;
    compute(a, off, w + done, first > 0 ? buffer : sums, {ahead + done, 0});
    for (int row = 0; first > 0 && row < rows * PANEL; row += PANEL)
      for (int i = row; i < row + TILE_COLS; i += VL)
        store_bytes(sums + i, load_bytes<vf>(sums + i) + load_bytes<vf>(buffer + i));
  }
}

template <class D, int M, long CHANNELS, class TX, class Epi>
NPU_NOINLINE void conv2d_winograd(const TX* x, const float* u, Epi& epi, Thread& th, int* counter) {
  using Plan = WinogradPlan<D, M>;
  using F = typename Plan::F;
  constexpr bool FLOAT = is_same<TX, float>::value;
  constexpr int SEGMENT = FLOAT ? WINOGRAD_SEGMENT : SEGMENT_16;
  constexpr long LONGEST = FLOAT ? CHANNELS : D::C;
  char* transformed = th.scratch;
  float* product = (float*)(transformed + Plan::TRANSFORMED);
  TX* zeros = (TX*)((char*)product + Plan::PRODUCT);
  int32_t* off = (int32_t*)((char*)zeros + Plan::ZEROS);
  bool* needs_direct = (bool*)off + Plan::OFFSETS;
  WinogradTile* at = (WinogradTile*)(needs_direct + Plan::NEEDS_DIRECT);
  constexpr WinogradTiles IN = {D::H,     D::W,     D::C,     D::OH,    D::OW,           D::pad_t,
                                D::pad_l, Plan::TH, Plan::TW, Plan::ROW_BYTES, Plan::POINT_BYTES};
  long part = 0, prepared = -1, i = own_chunk(th, counter, Plan::COUNT, part);
  if (i >= Plan::COUNT) return;
  memset(zeros, 0, Plan::ZEROS);
  for (long t = 0; t < Plan::T; t++) off[t] = (int32_t)(t * Plan::ROW_BYTES);
  const Tiling full = tiling<F32, Plan::T, true>(), less = tiling<F32, Plan::T_FIRST, true>();
  for (; i < Plan::COUNT; i = own_chunk(th, counter, Plan::COUNT, part)) {
    const long block = i / Plan::GROUPS, begin = i % Plan::GROUPS * Plan::PG, end = min_of(begin + Plan::PG, Plan::NP);
    const long count = Plan::ROWS.size(block);
    constexpr long POINT_BYTES = Plan::POINT_BYTES;
    if (prepared != block)
      winograd_inputs<F>(x, Plan::ROWS.begin(block), count, transformed, at, needs_direct, (const TX*)zeros, IN);
    prepared = block;
    const Tiling& tiles = count == Plan::T ? full : less;
    for (long pn = begin; pn < end; pn++) {
      const long col = pn * PANEL;
      const int parts = (int)min_of(PANEL / TILE_COLS, ceil_div(D::K - col, TILE_COLS));
      for (int t = 0, first = 0; t < tiles.count; t++) {
        const int rows = tiles.rows + (t < tiles.tall);
        for (int point = 0; point < Plan::POINTS; point++) {
          const char* w = (const char*)u + pn * Plan::PANEL_BYTES + point * D::C * PANEL * 4;
          const char* ahead = t == 0 ? w + WINOGRAD_PREFETCH_DISTANCE : w;
          for (int part = 0; part < parts; part++)
            winograd_product<D::C, LONGEST>(t < tiles.tall ? tiles.tall_fn : tiles.fn, transformed + point * POINT_BYTES,
                                            off + first, w + part * TILE_COLS * 4,
                                            product + point * TILE_ROWS * PANEL + part * TILE_COLS, ahead, SEGMENT, rows,
                                            product + Plan::SUMS);
        }
        for (int r = 0; r < rows; r++) {
          const WinogradTile tile = at[first + r];
          const TX* pixels[Plan::POINTS];
          if (needs_direct[first + r]) winograd_pixels<F>(x, tile, (const TX*)zeros, IN, pixels);
          auto compute = [&](int v, auto lanes) __attribute__((always_inline)) {
            const WinogradOutput<decltype(lanes)> out = {tile, col + v, lanes};
            if (!needs_direct[first + r]) return winograd_output<D, F>(product + r * PANEL + v, out, epi);
            winograd_direct<D, F>(pixels, (const float*)((const char*)u + pn * Plan::PANEL_BYTES) + v, out, epi);
          };
          for (int v = 0; v < PANEL && col + v < D::K; v += VL) {
            if (D::K % VL == 0 || col + v + VL <= D::K) compute(v, Full{});
            else compute(v, (int)(D::K - col - v));
          }
        }
        first += rows;
      }
    }
  }
}

}  // namespace npu
