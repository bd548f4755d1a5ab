// The reader of int4_g64: groups of 64 numbers of 4 bits with a float16 scale.
#pragma once
#include "blocks.h"

namespace npu {

struct int4_g64 : Int4<64> {
  template <class Kind> using Storage = Blocks<int4_g64, Kind>;
};

}  // namespace npu
