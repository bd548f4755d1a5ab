// The reader of fp8_e4m3: rows of e4m3 numbers with a float32 scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<Fp8Codes, FloatScale, 0, 0> fp8_e4m3;
