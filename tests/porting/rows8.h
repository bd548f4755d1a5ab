// rows8: a panel is the float32 scales of 32 columns, then a signed byte of each column for every element of the reduced
// dim.
#pragma once
#include "storage.h"

namespace npu {

struct rows8 {
  static constexpr int BLOCK = 0, HEAD_BYTES = 4 * PANEL, K_BYTES = PANEL;
  static constexpr long panel_bytes(long k) { return HEAD_BYTES + k * K_BYTES; }
  template <class Kind> using Storage = Values<rows8, Kind>;

  NPU_INLINE vf value(const char* panel, long k, int v) {
    const char* bytes = panel + HEAD_BYTES + k * K_BYTES + v * VL;
    return __builtin_convertvector(ld((const int8_t*)bytes, Full{}), vf) * load_bytes<vf>(panel + v * VL * 4);
  }
};

}  // namespace npu
