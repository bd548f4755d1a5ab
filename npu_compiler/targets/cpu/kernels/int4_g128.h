// The reader of int4_g128: groups of 128 numbers of 4 bits with a float16 scale.
#pragma once
#include "blocks.h"

namespace npu {

struct int4_g128 : Int4<128> {
  template <class Kind> using Storage = Blocks<int4_g128, Kind>;
};

}  // namespace npu
