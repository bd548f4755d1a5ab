// The reader of int4_g32_zp: groups of 32 codes of 4 bits with a float16 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<4, 0>, HalfScaleAndZero, 32, 32> int4_g32_zp;
