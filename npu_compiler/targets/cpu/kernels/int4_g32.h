// The reader of int4_g32: groups of 32 numbers of 4 bits with a float16 scale.
#pragma once
#include "blocks.h"

namespace npu {

struct int4_g32 : Int4<32> {
  template <class Kind> using Storage = Blocks<int4_g32, Kind>;
};

}  // namespace npu
