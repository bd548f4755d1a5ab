// Matrix products on AMX tiles, for operands in pairs of bf16 (BF16P) or in bytes (amx_int8.h). gemm.h and conv.h choose
// the blocks.
//
// Weights are the panels that the vector kernels read: 16 units of a panel, [16][32][2] bf16 with 128 bytes per unit,
// are two B tiles in VNNI order. A tile of A has 16 positions, `pitch` bytes apart, and up to 16 units of each. Two
// tiles of A and two of B make 32 positions x 32 columns of sums, in four tiles.
#pragma once
#include "amx.h"
#include "tile.h"

#if NPU_AMX
namespace npu {

constexpr long AMX_ROWS = 16, AMX_UNITS = 16;  // positions of a tile, and its most units of the reduced dim

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
  long row, col, shift;
};

// A tap: its byte offset in x, and its number, which is its place in the weights.
struct AmxTap { long x, number; };

// The weights of the next tiles (amx_gemm.h, amx_pieces.h), of which run() unpacks a share between products.
struct AmxAhead {
  void (*run)(AmxAhead& a);
  const char* panel = nullptr;
  char* to = nullptr;
  long first = 0, units = 0;  // of each product
  long next = 0, count = 0;   // of all products
  long share = 0, due = 0;    // units that become due in each call, and that are due
  bool finite = true;         // pieces: whether all weights are
  alignas(64) float spoiled[16] = {};

  // Begins with `n` units of each of `products` panels, which `calls` calls of run() unpack.
  void begin(const char* from, char* out, long products, long first_unit, long n, long calls) {
    panel = from, to = out, first = first_unit, units = n, next = due = 0, count = products * n;
    share = ceil_div(count, calls);
  }
  void finish() {
    share = count;
    if (next < count) run(*this);
  }
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
  const char* prefetch;  // weights to prefetch into L2: `lines` cache lines in each step
  int lines;
  AmxSums* waiting = nullptr;  // sums of other tiles, whose epilogue runs between the products of these
  int rows = 0;                // positions of `waiting` in each step
  long w_tap = 0;              // bytes of a panel in a tap
  AmxAhead* ahead = nullptr;   // weights of other tiles, which are unpacked between the products of these
};

// Whether the products of a plan are those of integers (amx_int8.h), whose sums are int32.
template <class Plan> constexpr bool amx_integers = false;

template <bool INTEGERS, int C, int A, int B> NPU_INLINE void amx_product() {
  if constexpr (INTEGERS) Amx::dpbusd<C, A, B>();
  else Amx::dpbf16ps<C, A, B>();
}

// Products of pieces of x and of the weights (amx_pieces.h). Neighbours share one of the two, which stays loaded.
template <int PIECES> struct AmxPieces { static constexpr int COUNT = 1, X[] = {0}, W[] = {0}; };
template <> struct AmxPieces<2> { static constexpr int COUNT = 3, X[] = {1, 0, 0}, W[] = {0, 0, 1}; };
template <> struct AmxPieces<3> {
  static constexpr int COUNT = 6, X[] = {2, 1, 1, 0, 0, 0}, W[] = {0, 0, 1, 1, 2, 0};
};
constexpr long AMX_X_PIECE = AMX_UNITS * 4, AMX_W_PIECE = AMX_UNITS * BF16P::W_BYTES;  // bytes

// The operand that is loaded without a place in L1, which the other one then keeps for its next use.
enum AmxStream { STREAM_NONE, STREAM_X, STREAM_W };
template <int T, bool STREAMED> NPU_INLINE void amx_load(const char* p, long pitch) {
  if constexpr (STREAMED) Amx::stream<T>(p, pitch);
  else Amx::load<T>(p, pitch);
}

