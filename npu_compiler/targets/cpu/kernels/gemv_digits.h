// Products of few rows of bf16 with blocks of small codes, on CPUs where `vdpbf16ps` is several times as slow as the dot
// products of bytes `vpdpbusd`. Elsewhere, codes of 6 bits only: their table of bf16 values makes them slower than memory.
//
// x is rounded to integers of 16 bits, relative to the largest magnitude of 256 elements: its error is below 2^-16 of
// that, so bf16 numbers down to 2^-8 of it are exact. An integer is 256 * high + low, two signed bytes: each is multiplied
// by the codes. The sums of a sub-block are exact in 32 bits; they are scaled in float32. A group of 4 elements is 4 high
// bytes, then 4 low ones, in the order of a plane's bytes (blocks.h): elements 0 2 1 3. If x is not finite among 256
// elements, their products are NaN.
#pragma once
#include "gemv.h"

namespace npu {

#if NPU_DIGITS
#if NPU_AMX || NPU_SLOW_BF16_DOT
template <int BITS> constexpr bool DIGITS_ARE_FASTER = true;
#else
template <int BITS> constexpr bool DIGITS_ARE_FASTER = BITS == 6;
#endif
struct DigitsHeader {  // in front of the digits of a sub-block
  float scale;
  int sum;      // of the integers
  float total;  // their sum times the scale
  int padding;
};

// Codes of a group for each of VECS vectors of columns as bytes, those of a lane in the order of the digits.
template <class Format> struct CodeBytes {
  using Code = Codes<Format>;
  // Both halves' fields of B bits, in the lowest bits of each byte.
  template <int B> NPU_INLINE vi32 spread(const char* from) {
    if constexpr (B == 4) return Code::template plane<B>(from, 0);
    else if constexpr (B == 2) {
      const vi32 x = (vi32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), y = x | x << 8;
      return (y & 0x000f000f) | (y << 4 & 0x0f000f00);
    } else {
      const vi32 x = Code::template plane<B>(from, 0), y = x | x << 12;
      return (y & 0x00030003) | (y << 6 & 0x03000300);
    }
  }
  template <int B> NPU_INLINE vi32 half(vi32 fields, int h) {
    return fields >> B * h & 0x01010101 * ((1 << B) - 1);
  }
  // Bytes that are BIAS above the values.
  static constexpr int BIAS = Format::LINEAR ? -(int)Format::value(0) : 128;
  NPU_INLINE vi32 biased(vi32 code) {
    if constexpr (Format::LINEAR) return code;
    else {
      static_assert(Code::BITS == 4, "a register holds no larger table");
      static constexpr struct Table {
        alignas(16) uint8_t of[16] = {};
        constexpr Table() {
          for (int i = 0; i < 16; i++) of[i] = (uint8_t)(Format::value(i) + BIAS);
        }
      } TABLE;
      const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)TABLE.of));
      return (vi32)_mm512_shuffle_epi8(table, (__m512i)code);
    }
  }
  NPU_INLINE void load(const char* group, vi32 (&codes)[2]) {
#if defined(__AVX512VBMI__)
    if constexpr (Code::BITS == 6 && Format::LINEAR) return load_six_bits(group, codes);
#endif
    const vi32 low = spread<Code::LOW_BITS>(group);
    vi32 high = low;
    if constexpr (Code::HIGH_BITS > 0) high = spread<Code::HIGH_BITS>(group + Code::LOW_BYTES);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      vi32 code = half<Code::LOW_BITS>(low, h);
      if constexpr (Code::HIGH_BITS > 0) code |= half<Code::HIGH_BITS>(high, h) << Code::LOW_BITS;
      codes[h] = biased(code);
    }
  }
#if defined(__AVX512VBMI__)
  // Byte i of a lane is bits from[i] .. from[i] + 7 of its 64 bits, cyclically: the field of its element becomes bits 4, 5.
  NPU_INLINE vi32 high_bits(vi32 plane, uint32_t from) {
    const __m512i at = _mm512_set1_epi64((long long)(from + 0x20202020u) << 32 | from);
    return (vi32)_mm512_multishift_epi64_epi8(at, (__m512i)plane);
  }
  NPU_INLINE vi32 join(vi32 low, vi32 high) {  // bits 0 .. 3 of a byte and bits 4 and 5 of the other one
    const __m512i mask = _mm512_set1_epi32(0x0f0f0f0f);
    return (vi32)_mm512_ternarylogic_epi32(mask, (__m512i)low, (__m512i)high, 0xca) & 0x3f3f3f3f;
  }
  NPU_INLINE void load_six_bits(const char* group, vi32 (&codes)[2]) {
    const vi32 low = Code::template plane<4>(group, 0), high = Code::template plane<2>(group + Code::LOW_BYTES, 0);
    codes[0] = join(low, high_bits(high, 0x0804003c)), codes[1] = join(low >> 4, high_bits(high, 0x0a06023e));
  }
#endif
};

// acc += the dot products of 4 unsigned bytes of each lane with the 4 signed bytes at x.
NPU_INLINE void dot_bytes(vi32& acc, vi32 codes, const char* x) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*(const int*)x));
}

