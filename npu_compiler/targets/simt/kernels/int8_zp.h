// The reader of int8_zp: rows of signed bytes with a float32 scale and a zero point.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScaleAndZero, 0, 0> int8_zp;
