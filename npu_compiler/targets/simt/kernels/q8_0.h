// The reader of q8_0: blocks of 32 signed bytes with a float16 scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, HalfScale, 32, 32> q8_0;
