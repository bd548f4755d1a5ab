// The reader of int8_zp: rows of 8-bit numbers with a float32 scale and a zero point.
#pragma once
#include "bytes.h"

namespace npu {

struct int8_zp : Int8Zero<0> {
  template <class Kind> using Storage = Values<int8_zp, Kind, true>;
};

}  // namespace npu
