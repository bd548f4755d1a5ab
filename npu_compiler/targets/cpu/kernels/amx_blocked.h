// The driver of matrix products on AMX tiles (amx_tile.h): chunks of rows and panels, and the epilogue. gemm.h and conv.h
// define the plans.
#pragma once
#include "amx_tile.h"
#include "blocked.h"

#if NPU_AMX
namespace npu {

// Limits of blocking (tile.h) for cores with 2 MB of L2 cache that multiply 16 times as fast as with vectors.
constexpr long AMX_L2_BYTES = 2 << 20;
constexpr BlockLimits AMX_LIMITS = {768 << 10, 64 << 10, 768 << 10, 2000000, 32, 2, 16};
constexpr BlockLimits AMX_COPY_LIMITS = {768 << 10, 64 << 10, 768 << 10, 2000000, 16, 2, 16};  // of copied input

// A plan defines what blocked() needs, with these differences. A block's positions are in tiles of HEIGHT, at most TILES
// of them. `rows` has AMX_ROWS entries for each tile; positions whose entry is negative do not count:
//   tap_offsets(taps)           fills in the taps
//   tiles(block, first, rows)   fills in the offset of each tile's first position, and the output row of each position
//                               relative to first_row(); returns the number of tiles
//   positions(block)            their number
//   STEPS, PITCH                steps of a tap; bytes between the positions of a tile
//   SLICES, SLICE               parts of a tap, one after the other, and the most steps of one
//   ROWS_FIRST                  whether a pair of tiles is multiplied by all panels before the next pair, if possible
//   PAIR_BYTES                  bytes of x that a pair of tiles reads in a slice
//   LIMBS                      1, or the limbs of an operand (amx_limbs.h); split() then takes the place of prepare()
//   PART                        if there are three limbs: steps of a part of the sums (AMX_PART)
template <class Plan> struct AmxScratch {
  static constexpr long UNITS = Plan::NTAPS * Plan::SLICE * Plan::STEPS.units;
  static constexpr bool UNPACK = !Plan::Stored::PLAIN || Plan::STEPS.padded;
  static constexpr long WEIGHTS = Plan::G * Plan::NP * (1 + Plan::DUAL) * Plan::Stored::panel_bytes(Plan::UNITS);
  static constexpr bool LEAVE = WEIGHTS > AMX_LIMITS.resident_bytes;  // weights leave L2 before they are read again
  static constexpr bool SIMPLE = Plan::G == 1 && Plan::SLICES == 1 && !UNPACK && !LEAVE && Plan::NTAPS == 1 &&
                                 Plan::LIMBS == 1;
  static constexpr bool TWO_STEPS = SIMPLE && !Plan::DUAL && Plan::STEPS.count == 2 &&
                                    Plan::STEPS.units == AMX_UNITS;  // so all tiles have one shape
  static constexpr bool ROWS_FIRST = Plan::ROWS_FIRST && SIMPLE && !TWO_STEPS;
  static constexpr long SPAN = ROWS_FIRST ? min_of(2, Plan::NP) : 1;  // panels whose epilogue runs row by row
  // Pairs of tiles whose sums exist at once. Some wait for their epilogue while the next ones are multiplied.
  static constexpr long PAIRS = Plan::SLICES > 1 ? ceil_div(Plan::TILES, 2) : 2 * SPAN;
  static constexpr long PANEL_SUMS = PAIRS * 2 * AMX_ROWS * PANEL;
  static constexpr long UNPACKED = UNPACK ? Plan::LIMBS * UNITS * BF16P::W_BYTES : 0;
  // x is used again by the next panel (ROWS_FIRST) or tap, w by the next pair of tiles.
  static constexpr bool X_AGAIN = ROWS_FIRST || Plan::NTAPS > 1;
  static constexpr long NEAR_BYTES = 40 << 10;
  // Neither if L1 has room for both.
  static constexpr long PANEL_UNITS = UNITS * BF16P::W_BYTES;
  static constexpr bool BOTH_NEAR = Plan::NTAPS > 1 ? WEIGHTS + Plan::PAIR_BYTES <= NEAR_BYTES
                                                    : !ROWS_FIRST && PANEL_UNITS + Plan::PAIR_BYTES <= NEAR_BYTES / 2;
  // A panel that L1 holds stays there if several pairs of tiles are multiplied by it. Otherwise x stays longer: the next
  // panel reads it again.
  static constexpr bool W_AGAIN = PANEL_UNITS <= NEAR_BYTES && Plan::TILES > 4;
  static constexpr AmxStream STREAM = Plan::LIMBS > 1 || BOTH_NEAR ? STREAM_NONE
                                      : X_AGAIN ? Plan::PAIR_BYTES <= NEAR_BYTES ? STREAM_W : STREAM_NONE
                                      : W_AGAIN ? STREAM_X : STREAM_W;
  // Products of few steps take less time than their epilogue, whose loads these would delay.
  static constexpr bool EARLY = Plan::LIMBS == 1 && (Plan::NTAPS > 1 || Plan::STEPS.count > 8);
  static constexpr long FIRST = align64(Plan::NTAPS * (long)sizeof(AmxTap)), ROWS = FIRST + align64(Plan::TILES * 4);
  static constexpr long COPY = ROWS + align64(Plan::TILES * AMX_ROWS * 4), SUMS = COPY + align64(Plan::COPY_BYTES);
  static constexpr long PANELS = SUMS + (Plan::SLICES > 1 ? Plan::PG : 1) * (1 + Plan::DUAL) * PANEL_SUMS * 4;
  // Limbs of a panel are split between the products of the one before, if L2 holds those of both.
  static constexpr long SIDE = (1 + Plan::DUAL) * UNPACKED;
  static constexpr bool AHEAD = Plan::LIMBS > 1 && UNPACK && 2 * SIDE + Plan::COPY_BYTES <= 1536 << 10;
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
  for (int p = begin; p < end && p < s.after_count; p++)
    if (s.after[p] >= 0) e.prefetch(s.row + s.after[p], s.after_col);
  if constexpr (AmxScratch<Plan>::SPAN == 1) {
    amx_epilogue_panels<1, Plan>(s, e, begin, end, 0);
    return;
  }
  int panel = 0;  // pairs, because lines that are next to each other are stored faster
  for (; panel + 2 <= s.panels; panel += 2) amx_epilogue_panels<2, Plan>(s, e, begin, end, panel);
  for (; panel < s.panels; panel++) amx_epilogue_panels<1, Plan>(s, e, begin, end, panel);
}
// The fewest positions of a call between products: a call has as many instructions as the epilogue of three of them.
constexpr long LEAST_SHARE = 4;
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
  bool fetch, begins;  // whether the weights may not be in L2; whether no chunk before this one prefetched them
};