// One step: adds the products of the tiles at x, and x + second, and those at w. Calls between(last) after each pair of
// pieces.
template <int TILES, bool INTEGERS, int PIECES, AmxStream STREAM, int I = 0, class Between>
NPU_INLINE void amx_step(const char* x, long second, long pitch, const char* w, const Between& between) {
  using P = AmxPieces<PIECES>;
  constexpr int LAST = I > 0 ? I - 1 : 0;
  constexpr bool NEW_X = I == 0 || P::X[I] != P::X[LAST], NEW_W = I == 0 || P::W[I] != P::W[LAST];
  const char *from = x + P::X[I] * AMX_X_PIECE, *units = w + P::W[I] * AMX_W_PIECE;
  if constexpr (NEW_W) amx_load<6, STREAM == STREAM_W>(units, PANEL * 4);
  if constexpr (NEW_X) amx_load<4, STREAM == STREAM_X>(from, pitch);
  amx_product<INTEGERS, 0, 4, 6>();
  if constexpr (NEW_W) amx_load<7, STREAM == STREAM_W>(units + 64, PANEL * 4);
  amx_product<INTEGERS, 1, 4, 7>();
  if constexpr (TILES == 2) {
    if constexpr (NEW_X) amx_load<5, STREAM == STREAM_X>(from + second, pitch);
    amx_product<INTEGERS, 2, 5, 6>();
    amx_product<INTEGERS, 3, 5, 7>();
  }
  between(I + 1 == P::COUNT);
  if constexpr (I + 1 < P::COUNT) amx_step<TILES, INTEGERS, PIECES, STREAM, I + 1>(x, second, pitch, w, between);
}

