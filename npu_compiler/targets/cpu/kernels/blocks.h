// The storage of formats whose rows consist of blocks of small codes with a scale (npu_compiler/weights/blocks.py
// describes the bytes). An element is value(code) * scale + base. Codes are decoded in registers, where values are exact
// in bf16; the sum of a sub-block is scaled.
//
// A Format defines
//   BITS, SUB_BLOCK              bits of a code, codes that share a scale
//   SUB_BLOCKS, HEAD_BYTES       sub-blocks of a block and the bytes in front of them
//   SCALE_BYTES                  bytes after the codes of a sub-block
//   value(code)                  constexpr float, exact in bf16; LINEAR: it is code + value(0)
//   scale(head, scales, v)       of the VL columns from v * VL on
//   HAS_BASE                     whether there is a base(head, scales, v), too
//   HAS_SUBNORMALS               whether an element may be a subnormal float
// All bytes are those of 32 columns.
#pragma once
#include "pairs.h"
#include "storage.h"

namespace npu {

// Values of all codes. Shorter tables repeat, so that an index may have anything above the bits of its code.
template <class Format> struct ValueTable {
  alignas(64) float floats[64];
  alignas(64) uint16_t words[64];  // as bf16
  constexpr ValueTable() : floats{}, words{} {
    for (int i = 0; i < 64; i++) {
      floats[i] = Format::value(i & ((1 << Format::BITS) - 1));
      words[i] = (uint16_t)(__builtin_bit_cast(uint32_t, floats[i]) >> 16);
    }
  }
};
template <class Format> constexpr ValueTable<Format> VALUES;

// A group is 4 elements of the reduced dim. Each plane of B bits has, for columns c and c + 16, a number of 8 * B bits:
// its field 4 * (k % 2) + 2 * (k / 2) + (column / 16) belongs to element k of the group.
template <class Format> struct Codes {
  static constexpr int BITS = Format::BITS, LOW_BITS = BITS >= 4 ? 4 : 2, HIGH_BITS = BITS - LOW_BITS;
  static constexpr int GROUP = 4, LOW_BYTES = 16 * LOW_BITS, GROUP_BYTES = 16 * BITS, HALF = 16 / VL;
  static_assert(BITS >= 2 && BITS <= 6, "codes have 2 to 6 bits");
  template <int B> NPU_INLINE vi32 plane(const char* from, int v) {
    const char* at = from + v % HALF * VL * B;
    if constexpr (B == 4) return load_bytes<vi32>(at);
    else if constexpr (B == 2) return ld((const int16_t*)at, Full{});
    else return ld((const uint8_t*)at, Full{});
  }
  // Element k of a group: bits above the code are not zero.
  NPU_INLINE vi32 index(const char* group, int k, int v) {
    const int field = 4 * (k % 2) + 2 * (k / 2) + v / HALF;
    const vi32 low = plane<LOW_BITS>(group, v) >> LOW_BITS * field;
    if constexpr (HIGH_BITS == 0) return low;
    else {
      const vi32 high = plane<HIGH_BITS>(group + LOW_BYTES, v);
      const int left = LOW_BITS - HIGH_BITS * field;
      const int mask = (1 << LOW_BITS) - 1;
      return (low & mask) | ((left > 0 ? high << left : high >> -left) & ~mask);
    }
  }
  NPU_INLINE vf value(const char* group, int k, int v) {
    const vi32 i = index(group, k, v);
#if NPU_AVX512
    const float* table = VALUES<Format>.floats;
    if constexpr (BITS <= 4) return (vf)_mm512_permutexvar_ps((__m512i)i, _mm512_load_ps(table));
    else if constexpr (BITS == 5)
      return (vf)_mm512_permutex2var_ps(_mm512_load_ps(table), (__m512i)i, _mm512_load_ps(table + 16));
#endif
    const vi32 code = i & ((1 << BITS) - 1);
    if constexpr (Format::LINEAR) {
      return __builtin_convertvector(code, vf) + Format::value(0);
    } else {
#if NPU_AVX2
      static_assert(BITS == 4, "two registers hold a table");
      const __m256 low = _mm256_load_ps(VALUES<Format>.floats), high = _mm256_load_ps(VALUES<Format>.floats + 8);
      return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, (__m256i)i), _mm256_permutevar8x32_ps(high, (__m256i)i),
                                  (__m256)(i << 28));
#else
      vf out = {};
      for (int j = 0; j < VL; j++) out[j] = VALUES<Format>.floats[code[j]];
      return out;
#endif
    }
  }
