// Pairs of bf16 by the instruction `vcvtne2ps2bf16`, which rounds the lanes of two vectors in their order. If lanes 2c and
// 2c + 1 hold the two elements of column c, the result is a unit of 16 columns (tile.h) without a shuffle.
#pragma once
#include "simd.h"

#if defined(__AVX512BF16__) && NPU_AVX512
#define NPU_BF16_PAIRS 1
namespace npu {

// out[0]: lanes 0 0 1 1 ... 7 7 of v; out[1]: lanes 8 8 ... 15 15.
NPU_INLINE void twice(vf v, vf (&out)[2]) {
  alignas(64) static constexpr int32_t ORDER[16] = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
  const __m512i order = _mm512_load_si512(ORDER);
  out[0] = (vf)_mm512_permutexvar_ps(order, (__m512)v);
  out[1] = (vf)_mm512_permutexvar_ps(_mm512_or_si512(order, _mm512_set1_epi32(8)), (__m512)v);
}

// Rounds to nearest even and stores 16 columns: those of `first`, then those of `second`. Flushes subnormals.
NPU_INLINE void store_pairs(char* to, vf first, vf second) {
  __m512i both;
  __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
  _mm512_storeu_si512(to, both);
}

// Whether a product with any of these scales may be subnormal.
NPU_INLINE bool is_tiny(vf scale) {
  const __m512 magnitude = _mm512_abs_ps((__m512)scale);
  const __mmask16 some = _mm512_cmp_ps_mask(magnitude, _mm512_setzero_ps(), _CMP_GT_OQ);
  return _mm512_mask_cmp_ps_mask(some, magnitude, _mm512_set1_ps(0x1p-100f), _CMP_LT_OQ) != 0;
}

}  // namespace npu
#else
#define NPU_BF16_PAIRS 0
#endif
