// The reader of q2_k: codes of 2 bits; 16 share a scale and a minimum, the halves of a byte times two float16 numbers for 256.
#pragma once
#include "blocks.h"

namespace npu {

struct q2_k : LargeFrom<2, 16> {
  NPU_INLINE vf scale(const char* head, const char* scales, int v) {
    return number(head, 0, v) * cvt<vf>(whole<uint8_t>(scales, 0, v) & 15);
  }
  NPU_INLINE vf base(const char* head, const char* scales, int v) {
    const vf minimum = number(head, 1, v) * cvt<vf>(whole<uint8_t>(scales, 0, v) >> 4);
    return -scale(head, scales, v) * value(0) - minimum;
  }
  template <class Kind> using Storage = Blocks<q2_k, Kind>;
};

}  // namespace npu
