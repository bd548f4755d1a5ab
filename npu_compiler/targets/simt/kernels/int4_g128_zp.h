// The reader of int4_g128_zp: groups of 128 codes of 4 bits with a float16 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<4, 0>, HalfScaleAndZero, 128, 128> int4_g128_zp;
