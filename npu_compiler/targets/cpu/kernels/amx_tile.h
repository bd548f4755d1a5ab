// Matrix products on AMX tiles, for operands in pairs of bf16 (BF16P) or in bytes (amx_int8.h). amx_blocked.h and
// amx_gemm.h are the drivers.
//
// Weights are the panels that the vector kernels read: 16 units of a panel, [16][32][2] bf16 with 128 bytes per unit,
// are two B tiles in VNNI order. A tile of A has 16 positions, `pitch` bytes apart, and up to 16 units of each. Two
// tiles of A and two of B make 32 positions x 32 columns of sums, in four tiles.
#pragma once
#include "amx.h"
#include "tile.h"

#if NPU_AMX
namespace npu {

constexpr long AMX_ROWS = 16, AMX_UNITS = 16;  // most positions of a tile, and its most units of the reduced dim
constexpr long AMX_LEAST_ROWS = 8;             // products of tiles with fewer positions take no less time

// Units of the reduced dim as steps of equal size. `padded`: the last step has more units than remain.
struct AmxSteps {
  long units, count;
  bool padded;
};
constexpr AmxSteps amx_steps(long units) {
  const long count = ceil_div(units, AMX_UNITS), step = ceil_div(units, count);
  return {step, count, step * count != units};
}

// The sums of a pair of tiles and of neighbouring panels that wait for the epilogue: of `count` positions, whose output
// rows are row + rows[i].
// run(sums, epi, n) applies it to the next n positions, which begin with `next`.
struct AmxSums {
  void (*run)(AmxSums& s, const void* epi, int n);
  const void* epi;
  const float* sums;
  const int32_t* rows;
  int next = 0, count = 0, panels = 1;
  long row = 0, col = 0, shift = 0;
  // Output rows that wait next, and their column: run() prefetches what their epilogue reads and writes.
  const int32_t* after = nullptr;
  int after_count = 0;
  long after_col = 0;
};

// A tap: its byte offset in x, and its number, which is its place in the weights.
struct AmxTap { long x, number; };

// Work on the weights of other tiles, of which run() does a share between the products of these. amx_tile() keeps it in
// registers.
struct NoAmxWork {
  __attribute__((always_inline)) void run() {}
};

struct AmxArgs {
  const char* x;       // the first position of the first tile
  long second, pitch;  // bytes to the first position of the second tile, and between two positions
  const AmxTap* taps;
  int ntaps, steps;    // steps per tap
  long x_step;         // bytes of a position in a step
  const char* w;
  long w_step;  // bytes of a panel in a step
  float* acc;   // [2 * AMX_ROWS][PANEL]
  bool add;     // add to the contents of acc
  const char* prefetch;  // weights or rows to prefetch into L2: `lines` cache lines in each step
  int lines;
  AmxSums* waiting = nullptr;  // sums of other tiles, whose epilogue runs between the products of these
  int rows = 0;                // positions of `waiting` in each step
  long w_tap = 0;              // bytes of a panel in a tap
  // The first step of the next call, whose tiles are loaded before the sums are stored: its products wait for neither.
  const char *next_x = nullptr, *next_w = nullptr;
  long next_second = 0;  // -1: it has one tile
  bool loaded = false;   // the first step of this call has been loaded
  int part = 0;          // steps of a part of the sums of three limbs (AMX_PART)
};

// Whether the products of a plan are those of integers (amx_int8.h), whose sums are int32.
template <class Plan> constexpr bool amx_integers = false;

template <bool INTEGERS, int C, int A, int B> NPU_INLINE void amx_product() {
  if constexpr (INTEGERS) Amx::dpbusd<C, A, B>();
  else Amx::dpbf16ps<C, A, B>();
}

// Products of limbs of x and of the weights (amx_limbs.h). Neighbours share one of the two, which stays loaded.
template <int LIMBS> struct AmxLimbs { static constexpr int COUNT = 1, X[] = {0}, W[] = {0}; };
template <> struct AmxLimbs<2> { static constexpr int COUNT = 3, X[] = {1, 0, 0}, W[] = {0, 0, 1}; };
template <> struct AmxLimbs<3> {
  static constexpr int COUNT = 6, X[] = {2, 1, 1, 0, 0, 0}, W[] = {0, 0, 1, 1, 2, 0};
};
constexpr long AMX_X_LIMB = AMX_UNITS * 4, AMX_W_LIMB = AMX_UNITS * BF16P::W_BYTES;  // bytes

// The operands that are loaded without a place in L1, which the other one, or other data, then keeps for its next use.
enum AmxStream { STREAM_NONE, STREAM_X, STREAM_W, STREAM_BOTH };
constexpr bool streams_x(AmxStream s) { return s == STREAM_X || s == STREAM_BOTH; }
constexpr bool streams_w(AmxStream s) { return s == STREAM_W || s == STREAM_BOTH; }
template <int T, bool STREAMED> NPU_INLINE void amx_load(const char* p, long pitch) {
  if constexpr (STREAMED) Amx::stream<T>(p, pitch);
  else Amx::load<T>(p, pitch);
}

// Loads the operands of a step: tiles 4 and 5 at x, and at x + second if this is not negative, 6 and 7 at w.
template <AmxStream STREAM> NPU_INLINE void amx_operands(const char* x, long second, long pitch, const char* w) {
  amx_load<6, streams_w(STREAM)>(w, PANEL * 4);
  amx_load<4, streams_x(STREAM)>(x, pitch);
  amx_load<7, streams_w(STREAM)>(w + 64, PANEL * 4);
  if (second >= 0) amx_load<5, streams_x(STREAM)>(x + second, pitch);
}

// The products of a step whose operands are loaded. Loads those of the next step, if `w` is not null, each as soon as
// the last product has read its tile.
template <int TILES, bool INTEGERS, AmxStream STREAM>
NPU_INLINE void amx_loaded_step(const char* x, long second, long pitch, const char* w) {
  amx_product<INTEGERS, 0, 4, 6>();
  amx_product<INTEGERS, 1, 4, 7>();
  if (w) amx_load<4, streams_x(STREAM)>(x, pitch);
  if constexpr (TILES == 2) amx_product<INTEGERS, 2, 5, 6>();
  if (w) amx_load<6, streams_w(STREAM)>(w, PANEL * 4);
  if constexpr (TILES == 2) amx_product<INTEGERS, 3, 5, 7>();
  if (w && second >= 0) amx_load<5, streams_x(STREAM)>(x + second, pitch);
  if (w) amx_load<7, streams_w(STREAM)>(w + 64, PANEL * 4);
}

// One step: adds the products of the tiles at x, and x + second, and those at w. Calls between(last) after each pair of
// limbs.
template <int TILES, bool INTEGERS, int LIMBS, AmxStream STREAM, bool LOADED = false, int I = 0, class Between>
NPU_INLINE void amx_step(const char* x, long second, long pitch, const char* w, const Between& between) {
  using P = AmxLimbs<LIMBS>;
  constexpr int LAST = I > 0 ? I - 1 : 0;
  constexpr bool NEW_X = !LOADED && (I == 0 || P::X[I] != P::X[LAST]);
  constexpr bool NEW_W = !LOADED && (I == 0 || P::W[I] != P::W[LAST]);
  const char *from = x + P::X[I] * AMX_X_LIMB, *units = w + P::W[I] * AMX_W_LIMB;
  if constexpr (NEW_W) amx_load<6, streams_w(STREAM)>(units, PANEL * 4);
  if constexpr (NEW_X) amx_load<4, streams_x(STREAM)>(from, pitch);
  amx_product<INTEGERS, 0, 4, 6>();
  if constexpr (NEW_W) amx_load<7, streams_w(STREAM)>(units + 64, PANEL * 4);
  amx_product<INTEGERS, 1, 4, 7>();
  if constexpr (TILES == 2) {
    if constexpr (NEW_X) amx_load<5, streams_x(STREAM)>(from + second, pitch);
    amx_product<INTEGERS, 2, 5, 6>();
    amx_product<INTEGERS, 3, 5, 7>();
  }
  between(I + 1 == P::COUNT);
  if constexpr (I + 1 < P::COUNT) amx_step<TILES, INTEGERS, LIMBS, STREAM, LOADED, I + 1>(x, second, pitch, w, between);
}

// The sums of TILES tiles of positions, in tiles 0 to 3.
template <int TILES> NPU_INLINE void amx_zero_sums() {
  Amx::zero<0>(), Amx::zero<1>();
  if constexpr (TILES == 2) Amx::zero<2>(), Amx::zero<3>();
}
template <int TILES> NPU_INLINE void amx_store_sums(float* acc) {
  constexpr long ACC = PANEL * 4;
  float* low = acc + AMX_ROWS * PANEL;
  Amx::store<0>(acc, ACC);
  Amx::store<1>(acc + AMX_ROWS, ACC);
  if constexpr (TILES == 2) Amx::store<2>(low, ACC), Amx::store<3>(low + AMX_ROWS, ACC);
}

// The most steps whose products of three limbs are added up in tiles: a part of the sums, which are in memory. Each
// product is one more rounded addition to a tile, six in a step. In one chain, a 3x3 convolution of 256 channels has twice
// the error of float arithmetic. The error of a part grows with the root of its steps. Sums of half numbers have no parts:
// their results are rounded to 11 bits.
constexpr int AMX_PART = 12;

template <int TILES> NPU_INLINE void amx_add_part(float* acc, bool first) {
  if (first) {
    amx_store_sums<TILES>(acc);
    return;
  }
  alignas(64) float part[TILES * AMX_ROWS * PANEL];
  amx_store_sums<TILES>(part);
  for (long i = 0; i < TILES * AMX_ROWS * PANEL; i += VL)
    store_bytes(acc + i, load_bytes<vf>(acc + i) + load_bytes<vf>(part + i));
}

// EARLY: load the operands of a step between the products of the step before.
template <int TILES, bool INTEGERS = false, int LIMBS = 1, AmxStream STREAM = STREAM_NONE, bool EARLY = false,
          class Work = NoAmxWork>
NPU_NOINLINE void amx_tile(const AmxArgs& a, Work& ahead) {
  constexpr long ACC = PANEL * 4;
  if (a.add) {
    const float* low = a.acc + AMX_ROWS * PANEL;
    Amx::load<0>(a.acc, ACC);
    Amx::load<1>(a.acc + AMX_ROWS, ACC);
    if constexpr (TILES == 2) Amx::load<2>(low, ACC), Amx::load<3>(low + AMX_ROWS, ACC);
  } else {
    amx_zero_sums<TILES>();
  }
  const char* prefetch = a.prefetch;
  const long pitch = a.pitch, second = a.second, x_step = a.x_step, w_step = a.w_step;
  const int steps = a.steps, lines = a.lines;
  AmxSums* waiting = a.rows ? a.waiting : nullptr;
  bool first_part = true;
  Work work = ahead;
  auto between = [&](bool last) __attribute__((always_inline)) {
    for (int line = 0; last && line < lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
    if (last && waiting && waiting->next < waiting->count) waiting->run(*waiting, waiting->epi, a.rows);
    work.run();
  };
  if constexpr (EARLY) {
    const long low_x = TILES == 2 ? second : -1;
    const char *x = a.x + a.taps[0].x, *w = a.w + a.taps[0].number * a.w_tap;
    if (!a.loaded) amx_operands<STREAM>(x, low_x, pitch, w);
    for (int t = 1; t <= a.ntaps; t++) {
      for (int s = 1; s < steps; s++) {
        x += x_step, w += w_step;
        amx_loaded_step<TILES, INTEGERS, STREAM>(x, low_x, pitch, w);
        between(true);
      }
      if (t == a.ntaps) break;
      x = a.x + a.taps[t].x, w = a.w + a.taps[t].number * a.w_tap;
      amx_loaded_step<TILES, INTEGERS, STREAM>(x, low_x, pitch, w);
      between(true);
    }
    amx_loaded_step<TILES, INTEGERS, STREAM>(a.next_x, a.next_second, pitch, a.next_w);
    between(true);
  } else {
    bool loaded = LIMBS == 1 && a.loaded;
    int part_steps = 0;
    for (int t = 0; t < a.ntaps; t++) {
      const char *x = a.x + a.taps[t].x, *w = a.w + a.taps[t].number * a.w_tap;
      for (int s = 0; s < steps; s++, x += x_step, w += w_step) {
        if (LIMBS == 3 && part_steps++ == a.part) {
          amx_add_part<TILES>(a.acc, first_part);
          amx_zero_sums<TILES>();
          first_part = false, part_steps = 1;
        }
        if (loaded) amx_step<TILES, INTEGERS, 1, STREAM, true>(x, second, pitch, w, between);
        else amx_step<TILES, INTEGERS, LIMBS, STREAM>(x, second, pitch, w, between);
        loaded = false;
      }
    }
    if (a.next_w) amx_operands<STREAM>(a.next_x, a.next_second, pitch, a.next_w);
  }
  amx_add_part<TILES>(a.acc, first_part);
  ahead = work;
}
template <bool INTEGERS, int LIMBS, AmxStream STREAM, bool EARLY, class Work>
NPU_INLINE void amx_pair(bool two, const AmxArgs& a, Work& ahead) {
  if (two) amx_tile<2, INTEGERS, LIMBS, STREAM, EARLY>(a, ahead);
  else amx_tile<1, INTEGERS, LIMBS, STREAM, EARLY>(a, ahead);
}

}  // namespace npu
#endif
