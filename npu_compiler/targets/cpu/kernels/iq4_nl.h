// The reader of iq4_nl: blocks of 32 codes of 16 unevenly spaced values, with a float16 scale.
#pragma once
#include "blocks.h"

namespace npu {

struct iq4_nl : Scaled<4> {
  static constexpr bool LINEAR = false;
  static constexpr float value(int code) {
    constexpr int VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return (float)VALUES[code];
  }
  template <class Kind> using Storage = Blocks<iq4_nl, Kind>;
};

}  // namespace npu
