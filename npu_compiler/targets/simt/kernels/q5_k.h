// The reader of q5_k: blocks of 256 codes of 5 bits, whose sub-blocks of 32 have a scale and a minimum.
#pragma once
#include "blocks.h"

typedef BlockFormat<LinearCodes<5, 0>, LargeFromScale, 256, 32> q5_k;
