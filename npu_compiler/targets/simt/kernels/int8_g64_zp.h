// The reader of int8_g64_zp: groups of 64 of signed bytes with a float32 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScaleAndZero, 64, 64> int8_g64_zp;
