// The reader of iq4_nl: blocks of 32 codes of 4 bits that select one of 16 values, with a float16 scale.
#pragma once
#include "blocks.h"

// -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
typedef BlockFormat<ListedCodes<0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u>, HalfScale, 32, 32> iq4_nl;
