// The reader of int8_g32: groups of 32 8-bit numbers with a float32 scale.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_g32 : Int8<32> {
  template <class Kind> using Storage = Values<int8_g32, Kind>;
};

}  // namespace npu
