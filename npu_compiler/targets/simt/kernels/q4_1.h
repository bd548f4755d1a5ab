// The reader of q4_1: blocks of 32 codes of 4 bits with a float16 scale and minimum.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<4, 0>, HalfScaleAndBase, 32, 32> q4_1;
