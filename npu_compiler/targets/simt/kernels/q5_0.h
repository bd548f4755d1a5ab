// The reader of q5_0: blocks of 32 codes of 5 bits with a float16 scale; an element is (code - 16) * scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<5, -16>, HalfScale, 32, 32> q5_0;
