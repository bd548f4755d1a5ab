// The reader of q3_k: blocks of 256 codes of 3 bits, whose sub-blocks of 16 have a scale of 6 bits minus 32.
#pragma once
#include "blocks.h"

struct ScaleMinus32 {
  CONSTANTS int SCALE_BYTES = 1, HEAD_BYTES = 2;
  CONSTANTS bool HAS_BASE = false;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint* head, int r) {
    return half_at(head, r) * (raised_byte_at(scales, r) - (8388608.0f + 32.0f));
  }
  static INLINE float base(THREAD const uint*, THREAD const uint*, int) { return 0.0f; }
};
typedef BlockFormat<LinearCodes<3, -4>, ScaleMinus32, 256, 16> q3_k;