template <class Format, class Kind> struct Digits<Blocks<Format, Kind>> {
  using Storage = Blocks<Format, Kind>;
  using Code = Codes<Format>;
  static constexpr bool USED = Kind::X_PER_UNIT == 2 && DIGITS_ARE_FASTER<Format::BITS>;
  static constexpr int N = Format::SUB_BLOCK;
  static constexpr long SUB_BYTES = (long)sizeof(DigitsHeader) + 2 * N, SHARED = 256;  // elements that share a scale
  static constexpr long row_bytes(long k) { return k / N * SUB_BYTES; }
  static constexpr int streams(long m) { return (int)max_of(1, min_of(4, 28 / (4 * m))); }

  // Converts a row of k elements.
  static NPU_NOINLINE void write(const char* x, long k, char* out) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (long begin = 0; begin < k; begin += SHARED) {
      const long end = min_of(k, begin + SHARED);
      __m512i top = _mm512_setzero_si512();  // magnitudes of bf16 are ordered as integers
      for (long i = begin; i < end; i += 32)
        top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(x + 2 * i), _mm512_set1_epi16(0x7fff)));
      const __m512i odd = _mm512_srli_epi32(top, 16), even = _mm512_and_si512(top, _mm512_set1_epi32(0xffff));
      const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(odd, even));
      const float largest = bf16_to_float((uint16_t)bits), most = largest > 0x1p-100f ? largest : 0x1p-100f;
      const float scale = bits < 0x7f80 ? most / 32512 : __builtin_nanf("");
      const __m512 factor = _mm512_set1_ps(32512 / most);
      for (long b = begin; b < end; b += N, out += SUB_BYTES) {
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < N; i += 16) {
          const __m256i raw = _mm256_loadu_si256((const __m256i*)(x + 2 * (b + i)));
          const __m512 value = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
          const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(value, factor));
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
          const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
          total = _mm512_add_epi32(total, q);
          const __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order);
          const __m128i l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), order);
          char* to = out + sizeof(DigitsHeader) + 2 * i;
          _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi32(h, l));
          _mm_storeu_si128((__m128i*)(to + 16), _mm_unpackhi_epi32(h, l));
        }
        const int sum = _mm512_reduce_add_epi32(total);
        const DigitsHeader header = {scale, sum, scale * (float)sum, 0};
        memcpy(out, &header, sizeof header);
      }
    }
  }

  template <int M, int PANELS> static NPU_NOINLINE void tile(const GemvArgs<float>& a) {
    vf out[PANELS][2][M];
#pragma GCC unroll 4
    for (int s = 0; s < PANELS; s++)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * M; i++) out[s][i % 2][i / 2] = vf{};
    const long subs = a.len * Kind::X_PER_UNIT / N;
    const char* x = a.x;
    for (long sub = 0; sub < subs; sub++, x += SUB_BYTES) {
      auto header = [&](int m) __attribute__((always_inline)) {
        return (const DigitsHeader*)(x + m * a.row_bytes);
      };
      vi32 high[PANELS][2][M], low[PANELS][2][M];
      const char* w[PANELS];
#pragma GCC unroll 4
      for (int s = 0; s < PANELS; s++) {
        w[s] = Storage::codes(a.w + s * a.stride, sub);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          const vi32 bias = splat<vi32>(-CodeBytes<Format>::BIAS * header(m)->sum);
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) high[s][v][m] = vi32{}, low[s][v][m] = bias;
        }
      }
      const char* digits = x + sizeof(DigitsHeader);
      const long ahead = a.template ahead<PANELS>(w[0]);
#pragma GCC unroll 2
      for (int group = 0; group < N / Code::GROUP; group++, digits += 2 * Code::GROUP) {
#pragma GCC unroll 4
        for (int s = 0; s < PANELS; s++) {
          const char* from = w[s] + group * Code::GROUP_BYTES;
#pragma GCC unroll 2
          for (int line = 0; line < Code::GROUP_BYTES; line += 64)
            __builtin_prefetch(from + ahead + line, 0, 3);
          vi32 codes[2];
          CodeBytes<Format>::load(from, codes);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
              dot_bytes(high[s][v][m], codes[v], digits + m * a.row_bytes);
              dot_bytes(low[s][v][m], codes[v], digits + m * a.row_bytes + Code::GROUP);
            }
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < PANELS; s++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          const char* panel = a.w + s * a.stride;
          const vf scale = Storage::scale(panel, 0, sub, v), base = Storage::base(panel, 0, sub, v);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            const vf sum = cvt<vf>((high[s][v][m] << 8) + low[s][v][m]);
            out[s][v][m] += sum * (scale * splat<vf>(header(m)->scale));
            if constexpr (Storage::HAS_BASE) out[s][v][m] += base * splat<vf>(header(m)->total);
          }
        }
    }
#pragma GCC unroll 4
    for (int s = 0; s < PANELS; s++)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * M; i++)
        store_bytes(a.acc + (s * M + i / 2) * PANEL + i % 2 * VL, out[s][i % 2][i / 2]);
  }
};
#endif

}  // namespace npu
