// The reader of int8: rows of 8-bit numbers with a float32 scale.
#pragma once
#include "bytes.h"

namespace npu {

struct int8 : Int8<0> {
  template <class Kind> using Storage = Values<int8, Kind>;
};

}  // namespace npu
