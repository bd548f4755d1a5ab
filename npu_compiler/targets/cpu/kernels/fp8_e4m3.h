// The reader of fp8_e4m3: rows of e4m3 numbers with a float32 scale.
#pragma once
#include "bytes.h"

namespace npu {

struct fp8_e4m3 : FP8<0> {
  template <class Kind> using Storage = Values<fp8_e4m3, Kind>;
};

}  // namespace npu
