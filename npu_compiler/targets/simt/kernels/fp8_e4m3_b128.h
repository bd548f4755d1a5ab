// The reader of fp8_e4m3_b128: e4m3 numbers with a float32 scale for blocks of 128 rows and 128 columns.
#pragma once
#include "blocks.h"

typedef BlockFormat<Fp8Codes, FloatScale, 128, 128> fp8_e4m3_b128;
