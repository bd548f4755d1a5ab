// The reader of q5_1: blocks of 32 codes of 5 bits with a float16 scale and minimum.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<5, 0>, HalfScaleAndBase, 32, 32> q5_1;
