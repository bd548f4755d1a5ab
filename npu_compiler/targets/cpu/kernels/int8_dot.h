// Dot products of 8-bit integers, summed in int32: acc[i] += u[4i] * s[4i] + ... + u[4i + 3] * s[4i + 3], with unsigned
// u and signed s. Exact on every CPU: no sum saturates, and none overflows for up to 2^16 products.
//
// The product of pairs of 16-bit integers takes the place of this where NPU_INT8_DOT is 0 (U8S8W in tile.h): `vpmaddubsw`
// would saturate.
#pragma once
#include "simd.h"

#if NPU_AVX512 && !defined(__AVX512VNNI__) || NPU_AVX2 && !defined(__AVXVNNI__)
#define NPU_INT8_DOT 0
#else
#define NPU_INT8_DOT 1
#endif

namespace npu {

#if NPU_AVX512 || NPU_AVX2
// acc += the sums of two products of 16-bit integers in each lane. Inline assembly, because gcc would add up the products
// of several steps first, which takes more registers than there are.
NPU_INLINE void dot_words(vi32& acc, vi32 w, vi32 x) {
#if NPU_AVX512 && defined(__AVX512VNNI__)
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#elif NPU_AVX2 && defined(__AVXVNNI__)
  __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
#else
  vi32 products;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(w), "v"(x));
#endif
}
#endif

#if NPU_AVX512 && defined(__AVX512VNNI__)
// Inline assembly for the reason given at mul_add (tile.h).
NPU_INLINE void dot_u8s8(vi32& acc, vi32 u, vi32 s) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
}
#elif NPU_AVX2 && defined(__AVXVNNI__)
NPU_INLINE void dot_u8s8(vi32& acc, vi32 u, vi32 s) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));
}
#elif NPU_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
NPU_INLINE void dot_u8s8(vi32& acc, vi32 u, vi32 s) {
  acc = (vi32)vusdotq_s32((int32x4_t)acc, (uint8x16_t)u, (int8x16_t)s);
}
#elif NPU_NEON && defined(__ARM_FEATURE_DOTPROD)
// u = (u - 128) + 128: a signed dot product, and 128 times the sum of s.
NPU_INLINE void dot_u8s8(vi32& acc, vi32 u, vi32 s) {
  const int8x16_t shifted = vreinterpretq_s8_u8(veorq_u8((uint8x16_t)u, vdupq_n_u8(128)));
  const int8x16_t weights = (int8x16_t)s, most = vdupq_n_s8(64);
  int32x4_t sums = vdotq_s32((int32x4_t)acc, shifted, weights);
  acc = (vi32)vdotq_s32(vdotq_s32(sums, weights, most), weights, most);
}
#else
NPU_INLINE void dot_u8s8(vi32& acc, vi32 u, vi32 s) {
  typedef uint32_t vu32 __attribute__((vector_size(VL * 4)));
#pragma GCC unroll 4
  for (int byte = 0; byte < 4; byte++)
    acc += (vi32)((vu32)u >> (8 * byte) & 0xff) * ((vi32)((vu32)s << (24 - 8 * byte)) >> 24);
}
#endif

}  // namespace npu
