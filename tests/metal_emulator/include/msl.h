// The Metal standard library as far as compute kernels need it, in C++17 for any compiler.
//
// Strict where Metal is: an implicit float -> bfloat, exp(int), max(float, int), simd_sum(bfloat) do not compile.
#pragma once
#include "runtime.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define EMU_INLINE static inline __attribute__((unused))

#include "msl_types.h"

#include "msl_memory.h"

#include "msl_math.h"

#include "msl_simd.h"

using metal::as_type;
using namespace metal::types;