#if NPU_AVX512 || NPU_AVX2
  typedef uint16_t words __attribute__((vector_size(VL * 4)));
  template <int B> NPU_INLINE words wide_plane(const char* from, int v) {  // the fields of odd elements in odd words
    const vi32 x = plane<B>(from, v);
    if constexpr (B == 4) return (words)x;
    else if constexpr (B == 2) return (words)((x & 0xffff) | x << 8);
    else return (words)(x | x << 12);
  }
  // Elements 2u and 2u + 1 of a group in two words. Without HIGH_BITS, bits above the code are not zero.
  NPU_INLINE words pair_index(const char* group, int u, int v) {
    const int field = 2 * u + v / HALF;
    const words low = wide_plane<LOW_BITS>(group, v) >> LOW_BITS * field;
    if constexpr (HIGH_BITS == 0) return low;
    else {
      const words high = wide_plane<HIGH_BITS>(group + LOW_BYTES, v);
      const int left = LOW_BITS - HIGH_BITS * field;
      const uint16_t mask = (uint16_t)((1 << LOW_BITS) - 1);
      return (low & mask) | ((left > 0 ? high << left : high >> -left) & (uint16_t)((1 << BITS) - 1 - mask));
    }
  }
#endif
  // Elements 2u and 2u + 1 of a group for all columns, as pairs of bf16.
  template <int VECS> NPU_INLINE void pairs(const char* group, int u, vf (&w)[VECS]) {
#if NPU_AVX512
    const uint16_t* table = VALUES<Format>.words;
    const __m512i values = _mm512_load_si512(table);
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const words i = pair_index(group, u, v);
      if constexpr (BITS <= 5) w[v] = (vf)_mm512_permutexvar_epi16((__m512i)i, values);
      else w[v] = (vf)_mm512_permutex2var_epi16(values, (__m512i)i, _mm512_load_si512(table + 32));
    }
#else
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) {
      const vf even = value(group, 2 * u, v), odd = value(group, 2 * u + 1, v);
      w[v] = (vf)(((vi32)even >> 16 & 0xffff) | (vi32)odd);
    }
#endif
  }
};

#if NPU_BF16_PAIRS
// Floats of 8 columns at a time: lanes 2c and 2c + 1 of a part hold column 8 * part + c (of a half: 0 .. 15, 16 .. 31).
template <class Format> struct PairCodes {
  using Code = Codes<Format>;
  // Lane 2c: the fields of elements 0 and 2 of a group; lane 2c + 1: those of elements 1 and 3.
  template <int B> NPU_INLINE vi32 plane(const char* from, int part) {
    const char* at = from + part * 8 * B;
    if constexpr (B == 4) return (vi32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
    else if constexpr (B == 2) return (vi32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
    else {
      const __m512i x = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)at));
      return (vi32)_mm512_or_si512(x, _mm512_slli_epi64(x, 28));
    }
  }
  NPU_INLINE vf value(vi32 low, vi32 high, int field) {
    constexpr int LOW = Code::LOW_BITS, HIGH = Code::HIGH_BITS, BITS = Code::BITS;
    __m512i i = (__m512i)(low >> LOW * field);
    if constexpr (HIGH > 0) {
      const int left = LOW - HIGH * field;
      const vi32 above = left > 0 ? high << left : high >> -left;
      i = _mm512_ternarylogic_epi32(_mm512_set1_epi32((1 << LOW) - 1), i, (__m512i)above, 0xca);  // mask ? i : above
    }
    const float* table = VALUES<Format>.floats;
    if constexpr (BITS <= 4) return (vf)_mm512_permutexvar_ps(i, _mm512_load_ps(table));
    else if constexpr (BITS == 5)
      return (vf)_mm512_permutex2var_ps(_mm512_load_ps(table), i, _mm512_load_ps(table + 16));
    else {  // the float 2^23 + code, by its bits
      static_assert(Format::LINEAR, "a register holds no table of 64 values");
      const __m512i mask = _mm512_set1_epi32((1 << BITS) - 1), bits = _mm512_set1_epi32(0x4b000000);
      return (vf)_mm512_ternarylogic_epi32(i, mask, bits, 0xea) - (0x1p23f - Format::value(0));  // i & mask | bits
    }
  }
  // The elements of a group, value * s + low, as units of pairs of bf16.
  template <bool HAS_BASE> NPU_INLINE void store(const char* group, const vf (&s)[2][2], const vf (&low)[2][2], char* to) {
    vi32 codes[2], high[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      codes[part] = high[part] = plane<Code::LOW_BITS>(group, part);
      if constexpr (Code::HIGH_BITS > 0) high[part] = plane<Code::HIGH_BITS>(group + Code::LOW_BYTES, part);
    }
#pragma GCC unroll 4
    for (int field = 0; field < 4; field++) {  // 2 * unit + half
      vf w[2];
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        w[part] = value(codes[part], high[part], field);
        w[part] = HAS_BASE ? w[part] * s[field % 2][part] + low[field % 2][part] : w[part] * s[field % 2][part];
      }
      store_pairs(to + field * 64, w[0], w[1]);
    }
  }
};
#endif

