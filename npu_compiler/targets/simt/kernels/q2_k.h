// The reader of q2_k: blocks of 256 codes of 2 bits, whose sub-blocks of 16 have a scale and a minimum of 4 bits.
#pragma once
#include "blocks.h"

struct NibblePair {
  CONSTANTS int SCALE_BYTES = 1, HEAD_BYTES = 4;
  CONSTANTS bool HAS_BASE = true;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint* head, int r) {
    const uint low = scales[0] & 0x0f0f0f0fu;
    return half_at(head, r) * byte_at(&low, r);
  }
  static INLINE float base(THREAD const uint* scales, THREAD const uint* head, int r) {
    const uint high = scales[0] >> 4 & 0x0f0f0f0fu;
    return -(half_at(head + 2, r) * byte_at(&high, r));
  }
};
typedef BlockFormat<LinearCodes<2, 0>, NibblePair, 256, 16> q2_k;
