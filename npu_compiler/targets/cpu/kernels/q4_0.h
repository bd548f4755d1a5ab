// The reader of q4_0: blocks of 32 codes of 4 bits with a float16 scale; an element is (code - 8) * scale.
#pragma once
#include "blocks.h"

namespace npu {

struct q4_0 : Scaled<4> {
  template <class Kind> using Storage = Blocks<q4_0, Kind>;
};

}  // namespace npu