template <class Format, class Kind> struct Blocks {
  using Code = Codes<Format>;
  static constexpr bool PLAIN = false, ODD_UNITS = false, HAS_BASE = Format::HAS_BASE;
  static constexpr int DEPTH = Kind::X_PER_UNIT, VECS = PANEL / VL, BLOCK_UNITS = Format::SUB_BLOCK / DEPTH;
  static constexpr int SUB_BYTES = Format::SUB_BLOCK / Code::GROUP * Code::GROUP_BYTES + Format::SCALE_BYTES;
  static constexpr int BLOCK_BYTES = Format::HEAD_BYTES + Format::SUB_BLOCKS * SUB_BYTES;
  static constexpr int UNIT_BYTES = (SUB_BYTES + BLOCK_UNITS - 1) / BLOCK_UNITS;  // on average, for prefetching
  static constexpr long panel_bytes(long units) {
    return (units / BLOCK_UNITS / Format::SUB_BLOCKS * BLOCK_BYTES + 63) / 64 * 64;
  }
  // Of sub-block `sub` of a panel:
  NPU_INLINE const char* head(const char* panel, long sub) { return panel + sub / Format::SUB_BLOCKS * BLOCK_BYTES; }
  NPU_INLINE const char* codes(const char* panel, long sub) {
    return head(panel, sub) + Format::HEAD_BYTES + sub % Format::SUB_BLOCKS * SUB_BYTES;
  }
  NPU_INLINE const char* scales(const char* panel, long sub) {
    return codes(panel, sub) + SUB_BYTES - Format::SCALE_BYTES;
  }
  NPU_INLINE const char* at(const char* panel, long unit) {
    return codes(panel, unit / BLOCK_UNITS) + unit % BLOCK_UNITS * DEPTH / Code::GROUP * Code::GROUP_BYTES;
  }
  NPU_INLINE vf scale(const char* panel, long, long sub, int v) {
    return Format::scale(head(panel, sub), scales(panel, sub), v);
  }
  NPU_INLINE vf base(const char* panel, long, long sub, int v) {
    if constexpr (HAS_BASE) return Format::base(head(panel, sub), scales(panel, sub), v);
    else return vf{};
  }
  NPU_INLINE vf rounded(vf even, vf odd) { return (vf)(bf16_lanes(even) | bf16_lanes(odd) << 16); }
#if NPU_BF16_PAIRS
  static NPU_NOINLINE const char* unpack_pairs(const char* panel, long first, long n, char* buffer) {
    vf s[2][2], low[2][2];
    char* to = buffer;
    for (long unit = first; unit < first + n; unit += Code::GROUP / 2, to += 4 * VL * 4) {
      if (unit == first || unit % BLOCK_UNITS == 0)
        for (int v = 0; v < 2; v++) {
          twice(scale(panel, 0, unit / BLOCK_UNITS, v), s[v]);
          twice(base(panel, 0, unit / BLOCK_UNITS, v), low[v]);
        }
      const char* group = at(panel, unit);
      __builtin_prefetch(group + 1024, 0, 3);
      __builtin_prefetch(group + 1024 + 64, 0, 3);
      PairCodes<Format>::template store<HAS_BASE>(group, s, low, to);
    }
    return buffer;
  }
#endif
  static NPU_NOINLINE const char* unpack(const char* panel, long, long first, long n, char* buffer) {
#if NPU_BF16_PAIRS
    if constexpr (DEPTH == 2 && !Format::HAS_SUBNORMALS) return unpack_pairs(panel, first, n, buffer);
#endif
    vf s[VECS], low[VECS];
    char* to = buffer;
    for (long unit = first; unit < first + n; unit += Code::GROUP / DEPTH) {
      if (unit == first || unit % BLOCK_UNITS == 0)
        for (int v = 0; v < VECS; v++) {
          s[v] = scale(panel, 0, unit / BLOCK_UNITS, v);
          low[v] = base(panel, 0, unit / BLOCK_UNITS, v);
        }
      const char* group = at(panel, unit);
      __builtin_prefetch(group + 1024, 0, 3);
      __builtin_prefetch(group + 1024 + 64, 0, 3);
      auto element = [&](vf w, int v) __attribute__((always_inline)) {
        return HAS_BASE ? w * s[v] + low[v] : w * s[v];
      };
#pragma GCC unroll 4
      for (int u = 0; u < Code::GROUP / DEPTH; u++) {
        vf w[VECS];
        if constexpr (DEPTH == 2) Code::pairs(group, u, w);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++, to += VL * 4) {
          if constexpr (DEPTH == 1) store_bytes(to, element(Code::value(group, u, v), v));
          else {
            const vf even = element((vf)((vi32)w[v] << 16), v), odd = element((vf)((vi32)w[v] & (int)0xffff0000), v);
            store_bytes(to, rounded(even, odd));
          }
        }
      }
    }
    return buffer;
  }
  template <int M, class Args> NPU_INLINE void add_outliers(const Args&, const char*, float*) {}
};

