// Products of rows of bf16 with blocks of small codes, on CPUs without a dot product of pairs of bf16: `vpmaddwd` adds two
// products of 16-bit integers, in half the time of two multiply-adds of floats.
//
// x is rounded to integers of 16 bits, relative to the largest magnitude of 256 elements: its error is below 2^-16 of
// that, so bf16 numbers down to 2^-7 of it are exact. The sums of a sub-block are exact in 32 bits; they are scaled in
// float32. If x is not finite among 256 elements, their products are NaN.
//
// A unit is a sub-block: of x, a header and its integers; of unpacked weights, for each TILE_COLS columns their scales and
// bases, then pairs of codes.
#pragma once
#include "gemv.h"
#include "operands.h"

namespace npu {

#if NPU_WORDS
struct WordsHeader {  // in front of the integers of a sub-block
  float scale;
  int sum;      // of the integers
  float total;  // their sum times the scale
  int padding;
};

NPU_INLINE vi32 nearest_integers(vf x) {
#if NPU_AVX512
  return (vi32)_mm512_cvtps_epi32((__m512)x);
#else
  return (vi32)_mm256_cvtps_epi32((__m256)x);
#endif
}

// Stores 2 * VL integers as 16-bit ones.
NPU_INLINE void store_words(char* to, vi32 low, vi32 high) {
#if NPU_AVX512
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)low));
  _mm256_storeu_si256((__m256i*)(to + VL * 2), _mm512_cvtepi32_epi16((__m512i)high));
#else
  const __m256i both = _mm256_packs_epi32((__m256i)low, (__m256i)high);  // of each half of the registers
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(both, 0xd8));
#endif
}

// Converts n elements of x to units.
template <int SUB_BLOCK> NPU_NOINLINE void write_words(char* out, const bf16* x, long n) {
  constexpr long SHARED = 256;  // elements that share a scale
  static_assert(SHARED % SUB_BLOCK == 0 && SUB_BLOCK % (2 * VL) == 0 || SUB_BLOCK == VL, "a sub-block fills registers");
  for (long begin = 0; begin < n; begin += SHARED) {
    const long end = min_of(n, begin + SHARED);
    vi32 top = {};  // magnitudes are ordered as integers
    for (long i = begin; i < end; i += VL) {
      const vi32 magnitude = (vi32)ld(x + i, Full{}) & 0x7fffffff;
      top = magnitude > top ? magnitude : top;
    }
    int bits = 0;
    for (int i = 0; i < VL; i++) bits = top[i] > bits ? top[i] : bits;
    const float largest = bitcast<float>(bits), most = largest > 0x1p-100f ? largest : 0x1p-100f;
    const float scale = bits < 0x7f800000 ? most / 32512 : __builtin_nanf("");
    const vf factor = splat<vf>(bits < 0x7f800000 ? 32512 / most : 0.0f);
    for (long b = begin; b < end; b += SUB_BLOCK) {
      vi32 total = {};
      char* to = out + sizeof(WordsHeader);
      for (int i = 0; i < SUB_BLOCK; i += 2 * VL, to += 4 * VL) {
        const vi32 low = nearest_integers(ld(x + b + i, Full{}) * factor);
        vi32 high = {};
        if (SUB_BLOCK > VL) high = nearest_integers(ld(x + b + i + VL, Full{}) * factor);
        store_words(to, low, high);
        total += low + high;
      }
      int sum = 0;
      for (int i = 0; i < VL; i++) sum += total[i];
      const WordsHeader header = {scale, sum, scale * (float)sum, 0};
      memcpy(out, &header, sizeof header);
      out += sizeof header + 2 * SUB_BLOCK;
    }
  }
}

