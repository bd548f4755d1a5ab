// The reader of q2_k: blocks of 256 codes of 2 bits, whose sub-blocks of 16 have a scale and a minimum of 4 bits.
#pragma once
#include "blocks.h"

struct NibblePair {
  CONSTANTS int SCALE_BYTES = 1, HEAD_BYTES = 4;
  CONSTANTS bool HAS_BASE = true;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint* head, int r) {
    return half_at(head, r) * (float)(byte_at(scales, r) & 15u);
  }
  static INLINE float base(THREAD const uint* scales, THREAD const uint* head, int r) {
    return -(half_at(head, 4 + r) * (float)(byte_at(scales, r) >> 4));
  }
};
typedef BlockFormat<LinearCodes<2, 0>, NibblePair, 256, 16> q2_k;
