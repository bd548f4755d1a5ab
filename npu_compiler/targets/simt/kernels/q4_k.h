// The reader of q4_k: blocks of 256 codes of 4 bits, whose sub-blocks of 32 have a scale and a minimum.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<4, 0>, LargeFromScale, 256, 32> q4_k;
