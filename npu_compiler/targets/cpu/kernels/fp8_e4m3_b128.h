// The reader of fp8_e4m3_b128: e4m3 numbers with a float32 scale for 128 of a row.
#pragma once
#include "bytes.h"

namespace npu {

struct fp8_e4m3_b128 : FP8<128> {
  template <class Kind> using Storage = Values<fp8_e4m3_b128, Kind>;
};

}  // namespace npu
