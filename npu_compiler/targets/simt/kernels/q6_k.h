// The reader of q6_k: blocks of 256 codes of 6 bits, whose sub-blocks of 16 have a signed scale.
#pragma once
#include "blocks.h"

struct SignedScale {
  CONSTANTS int SCALE_BYTES = 1, HEAD_BYTES = 2;
  CONSTANTS bool HAS_BASE = false;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint* head, int r) {
    return half_at(head, r) * signed_byte_at(scales, r);
  }
  static INLINE float base(THREAD const uint*, THREAD const uint*, int) { return 0.0f; }
};
typedef BlockFormat<LinearCodes<6, -32>, SignedScale, 256, 16> q6_k;
