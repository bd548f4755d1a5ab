// The reader of int8_g128: groups of 128 of signed bytes with a float32 scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScale, 128, 128> int8_g128;
