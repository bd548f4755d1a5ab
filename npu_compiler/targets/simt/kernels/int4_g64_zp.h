// The reader of int4_g64_zp: groups of 64 codes of 4 bits with a float16 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<4, 0>, HalfScaleAndZero, 64, 64> int4_g64_zp;
