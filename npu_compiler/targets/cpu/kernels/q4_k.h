// The reader of q4_k: codes of 4 bits; 32 share a scale and a minimum, whole numbers times two float16 numbers for 256.
#pragma once
#include "blocks.h"

namespace npu {

struct q4_k : LargeFromBytes<4> {
  template <class Kind> using Storage = Blocks<q4_k, Kind>;
};

}  // namespace npu