template <int TILES, bool INTEGERS = false, int PIECES = 1, AmxStream STREAM = STREAM_NONE>
NPU_NOINLINE void amx_tile(const AmxArgs& a) {
  constexpr long ACC = PANEL * 4;
  float* low = a.acc + AMX_ROWS * PANEL;
  if (a.add) {
    Amx::load<0>(a.acc, ACC);
    Amx::load<1>(a.acc + AMX_ROWS, ACC);
    if constexpr (TILES == 2) Amx::load<2>(low, ACC), Amx::load<3>(low + AMX_ROWS, ACC);
  } else {
    Amx::zero<0>(), Amx::zero<1>();
    if constexpr (TILES == 2) Amx::zero<2>(), Amx::zero<3>();
  }
  const char* prefetch = a.prefetch;
  const long pitch = a.pitch, second = a.second, x_step = a.x_step, w_step = a.w_step;
  const int steps = a.steps, lines = a.lines;
  AmxSums* waiting = a.rows ? a.waiting : nullptr;
  AmxAhead* ahead = a.ahead;
  auto between = [&](bool last) __attribute__((always_inline)) {
    for (int line = 0; last && line < lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
    if (last && waiting && waiting->next < waiting->count) waiting->run(*waiting, waiting->epi, a.rows);
    if (ahead && ahead->next < ahead->count) ahead->run(*ahead);
  };
  for (int t = 0; t < a.ntaps; t++) {
    const char *x = a.x + a.taps[t].x, *w = a.w + a.taps[t].number * a.w_tap;
    for (int s = 0; s < steps; s++, x += x_step, w += w_step)
      amx_step<TILES, INTEGERS, PIECES, STREAM>(x, second, pitch, w, between);
  }
  Amx::store<0>(a.acc, ACC);
  Amx::store<1>(a.acc + AMX_ROWS, ACC);
  if constexpr (TILES == 2) Amx::store<2>(low, ACC), Amx::store<3>(low + AMX_ROWS, ACC);
}

// Limits of blocking (tile.h) for cores with 2 MB of L2 cache that multiply 16 times as fast as with vectors.
constexpr long AMX_L2_BYTES = 2 << 20;
constexpr BlockLimits AMX_LIMITS = {768 << 10, 64 << 10, 768 << 10, 2000000, 32, 2, 16};
constexpr BlockLimits AMX_COPY_LIMITS = {768 << 10, 64 << 10, 768 << 10, 2000000, 16, 2, 16};  // of copied input

// A plan defines what blocked() needs, with these differences. A block's positions are in tiles of AMX_ROWS, at most
// TILES of them, which are the only positions of a tile that count unless their entry in `rows` is negative:
//   tap_offsets(taps)           fills in the taps
//   tiles(block, first, rows)   fills in the offset of each tile's first position, and the output row of each position
//                               relative to first_row(); returns the number of tiles
//   positions(block)            their number
//   STEPS, PITCH                steps of a tap; bytes between the positions of a tile
//   SLICES, SLICE               parts of a tap, one after the other, and the most steps of one
//   ROWS_FIRST                  whether a pair of tiles is multiplied by all panels before the next pair, if possible
//   PAIR_BYTES                  bytes of x that a pair of tiles reads in a slice
//   PIECES                      1, or the pieces of an operand (amx_pieces.h); split() then takes the place of prepare()
template <class Plan> struct AmxScratch {
  static constexpr long UNITS = Plan::NTAPS * Plan::SLICE * Plan::STEPS.units;
  static constexpr bool UNPACK = !Plan::Stored::PLAIN || Plan::STEPS.padded;
  static constexpr long WEIGHTS = Plan::G * Plan::NP * (1 + Plan::DUAL) * Plan::Stored::panel_bytes(Plan::UNITS);
  static constexpr bool LEAVE = WEIGHTS > AMX_LIMITS.resident_bytes;  // weights leave L2 before they are read again
  static constexpr bool ROWS_FIRST = Plan::ROWS_FIRST && Plan::G == 1 && Plan::SLICES == 1 && !UNPACK && !LEAVE;
  static constexpr long SPAN = ROWS_FIRST ? min_of(4, Plan::NP) : 1;  // panels whose epilogue runs row by row
  // Pairs of tiles whose sums exist at once. Some wait for their epilogue while the next ones are multiplied.
  static constexpr long PAIRS = Plan::SLICES > 1 ? ceil_div(Plan::TILES, 2) : 2 * SPAN;
  static constexpr long PANEL_SUMS = PAIRS * 2 * AMX_ROWS * PANEL;
  static constexpr long UNPACKED = UNPACK ? Plan::PIECES * UNITS * BF16P::W_BYTES : 0;
  // x is used again by the next panel (ROWS_FIRST) or tap, w by the next pair of tiles.
  static constexpr bool X_AGAIN = ROWS_FIRST || Plan::NTAPS > 1;
  static constexpr long NEAR_BYTES = 40 << 10;
  static constexpr AmxStream STREAM = Plan::PIECES > 1 ? STREAM_NONE
                                      : X_AGAIN        ? Plan::PAIR_BYTES <= NEAR_BYTES ? STREAM_W : STREAM_NONE
                                      : UNITS * BF16P::W_BYTES <= NEAR_BYTES ? STREAM_X : STREAM_NONE;
  static constexpr long FIRST = align64(Plan::NTAPS * (long)sizeof(AmxTap)), ROWS = FIRST + align64(Plan::TILES * 4);
  static constexpr long COPY = ROWS + align64(Plan::TILES * AMX_ROWS * 4), SUMS = COPY + align64(Plan::COPY_BYTES);
  static constexpr long PANELS = SUMS + (Plan::SLICES > 1 ? Plan::PG : 1) * (1 + Plan::DUAL) * PANEL_SUMS * 4;
  // Pieces of a panel are split between the products of the one before, if L2 holds those of both.
  static constexpr long SIDE = (1 + Plan::DUAL) * UNPACKED;
  static constexpr bool AHEAD = Plan::PIECES > 1 && 2 * SIDE + Plan::COPY_BYTES <= 1536 << 10;
  static constexpr long END = PANELS + (1 + AHEAD) * SIDE;
};

// Returns units first .. first + n of a panel in the layout of B tiles, followed by zeros up to UNITS if `UNPACK`.
template <class Plan> NPU_INLINE const char* amx_panel(const char* panel, long first, long n, char* buffer) {
  using S = AmxScratch<Plan>;
  const char* units = Plan::Stored::unpack(panel, Plan::UNITS, first, n, buffer);
  if constexpr (S::UNPACK) {
    if (Plan::Stored::PLAIN) memcpy(buffer, units, (size_t)(n * BF16P::W_BYTES));
    if (n < S::UNITS) memset(buffer + n * BF16P::W_BYTES, 0, (size_t)((S::UNITS - n) * BF16P::W_BYTES));
    return buffer;
  }
  return units;
}

// Applies the epilogue to positions begin .. end of COUNT neighbouring panels, whose columns it keeps in registers.
template <int COUNT, class Plan, class Epi>
NPU_INLINE void amx_epilogue_panels(const AmxSums& s, const Epi& e, int begin, int end, long panel) {
  constexpr long SECOND = AmxScratch<Plan>::PANEL_SUMS, NEXT = 2 * AMX_ROWS * PANEL;
  const float* sums = s.sums + panel * NEXT + begin * PANEL;
  const int32_t* rows = s.rows;
  const long row = s.row, col = s.col + panel * PANEL;
#if NPU_PAIRED_STORES
  if (Plan::N % PANEL == 0 || col + COUNT * PANEL <= Plan::N) {
    vf first[COUNT];
    const auto even = e.at(s.shift + col, FirstOfTwo{{}, first});
    const auto odd = e.at(s.shift + col + VL, SecondOfTwo{{}, first});
    const auto even1 = e.at(s.shift + col + (COUNT - 1) * PANEL, FirstOfTwo{{}, first + COUNT - 1});
    const auto odd1 = e.at(s.shift + col + (COUNT - 1) * PANEL + VL, SecondOfTwo{{}, first + COUNT - 1});
    auto apply = [&](auto& f, const float* acc, long r) __attribute__((always_inline)) {
      if constexpr (Plan::DUAL) f(load_bytes<vf>(acc), load_bytes<vf>(acc + SECOND), r);
      else f(load_bytes<vf>(acc), r);
    };
    for (int p = begin; p < end; p++, sums += PANEL) {
      if (rows[p] < 0) continue;
      const long r = row + rows[p];
      apply(even, sums, r), apply(odd, sums + VL, r);
      if constexpr (COUNT == 2) apply(even1, sums + NEXT, r), apply(odd1, sums + NEXT + VL, r);
    }
    return;
  }
#endif
  for (int p = begin; p < end; p++, sums += PANEL)
    for (int i = 0; rows[p] >= 0 && i < COUNT; i++)
      apply_epilogue<Plan::N, Plan::DUAL>(sums + i * NEXT, SECOND, 1, row + rows[p], col + i * PANEL, s.shift, e);
}
template <class Plan, class Epi> NPU_NOINLINE void amx_epilogue(AmxSums& s, const void* epi, int n) {
  const Epi e = *(const Epi*)epi;  // a copy, because stores could change what `epi` points to
  const int begin = s.next, end = s.next = (int)min_of(s.count, begin + n);
  int panel = 0;
  if constexpr (AmxScratch<Plan>::SPAN > 1)  // pairs, because lines that are next to each other are stored faster
    for (; panel + 2 <= s.panels; panel += 2) amx_epilogue_panels<2, Plan>(s, e, begin, end, panel);
  for (; panel < s.panels; panel++) amx_epilogue_panels<1, Plan>(s, e, begin, end, panel);
}
NPU_INLINE void amx_finish(AmxSums& s) {
  if (s.next < s.count) s.run(s, s.epi, s.count);
}

// The operands of a chunk.
struct AmxBlock {
  const char *x, *w;
  long row;  // of the results, the first one
  int tiles;
  const int32_t *first, *rows;
  const AmxTap* taps;
  bool fetch;  // prefetch weights
};

// Multiplies each pair of tiles by all panels of a chunk, and applies the epilogue to rows of SPAN panels: x and the
// results are read and written in the order of memory, as the prefetchers of L2 expect it. `turn`: the buffer of sums.
template <class Plan>
NPU_INLINE void amx_rows_first(const AmxBlock& b, const Chunk<Plan>& c, float* sums, AmxSums& waiting, int& turn) {
  using S = AmxScratch<Plan>;
  constexpr long PRODUCTS = 1 + Plan::DUAL, PRODUCT_BYTES = Plan::Stored::panel_bytes(Plan::UNITS);
  constexpr long STEP = Plan::STEPS.units, STEP_BYTES = STEP * BF16P::W_BYTES, PAIR_SUMS = 2 * AMX_ROWS * PANEL;
  constexpr int INTEGERS = amx_integers<Plan>, SHARE = ceil_div(2 * AMX_ROWS, Plan::STEPS.count * PRODUCTS * S::SPAN);
  for (int t = 0; t < b.tiles; t += 2)
    for (long pn = c.begin; pn < c.end; pn += S::SPAN, turn ^= 1) {
      const bool two = t + 1 < b.tiles;
      const long panels = min_of(S::SPAN, c.end - pn);
      float* acc = sums + turn * S::SPAN * PAIR_SUMS;
      for (long i = 0; i < panels * PRODUCTS; i++) {
        const char *panel = b.w + (pn * PRODUCTS + i) * PRODUCT_BYTES, *next = panel + PRODUCTS * PRODUCT_BYTES;
        const bool fetch = b.fetch && t == 0 && pn + i / PRODUCTS + 1 < Plan::NP;
        const AmxArgs a = {b.x + b.first[t], two ? b.first[t + 1] - b.first[t] : 0, Plan::PITCH, b.taps, 1,
                           (int)Plan::STEPS.count, STEP * 4, panel, STEP_BYTES,
                           acc + i / PRODUCTS * PAIR_SUMS + i % PRODUCTS * S::PANEL_SUMS, false, next,
                           fetch ? (int)(STEP_BYTES / 64) : 0, &waiting, SHARE};
        (two ? amx_tile<2, INTEGERS, 1, S::STREAM> : amx_tile<1, INTEGERS, 1, S::STREAM>)(a);
      }
      amx_finish(waiting);
      waiting.sums = acc, waiting.rows = b.rows + t * AMX_ROWS, waiting.panels = (int)panels;
      waiting.next = 0, waiting.count = (two ? 2 : 1) * (int)AMX_ROWS;
      waiting.row = b.row, waiting.col = pn * PANEL, waiting.shift = 0;
    }
}

template <class Plan> void multiply_as_floats(const char* x, const AmxTap* taps, const char* panel, float* acc);
template <class Plan> void amx_split(AmxAhead& a);

template <class Plan, class TX, class TW, class Epi>
NPU_INLINE void amx_blocked(const TX* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Stored = typename Plan::Stored;
  using S = AmxScratch<Plan>;
  constexpr long PRODUCTS = 1 + Plan::DUAL, PRODUCT_BYTES = Stored::panel_bytes(Plan::UNITS);
  constexpr long PANEL_BYTES = PRODUCTS * PRODUCT_BYTES, STEP = Plan::STEPS.units, TILE_SUMS = AMX_ROWS * PANEL;
  constexpr long STEP_BYTES = Plan::PIECES * STEP * BF16P::W_BYTES;
  constexpr bool INTEGERS = amx_integers<Plan>;
  constexpr int PIECES = Plan::PIECES;
  constexpr bool SLICED = Plan::SLICES > 1;
  AmxTap* taps = (AmxTap*)th.scratch;
  int32_t *first = (int32_t*)(th.scratch + S::FIRST), *rows = (int32_t*)(th.scratch + S::ROWS);
  float* sums = (float*)(th.scratch + S::SUMS);
  long part = 0;
  long i = own_chunk(th, counter, Chunk<Plan>::COUNT, part), prepared = -1, tabled = -1;
  if (i >= Chunk<Plan>::COUNT) return;
  Plan::tap_offsets(taps);
  TileShapes shapes;
  for (int t = 0; t < 4; t++) shapes.set(t, (int)AMX_ROWS, 64);
  for (int t = 4; t < 6; t++) shapes.set(t, (int)AMX_ROWS, (int)STEP * 4), shapes.set(t + 2, (int)STEP, 64);
  Amx::configure(shapes);
  const char* block = nullptr;
  AmxSums waiting;
  waiting.run = amx_epilogue<Plan, Epi>, waiting.epi = &epi;
  int tiles = 0, turn = 0;
  long cold = -1;  // the first block: its weights may not be in L2
  bool finite_x = true, finite_w = true;
  AmxAhead ahead;
  int side = 0;
  if constexpr (S::AHEAD) {
    const Chunk<Plan> c = Chunk<Plan>::of(i);
    ahead.run = amx_split<Plan>;
    ahead.begin((const char*)weights + c.image * Plan::W_IMAGE_BYTES + c.begin * PANEL_BYTES, th.scratch + S::PANELS,
                PRODUCTS, 0, Plan::UNITS, 1);
  }
  for (long after; i < Chunk<Plan>::COUNT; i = after) {
    const Chunk<Plan> c = Chunk<Plan>::of(i);
    after = own_chunk(th, counter, Chunk<Plan>::COUNT, part);
    if (cold < 0) cold = c.image * Plan::BLOCKS + c.block;
    if (prepared != c.image * Plan::BLOCKS + c.block) {
      if (tabled != Plan::positions(c.block)) {
        amx_finish(waiting);
        tiles = Plan::tiles(c.block, first, rows);
        tabled = Plan::positions(c.block);
      }
      block = th.scratch + S::COPY;
      if constexpr (PIECES > 1) finite_x = Plan::split(x, c.image, c.block, th.scratch + S::COPY);
      else block = Plan::prepare(x, c.image, c.block, th.scratch + S::COPY);
      prepared = c.image * Plan::BLOCKS + c.block;
    }
    const bool fetch_block = S::LEAVE || prepared == cold;
    const char* w = (const char*)weights + c.image * Plan::W_IMAGE_BYTES;
    const long row = Plan::first_row(c.image, c.block);
    if constexpr (S::ROWS_FIRST) {
      amx_rows_first<Plan>({block, w, row, tiles, first, rows, taps, fetch_block}, c, sums, waiting, turn);
    }
    for (long slice = 0; slice < (S::ROWS_FIRST ? 0 : Plan::SLICES); slice++) {
      const long step0 = slice * Plan::SLICE, steps = min_of(Plan::SLICE, Plan::STEPS.count - step0);
      const long units = min_of(Plan::NTAPS * steps * STEP, Plan::UNITS - step0 * STEP);
      const bool done = slice + 1 == Plan::SLICES;
      for (long pn = c.begin; pn < c.end; pn++) {
        const long group = pn / Plan::NP, col = pn % Plan::NP * PANEL;
        const char *panel = w + pn * PANEL_BYTES, *next = Stored::at(panel + PANEL_BYTES, Plan::NTAPS * step0 * STEP);
        const char* plain[PRODUCTS];
        finite_w = true;
        if constexpr (S::AHEAD) {
          ahead.finish();
          finite_w = ahead.finite;
          for (long p = 0; p < PRODUCTS; p++) plain[p] = ahead.to + p * S::UNPACKED;
          const Chunk<Plan> other = Chunk<Plan>::of(after);
          const char* following = (const char*)weights + other.image * Plan::W_IMAGE_BYTES + other.begin * PANEL_BYTES;
          const bool more = pn + 1 < c.end || after < Chunk<Plan>::COUNT;
          const long calls = ceil_div(tiles, 2) * PRODUCTS * Plan::NTAPS * steps * AmxPieces<PIECES>::COUNT;
          side ^= 1;
          ahead.begin(pn + 1 < c.end ? panel + PANEL_BYTES : following, th.scratch + S::PANELS + side * S::SIDE,
                      PRODUCTS, 0, more ? Plan::UNITS : 0, calls);
          next += PANEL_BYTES;
        }
        for (long p = 0; p < PRODUCTS && !S::AHEAD; p++) {
          char* unpacked = th.scratch + S::PANELS + p * S::UNPACKED;
          plain[p] = unpacked;
          if constexpr (PIECES > 1) finite_w &= Stored::split(panel + p * PRODUCT_BYTES, unpacked);
          else plain[p] = amx_panel<Plan>(panel + p * PRODUCT_BYTES, step0 * STEP, units, unpacked);
        }
        const bool fetch = fetch_block && pn + 1 + S::AHEAD < Plan::G * Plan::NP;  // of the next chunk as well
        const int lines = fetch ? (int)ceil_div(STEP * Stored::UNIT_BYTES, (tiles + 1) / 2 * 64) : 0;
        const int share = (int)max_of(2, ceil_div(2 * AMX_ROWS, Plan::NTAPS * steps * PRODUCTS));
        float* panel_sums = sums + (SLICED ? (pn - c.begin) * PRODUCTS * S::PANEL_SUMS : 0);
        for (int t = 0; t < tiles; t += 2, turn ^= 1) {
          const bool two = t + 1 < tiles;
          float* acc = panel_sums + (SLICED ? t : 2 * turn) * TILE_SUMS;
          for (long p = 0; p < PRODUCTS; p++) {
            const char* from = block + group * Plan::GROUP_BYTES + first[t] + step0 * STEP * 4;
            const char* after = next + p * PRODUCT_BYTES + t / 2 * Plan::NTAPS * steps * lines * 64;
            const AmxArgs a = {from, two ? first[t + 1] - first[t] : 0, Plan::PITCH, taps, Plan::NTAPS, (int)steps,
                               PIECES * STEP * 4, plain[p], STEP_BYTES, acc + p * S::PANEL_SUMS, slice > 0, after,
                               lines, &waiting, share, Plan::STEPS.count * STEP_BYTES,
                               S::AHEAD ? &ahead : nullptr};
            (two ? amx_tile<2, INTEGERS, PIECES, S::STREAM> : amx_tile<1, INTEGERS, PIECES, S::STREAM>)(a);
            if constexpr (PIECES > 1) {
              for (int half = 0; half <= two && !(finite_x && finite_w); half++)
                multiply_as_floats<Plan>(block + first[t + half], taps, plain[p],
                                         acc + p * S::PANEL_SUMS + half * TILE_SUMS);
            }
          }
          if (!done) continue;
          amx_finish(waiting);
          waiting.sums = acc, waiting.rows = rows + t * AMX_ROWS;
          waiting.next = 0, waiting.count = (two ? 2 : 1) * (int)AMX_ROWS;
          waiting.row = row, waiting.col = col, waiting.shift = group * Plan::N;
        }
      }
      if (SLICED && done) amx_finish(waiting);
    }
  }
  amx_finish(waiting);
  Amx::release();
}

}  // namespace npu
#endif