// Codes as 16-bit integers that are BIAS above the values.
template <class Format> struct CodeWords {
  using Code = Codes<Format>;
  static constexpr int BIAS = Format::LINEAR ? -(int)Format::value(0) : 128;
  // Pair u of a group for vector v of the columns.
  NPU_INLINE vi32 load(const char* group, int u, int v) {
    const vi32 i = (vi32)Code::pair_index(group, u, v);
    if constexpr (Code::HIGH_BITS > 0) return i;
    else if constexpr (Format::LINEAR) return i & 0x10001 * ((1 << Code::BITS) - 1);
    else {
      static_assert(Code::BITS == 4, "a register holds no larger table");
      static constexpr struct Table {
        alignas(16) uint8_t of[16] = {};
        constexpr Table() {
          for (int i = 0; i < 16; i++) of[i] = (uint8_t)(Format::value(i) + BIAS);
        }
      } TABLE;
      const __m128i table = _mm_load_si128((const __m128i*)TABLE.of);
      const vi32 at = i & 0x000f000f | (int)0x80008000;  // high bytes become 0
#if NPU_AVX512
      return (vi32)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)at);
#else
      return (vi32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)at);
#endif
    }
  }
};

template <class Format> struct Words : FloatSums {
  static constexpr int SUB_BLOCK = Format::SUB_BLOCK, PAIRS = SUB_BLOCK / 2, X_PER_UNIT = SUB_BLOCK;
  // For sub-blocks of fewer elements than store_words() stores, the next header overwrites the rest.
  static constexpr int UNIT = sizeof(WordsHeader) + 2 * SUB_BLOCK;
  static constexpr int COLUMNS_BYTES = (2 + PAIRS) * TILE_COLS * 4, W_BYTES = PANEL / TILE_COLS * COLUMNS_BYTES;
  static constexpr bool STEPS_UNITS = true, WHOLE_BLOCKS = true;
  NPU_INLINE void write(char* out, const bf16* x, long n) { write_words<SUB_BLOCK>(out, x, n); }

  // Adds the products of a unit of each of P rows with V vectors of unpacked columns.
  template <int P, int V>
  NPU_INLINE void step_unit(vf (&acc)[P][V], const char* const (&xp)[P], long xk, const char* w) {
    vi32 sums[P][V] = {};
    const char* pairs = w + 2 * TILE_COLS * 4;
#pragma GCC unroll 1  // more steps spill sums
    for (int i = 0; i < PAIRS; i++, pairs += TILE_COLS * 4) {
      vi32 wv[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) wv[v] = load_bytes<vi32>(pairs + v * VL * 4);
#pragma GCC unroll 14
      for (int p = 0; p < P; p++) {
        const vi32 x = (vi32)splat_unit(xp[p] + xk + sizeof(WordsHeader) + 4 * i);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) dot_words(sums[p][v], wv[v], x);
      }
    }
#pragma GCC unroll 14
    for (int p = 0; p < P; p++) {
      const WordsHeader* header = (const WordsHeader*)(xp[p] + xk);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const vf scale = load_bytes<vf>(w + v * VL * 4);
        acc[p][v] = fma(cvt<vf>(sums[p][v]), scale * splat<vf>(header->scale), acc[p][v]);
        if constexpr (Format::HAS_BASE)
          acc[p][v] = fma(load_bytes<vf>(w + (TILE_COLS + v * VL) * 4), splat<vf>(header->total), acc[p][v]);
      }
    }
  }

  // A product of M rows with panels that are read side by side, decoded in registers (gemv.h).
  template <int M, int PANELS> static NPU_NOINLINE void tile(const GemvArgs<float>& a) {
    using Stored = Blocks<Format, Words>;
    using Code = Codes<Format>;
    constexpr int VECS = PANEL / VL;
    for (long sub = 0; sub < a.len; sub++) {
      const char* x = a.x + sub * UNIT;
      auto header = [&](int m) __attribute__((always_inline)) { return (const WordsHeader*)(x + m * a.row_bytes); };
#pragma GCC unroll 4
      for (int s = 0; s < PANELS; s++) {
        const char *panel = a.w + s * a.stride, *codes = Stored::at(panel, sub);
        const long ahead = a.template ahead<PANELS>(codes);
        vi32 sums[VECS][M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
          for (int v = 0; v < VECS; v++) sums[v][m] = splat<vi32>(-CodeWords<Format>::BIAS * header(m)->sum);
        const char* words = x + sizeof(WordsHeader);
#pragma GCC unroll 2
        for (int group = 0; group < SUB_BLOCK / Code::GROUP; group++, codes += Code::GROUP_BYTES, words += 8) {
#pragma GCC unroll 2
          for (int line = 0; line < Code::GROUP_BYTES; line += 64) __builtin_prefetch(codes + ahead + line, 0, 3);
#pragma GCC unroll 2
          for (int u = 0; u < 2; u++) {
            vi32 xv[M];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) xv[m] = (vi32)splat_unit(words + m * a.row_bytes + 4 * u);
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) {
              const vi32 wv = CodeWords<Format>::load(codes, u, v);
#pragma GCC unroll 4
              for (int m = 0; m < M; m++) dot_words(sums[v][m], wv, xv[m]);
            }
          }
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) {
          const vf scale = Stored::scale(panel, sub, v), base = Stored::base(panel, sub, v);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            float* to = a.acc + (s * M + m) * PANEL + v * VL;
            vf total = sub == 0 ? vf{} : load_bytes<vf>(to);
            total = fma(cvt<vf>(sums[v][m]), scale * splat<vf>(header(m)->scale), total);
            if constexpr (Format::HAS_BASE) total = fma(base, splat<vf>(header(m)->total), total);
            store_bytes(to, total);
          }
        }
      }
    }
  }
};

