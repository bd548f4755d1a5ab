// Storage of weights in panels of 32 columns, and readers of it. A panel has the layout that the register tile reads
// (Plain), or a weight format. A product of few rows decodes a format in registers; a product of many rows unpacks each
// panel once.
//
// A unit is 4 bytes of the left operand (or a double) and the weights they are multiplied by: one element of the reduced
// dim, or a pair of bf16. A storage has
//   PLAIN                                  whether the tile reads a panel without unpacking it
//   ODD_UNITS                              whether a panel may have an odd number of units
//   UNIT_BYTES, panel_bytes(units)         sizes
//   BLOCK_UNITS                            0, or how many units share one scale(panel, units, block, v)
//   at(panel, unit)                        the address from which a unit is prefetched
//   unpack(panel, units, first, n, buffer) units first .. first + n in the layout of the tile; buffer: n * 128 bytes
//   add_outliers<M>(rows, panel, acc)      unless PLAIN: adds the weights that the units omit to acc[M][PANEL], for a
//                                          product of M rows (GemvArgs)
// and a Reader<Storage>, made by of(panel). load(u, w), only if ODD_UNITS, reads the unit u units after the current one
// into registers; load2(u, w) reads that unit and the next. skip(units) advances; `from` is the address of the current
// unit.
//
// A weight format F is a struct of that name; F::Storage<Kind> is its storage for the operands of a Kind (tile.h). A
// format whose elements can be read as floats one by one uses the storage Values.
#pragma once
#include "pairs.h"
#include "simd.h"

namespace npu {

constexpr int PANEL = 32;

template <class Format> struct stored { uint8_t byte; };  // element type of pointers to weights in a format

template <class Storage> struct Reader;

template <class Kind> struct Plain {
  static constexpr bool PLAIN = true, ODD_UNITS = true, HAS_BASE = false;
  static constexpr int UNIT_BYTES = Kind::W_BYTES, BLOCK_UNITS = 0;
  static constexpr long panel_bytes(long units) { return units * UNIT_BYTES; }
  NPU_INLINE const char* at(const char* panel, long unit) { return panel + unit * UNIT_BYTES; }
  NPU_INLINE const char* unpack(const char* panel, long, long first, long, char*) { return at(panel, first); }
};

template <class Kind> struct Reader<Plain<Kind>> {
  using Vec = typename Kind::Vec;
  static constexpr int VECS = PANEL * sizeof(typename Kind::Sum) / sizeof(Vec);
  const char* from;
  NPU_INLINE Reader of(const char* panel) { return {panel}; }
  __attribute__((always_inline)) void load(int u, Vec (&w)[VECS]) const {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) w[v] = Kind::weights(from + u * Kind::W_BYTES, v);
  }
  __attribute__((always_inline)) void load2(int u, Vec (&w)[2][VECS]) const {
    load(u, w[0]);
    load(u + 1, w[1]);
  }
  __attribute__((always_inline)) void skip(int units) { from += units * Kind::W_BYTES; }
};