// Multiplies each pair of tiles by all panels of a chunk, and applies the epilogue to rows of SPAN panels: x and the
// results are read and written in the order of memory, as the prefetchers of L2 expect it. `turn`: the buffer of sums.
template <class Plan>
NPU_INLINE void amx_rows_first(const AmxBlock& b, const Chunk<Plan>& c, float* sums, AmxSums& waiting, int& turn) {
  using S = AmxScratch<Plan>;
  constexpr long PRODUCTS = 1 + Plan::DUAL, PRODUCT_BYTES = Plan::Stored::panel_bytes(Plan::UNITS);
  constexpr long STEP = Plan::STEPS.units, STEP_BYTES = STEP * BF16P::W_BYTES, PAIR_SUMS = 2 * AMX_ROWS * PANEL;
  constexpr int INTEGERS = amx_integers<Plan>, SHARE = ceil_div(2 * AMX_ROWS, Plan::STEPS.count * PRODUCTS * S::SPAN);
  auto second = [&](int t) { return t + 1 < b.tiles ? b.first[t + 1] - b.first[t] : -1; };
  // The rows of the next pair of tiles are prefetched once L2 has the weights: loads of 16 rows side by side follow no
  // order that hardware recognises.
  constexpr long PAIR_X = Plan::COPY_BYTES ? 0 : 2 * AMX_ROWS * Plan::PITCH;
  const long steps = (c.end - c.begin) * PRODUCTS * Plan::STEPS.count, lines = ceil_div(PAIR_X, steps * 64);  // of a step
  // The weights of the next chunk are prefetched during all of this one. The first chunk needs its own first: those of
  // each panel are prefetched during the panel before, for the first pair of tiles.
  const long after = b.fetch ? min_of(c.end - c.begin, Plan::NP - c.end) * PRODUCTS * PRODUCT_BYTES : 0;
  const long own = b.begins ? (c.end - c.begin - 1) * PRODUCTS * Plan::STEPS.count : 0;  // steps
  const long share = ceil_div(after, (ceil_div(b.tiles, 2) * steps - own) * 64);         // lines of a step
  const char* next_chunk = b.w + c.end * PRODUCTS * PRODUCT_BYTES;
  bool loaded = false;
  for (int t = 0; t < b.tiles; t += 2)
    for (long pn = c.begin; pn < c.end; pn += S::SPAN, turn ^= 1) {
      const bool two = t + 1 < b.tiles;
      const long panels = min_of(S::SPAN, c.end - pn);
      float* acc = sums + turn * S::SPAN * PAIR_SUMS;
      for (long i = 0; i < panels * PRODUCTS; i++) {
        const char *panel = b.w + (pn * PRODUCTS + i) * PRODUCT_BYTES, *next = panel + PRODUCTS * PRODUCT_BYTES;
        const bool fetch = b.begins && t == 0 && pn + i / PRODUCTS + 1 < c.end;
        AmxArgs a = {b.x + b.first[t], second(t), Plan::PITCH, b.taps, 1,
                     (int)Plan::STEPS.count, STEP * 4, panel, STEP_BYTES,
                     acc + i / PRODUCTS * PAIR_SUMS + i % PRODUCTS * S::PANEL_SUMS, false, next,
                     fetch ? (int)(STEP_BYTES / 64) : 0, &waiting, SHARE};
        a.loaded = loaded;
        const long fetched = ((pn - c.begin) * PRODUCTS + i) * Plan::STEPS.count * lines * 64;
        if (!fetch && share > 0) {
          a.prefetch = next_chunk, a.lines = (int)share;
          next_chunk += Plan::STEPS.count * share * 64;
        } else if (!fetch && fetched < PAIR_X) {
          a.prefetch = a.x + PAIR_X + fetched, a.lines = (int)lines;
        }
        const bool last = pn + S::SPAN >= c.end && i + 1 == panels * PRODUCTS;
        if (!last) a.next_x = a.x, a.next_second = a.second, a.next_w = panel + PRODUCT_BYTES;
        else if (t + 2 < b.tiles)
          a.next_x = b.x + b.first[t + 2], a.next_second = second(t + 2), a.next_w = b.w + c.begin * PRODUCTS * PRODUCT_BYTES;
        loaded = a.next_w != nullptr;
        NoAmxWork work;
        amx_pair<INTEGERS, 1, S::STREAM, S::EARLY>(two, a, work);
      }
      amx_finish(waiting);
      waiting.sums = acc, waiting.rows = b.rows + t * AMX_ROWS, waiting.panels = (int)panels;
      waiting.next = 0, waiting.count = (two ? 2 : 1) * (int)AMX_ROWS;
      waiting.row = b.row, waiting.col = pn * PANEL, waiting.shift = 0;
    }
}

