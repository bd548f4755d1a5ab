// The reader of q6_k: codes of 6 bits; 16 share a scale, a signed byte times a float16 number for 256.
#pragma once
#include "blocks.h"

namespace npu {

struct q6_k : Large<6, 16> {
  NPU_INLINE vf scale(const char* head, const char* scales, int v) {
    return number(head, 0, v) * cvt<vf>(whole<int8_t>(scales, 0, v));
  }
  template <class Kind> using Storage = Blocks<q6_k, Kind>;
};

}  // namespace npu
