// The reader of int8_g128: groups of 128 8-bit numbers with a float32 scale.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_g128 : Int8<128> {
  template <class Kind> using Storage = Values<int8_g128, Kind>;
};

}  // namespace npu
