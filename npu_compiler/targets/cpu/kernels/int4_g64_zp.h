// The reader of int4_g64_zp: groups of 64 numbers of 4 bits with a float16 scale and a zero point.
#pragma once
#include "blocks.h"

namespace npu {

struct int4_g64_zp : Int4Zero<64> {
  template <class Kind> using Storage = Blocks<int4_g64_zp, Kind>;
};

}  // namespace npu
