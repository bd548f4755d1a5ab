// The reader of q8_0: blocks of 32 8-bit integers with a float16 scale (npu_compiler/weights/formats/q8_0.py describes
// the bytes). The integers are exact in bf16; the sum of a block is scaled.
#pragma once
#include "storage.h"

namespace npu {

struct q8_0 {
  static constexpr int BLOCK = 32, HEAD_BYTES = 0, K_BYTES = PANEL;
  static constexpr long panel_bytes(long k) { return k * K_BYTES + k / BLOCK * PANEL * 2; }
  template <class Kind> using Storage = Values<q8_0, Kind>;

  NPU_INLINE vf value(const char* panel, long k, int v) {
    return __builtin_convertvector(ld((const int8_t*)(panel + k * K_BYTES) + v * VL, Full{}), vf);
  }
  NPU_INLINE vf scale(const char* panel, long length, long block, int v) {
    return ld((const f16*)(panel + length * K_BYTES) + block * PANEL + v * VL, Full{});
  }
};

}  // namespace npu
