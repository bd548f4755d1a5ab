// The reader of int8_g64: groups of 64 8-bit numbers with a float32 scale.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_g64 : Int8<64> {
  template <class Kind> using Storage = Values<int8_g64, Kind>;
};

}  // namespace npu
