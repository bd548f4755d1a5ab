// The reader of int8_g32_zp: groups of 32 of signed bytes with a float32 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScaleAndZero, 32, 32> int8_g32_zp;
