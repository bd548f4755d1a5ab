// The reader of q5_k: codes of 5 bits; 32 share a scale and a minimum, whole numbers times two float16 numbers for 256.
#pragma once
#include "blocks.h"

namespace npu {

struct q5_k : LargeFromBytes<5> {
  template <class Kind> using Storage = Blocks<q5_k, Kind>;
};

}  // namespace npu
