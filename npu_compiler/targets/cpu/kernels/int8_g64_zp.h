// The reader of int8_g64_zp: groups of 64 8-bit numbers with a float32 scale and a zero point.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_g64_zp : Int8Zero<64> {
  template <class Kind> using Storage = Values<int8_g64_zp, Kind, true>;
};

}  // namespace npu
