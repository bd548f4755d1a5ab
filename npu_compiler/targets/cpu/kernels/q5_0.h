// The reader of q5_0: blocks of 32 codes of 5 bits with a float16 scale; an element is (code - 16) * scale.
#pragma once
#include "blocks.h"

namespace npu {

struct q5_0 : Scaled<5> {
  template <class Kind> using Storage = Blocks<q5_0, Kind>;
};

}  // namespace npu
