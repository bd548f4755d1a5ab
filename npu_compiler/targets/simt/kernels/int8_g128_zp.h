// The reader of int8_g128_zp: groups of 128 of signed bytes with a float32 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScaleAndZero, 128, 128> int8_g128_zp;
