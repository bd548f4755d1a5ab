// The reader of int8_g32_zp: groups of 32 8-bit numbers with a float32 scale and a zero point.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_g32_zp : Int8Zero<32> {
  template <class Kind> using Storage = Values<int8_g32_zp, Kind, true>;
};

}  // namespace npu
