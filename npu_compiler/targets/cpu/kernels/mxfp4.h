// The reader of mxfp4: blocks of 32 numbers of 4 bits (twice e2m1), whose scale is the power of two 2^(byte - 128).
#pragma once
#include "blocks.h"

namespace npu {

struct mxfp4 : Scaled<4> {
  static constexpr int SCALE_BYTES = PANEL;
  static constexpr bool LINEAR = false, HAS_SUBNORMALS = true;
  static constexpr float value(int code) {
    constexpr int VALUES[] = {0, 1, 2, 3, 4, 6, 8, 12};
    return code < 8 ? (float)VALUES[code] : (float)-VALUES[code - 8];
  }
  NPU_INLINE vf scale(const char*, const char* scales, int v) {
    const vi32 e = ld((const uint8_t*)scales + v * VL, Full{});
    const vi32 subnormal = splat<vi32>(1 << 21) << (e & 1);
    return (vf)select(e < 2, subnormal, (e - 1) << 23);
  }
  template <class Kind> using Storage = Blocks<mxfp4, Kind>;
};

}  // namespace npu
