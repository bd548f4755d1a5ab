// The reader of int4_g64: groups of 64 codes of 4 bits with a float16 scale; an element is (code - 8) * scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<4, -8>, HalfScale, 64, 64> int4_g64;
