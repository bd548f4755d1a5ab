// The register tile shared by gemm, conv and attention: P positions x TILE_VECS registers of output columns.
//
//   acc[p][c] = sum over taps t, units k:  x[taps[t] + off[p] + UNIT * k] * w[t * len + k][c]
//
// A unit is UNIT bytes of x: 4 (one float, a pair of bf16, or four uint8), a double, or four 16-bit integers. Weights are stored in panels of
// 32 columns:
//   F32   [K][32] float      F16W  [K][32] f16, widened in registers      BF16P  [K/2][32][2] bf16
//   U8S8  [K/4][32][4] int8, whose sums are int32; their bits are in the lanes of float vectors
//   F64   [K][32] double, whose sums are double
// Sizes are run-time arguments, so all shapes of a program share one instantiation per (kind, P).
#pragma once
#include "int8_dot.h"
#include "pool.h"
#include "simd.h"
#include "storage.h"

namespace npu {

constexpr long min_of(long a, long b) { return a < b ? a : b; }
constexpr long max_of(long a, long b) { return a > b ? a : b; }
constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }
constexpr long align64(long bytes) { return (bytes + 63) / 64 * 64; }

// Units in one chain of additions. With float operands and results, rounding in the sum is the dominant error; short
// chains reduce it to that of the best libraries. With 16-bit results the rounding of the result dominates.
constexpr int SEGMENT_F32 = 96, SEGMENT_16 = 1 << 30;
#if NPU_AVX512
constexpr int TILE_VECS = 2, TILE_ROWS = 14;  // 28 accumulators + 2 weights + 1 broadcast of 32 registers
#elif NPU_AVX2
constexpr int TILE_VECS = 2, TILE_ROWS = 6;  // 12 + 2 + 1 of 16
#elif NPU_NEON
constexpr int TILE_VECS = 4, TILE_ROWS = 6;  // 24 + 4 + 1 of 32
#else
constexpr int TILE_VECS = 2, TILE_ROWS = 5;
#endif
constexpr int TILE_COLS = TILE_VECS * VL;

// What the tiles of a panel have in common. What differs are arguments, which stay in registers: a structure that is
// filled in for each tile is read back through the store buffer, behind the sums of the tile before.
struct TileArgs {
  const char* x;
  const long* taps;  // byte offset of each tap
  int ntaps, len;    // len: units per tap
  int segment;       // units that are summed before they are added to the sums
  bool add = false;  // add to the contents of the sums
};
// Weights to prefetch into L2, one step for every two units.
struct Prefetch {
  const char* from;
  long step;  // bytes; 0 prefetches nothing
};
// off: byte offset of each position; acc: [P][PANEL] sums.
typedef void (*TileFn)(const TileArgs& a, const int32_t* off, const char* w, void* acc, Prefetch ahead);

template <class Sum = float> NPU_INLINE Sum unit(const char* p) {
  Sum x;
  memcpy(&x, p, sizeof x);
  return x;
}