// The storage of a format whose elements are read one by one. Format defines HEAD_BYTES in front of a panel's elements,
// K_BYTES for each element of the reduced dim (all 32 columns), panel_bytes(k), and
//   value(panel, k, v)              element k of the VL columns from v * VL on, as floats
// For bf16 operands, values are rounded to nearest even, like weights that are stored in no format. If BLOCK is not 0,
// value() returns numbers that are exact in bf16, and an element is such a number times
//   scale(panel, length, block, v)  one scale per column, for BLOCK elements of the reduced dim of `length`
//   numbers(bytes)                  optional: the values of 16 bytes, if a value is a byte
// plus, if BASED, base(panel, length, block, v).
#if NPU_BF16_PAIRS
template <class Format> constexpr auto has_numbers(int) -> decltype(Format::numbers(__m128i{}), true) { return true; }
template <class Format> constexpr bool has_numbers(...) { return false; }
#endif
template <class Format, class Kind, bool BASED = false> struct Values {
  static constexpr bool PLAIN = false, ODD_UNITS = true, HAS_BASE = BASED;
  static constexpr int DEPTH = Kind::X_PER_UNIT, UNIT_BYTES = Format::K_BYTES * DEPTH, VECS = PANEL / VL;
  static constexpr int BLOCK_UNITS = Format::BLOCK / DEPTH;
  static constexpr long panel_bytes(long units) { return Format::panel_bytes(units * DEPTH); }
  NPU_INLINE const char* at(const char* panel, long unit) { return panel + Format::HEAD_BYTES + unit * UNIT_BYTES; }
  NPU_INLINE vf weights(const char* panel, long unit, int v) {
    if constexpr (DEPTH == 1) return Format::value(panel, unit, v);
    else {
      const vf even = Format::value(panel, 2 * unit, v), odd = Format::value(panel, 2 * unit + 1, v);
      if constexpr (BLOCK_UNITS > 0) return (vf)((vi32)even >> 16 & 0xffff | (vi32)odd);
      else return rounded(even, odd);
    }
  }
  using Encoding = Format;
  NPU_INLINE const char* fields(const char* panel, long units, long block) {
    return Format::fields(panel, units * DEPTH, block);
  }
  NPU_INLINE vf scale(const char* panel, long units, long block, int v) {
    return Format::scale(panel, units * DEPTH, block, v);
  }
  NPU_INLINE vf base(const char* panel, long units, long block, int v) {
    return Format::base(panel, units * DEPTH, block, v);
  }
#if NPU_BF16_PAIRS
  // Units first .. first + n of one block.
  NPU_INLINE void unpack_pairs(const char* panel, const vf (&s)[VECS], const vf (&low)[VECS], long first, long n,
                               char* to) {
    vf scales[2][2], bases[2][2];
    for (int v = 0; v < 2; v++) twice(s[v], scales[v]), twice(low[v], bases[v]);
    store_pairs_of(panel, scales, bases, first, n, to);
  }
  NPU_INLINE void store_pairs_of(const char* panel, const vf (&scales)[2][2], const vf (&bases)[2][2], long first,
                                 long n, char* to) {
    for (long unit = first; unit < first + n; unit++, to += 2 * VL * 4) {
      const char* from = at(panel, unit);
      __builtin_prefetch(from + 1024, 0, 3);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const __m128i even = _mm_loadu_si128((const __m128i*)(from + v * VL));
        const __m128i odd = _mm_loadu_si128((const __m128i*)(from + PANEL + v * VL));
        vf w[2] = {Format::numbers(_mm_unpacklo_epi8(even, odd)), Format::numbers(_mm_unpackhi_epi8(even, odd))};
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++)
          w[part] = HAS_BASE ? w[part] * scales[v][part] + bases[v][part] : w[part] * scales[v][part];
        store_pairs(to + v * VL * 4, w[0], w[1]);
      }
    }
  }
