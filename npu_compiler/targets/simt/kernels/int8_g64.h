// The reader of int8_g64: groups of 64 of signed bytes with a float32 scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScale, 64, 64> int8_g64;