template <class Format> struct Blocks<Format, Words<Format>> {
  using Bytes = Blocks<Format, F32>;  // has the same panels
  using Code = Codes<Format>;
  static constexpr bool PLAIN = false, ODD_UNITS = true, HAS_BASE = Format::HAS_BASE;
  static constexpr int UNIT_BYTES = Bytes::SUB_BYTES, BLOCK_UNITS = 1, VECS = PANEL / VL;
  static constexpr long panel_bytes(long units) { return Bytes::panel_bytes(units * Format::SUB_BLOCK); }
  NPU_INLINE const char* at(const char* panel, long unit) { return Bytes::codes(panel, unit); }
  NPU_INLINE vf scale(const char* panel, long unit, int v) { return Bytes::scale(panel, 0, unit, v); }
  NPU_INLINE vf base(const char* panel, long unit, int v) { return Bytes::base(panel, 0, unit, v); }
  static NPU_NOINLINE const char* unpack(const char* panel, long, long first, long n, char* buffer) {
    const vi32 bias = splat<vi32>(0x10001 * CodeWords<Format>::BIAS);
    char* unit = buffer;
    for (long sub = first; sub < first + n; sub++, unit += Words<Format>::W_BYTES) {
      auto column = [&](int v) __attribute__((always_inline)) {
        return unit + v / TILE_VECS * Words<Format>::COLUMNS_BYTES + v % TILE_VECS * VL * 4;
      };
      for (int v = 0; v < VECS; v++) {
        store_bytes(column(v), scale(panel, sub, v));
        store_bytes(column(v) + TILE_COLS * 4, base(panel, sub, v));
      }
      const char* group = at(panel, sub);
      for (int pair = 0; pair < Words<Format>::PAIRS; pair += 2, group += Code::GROUP_BYTES) {
        __builtin_prefetch(group + 1024, 0, 3);
        __builtin_prefetch(group + 1024 + 64, 0, 3);
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++)
#pragma GCC unroll 8
          for (int v = 0; v < VECS; v++) {
            const vi32 codes = CodeWords<Format>::load(group, u, v);
#if NPU_AVX512
            const vi32 values = (vi32)_mm512_sub_epi16((__m512i)codes, (__m512i)bias);
#else
            const vi32 values = (vi32)_mm256_sub_epi16((__m256i)codes, (__m256i)bias);
#endif
            store_bytes(column(v) + (2 + pair + u) * TILE_COLS * 4, values);
          }
      }
    }
    return buffer;
  }
};

template <class Format> struct BF16Rows<Format, decltype((void)Format::SUB_BLOCK)> { using Kind = Words<Format>; };
#endif

}  // namespace npu