// acc += w * x in place. Inline assembly, because gcc 12 otherwise mixes in FMA forms that overwrite a factor, which
// costs register moves and spills in a tile that fills the register file.
NPU_INLINE void mul_add(vf& acc, vf w, vf x) {
#if NPU_AVX512 || NPU_AVX2
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#else
  acc = fma(w, x, acc);
#endif
}
NPU_INLINE void mul_add(half_vd& acc, half_vd w, half_vd x) {
#if NPU_AVX512 || NPU_AVX2
  __asm__("vfmadd231pd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#else
  acc = fma(w, x, acc);
#endif
}

// The sums of a kind of operands, a register of them, and the bytes of a unit of x, which splat_unit() loads into all
// lanes.
struct FloatSums {
  using Sum = float;
  using Vec = vf;
  static constexpr int UNIT = 4;
  static constexpr bool INTEGERS = false;      // whether the sums are int32
  static constexpr bool STEPS_UNITS = false;   // whether the kind itself multiplies the units of a tile's rows
  static constexpr bool WHOLE_BLOCKS = false;  // whether a unit is a sub-block of a weight format (words.h)
  NPU_INLINE vf splat_unit(const char* x) { return splat<vf>(unit(x)); }
};
struct DoubleSums {
  using Sum = double;
  using Vec = half_vd;
  static constexpr int UNIT = 8;
  static constexpr bool INTEGERS = false, STEPS_UNITS = false, WHOLE_BLOCKS = false;
  NPU_INLINE half_vd splat_unit(const char* x) {
#if NPU_AVX512
    return (half_vd)_mm512_set1_pd(unit<double>(x));
#elif NPU_AVX2
    return (half_vd)_mm256_set1_pd(unit<double>(x));
#else
    return unit<double>(x) - half_vd{};
#endif
  }
};
template <class Kind> constexpr int LANES = sizeof(typename Kind::Vec) / sizeof(typename Kind::Sum);

struct F32 : FloatSums {
  static constexpr int W_BYTES = PANEL * 4;  // bytes of one unit of a panel
  static constexpr int X_PER_UNIT = 1;
  NPU_INLINE vf weights(const char* w, int v) { return load_bytes<vf>(w + v * VL * 4); }
  NPU_INLINE vf ones() { return splat<vf>(1.0f); }  // a unit of weights 1
  NPU_INLINE void step(vf& acc, vf w, vf x) { mul_add(acc, w, x); }
};

struct BF16F : F32 {};  // rows of bf16, widened

struct F16W : FloatSums {
  static constexpr int W_BYTES = PANEL * 2;
  static constexpr int X_PER_UNIT = 1;
  NPU_INLINE vf weights(const char* w, int v) { return ld((const f16*)w + v * VL, Full{}); }
  NPU_INLINE void step(vf& acc, vf w, vf x) { mul_add(acc, w, x); }
};

struct BF16P : FloatSums {
  static constexpr int W_BYTES = PANEL * 4;
  static constexpr int X_PER_UNIT = 2;
  NPU_INLINE vf weights(const char* w, int v) { return load_bytes<vf>(w + v * VL * 4); }
  NPU_INLINE vf ones() { return (vf)(vi32{} + 0x3f803f80); }
  NPU_INLINE void step(vf& acc, vf w, vf x) {
#if defined(__AVX512BF16__) && NPU_AVX512
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && NPU_NEON
    // Rounds as the code below does. BFDOT and BFMMLA would flush subnormals.
    const bfloat16x8_t ws = (bfloat16x8_t)w, xs = (bfloat16x8_t)x;
    acc = (vf)vbfmlaltq_f32(vbfmlalbq_f32((float32x4_t)acc, ws, xs), ws, xs);
#else
    mul_add(acc, (vf)((vi32)w << 16), (vf)((vi32)x << 16));
    mul_add(acc, (vf)((vi32)w & (int32_t)0xffff0000), (vf)((vi32)x & (int32_t)0xffff0000));
#endif
  }
};

struct U8S8 : FloatSums {
  static constexpr int W_BYTES = PANEL * 4;
  static constexpr int X_PER_UNIT = 4;
  static constexpr bool INTEGERS = true;
  NPU_INLINE vf weights(const char* w, int v) { return load_bytes<vf>(w + v * VL * 4); }
  NPU_INLINE void step(vf& acc, vf w, vf x) {
    vi32 sums = (vi32)acc;
    dot_u8s8(sums, (vi32)x, (vi32)w);
    acc = (vf)sums;
  }
};

#if !NPU_INT8_DOT
// The same weights, for rows that are widened to 16-bit integers. A unit of x is two pairs.
struct U8S8W : FloatSums {
  static constexpr int UNIT = 8, W_BYTES = PANEL * 4, X_PER_UNIT = 4;
  static constexpr bool INTEGERS = true, STEPS_UNITS = true;

  // Bytes 2u and 2u + 1 of each lane, sign-extended.
  NPU_INLINE vi32 pair(vi32 w, int u) {
    const int low = 0x01800080 + 0x02000200 * u;
    const __m128i order = _mm_setr_epi32(low, low + 0x04000400, low + 0x08000800, low + 0x0c000c00);
#if NPU_AVX512
    return (vi32)_mm512_srai_epi16(_mm512_shuffle_epi8((__m512i)w, _mm512_broadcast_i32x4(order)), 8);
#else
    return (vi32)_mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)w, _mm256_broadcastsi128_si256(order)), 8);
