// A convolution of an image and the maximum pool of its results, line by line: windows of 3 x 3 pixels, two pixels
// apart, with one pixel of padding.
//
// The rows of wgmma are the 64 filters, which stay in registers, and its columns are the pixels of a line. With the
// pixels as rows, there would be as few columns as filters, and shared memory would limit the products. A thread has
// two neighbouring channels of pairs of neighbouring pixels. It keeps the maxima of the lines above in registers and
// takes the pixel to the left from the lane beside it. The pooled line goes through shared memory to become whole rows.
//
// A band is POOLED pooled lines of an image. Each warpgroup computes bands in order, with a ring of lines of its own,
// which a warp of the last warpgroup fills: their first line of results is also the last one of the band before. Two
// lines of results are multiplied at once, so that one is pooled while the other one is still multiplied. Pixels are
// contiguous elements of an image, where a row of a filter is 32 neighbouring b16 elements, and neighbouring
// results begin 8 elements apart, as in tma_conv.h.
//
// Constants of D, in addition to those of tma_conv.h: POOLED; BANDS of an image; RANGES: warpgroups of the whole grid;
// LINES of the image that a band reads.
#pragma once
#include "max_pool.h"

template <class D> struct PooledRows {
  typedef typename D::T T;
  typedef typename D::R R;
  typedef ResultSubtile<D> P;
  typedef WgmmaC<D::OW, typename D::Sum> Sums;
  static constexpr int WARPGROUPS = D::TILE_M / 64, STEPS = D::TAPS * D::CHANNELS / 16, K = D::TAPS * D::CHANNELS;
  static constexpr int GROUPS = D::OW / LINE_BLOCK, OH = D::OH / 2, OW = D::OW / 2;
  static constexpr int LINE_B16 = OW * P::ROW_B16;  // b16 elements of a pooled line
  static constexpr int WORDS = sizeof(R);          // words of two channels of two neighbouring pixels: left, right

  struct Range {
    int first, last;
  };
  static INLINE Range bands(int range) {
    const int64_t all = (int64_t)D::IMAGES * D::BANDS;
    return {(int)(range * all / D::RANGES), (int)((range + 1) * all / D::RANGES)};
  }

  // Loads the lines of a band: those of the last line of results of the band above come first.
  static INLINE void load(T* to, const T* pixels, int64_t* full, int band) {
    const int pooled = band % D::BANDS * D::POOLED, skipped = pooled == 0 ? D::STRIDE_H : 0;
    const int y0 = (2 * pooled - 1) * D::STRIDE_H + skipped, lines = D::LINES - skipped, rest = D::IMAGE_H - y0;
    const int bytes = (rest < lines ? rest : lines) * (D::PITCH * 2);
    mbarrier_expect_bytes(full, bytes);
    tma_load_bytes(to + skipped * D::PITCH, pixels + (int64_t)(band / D::BANDS) * D::IMAGE_SIZE + y0 * D::PITCH, full,
                   bytes);
  }

  // The filters of neighbouring channels are rows i and i + 8 of a warp.
  static INLINE void read_filters(FragA<T>* filters, const T* weights, int channel, int lane) {
    const T* const from = weights + channel * K + (lane & 3) * 2;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) filters[s].v[i] = *(const uint*)(from + i % 2 * K + s * 16 + i / 2 * 8);
  }

  // Starts the products of a line of results. `lines`: the first line of the image that it reads.
  static INLINE void multiply(Sums& sums, const FragA<T>* filters, const T* lines) {
    const uint64_t windows = wgmma_pitched_descriptor<LINE_BLOCK * LINE_BLOCK * 2, 0>(lines);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int tap = s * 16 / D::CHANNELS, at = tap * (D::DILATION_H * D::PITCH / 8) + s % (D::CHANNELS / 16) * 2;
      wgmma_k16(sums, filters[s], windows + at, s > 0);
    }
    wgmma_commit();
  }

  // Passes both channels of every pair of neighbouring pixels of a line to use(group of 8 pixels, words). `row`: the
  // line's first pixel.
  template <class E, class Use>
  static INLINE void results(const E& epilogue, const Sums& sums, int row, int channel, int lane,
                             const typename E::Shared& shared, const Use& use) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      uint pixels[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const typename E::Ahead ahead = {};
        const typename D::Sum x[2] = {sums.v[4 * g + i], sums.v[4 * g + 2 + i]};
        typename E::Result y[2], y1[2];
        epilogue.compute(row + g * LINE_BLOCK + (lane & 3) * 2 + i, channel, x, y, y1, ahead, shared);
        pixels[i] = pack_pair(y[0], y[1], (R*)nullptr);
      }
      if constexpr (WORDS == 1) pixels[0] = byte_permute(pixels[0], pixels[1], 0x5410);
      use(g, pixels);
    }
  }
  static INLINE void copy(uint* to, const uint* pixels) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) to[i] = pixels[i];
  }
  static INLINE void take_max(uint* to, const uint* pixels) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) to[i] = word_max(to[i], pixels[i], (R*)nullptr);
  }
  // The maximum of a window, in the lower half of the word if channels are bytes. `beside`: its pixel on the left.
  static INLINE uint window_max(uint beside, const uint* pixels) {
    return word_max(word_max(beside, pixels[0], (R*)nullptr), right(pixels), (R*)nullptr);
  }
  static INLINE uint right(const uint* pixels) { return WORDS == 1 ? pixels[0] >> 16 : pixels[WORDS - 1]; }

  // Writes both channels of a pooled pixel to a line in shared memory.
  static INLINE void put(T* line, int q, int channel, uint pair) {
    char* const to = P::place(line, q, channel * (int)sizeof(R) / 16) + channel * (int)sizeof(R) % 16;
    if constexpr (sizeof(R) == 1) *(uint16_t*)to = (uint16_t)pair;
    else *(uint*)to = pair;
  }
};