template <class Format, class Kind> struct Reader<Blocks<Format, Kind>> {
  using Storage = Blocks<Format, Kind>;
  using Code = Codes<Format>;
  static constexpr int VECS = PANEL / VL, GROUP_UNITS = Code::GROUP / Storage::DEPTH;
  const char* from;
  NPU_INLINE Reader of(const char* panel) { return {Storage::at(panel, 0)}; }
  __attribute__((always_inline)) void load2(int u, vf (&w)[2][VECS]) const {
#pragma GCC unroll 2
    for (int i = u; i < u + 2; i++) {
      const char* group = from + i / GROUP_UNITS * Code::GROUP_BYTES;
      if constexpr (Storage::DEPTH == 2) Code::pairs(group, i % GROUP_UNITS, w[i - u]);
      else
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) w[i - u][v] = Code::value(group, i % GROUP_UNITS, v);
    }
  }
  __attribute__((always_inline)) void skip(int units) { from += units / GROUP_UNITS * Code::GROUP_BYTES; }
};

#if NPU_BF16_PAIRS
template <class Format, class Kind> struct Unpacker<Blocks<Format, Kind>> {
  using Stored = Blocks<Format, Kind>;
  const char* panel;
  const char* group;
  long unit;
  vf s[2][2], low[2][2];
  __attribute__((always_inline)) void load_scales() {
    const long sub = unit / Stored::BLOCK_UNITS;
    group = Stored::at(panel, unit);
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      twice(Stored::scale(panel, 0, sub, v), s[v]);
      if (Format::HAS_BASE) twice(Stored::base(panel, 0, sub, v), low[v]);
    }
  }
  __attribute__((always_inline)) void begin(const char* from, long, long first) {
    panel = from, unit = first;
    load_scales();
  }
  __attribute__((always_inline)) void next(long n, char* to) {
    if constexpr (Format::HAS_SUBNORMALS) Stored::unpack(panel, 0, unit, n, to);
    else {
      if (unit % Stored::BLOCK_UNITS == 0) load_scales();
      PairCodes<Format>::template store<Format::HAS_BASE>(group, s, low, to);
      group += Stored::Code::GROUP_BYTES;
    }
    unit += n;
  }
};
#endif