#endif
  }
  template <int P, int V> NPU_INLINE void step_unit(vf (&acc)[P][V], const char* const (&xp)[P], long xk, const char* w) {
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++) {
      vi32 wv[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) wv[v] = pair(load_bytes<vi32>(w + v * VL * 4), u);
#pragma GCC unroll 14
      for (int p = 0; p < P; p++) {
        const vi32 x = (vi32)splat_unit(xp[p] + xk + 4 * u);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          vi32 sums = (vi32)acc[p][v];
          dot_words(sums, wv[v], x);
          acc[p][v] = (vf)sums;
        }
      }
    }
  }
};
#endif

struct F64 : DoubleSums {
  static constexpr int W_BYTES = PANEL * 8;
  static constexpr int X_PER_UNIT = 1;
  NPU_INLINE half_vd weights(const char* w, int v) { return load_bytes<half_vd>(w + v * sizeof(half_vd)); }
  NPU_INLINE void step(half_vd& acc, half_vd w, half_vd x) { mul_add(acc, w, x); }
};

// Adds two vectors of sums.
template <class Kind> NPU_INLINE typename Kind::Vec add_sums(typename Kind::Vec a, typename Kind::Vec b) {
  if constexpr (Kind::INTEGERS) return (vf)((vi32)a + (vi32)b);
  else return a + b;
}

template <class Kind, int P, int V>
NPU_INLINE void tile_step(typename Kind::Vec (&acc)[P][V], const char* const (&xp)[P], long xk, const char* w) {
  if constexpr (Kind::STEPS_UNITS) {
    Kind::step_unit(acc, xp, xk, w);
  } else {
    typename Kind::Vec wv[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) wv[v] = Kind::weights(w, v);
#pragma GCC unroll 14
    for (int p = 0; p < P; p++) {
      const typename Kind::Vec x = Kind::splat_unit(xp[p] + xk);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) Kind::step(acc[p][v], wv[v], x);
    }
  }
}

// Stores acc to `to`, or adds it if `add`.
template <class Kind, int P, int V>
NPU_INLINE void add_to(void* sums, const typename Kind::Vec (&acc)[P][V], bool add) {
  using Vec = typename Kind::Vec;
  typename Kind::Sum* to = (typename Kind::Sum*)sums;
  if (add) {
#pragma GCC unroll 14
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        typename Kind::Sum* q = to + p * PANEL + v * LANES<Kind>;
        store_bytes(q, add_sums<Kind>(acc[p][v], load_bytes<Vec>(q)));
      }
  } else {
#pragma GCC unroll 14
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store_bytes(to + p * PANEL + v * LANES<Kind>, acc[p][v]);
  }
}

// STREAM: the weights are read once, so all of them are prefetched, starting at ahead.from. V: vectors of a row that are
// computed.
template <class Kind, int P, bool STREAM = false, int V = TILE_VECS>
NPU_NOINLINE void tile(const TileArgs& a, const int32_t* off, const char* w, void* sums, Prefetch ahead) {
  using Vec = typename Kind::Vec;
  constexpr long UNIT = Kind::UNIT;
  Vec acc[P][V];
  bool partial = a.add;  // `sums` holds the sums of earlier segments
  int remaining = a.segment;
#pragma GCC unroll 14
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[p][v] = Vec{};
  for (int t = 0; t < a.ntaps; t++) {
    const char* xp[P];
#pragma GCC unroll 14
    for (int p = 0; p < P; p++) xp[p] = a.x + a.taps[t] + off[p];
    for (long k = 0, end; k < a.len;) {
      if (remaining <= 0) {
        add_to<Kind>(sums, acc, partial);
        partial = true;
        remaining = a.segment;
#pragma GCC unroll 14
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) acc[p][v] = Vec{};
      }
      end = min_of(a.len, k + remaining);
      remaining -= (int)(end - k);
      for (; k + 4 <= end; k += 4) {
        if constexpr (STREAM) {
#pragma GCC unroll 8
          for (int line = 0; line < 4 * Kind::W_BYTES; line += 64) __builtin_prefetch(ahead.from + line, 0, 2);
        } else {
          __builtin_prefetch(ahead.from, 0, 2);
          __builtin_prefetch(ahead.from + ahead.step, 0, 2);
        }
        tile_step<Kind>(acc, xp, k * UNIT, w);
        tile_step<Kind>(acc, xp, k * UNIT + UNIT, w + Kind::W_BYTES);
        tile_step<Kind>(acc, xp, k * UNIT + 2 * UNIT, w + 2 * Kind::W_BYTES);
        tile_step<Kind>(acc, xp, k * UNIT + 3 * UNIT, w + 3 * Kind::W_BYTES);
        w += 4 * Kind::W_BYTES;
        ahead.from += STREAM ? 4 * Kind::W_BYTES : 2 * ahead.step;
      }
      for (; k < end; k++, w += Kind::W_BYTES) tile_step<Kind>(acc, xp, k * UNIT, w);
    }
  }
  add_to<Kind>(sums, acc, partial);
}

