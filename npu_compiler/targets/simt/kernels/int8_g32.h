// The reader of int8_g32: groups of 32 of signed bytes with a float32 scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScale, 32, 32> int8_g32;
