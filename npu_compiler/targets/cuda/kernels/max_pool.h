// Maximum pooling of the results of tma_conv.h: windows of 3 x 3 pixels, two pixels apart, with one pixel of padding.
//
// In a step, the warpgroups of a thread block write the pixels of a part of a band to shared memory, next to each other,
// each a subtile of 8 lines by 8 pixels. Every thread then computes maxima of four bytes of channels. What the windows
// read to the left is kept from the step before, and the maxima of the line above from the band before.
#pragma once
#include "tma_conv.h"

INLINE uint word_max(uint a, uint b, f16*) {
  uint x;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
INLINE uint word_max(uint a, uint b, bf16*) {
  uint x;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
INLINE uint word_max(uint a, uint b, uint8_t*) {  // the upper byte of a 16-bit maximum is the maximum of upper bytes
  uint upper, lower;
  asm("max.u16x2 %0, %1, %2;" : "=r"(upper) : "r"(a), "r"(b));
  asm("max.u16x2 %0, %1, %2;" : "=r"(lower) : "r"(a & 0x00ff00ffu), "r"(b & 0x00ff00ffu));
  return masked_or(upper, 0xff00ff00u, lower);
}

template <class D> struct MaxPool {
  static constexpr bool ENABLED = true;
  typedef typename D::R R;
  typedef ResultSubtile<D> P;
  static constexpr int WARPGROUPS = D::TILE_M / 64, THREADS = D::TILE_M * 2, OH = D::OH / 2, OW = D::OW / 2;
  static constexpr int WORDS = D::TILE_N * sizeof(R) / 4;      // of a pixel
  static constexpr int ACROSS = WARPGROUPS * LINE_BLOCK / 2;   // results of a step in a line
  static constexpr int PARTS = THREADS / (ACROSS * WORDS);     // threads that share the lines of a band
  static constexpr int LINES = LINE_BLOCK / PARTS;             // lines of pixels of each
  typename D::T* subtiles;
  uint* edge;   // [2, LINE_BLOCK, WORDS]: the last pixels of the step before; steps take turns
  uint* above;  // [2, OW, WORDS]: maxima of three pixels in the last line of the band before; bands take turns
  R* out;

  INLINE void barrier() const { named_barrier(1 + WARPGROUPS, THREADS); }

  INLINE uint pixel(int line, int x, int word) const {
    return *(const uint*)(P::place(subtiles + x / LINE_BLOCK * P::SIZE, line * LINE_BLOCK + x % LINE_BLOCK, word / 4) +
                          word % 4 * 4);
  }

  // The maximum of the pixels 2 q - 1 to 2 q + 1 of a line.
  INLINE uint line_max(int line, int q, int word, int step) const {
    const uint centre = pixel(line, 2 * q, word), right = pixel(line, 2 * q + 1, word);
    uint left = centre;
    if (q > 0) left = pixel(line, 2 * q - 1, word);
    else if (step > 0) left = edge[((step & 1) * LINE_BLOCK + line) * WORDS + word];
    return word_max(word_max(left, centre, (R*)nullptr), right, (R*)nullptr);
  }

  // Stores the maxima of step `step` of a band.
  INLINE void store(int image, int band, int step, int tid) const {
    const int word = tid % WORDS, q = tid / WORDS % ACROSS, first = tid / (WORDS * ACROSS) * LINES;
    uint* const kept = above + (step * ACROSS + q) * WORDS + word;
    uint* const to = (uint*)out + ((image * OH + (band * LINE_BLOCK + first) / 2) * OW + step * ACROSS + q) * WORDS + word;
    if (q == ACROSS - 1) {
#pragma unroll
      for (int i = first; i < first + LINES; i++)
        edge[(((step + 1) & 1) * LINE_BLOCK + i) * WORDS + word] = pixel(i, 2 * q + 1, word);
    }
    uint before = 0;
    if (first > 0) before = line_max(first - 1, q, word, step);
    else if (band > 0) before = kept[(band & 1) * (OW * WORDS)];
#pragma unroll
    for (int i = 0; i < LINES; i += 2) {
      const uint upper = line_max(first + i, q, word, step), lower = line_max(first + i + 1, q, word, step);
      if (i == 0 && first == 0 && band == 0) before = upper;
      to[i / 2 * (OW * WORDS)] = word_max(word_max(before, upper, (R*)nullptr), lower, (R*)nullptr);
      before = lower;
    }
    if (first + LINES == LINE_BLOCK) kept[((band + 1) & 1) * (OW * WORDS)] = before;
  }
};