// Q positions as the fewest tiles of nearly equal height: `tall` tiles of `rows + 1` positions, then tiles of `rows`.
// N: columns. The functions for narrow tiles compute one vector of a row: the last columns may need no more.
struct Tiling {
  TileFn tall_fn, fn, tall_narrow, narrow;
  int tall, count, rows;
};
template <class Kind, long Q, bool STREAM = false, long N = 0> NPU_INLINE Tiling tiling() {
  constexpr int count = (int)((Q + TILE_ROWS - 1) / TILE_ROWS), rows = (int)(Q / count), tall = (int)(Q % count);
  constexpr int high = rows + (tall > 0), LAST = (int)(N % (TILE_VECS * LANES<Kind>));
  constexpr int V = LAST > 0 && LAST <= LANES<Kind> ? 1 : TILE_VECS;
  return {tile<Kind, high, STREAM>, tile<Kind, rows, STREAM>, tile<Kind, high, STREAM, V>, tile<Kind, rows, STREAM, V>,
          tall, count, rows};
}

// Prefetches the elements of a panel in one row into L2. L1 would not keep them if rows are a multiple of 4096 bytes
// apart.
template <class T> NPU_INLINE void prefetch_panel(const T* row) {
#pragma GCC unroll 4
  for (long at = 0; at < PANEL * (long)sizeof(T); at += 64) __builtin_prefetch((const char*)row + at, 0, 2);
}

// Prefetches what the epilogue of `rows` rows of a panel reads and writes, so that its stores wait for no cache line.
template <class Epi> NPU_INLINE void prefetch_epilogue(int rows, long row, long col, const Epi& epi) {
  for (int p = 0; p < rows; p++) epi.prefetch(row + p, col);
}

// Applies the epilogue to `rows` rows of a panel of sums. N is the number of columns of a group, col the panel's first
// column in its group, shift the group's first column. The sums of the second of two products are `second` floats after
// those of the first.
template <long N, bool DUAL = false, class Sum, class Epi>
NPU_INLINE void apply_epilogue(const Sum* acc, long second, int rows, long row, long col, long shift,
                               const Epi& from) {
  using Vec = vec<Sum>;
  const Epi epi = from;  // a local copy stays in registers: stores of bytes could change an object in memory
  const bool whole = N % PANEL == 0 || col + PANEL <= N;
  auto apply = [&](const auto& columns, int v) __attribute__((always_inline)) {
    if constexpr (DUAL) columns(load_bytes<Vec>(acc + v), load_bytes<Vec>(acc + second + v), row);
    else columns(load_bytes<Vec>(acc + v), row);
  };
#if NPU_PAIRED_STORES
  static_assert(PANEL == 2 * VL, "a row of a panel is two vectors");
  if (whole) {
    vf first;
    const auto even = epi.at(shift + col, FirstOfTwo{{}, &first});
    const auto odd = epi.at(shift + col + VL, SecondOfTwo{{}, &first});
    for (int p = 0; p < rows; p++, acc += PANEL, row++) apply(even, 0), apply(odd, VL);
    return;
  }
#endif
  for (int p = 0; p < rows; p++, acc += PANEL, row++) {
    if (whole) {
#pragma GCC unroll 8
      for (int v = 0; v < PANEL; v += VL) apply(epi.at(shift + col + v, Full{}), v);
    } else {
      for (int v = 0; v < PANEL && col + v < N; v += VL) {
        if (col + v + VL <= N) apply(epi.at(shift + col + v, Full{}), v);
        else apply(epi.at(shift + col + v, (int)(N - col - v)), v);
      }
    }
  }
}

}  // namespace npu
