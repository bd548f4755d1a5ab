// The reader of mxfp4: blocks of 32 numbers of 4 bits (twice e2m1), whose scale is the power of two 2^(byte - 128).
#pragma once
#include "blocks.h"

struct PowerOfTwo {
  CONSTANTS int SCALE_BYTES = 1, HEAD_BYTES = 0;
  CONSTANTS bool HAS_BASE = false;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint*, int r) {
    const uint e = scales[0] >> (8 * r) & 0xffu;
    return f32_of_bits(e < 2 ? (1u << 21) << e : (e - 1) << 23);
  }
  static INLINE float base(THREAD const uint*, THREAD const uint*, int) { return 0.0f; }
};
// 0 1 2 3, 4 6 8 12, and the same with the other sign
typedef BlockFormat<ListedCodes<0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu>, PowerOfTwo, 32, 32> mxfp4;
