// The reader of q8_0: blocks of 32 8-bit integers with a float16 scale.
#pragma once
#include "bytes.h"

namespace npu {

struct q8_0 : Int8<32, 2> {
  template <class Kind> using Storage = Values<q8_0, Kind>;
  NPU_INLINE vf scale(const char* panel, long length, long block, int v) {
    return ld((const f16*)fields(panel, length, block) + v * VL, Full{});
  }
};

}  // namespace npu