// Products of two steps, which take less time than their epilogue. The weights of a panel stay in tiles for a group of
// GROUP tiles of positions; the epilogue of a tile is inlined between the products of the next one, so that a core
// works on both.
template <class Plan, class Epi>
NPU_INLINE void amx_two_steps(const AmxBlock& b, const Chunk<Plan>& c, const Epi& epi, float* sums, AmxSums& waiting,
                              int& turn) {
  constexpr long STEP = Plan::STEPS.units, STEP_BYTES = STEP * BF16P::W_BYTES, ACC = PANEL * 4;
  constexpr bool INTEGERS = amx_integers<Plan>;
  constexpr int GROUP = 8, SHARE = (int)AMX_ROWS / 4;
  const Epi e = epi;
  auto load_x = [&](int t) __attribute__((always_inline)) {
    Amx::load<2>(b.x + b.first[t], Plan::PITCH);
    Amx::load<3>(b.x + b.first[t] + STEP * 4, Plan::PITCH);
  };
  auto between = [&]() __attribute__((always_inline)) {
    if (waiting.next == waiting.count) return;
    amx_epilogue_panels<1, Plan>(waiting, e, waiting.next, waiting.next + SHARE, 0);
    waiting.next += SHARE;
  };
  amx_finish(waiting);
  for (int begin = 0; begin < b.tiles; begin += GROUP)
    for (long pn = c.begin; pn < c.end; pn++) {
      const int end = (int)min_of(begin + GROUP, b.tiles);
      const char* w = b.w + pn * Plan::Stored::panel_bytes(Plan::UNITS);
      Amx::load<4>(w, ACC), Amx::load<5>(w + 64, ACC);
      Amx::load<6>(w + STEP_BYTES, ACC), Amx::load<7>(w + STEP_BYTES + 64, ACC);
      load_x(begin);
      for (int t = begin; t < end; t++, turn ^= 1) {
        float* acc = sums + turn * AMX_ROWS * PANEL;
        Amx::zero<0>(), Amx::zero<1>();
        amx_product<INTEGERS, 0, 2, 4>();
        between();
        amx_product<INTEGERS, 1, 2, 5>();
        between();
        amx_product<INTEGERS, 0, 3, 6>();
        between();
        amx_product<INTEGERS, 1, 3, 7>();
        between();
        if (t + 1 < end) load_x(t + 1);
        Amx::store<0>(acc, ACC), Amx::store<1>(acc + AMX_ROWS, ACC);
        waiting.sums = acc, waiting.rows = b.rows + t * AMX_ROWS, waiting.panels = 1;
        waiting.next = 0, waiting.count = (int)AMX_ROWS;
        waiting.row = b.row, waiting.col = pn * PANEL, waiting.shift = 0;
      }
    }
}

