// The reader of q3_k: codes of 3 bits; 16 share a scale, a number of 6 bits minus 32, times a float16 number for 256.
#pragma once
#include "blocks.h"

namespace npu {

struct q3_k : Large<3, 16> {
  NPU_INLINE vf scale(const char* head, const char* scales, int v) {
    return number(head, 0, v) * cvt<vf>(whole<uint8_t>(scales, 0, v) - 32);
  }
  template <class Kind> using Storage = Blocks<q3_k, Kind>;
};

}  // namespace npu
