// The reader of q4_1: blocks of 32 codes of 4 bits with a float16 scale and minimum; an element is code * scale + minimum.
#pragma once
#include "blocks.h"

namespace npu {

struct q4_1 : ScaledFrom<4> {
  template <class Kind> using Storage = Blocks<q4_1, Kind>;
};

}  // namespace npu