// Formats of blocks of 32 codes with a float16 scale, and with a float16 minimum.
template <int B> struct Scaled {
  static constexpr int BITS = B, SUB_BLOCK = 32, SUB_BLOCKS = 1, HEAD_BYTES = 0, SCALE_BYTES = PANEL * 2;
  static constexpr bool HAS_BASE = false, LINEAR = true, HAS_SUBNORMALS = false;
  static constexpr float value(int code) { return (float)(code - (1 << B) / 2); }
  NPU_INLINE vf scale(const char*, const char* scales, int v) { return ld((const f16*)scales + v * VL, Full{}); }
};
// The element of the middle code takes the place of the minimum. It is smaller, so that the products of a block and its
// sum of x cancel less.
template <int B> struct ScaledFrom : Scaled<B> {
  static constexpr int SCALE_BYTES = 2 * PANEL * 2;
  static constexpr bool HAS_BASE = true;
  NPU_INLINE vf base(const char* head, const char* scales, int v) {
    const vf lowest = ld((const f16*)scales + PANEL + v * VL, Full{});
    return lowest - Scaled<B>::scale(head, scales, v) * Scaled<B>::value(0);
  }
};

// Groups of N codes with a float16 scale, and with a zero point.
template <int N> struct Int4 : Scaled<4> { static constexpr int SUB_BLOCK = N; };
template <int N> struct Int4Zero : Int4<N> {
  static constexpr int SCALE_BYTES = 3 * PANEL;
  static constexpr bool HAS_BASE = true;
  NPU_INLINE vf base(const char* head, const char* scales, int v) {
    const vi32 zero = ld((const uint8_t*)scales + 2 * PANEL + v * VL, Full{});
    return cvt<vf>(8 - zero) * Int4<N>::scale(head, scales, v);
  }
};

// Formats of blocks of 256 codes in sub-blocks: a scale is a whole number times a float16 number of the block.
template <int B, int N> struct Large {
  static constexpr int BITS = B, SUB_BLOCK = N, SUB_BLOCKS = 256 / N, HEAD_BYTES = PANEL * 2, SCALE_BYTES = PANEL;
  static constexpr bool HAS_BASE = false, LINEAR = true, HAS_SUBNORMALS = false;
  static constexpr float value(int code) { return (float)(code - (1 << B) / 2); }
  NPU_INLINE vf number(const char* head, int field, int v) {
    return ld((const f16*)head + field * PANEL + v * VL, Full{});
  }
  template <class T> NPU_INLINE vi32 whole(const char* scales, int field, int v) {
    return ld((const T*)scales + field * PANEL + v * VL, Full{});
  }
};
template <int B, int N> struct LargeFrom : Large<B, N> {
  static constexpr int HEAD_BYTES = 2 * PANEL * 2;
  static constexpr bool HAS_BASE = true;
};
// Scale and minimum are bytes.
template <int B> struct LargeFromBytes : LargeFrom<B, 32> {
  using Base = LargeFrom<B, 32>;
  static constexpr int SCALE_BYTES = 2 * PANEL;
  NPU_INLINE vf scale(const char* head, const char* scales, int v) {
    return Base::number(head, 0, v) * cvt<vf>(Base::template whole<uint8_t>(scales, 0, v));
  }
  NPU_INLINE vf base(const char* head, const char* scales, int v) {
    const vf minimum = Base::number(head, 1, v) * cvt<vf>(Base::template whole<uint8_t>(scales, 1, v));
    return -scale(head, scales, v) * Base::value(0) - minimum;
  }
};

}  // namespace npu

#include "gemv_digits.h"
#include "words.h"
