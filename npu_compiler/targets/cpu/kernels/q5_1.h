// The reader of q5_1: blocks of 32 codes of 5 bits with a float16 scale and minimum; an element is code * scale + minimum.
#pragma once
#include "blocks.h"

namespace npu {

struct q5_1 : ScaledFrom<5> {
  template <class Kind> using Storage = Blocks<q5_1, Kind>;
};

}  // namespace npu
