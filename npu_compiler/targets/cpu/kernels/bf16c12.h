// The reader of bf16c12, which stores bf16 weights in 12 bits without loss
// (npu_compiler/weights/formats/bf16c12/panels.py describes the bytes). Outlier weights are stored as zero in the main
// stream and listed after it, so an infinite activation produces NaN (inf * 0).
#pragma once
#include "operands.h"

namespace npu {

#if NPU_AVX512
typedef __m512i vbytes;
NPU_INLINE vbytes load_table(const char* p) { return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)p)); }
NPU_INLINE vbytes load_vbytes(const char* p) { return _mm512_loadu_si512(p); }
NPU_INLINE vbytes low_codes(vbytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
NPU_INLINE vbytes high_codes(vbytes v) { return low_codes(_mm512_srli_epi16(v, 4)); }
NPU_INLINE vbytes look_up(vbytes table, vbytes codes) { return _mm512_shuffle_epi8(table, codes); }
NPU_INLINE vf zip_low(vbytes low, vbytes high) { return (vf)_mm512_unpacklo_epi8(low, high); }
NPU_INLINE vf zip_high(vbytes low, vbytes high) { return (vf)_mm512_unpackhi_epi8(low, high); }
#elif NPU_AVX2
typedef __m256i vbytes;
NPU_INLINE vbytes load_table(const char* p) { return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)p)); }
NPU_INLINE vbytes load_vbytes(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
NPU_INLINE vbytes low_codes(vbytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
NPU_INLINE vbytes high_codes(vbytes v) { return low_codes(_mm256_srli_epi16(v, 4)); }
NPU_INLINE vbytes look_up(vbytes table, vbytes codes) { return _mm256_shuffle_epi8(table, codes); }
NPU_INLINE vf zip_low(vbytes low, vbytes high) { return (vf)_mm256_unpacklo_epi8(low, high); }
NPU_INLINE vf zip_high(vbytes low, vbytes high) { return (vf)_mm256_unpackhi_epi8(low, high); }
#elif NPU_NEON
typedef uint8x16_t vbytes;
NPU_INLINE vbytes load_table(const char* p) { return vld1q_u8((const uint8_t*)p); }
NPU_INLINE vbytes load_vbytes(const char* p) { return vld1q_u8((const uint8_t*)p); }
NPU_INLINE vbytes low_codes(vbytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
NPU_INLINE vbytes high_codes(vbytes v) { return vshrq_n_u8(v, 4); }
NPU_INLINE vbytes look_up(vbytes table, vbytes codes) { return vqtbl1q_u8(table, codes); }
NPU_INLINE vf zip_low(vbytes low, vbytes high) { return (vf)vzip1q_u8(low, high); }
NPU_INLINE vf zip_high(vbytes low, vbytes high) { return (vf)vzip2q_u8(low, high); }
#else
typedef uint8_t vbytes __attribute__((vector_size(VL * 4)));
NPU_INLINE vbytes load_table(const char* p) { return load_bytes<vbytes>(p); }
NPU_INLINE vbytes load_vbytes(const char* p) { return load_bytes<vbytes>(p); }
NPU_INLINE vbytes low_codes(vbytes v) { return v & 15; }
NPU_INLINE vbytes high_codes(vbytes v) { return v >> 4; }
NPU_INLINE vbytes look_up(vbytes table, vbytes codes) {
  vbytes out = {};
  for (int i = 0; i < 16; i++) out[i] = table[codes[i]];
  return out;
}
NPU_INLINE vf zip_half(vbytes low, vbytes high, int from) {
  vbytes out = {};
  for (int i = 0; i < 8; i++) out[2 * i] = low[from + i], out[2 * i + 1] = high[from + i];
  return (vf)out;
}
NPU_INLINE vf zip_low(vbytes low, vbytes high) { return zip_half(low, high, 0); }
NPU_INLINE vf zip_high(vbytes low, vbytes high) { return zip_half(low, high, 8); }
#endif

struct Outlier { uint32_t at; float value; };  // row at / PANEL of the reduced dim, column at % PANEL

template <class Kind> struct StorageOf12;

struct bf16c12 {
  static constexpr bool PLAIN = false, ODD_UNITS = false, HAS_BASE = false;
  static constexpr int HEAD_BYTES = 64, UNIT_BYTES = 96, BLOCK_UNITS = 0;
  template <class Kind> using Storage = typename StorageOf12<Kind>::type;
  static constexpr long slots(long units) { return (2 * units * PANEL / 128 + 7) / 8 * 8; }
  static constexpr long panel_bytes(long units) { return HEAD_BYTES + units * UNIT_BYTES + slots(units) * 8; }
  NPU_INLINE const char* at(const char* panel, long unit) { return panel + HEAD_BYTES + unit * UNIT_BYTES; }
  NPU_INLINE int outliers(const char* panel) { return *(const int*)(panel + 16); }
  NPU_INLINE const Outlier* list(const char* panel, long units) { return (const Outlier*)at(panel, units); }
  // unpack() in two parts: everything but the outliers, and the outliers.
  static void unpack_units(const char* panel, long first, long n, char* buffer);
  static void put_outliers(const char* panel, long units, long first, long n, char* buffer);
  static const char* unpack(const char* panel, long units, long first, long n, char* buffer) {
    unpack_units(panel, first, n, buffer);
    put_outliers(panel, units, first, n, buffer);
    return buffer;
  }
  template <int M, class Args> NPU_INLINE void add_outliers(const Args& a, const char* panel, float* acc) {
    add_outliers<M, bf16>(a, panel, list(panel, a.len), acc);
  }
  // x has elements of type T.
  template <int M, class T, class Args>
  NPU_INLINE void add_outliers(const Args& a, const char* panel, const Outlier* e, float* acc) {
    for (int i = 0, n = outliers(panel); i < n; i++) {
      const long k = e[i].at / PANEL;
      for (int m = 0; m < M; m++) {
        float& sum = acc[m * PANEL + e[i].at % PANEL];
        sum = __builtin_fmaf(e[i].value, ld1((const T*)(a.x + m * a.row_bytes) + k), sum);
      }
    }
  }
};
template <> struct StorageOf12<BF16P> { using type = bf16c12; };

template <> struct Reader<bf16c12> {
  static constexpr int VECS = PANEL / VL, REGISTERS = 16 / VL;
  const char* from;
  vbytes table;
  NPU_INLINE Reader of(const char* panel, long first = 0) { return {bf16c12::at(panel, first), load_table(panel)}; }
  // Unit i of two, of which the first is at `codes`.
  __attribute__((always_inline)) void load_one(const char* codes, int i, vf (&w)[VECS]) const {
#pragma GCC unroll 4
    for (int r = 0; r < REGISTERS; r++) {
      const vbytes c = load_vbytes(codes + r * VL * 4), high = look_up(table, i == 0 ? low_codes(c) : high_codes(c));
      const vbytes low = load_vbytes(codes + 64 * (1 + i) + r * VL * 4);
      w[r] = zip_low(low, high);
      w[REGISTERS + r] = zip_high(low, high);
    }
  }
  __attribute__((always_inline)) void load2(int u, vf (&w)[2][VECS]) const {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) load_one(from + u * bf16c12::UNIT_BYTES, i, w[i]);
  }
  __attribute__((always_inline)) void skip(int units) { from += units * bf16c12::UNIT_BYTES; }
};

#if NPU_AVX512
template <> struct Unpacker<bf16c12> {
  Reader<bf16c12> from;
  __attribute__((always_inline)) void begin(const char* panel, long, long first) {
    from = Reader<bf16c12>::of(panel, first);
  }
  __attribute__((always_inline)) void next(long, char* to) {  // each register is stored at once: an array would be too
    const vbytes codes = load_vbytes(from.from);
    store(from.from + 64, look_up(from.table, low_codes(codes)), to);
    store(from.from + 128, look_up(from.table, high_codes(codes)), to + 128);
    from.skip(2);
  }
  NPU_INLINE void store(const char* bytes, vbytes high, char* to) {
    const vbytes low = load_vbytes(bytes);
    store_bytes(to, zip_low(low, high));
    store_bytes(to + 64, zip_high(low, high));
  }
};
#endif

NPU_NOINLINE inline void bf16c12::unpack_units(const char* panel, long first, long n, char* buffer) {
  auto reader = Reader<bf16c12>::of(panel, first);
  char* to = buffer;
  for (long u = 0; u < n; u += 2, to += 4 * PANEL * 2) {
    vf w[2][Reader<bf16c12>::VECS];
#pragma GCC unroll 6
    for (int line = 0; line < 192; line += 64) __builtin_prefetch(reader.from + 1024 + line, 0, 3);
    reader.load2(0, w);
    reader.skip(2);
    memcpy(to, w, sizeof w);
  }
}
NPU_NOINLINE inline void bf16c12::put_outliers(const char* panel, long units, long first, long n, char* buffer) {
  const Outlier* e = list(panel, units);
  const int count = outliers(panel);
  for (int i = 0; i < count; i++) {
    const long k = e[i].at / PANEL, column = e[i].at % PANEL, unit = k / 2 - first;
    const uint16_t bits = (uint16_t)(bitcast<uint32_t>(e[i].value) >> 16);
    if (unit >= 0 && unit < n) memcpy(buffer + unit * 4 * PANEL + column * 4 + k % 2 * 2, &bits, 2);
  }
}

// The same panels for rows that are widened to floats, whose units are single elements.
struct bf16c12_floats {
  static constexpr bool PLAIN = false, ODD_UNITS = false, HAS_BASE = false;
  static constexpr int UNIT_BYTES = bf16c12::UNIT_BYTES / 2, BLOCK_UNITS = 0;
  static constexpr long panel_bytes(long units) { return bf16c12::panel_bytes(ceil_div(units, 2)); }
  NPU_INLINE const char* at(const char* panel, long unit) { return bf16c12::at(panel, unit / 2); }
  NPU_INLINE const Outlier* list(const char* panel, long units) { return bf16c12::list(panel, ceil_div(units, 2)); }
  static NPU_NOINLINE const char* unpack(const char* panel, long units, long first, long n, char* buffer);
  template <int M, class Args> NPU_INLINE void add_outliers(const Args& a, const char* panel, float* acc) {
    bf16c12::add_outliers<M, float>(a, panel, list(panel, a.len), acc);
  }
};
template <> struct StorageOf12<BF16F> { using type = bf16c12_floats; };

template <> struct Reader<bf16c12_floats> {
  using Pairs = Reader<bf16c12>;
  const char* from;
  vbytes table;
  NPU_INLINE Reader of(const char* panel, long first = 0) {
    return {bf16c12::at(panel, first / 2), load_table(panel)};
  }
  __attribute__((always_inline)) void load2(int u, vf (&w)[2][Pairs::VECS]) const {
    vf both[Pairs::VECS];
    Pairs{from, table}.load_one(from + u / 4 * 2 * bf16c12::UNIT_BYTES, u / 2 % 2, both);
#pragma GCC unroll 8
    for (int v = 0; v < Pairs::VECS; v++)
      w[0][v] = (vf)((vi32)both[v] << 16), w[1][v] = (vf)((vi32)both[v] & (int32_t)0xffff0000);
  }
  __attribute__((always_inline)) void skip(int units) { from += units * bf16c12_floats::UNIT_BYTES; }
};

NPU_NOINLINE inline const char* bf16c12_floats::unpack(const char* panel, long units, long first, long n, char* buffer) {
  auto reader = Reader<bf16c12>::of(panel, first / 2);
  char* to = buffer;
  for (long k = 0; k < n; k += 4, to += 4 * PANEL * 4) {
#pragma GCC unroll 6
    for (int line = 0; line < 192; line += 64) __builtin_prefetch(reader.from + 1024 + line, 0, 3);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      vf both[Reader<bf16c12>::VECS];
      reader.load_one(reader.from, i, both);
#pragma GCC unroll 8
      for (int v = 0; v < PANEL / VL; v++) {
        store_bytes(to + (2 * i * PANEL + v * VL) * 4, (vi32)both[v] << 16);
        store_bytes(to + ((2 * i + 1) * PANEL + v * VL) * 4, (vi32)both[v] & (int32_t)0xffff0000);
      }
    }
    reader.skip(2);
  }
  const Outlier* e = list(panel, units);
  for (int i = 0, count = bf16c12::outliers(panel); i < count; i++) {
    const long k = e[i].at / PANEL - first;
    if (k >= 0 && k < n) memcpy(buffer + (k * PANEL + e[i].at % PANEL) * 4, &e[i].value, 4);
  }
  return buffer;
}

}  // namespace npu
