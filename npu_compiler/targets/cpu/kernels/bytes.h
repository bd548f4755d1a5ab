// The storage of formats of one byte an element (npu_compiler/weights/bytes.py describes the bytes). The numbers are
// exact in bf16; the sum of a block is scaled.
//
// N: elements of a block, 0 for a whole row. FIELDS: bytes of a block's fields of one column. numbers(): the values of
// 16 bytes.
#pragma once
#include "storage.h"

namespace npu {

template <int N, int FIELDS> struct Bytes {
  static constexpr int BLOCK = N > 0 ? N : 1 << 30, HEAD_BYTES = 0, K_BYTES = PANEL, FIELD_BYTES = FIELDS * PANEL;
  static constexpr long panel_bytes(long k) { return (k * K_BYTES + ceil_div(k, BLOCK) * FIELDS * PANEL + 63) / 64 * 64; }
  NPU_INLINE const char* fields(const char* panel, long length, long block) {
    return panel + length * K_BYTES + block * FIELDS * PANEL;
  }
  NPU_INLINE vf scale(const char* panel, long length, long block, int v) {
    return load_bytes<vf>(fields(panel, length, block) + v * VL * 4);
  }
};

// Signed integers.
template <int N, int FIELDS = 4> struct Int8 : Bytes<N, FIELDS> {
#if NPU_AVX512
  NPU_INLINE vf numbers(__m128i bytes) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
#endif
  NPU_INLINE vf value(const char* panel, long k, int v) {
    return cvt<vf>(ld((const int8_t*)(panel + k * PANEL) + v * VL, Full{}));
  }
};

// With a zero point.
template <int N> struct Int8Zero : Int8<N, 5> {
  using Base = Int8<N, 5>;
  NPU_INLINE vf base(const char* panel, long length, long block, int v) {
    const char* zeros = Base::fields(panel, length, block) + 4 * PANEL;
    return -cvt<vf>(ld((const int8_t*)zeros + v * VL, Full{})) * Base::scale(panel, length, block, v);
  }
};

// e4m3 numbers. NaN is not among them: packing refuses it. The bits of magnitude are those of a float16 number that is
// 1 / 256 of it, which scales make up for.
template <int N> struct FP8 : Bytes<N, 4> {
#if NPU_AVX512
  NPU_INLINE vf numbers(__m128i bytes) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xbf80)));
  }
#endif
  NPU_INLINE vf value(const char* panel, long k, int v) {
    const char* from = panel + k * PANEL + v * VL;
#if NPU_AVX512
    return numbers(_mm_loadu_si128((const __m128i*)from));
#elif NPU_AVX2  // both halves of 16 bytes share the first instructions
    const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(from - v % 2 * VL)));
    const __m256i words = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xbf80));
    return (vf)_mm256_cvtph_ps(v % 2 ? _mm256_extracti128_si256(words, 1) : _mm256_castsi256_si128(words));
#else
    const vi32 code = ld((const uint8_t*)from, Full{}), magnitude = code & 0x7f;
    const vi32 normal = (magnitude << 20) + (112 << 23), subnormal = (vi32)(cvt<vf>(magnitude) * 0x1p-17f);
    return (vf)(select(magnitude < 8, subnormal, normal) | (code & 0x80) << 24);
#endif
  }
  NPU_INLINE vf scale(const char* panel, long length, long block, int v) {
    return Bytes<N, 4>::scale(panel, length, block, v) * 256.0f;
  }
};

}  // namespace npu