// `ring`: STAGES of each warpgroup. `staging`: two pooled lines of each.
template <class D, class E>
INLINE void pooled_rows(const typename D::T* pixels, const typename D::T* weights, typename D::T* ring,
                        typename D::T* staging, int64_t* full, const E& epilogue, typename D::R* out,
                        const Thread& th) {
  typedef PooledRows<D> Rows;
  typedef typename Rows::P P;
  ASSUME(th.tid >= 0 && th.tid < D::TILE_M * 2 + 128);
  int64_t* const empty = full + Rows::WARPGROUPS * D::STAGES;
  if (th.tid == 0) {
    for (int i = 0; i < 2 * Rows::WARPGROUPS * D::STAGES; i++) mbarrier_init(full + i, 1);
    mbarrier_init_fence();
  }
  barrier();
  const bool loads = th.subgroup >= Rows::WARPGROUPS * 4;
  const int warpgroup = loads ? th.subgroup - Rows::WARPGROUPS * 4 : th.subgroup / 4;
  const typename Rows::Range bands = Rows::bands(th.workgroup * Rows::WARPGROUPS + warpgroup);
  typename D::T* const own = ring + warpgroup * (D::STAGES * D::LINES_SIZE);
  full += warpgroup * D::STAGES;
  int64_t* const freed = empty + warpgroup * D::STAGES;
  if (loads) {
    fewer_registers<40>();
    if (th.lane == 0 && warpgroup < Rows::WARPGROUPS) {
      pdl_wait();
      fence_async_global();
      RingPosition<D::STAGES> at = {0, 1};
      for (int band = bands.first; band < bands.last; band++, at.next()) {
        mbarrier_wait(freed + at.slot, at.phase);
        Rows::load(own + at.slot * D::LINES_SIZE, pixels, full + at.slot, band);
      }
    }
    return;
  }
  more_registers<232>();
  const int channel = th.subgroup % 4 * 16 + (th.lane >> 2) * 2;
  FragA<typename D::T> filters[Rows::STEPS];
  Rows::read_filters(filters, weights, channel, th.lane);
  typename E::Shared shared;
  epilogue.read_shared(channel, shared);
  pdl_wait();
  const int line_size = D::STRIDE_H * D::PITCH;
  uint above[Rows::GROUPS][Rows::WORDS];  // maxima of the lines above the next one that are in the same windows
  typename Rows::Sums even, odd;          // of two lines of results
  RingPosition<D::STAGES> at = {0, 0};
  int turn = 0;
  for (int band = bands.first; band < bands.last; band++, at.next()) {
    const int image = band / D::BANDS, pooled = band % D::BANDS * D::POOLED;
    const int row0 = (image * D::OH + 2 * pooled) * D::OW;
    mbarrier_wait(full + at.slot, at.phase);
    const typename D::T* const lines = own + at.slot * D::LINES_SIZE + line_size;
    if (band == bands.first && pooled > 0) {
      Rows::multiply(odd, filters, lines - line_size);
      wgmma_finish(odd);
      Rows::results(epilogue, odd, row0 - D::OW, channel, th.lane, shared,
                    [&](int g, const uint* pixels) { Rows::copy(above[g], pixels); });
    }
#pragma unroll 1
    for (int i = 0; i < D::POOLED; i++, turn ^= 1) {
      const bool top = pooled + i == 0;
      const int row = row0 + 2 * i * D::OW;
      Rows::multiply(even, filters, lines + 2 * i * line_size);
      Rows::multiply(odd, filters, lines + (2 * i + 1) * line_size);
      wgmma_finish<1>(even);
      Rows::results(epilogue, even, row, channel, th.lane, shared, [&](int g, const uint* pixels) {
        if (top) Rows::copy(above[g], pixels);
        Rows::take_max(above[g], pixels);
      });
      wgmma_finish(odd);
      if (i + 1 == D::POOLED && th.tid % 128 == 0) mbarrier_arrive(freed + at.slot);
      typename D::T* const line = staging + (warpgroup * 2 + turn) * Rows::LINE_B16;
      uint before = 0;  // the last pixel of the group before, in the first lane of four
      Rows::results(epilogue, odd, row + D::OW, channel, th.lane, shared, [&](int g, const uint* pixels) {
        uint window[Rows::WORDS];
        Rows::copy(window, above[g]);
        Rows::take_max(window, pixels);
        Rows::copy(above[g], pixels);
        const uint beside = subgroup_from(Rows::right(window), (th.lane & ~3) | ((th.lane + 3) & 3));
        const uint outside = (th.lane & 3) != 0 ? beside : g > 0 ? before : window[0];
        before = beside;
        Rows::put(line, 4 * g + (th.lane & 3), channel, Rows::window_max(outside, window));
      });
      named_barrier(1 + warpgroup, 128);  // the other line has been stored by all threads before they are here
      uint4* const to = (uint4*)((typename D::T*)out + (int64_t)(image * Rows::OH + pooled + i) * Rows::LINE_B16);
      constexpr int CHUNKS = P::ROW / 16;
#pragma unroll
      for (int c = th.tid % 128; c < Rows::OW * CHUNKS; c += 128)
        to[c] = *(const uint4*)P::place(line, c / CHUNKS, c % CHUNKS);
    }
  }
}
