// The reader of int8: rows of signed bytes with a float32 scale.
#pragma once
#include "blocks.h"

typedef BlockFormat<SignedBytes, FloatScale, 0, 0> int8;
