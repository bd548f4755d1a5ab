// How panels of 32 weight columns are stored, and how kernels read them: as a tile wants them (Plain), or in a weight
// format, decoded in registers by a product of few rows and written out once by a product of many.
//
// A unit is what meets 4 bytes of the left operand: one element of the reduced dim, or a pair of bf16. A storage has
//   PLAIN                                whether a tile reads a panel as it is
//   ODD_UNITS                            whether a panel may have an odd number of units
//   UNIT_BYTES, panel_bytes(units)       sizes
//   BLOCK_UNITS                          0, or the units whose sum is to be multiplied by scale(panel, units, block, v)
//   at(panel, unit)                      the address from which a unit is prefetched
//   open(panel, units, first, n, room)   units first .. first + n as the tile wants them; room: n * 128 bytes
//   finish<M>(rows, panel, acc)          unless PLAIN: adds what the units leave out to acc[M][PANEL], for a product of
//                                        M rows (GemvArgs)
// and a Reader<Storage>: of(panel), two(u, w) and, if ODD_UNITS, unit(u, w) give the registers of units u (and u + 1)
// from the current one on, skip(units) moves on; `from` is the address of the current unit.
//
// A weight format F is a struct of that name; F::Storage<Kind> is how it meets the operands of a Kind (tile.h). A format
// that can give an element as a float needs no storage of its own: see Values.
#pragma once
#include "simd.h"

namespace npu {

constexpr int PANEL = 32;

template <class Format> struct stored { uint8_t byte; };  // what a pointer to weights in a format points to

template <class Storage> struct Reader;

template <class Kind> struct Plain {
  static constexpr bool PLAIN = true, ODD_UNITS = true;
  static constexpr int UNIT_BYTES = Kind::W_BYTES, BLOCK_UNITS = 0;
  static constexpr long panel_bytes(long units) { return units * UNIT_BYTES; }
  NPU_INLINE const char* at(const char* panel, long unit) { return panel + unit * UNIT_BYTES; }
  NPU_INLINE const char* open(const char* panel, long, long first, long, char*) { return at(panel, first); }
};

template <class Kind> struct Reader<Plain<Kind>> {
  static constexpr int VECS = PANEL / VL;
  const char* from;
  NPU_INLINE Reader of(const char* panel) { return {panel}; }
  __attribute__((always_inline)) void unit(int u, vf (&w)[VECS]) const {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) w[v] = Kind::weights(from + u * Kind::W_BYTES, v);
  }
  __attribute__((always_inline)) void two(int u, vf (&w)[2][VECS]) const {
    unit(u, w[0]);
    unit(u + 1, w[1]);
  }
  __attribute__((always_inline)) void skip(int units) { from += units * Kind::W_BYTES; }
};

// The storage of a format whose elements are read one by one. Format gives HEAD_BYTES in front of a panel's elements,
// K_BYTES for each element of the reduced dim (of all 32 columns), panel_bytes(k), and
//   value(panel, k, v)              element k of the VL columns from v * VL on, as floats
// bf16 operands get them rounded to nearest even, as they get weights that were never in a format. If BLOCK is not 0,
// value() gives whole numbers up to 256, which bf16 holds, and elements are these times
//   scale(panel, length, block, v)  of the columns, for BLOCK elements of the reduced dim, which has `length`
template <class Format, class Kind> struct Values {
  static constexpr bool PLAIN = false, ODD_UNITS = true;
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
  NPU_INLINE vf scale(const char* panel, long units, long block, int v) {
    return Format::scale(panel, units * DEPTH, block, v);
  }
  static NPU_NOINLINE const char* open(const char* panel, long units, long first, long n, char* room) {
    vf s[VECS];
    for (long u = 0; u < n; u++) {
      const long unit = first + u;
      __builtin_prefetch(at(panel, unit) + 1024, 0, 3);
      if constexpr (BLOCK_UNITS > 0) {
        if (u == 0 || unit % BLOCK_UNITS == 0)
          for (int v = 0; v < VECS; v++) s[v] = scale(panel, units, unit / BLOCK_UNITS, v);
      }
#pragma GCC unroll 8
      for (int v = 0; v < VECS; v++) {
        vf w = Format::value(panel, unit * DEPTH, v), odd = w;
        if constexpr (DEPTH == 2) odd = Format::value(panel, unit * DEPTH + 1, v);
        if constexpr (BLOCK_UNITS > 0) w *= s[v], odd *= s[v];
        store_bytes(room + (u * PANEL + v * VL) * 4, DEPTH == 2 ? rounded(w, odd) : w);
      }
    }
    return room;
  }
  NPU_INLINE vf rounded(vf even, vf odd) { return (vf)(bf16_lanes(even) | bf16_lanes(odd) << 16); }
  template <int M, class Args> NPU_INLINE void finish(const Args&, const char*, float*) {}
};

template <class Format, class Kind> struct Reader<Values<Format, Kind>> {
  using Storage = Values<Format, Kind>;
  static constexpr int VECS = PANEL / VL;
  const char* from;
  const char* panel;
  long first;
  NPU_INLINE Reader of(const char* panel) { return {Storage::at(panel, 0), panel, 0}; }
  __attribute__((always_inline)) void unit(int u, vf (&w)[VECS]) const {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) w[v] = Storage::weights(panel, first + u, v);
  }
  __attribute__((always_inline)) void two(int u, vf (&w)[2][VECS]) const {
    unit(u, w[0]);
    unit(u + 1, w[1]);
  }
  __attribute__((always_inline)) void skip(int units) { from += units * Storage::UNIT_BYTES, first += units; }
};

}  // namespace npu