#endif
  // Units first .. first + n of one block, whose scales and bases are given.
  NPU_INLINE void unpack_block(const char* panel, const vf (&s)[VECS], const vf (&low)[VECS], long first, long n,
                               char* to) {
    for (long unit = first; unit < first + n; unit++, to += PANEL * 4) {
      __builtin_prefetch(at(panel, unit) + 1024, 0, 3);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; v++) {
        vf w = Format::value(panel, unit * DEPTH, v), odd = w;
        if constexpr (DEPTH == 2) odd = Format::value(panel, unit * DEPTH + 1, v);
        if constexpr (BLOCK_UNITS > 0) w *= s[v], odd *= s[v];
        if constexpr (HAS_BASE) w += low[v], odd += low[v];
        store_bytes(to + v * VL * 4, DEPTH == 2 ? rounded(w, odd) : w);
      }
    }
  }
  static NPU_NOINLINE const char* unpack(const char* panel, long units, long first, long n, char* buffer) {
    vf s[VECS] = {}, low[VECS] = {};
    long count;
    for (long u = 0; u < n; u += count) {
      const long unit = first + u;
      count = n - u;
      if constexpr (BLOCK_UNITS > 0) {
        const long block = unit / BLOCK_UNITS, left = (block + 1) * BLOCK_UNITS - unit;
        count = left < count ? left : count;
        for (int v = 0; v < VECS; v++) {
          s[v] = scale(panel, units, block, v);
          if constexpr (HAS_BASE) low[v] = base(panel, units, block, v);
        }
#if NPU_BF16_PAIRS
        if constexpr (DEPTH == 2 && has_numbers<Format>(0))
          if (!is_tiny(s[0]) && !is_tiny(s[1])) {
            unpack_pairs(panel, s, low, unit, count, buffer + u * PANEL * 4);
            continue;
          }
#endif
      }
      unpack_block(panel, s, low, unit, count, buffer + u * PANEL * 4);
    }
    return buffer;
  }
  NPU_INLINE vf rounded(vf even, vf odd) { return (vf)(bf16_lanes(even) | bf16_lanes(odd) << 16); }
  template <int M, class Args> NPU_INLINE void add_outliers(const Args&, const char*, float*) {}
};

template <class Format, class Kind, bool BASED> struct Reader<Values<Format, Kind, BASED>> {
  using Storage = Values<Format, Kind, BASED>;
  static constexpr int VECS = PANEL / VL;
  const char* from;
  const char* panel;
  long first;
  NPU_INLINE Reader of(const char* panel) { return {Storage::at(panel, 0), panel, 0}; }
  __attribute__((always_inline)) void load(int u, vf (&w)[VECS]) const {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) w[v] = Storage::weights(panel, first + u, v);
  }
  __attribute__((always_inline)) void load2(int u, vf (&w)[2][VECS]) const {
    load(u, w[0]);
    load(u + 1, w[1]);
  }
  __attribute__((always_inline)) void skip(int units) { from += units * Storage::UNIT_BYTES, first += units; }
};

// Unpacks a panel, two units a call.
template <class Stored> struct Unpacker {
  const char* panel;
  long units, unit;
  __attribute__((always_inline)) void begin(const char* from, long length, long first) {
    panel = from, units = length, unit = first;
  }
  __attribute__((always_inline)) void next(long n, char* to) {
    if constexpr (Stored::PLAIN) memcpy(to, Stored::at(panel, unit), (size_t)(n * PANEL * 4));
    else Stored::unpack(panel, units, unit, n, to);
    unit += n;
  }
};

#if NPU_BF16_PAIRS
template <class Format, class Kind, bool BASED> struct Unpacker<Values<Format, Kind, BASED>> {
  using Stored = Values<Format, Kind, BASED>;
  const char* panel;
  long units, unit;
  bool tiny;
  vf s[2][2], low[2][2];
  __attribute__((always_inline)) void load_scales() {
    const long block = unit / Stored::BLOCK_UNITS;
    tiny = false;
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const vf scale = Stored::scale(panel, units, block, v);
      tiny |= is_tiny(scale);
      twice(scale, s[v]);
      if constexpr (BASED) twice(Stored::base(panel, units, block, v), low[v]);
    }
  }
  static constexpr bool PAIRS = Stored::DEPTH == 2 && Stored::BLOCK_UNITS > 1 && has_numbers<Format>(0);
  __attribute__((always_inline)) void begin(const char* from, long length, long first) {
    panel = from, units = length, unit = first;
    if constexpr (PAIRS) load_scales();
  }
  __attribute__((always_inline)) void next(long n, char* to) {
    if constexpr (PAIRS) {
      if (unit % Stored::BLOCK_UNITS == 0) load_scales();
      if (!tiny) Stored::store_pairs_of(panel, s, low, unit, n, to);
      else Stored::unpack(panel, units, unit, n, to);
    } else Stored::unpack(panel, units, unit, n, to);
    unit += n;
  }
};
#endif

}  // namespace npu
