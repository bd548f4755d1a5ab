// The reader of int8_g128_zp: groups of 128 8-bit numbers with a float32 scale and a zero point.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_g128_zp : Int8Zero<128> {
  template <class Kind> using Storage = Values<int8_g128_zp, Kind, true>;
};

}  // namespace npu