template <class Plan> void multiply_as_floats(const char* x, const AmxTap* taps, const char* panel, float* acc);

// The limbs of the weights of the next panel, or of two panels. run() splits a share of them.
struct AmxSplit {
  void (*split)(AmxSplit& a);
  const char* panel = nullptr;
  char* to = nullptr;
  long units = 0;             // of each panel
  long next = 0, count = 0;   // of all panels
  long share = 0;             // units of each call
  bool finite = true;         // whether all weights are
  alignas(64) float spoiled[16] = {};

  // Begins with `n` units of each of `products` panels, which `calls` calls of run() split.
  void begin(const char* from, char* out, long products, long n, long calls) {
    panel = from, to = out, units = n, next = 0, count = products * n;
    share = ceil_div(count, calls);
  }
  __attribute__((always_inline)) void run() {
    if (next < count) split(*this);
  }
  void finish() {
    share = count;
    run();
  }
};
struct AmxSplitWork {
  AmxSplit* split;
  __attribute__((always_inline)) void run() { split->run(); }
};
template <class Plan> void amx_split(AmxSplit& a);

template <class Plan, class TX, class TW, class Epi>
NPU_INLINE void amx_blocked(const TX* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Stored = typename Plan::Stored;
  using S = AmxScratch<Plan>;
  constexpr long PRODUCTS = 1 + Plan::DUAL, PRODUCT_BYTES = Stored::panel_bytes(Plan::UNITS);
  constexpr long PANEL_BYTES = PRODUCTS * PRODUCT_BYTES, STEP = Plan::STEPS.units, TILE_SUMS = AMX_ROWS * PANEL;
  constexpr long STEP_BYTES = Plan::LIMBS * STEP * BF16P::W_BYTES;
  constexpr bool INTEGERS = amx_integers<Plan>;
  constexpr int LIMBS = Plan::LIMBS;
  constexpr bool SLICED = Plan::SLICES > 1;
  AmxTap* taps = (AmxTap*)th.scratch;
  int32_t *first = (int32_t*)(th.scratch + S::FIRST), *rows = (int32_t*)(th.scratch + S::ROWS);
  float* sums = (float*)(th.scratch + S::SUMS);
  long part = 0;
  long i = own_chunk(th, counter, Chunk<Plan>::COUNT, part), prepared = -1, tabled = -1;
  if (i >= Chunk<Plan>::COUNT) return;
  Plan::tap_offsets(taps);
  TileShapes shapes;
  for (int t = 0; t < 4; t++) shapes.set(t, (int)Plan::HEIGHT, 64);
  for (int t = 4; t < 6; t++) shapes.set(t, (int)Plan::HEIGHT, (int)STEP * 4), shapes.set(t + 2, (int)STEP, 64);
  Amx::configure(shapes);
  const char* block = nullptr;
  AmxSums waiting;
  waiting.run = amx_epilogue<Plan, Epi>, waiting.epi = &epi;
  int tiles = 0, turn = 0;
  long cold = -1;  // the first block: its weights may not be in L2
  bool finite_x = true, finite_w = true;
  AmxSplit ahead;
  int side = 0;
  if constexpr (S::AHEAD) {
    const Chunk<Plan> c = Chunk<Plan>::of(i);
    ahead.split = amx_split<Plan>;
    ahead.begin((const char*)weights + c.image * Plan::W_IMAGE_BYTES + c.begin * PANEL_BYTES, th.scratch + S::PANELS,
                PRODUCTS, Plan::UNITS, 1);
  }
  constexpr bool PRELOAD = PRODUCTS == 1 && LIMBS == 1 && Plan::G == 1 && !S::UNPACK;
  bool loaded = false;
  for (long after; i < Chunk<Plan>::COUNT; i = after) {
    const Chunk<Plan> c = Chunk<Plan>::of(i);
    after = own_chunk(th, counter, Chunk<Plan>::COUNT, part);
    const bool begins = cold < 0;
    if (begins) cold = c.image * Plan::BLOCKS + c.block;
    if (prepared != c.image * Plan::BLOCKS + c.block) {
      if (tabled != Plan::positions(c.block)) {
        amx_finish(waiting);
        tiles = Plan::tiles(c.block, first, rows);
        tabled = Plan::positions(c.block);
      }
      block = th.scratch + S::COPY;
      if constexpr (LIMBS > 1) finite_x = Plan::split(x, c.image, c.block, th.scratch + S::COPY);
      else block = Plan::prepare(x, c.image, c.block, th.scratch + S::COPY);
      prepared = c.image * Plan::BLOCKS + c.block;
    }
    const bool fetch_block = S::LEAVE || prepared == cold;
    const char* w = (const char*)weights + c.image * Plan::W_IMAGE_BYTES;
    const long row = Plan::first_row(c.image, c.block);
    if constexpr (S::ROWS_FIRST) {
      amx_rows_first<Plan>({block, w, row, tiles, first, rows, taps, fetch_block, begins}, c, sums, waiting, turn);
    }
    if constexpr (S::TWO_STEPS)
      amx_two_steps<Plan>({block, w, row, tiles, first, rows, taps, fetch_block, begins}, c, epi, sums, waiting, turn);
    for (long slice = 0; slice < (S::ROWS_FIRST || S::TWO_STEPS ? 0 : Plan::SLICES); slice++) {
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
          const long calls = ceil_div(tiles, 2) * PRODUCTS * Plan::NTAPS * steps * AmxLimbs<LIMBS>::COUNT;
          side ^= 1;
          ahead.begin(pn + 1 < c.end ? panel + PANEL_BYTES : following, th.scratch + S::PANELS + side * S::SIDE,
                      PRODUCTS, more ? Plan::UNITS : 0, calls);
          next += PANEL_BYTES;
        }
        for (long p = 0; p < PRODUCTS && !S::AHEAD; p++) {
          char* unpacked = th.scratch + S::PANELS + p * S::UNPACKED;
          plain[p] = unpacked;
          if constexpr (LIMBS > 1 && S::UNPACK) finite_w &= Stored::split(panel + p * PRODUCT_BYTES, unpacked);
          else plain[p] = amx_panel<Plan>(panel + p * PRODUCT_BYTES, step0 * STEP, units, unpacked);
          if constexpr (LIMBS > 1 && !S::UNPACK) finite_w &= Stored::finite(panel + p * PRODUCT_BYTES);
        }
        const bool fetch = fetch_block && pn + 1 + S::AHEAD < Plan::G * Plan::NP;  // of the next chunk as well
        const int lines = fetch ? (int)ceil_div(STEP * Stored::UNIT_BYTES, (tiles + 1) / 2 * 64) : 0;
        const int share = (int)max_of(LEAST_SHARE, ceil_div(2 * AMX_ROWS, Plan::NTAPS * steps * PRODUCTS));
        float* panel_sums = sums + (SLICED ? (pn - c.begin) * PRODUCTS * S::PANEL_SUMS : 0);
        for (int t = 0; t < tiles; t += 2, turn ^= 1) {
          const bool two = t + 1 < tiles;
          float* acc = panel_sums + (SLICED ? t : 2 * turn) * TILE_SUMS;
          for (long p = 0; p < PRODUCTS; p++) {
            const char* from = block + group * Plan::GROUP_BYTES + first[t] + step0 * STEP * 4;
            const char* after = next + p * PRODUCT_BYTES + t / 2 * Plan::NTAPS * steps * lines * 64;
            AmxArgs a = {from, two ? first[t + 1] - first[t] : 0, Plan::PITCH, taps, Plan::NTAPS, (int)steps,
                         LIMBS * STEP * 4, plain[p], STEP_BYTES, acc + p * S::PANEL_SUMS, slice > 0, after,
                         lines, &waiting, share, Plan::STEPS.count * STEP_BYTES};
            if constexpr (LIMBS == 3) a.part = Plan::PART;
            if constexpr (PRELOAD) {
              const bool more = t + 2 < tiles;
              const int nt = more ? t + 2 : 0;
              a.loaded = loaded, a.next_x = from - first[t] + first[nt] + taps[0].x;
              a.next_second = nt + 1 < tiles ? first[nt + 1] - first[nt] : -1;
              if (more || pn + 1 < c.end)
                a.next_w = plain[p] + (more ? 0 : PANEL_BYTES) + taps[0].number * a.w_tap;
              loaded = a.next_w != nullptr;
            }
            if constexpr (S::AHEAD) {
              AmxSplitWork work = {&ahead};
              amx_pair<INTEGERS, LIMBS, S::STREAM, S::EARLY>(two, a, work);
            } else {
              NoAmxWork work;
              amx_pair<INTEGERS, LIMBS, S::STREAM, S::EARLY>(two, a, work);
            }
            if constexpr (LIMBS > 1) {
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
