// Matrix products on AMX tiles whose weights are read once: each thread multiplies neighbouring panels by all rows.
//
// Panels in a weight format are unpacked, and plain ones prefetched, between the products of the panel before. The rows
// of a block, or a slice of them, stay in L2. Products whose weights stay in L2 run in amx_blocked().
#pragma once
#include "amx_unpack.h"
#include "operands.h"

#if NPU_AMX
namespace npu {

template <class D, class TW> struct AmxPanelPlan {
  using Stored = typename Operands<bf16, TW>::Stored;
  static constexpr long UNITS = ceil_div(D::K, 2), NP = ceil_div(D::N, PANEL), M = D::M, N = D::N, G = 1;
  static constexpr long IMAGES = D::B;
  static constexpr bool DUAL = D::dual, ROWS_FIRST = false;
  static constexpr int PIECES = 1, NTAPS = 1;
  static constexpr long PRODUCTS = 1 + DUAL, PRODUCT_BYTES = Stored::panel_bytes(UNITS);
  static constexpr long W_IMAGE_BYTES = D::shared_w ? 0 : NP * PRODUCTS * PRODUCT_BYTES;
  static constexpr AmxSteps STEPS = amx_steps(UNITS);
  static constexpr long STEP_X = AMX_ROWS * STEPS.units * 4;  // bytes of a tile of x
  // A block has all rows if L2 holds them. Otherwise its rows are in slices, and its sums are kept for all panels.
  static constexpr long ROWS_BYTES = 1600 << 10, SLICE_BYTES = 768 << 10, SUMS_BYTES = 1536 << 10, MAX_ROWS = 512;
  static constexpr long ROW_BYTES = STEPS.count * STEPS.units * 4;
  static constexpr long FIT = max_of(MAX_ROWS, ROWS_BYTES / ROW_BYTES), BLOCKS = ceil_div(D::M, FIT);
  static constexpr long Q = min_of(D::M, ceil_div(ceil_div(D::M, BLOCKS), 2 * AMX_ROWS) * 2 * AMX_ROWS);
  static constexpr long TILES = ceil_div(Q, AMX_ROWS);
  static constexpr long FITTING = max_of(2, SLICE_BYTES / (TILES * STEP_X) / 2 * 2);  // steps; formats need pairs
  static constexpr long SLICES = Q * ROW_BYTES <= ROWS_BYTES ? 1 : ceil_div(STEPS.count, FITTING);
  static constexpr long SLICE = SLICES == 1 ? STEPS.count : ceil_div(ceil_div(STEPS.count, SLICES), 2) * 2;
  // Of a slice, L1 keeps NEAR_STEPS steps of a panel while BLOCK_PAIRS pairs of tiles are multiplied by them.
  static constexpr bool NEAR = SLICES > 1 && Stored::PLAIN;
  static constexpr long BLOCK_PAIRS = NEAR ? 8 : 1, NEAR_STEPS = NEAR ? 16 : SLICE;
  // The most panels of a chunk: one whose rows are in slices has as many as possible, because it reads all of them.
  static constexpr long PG = SLICES > 1 ? max_of(1, min_of(NP, SUMS_BYTES / (TILES * AMX_ROWS * PANEL * 4 * PRODUCTS)))
                                        : ceil_div(NP * BLOCKS * IMAGES, 2 * AMX_LIMITS.chunks);
  // Rows are copied if tiles would be unaligned, or if their rows would compete for few sets of L1 in many panels.
  static constexpr bool ALIGNED = D::M >= AMX_ROWS && D::K % 2 == 0 && D::lda % 32 == 0 && !STEPS.padded;
  static constexpr bool COPY = !ALIGNED || SLICES > 1 || (D::lda % 512 == 0 && NP >= 128);
  static constexpr long PITCH = COPY ? STEPS.units * 4 : D::lda * 2;
  static constexpr long COPY_BYTES = COPY ? TILES * STEP_X * SLICE : 0, PAIR_BYTES = 2 * STEP_X * SLICE;
};

// Copies a slice of rows into tiles [tile][step][16][units].
template <class D, class Plan>
NPU_NOINLINE void amx_copy_rows(const bf16* a, long rows, long step0, long steps, char* out) {
  constexpr long UNITS = Plan::STEPS.units, BYTES = UNITS * 4;
  for (long r = 0; r < rows; r++, a += D::lda) {
    char* to = out + (r / AMX_ROWS * steps * AMX_ROWS + r % AMX_ROWS) * BYTES;
    for (long s = step0; s < step0 + steps; s++, to += Plan::STEP_X) {
      const long first = s * UNITS * 2, left = D::K - first;
      if (left >= UNITS * 2) {
        memcpy(to, a + first, BYTES);
        continue;
      }
      memset(to, 0, BYTES);
      if (left > 0) copy_units<BF16P>(to, a + first, left);
    }
  }
}

// A panel and a slice of the rows of a chunk. The panels of a chunk are the innermost loop, its slices the next one.
struct AmxItem {
  long chunk = -1, image, block, begin, end, slice, panel;
};
template <class Plan> struct AmxItems {
  Thread& th;
  int* counter;
  long height, blocks;  // rows of a block, and blocks of an image
  long groups, count;   // chunks of a block, and of all
  long part = 0;

  AmxItems(Thread& th, int* counter) : th(th), counter(counter) {
    // Few panels for many threads: blocks have fewer rows, so that the threads' shares are more even.
    const long parts = max_of(1, min_of(ceil_div(4 * th.n, Plan::NP), Plan::TILES / 4));
    height = min_of(Plan::Q, ceil_div(ceil_div(Plan::Q, parts), 2 * AMX_ROWS) * 2 * AMX_ROWS);
    blocks = ceil_div(Plan::M, height);
    groups = ceil_div(Plan::NP, min_of(Plan::PG, ceil_div(Plan::NP * blocks * Plan::IMAGES, th.n)));
    count = Plan::IMAGES * blocks * groups;
  }
  AmxItem of(long chunk) const {
    const long group = chunk % groups, begin = Plan::NP * group / groups, end = Plan::NP * (group + 1) / groups;
    return {chunk, chunk / groups / blocks, chunk / groups % blocks, begin, end, 0, begin};
  }
  AmxItem claim() { return of(own_chunk(th, counter, count, part)); }
  bool valid(const AmxItem& i) const { return i.chunk < count; }
  // Moves to the next item of the chunk, if there is one.
  bool advance(AmxItem& i) const {
    if (++i.panel < i.end) return true;
    i.panel = i.begin;
    return ++i.slice < Plan::SLICES;
  }
};

template <class Plan> struct AmxPanelScratch : AmxScratch<Plan> {
  using Base = AmxScratch<Plan>;
  static constexpr long END = Base::PANELS + 2 * Base::SIDE;  // unpacked panels: of the current item and the next one
};

template <class D, class TW, class Epi>
NPU_INLINE void amx_panels(const bf16* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Plan = AmxPanelPlan<D, TW>;
  using Stored = typename Plan::Stored;
  using S = AmxPanelScratch<Plan>;
  constexpr long PRODUCTS = Plan::PRODUCTS, STEP = Plan::STEPS.units, STEP_BYTES = STEP * BF16P::W_BYTES;
  constexpr long TILE_SUMS = AMX_ROWS * PANEL, FETCHED = STEP * Stored::UNIT_BYTES;  // bytes of a step
  constexpr bool SLICED = Plan::SLICES > 1;
  constexpr long X_STEP = Plan::COPY ? Plan::STEP_X : STEP * 4;
  constexpr AmxStream STREAM = Plan::NEAR ? STREAM_X : S::STREAM;
  AmxItems<Plan> items(th, counter);
  AmxItem now = items.claim();
  if (!items.valid(now)) return;
  AmxItem next = now;
  if (!items.advance(next)) next = items.claim();

  const AmxTap tap = {0, 0};
  int32_t* rows = (int32_t*)(th.scratch + S::ROWS);
  float* sums = (float*)(th.scratch + S::SUMS);
  char* copy = th.scratch + S::COPY;
  TileShapes shapes;
  for (int t = 0; t < 4; t++) shapes.set(t, (int)AMX_ROWS, 64);
  for (int t = 4; t < 6; t++) shapes.set(t, (int)AMX_ROWS, (int)STEP * 4), shapes.set(t + 2, (int)STEP, 64);
  Amx::configure(shapes);

  auto panel_of = [&](const AmxItem& i) {
    return (const char*)weights + i.image * Plan::W_IMAGE_BYTES + i.panel * PRODUCTS * Plan::PRODUCT_BYTES;
  };
  auto steps_of = [](const AmxItem& i) { return min_of(Plan::SLICE, Plan::STEPS.count - i.slice * Plan::SLICE); };
  int side = 0;
  AmxUnpack<Plan> ahead;
  auto begin_to_unpack = [&](const AmxItem& i, long calls) {
    const long first = i.slice * Plan::SLICE * STEP, units = min_of(steps_of(i) * STEP, Plan::UNITS - first);
    ahead.begin(panel_of(i), th.scratch + S::PANELS + side * S::SIDE, PRODUCTS, first, units, calls);
  };
  if constexpr (S::UNPACK) begin_to_unpack(now, 1), ahead.finish();

  AmxSums waiting;
  waiting.run = amx_epilogue<Plan, Epi>, waiting.epi = &epi;
  long copied = -1, count = 0;  // the block and slice that were copied, and the rows in the table
  for (int turn = 0; items.valid(now);) {
    const long at = now.block * items.height, held = min_of(items.height, D::M - at);
    const long tiles = ceil_div(held, AMX_ROWS);
    const long step0 = now.slice * Plan::SLICE, steps = steps_of(now);
    const char* block = (const char*)(x + now.image * D::batch_a + at * D::lda);
    if (count != held) {
      amx_finish(waiting);
      count = held;
      for (long p = 0; p < tiles * AMX_ROWS; p++) {  // rows that are not copied end where x does
        const long first = Plan::COPY ? p : min_of(p / AMX_ROWS * AMX_ROWS, held - AMX_ROWS) + p % AMX_ROWS;
        rows[p] = first < held && first >= p / AMX_ROWS * AMX_ROWS ? (int32_t)first : -1;
      }
    }
    if constexpr (Plan::COPY) {
      const long key = (now.image * items.blocks + now.block) * Plan::SLICES + now.slice;
      if (copied != key) amx_copy_rows<D, Plan>((const bf16*)block, held, step0, steps, copy);
      copied = key, block = copy;
    }
    const bool more = items.valid(next), same_chunk = next.chunk == now.chunk;
    const long pairs = ceil_div(tiles, 2);
    const char* panel = Stored::at(panel_of(now), step0 * STEP);
    AmxItem fetched = next;  // the panels that are prefetched: those of the next item, or of the one after
    if constexpr (S::UNPACK) {
      panel = th.scratch + S::PANELS + side * S::SIDE;
      side ^= 1;
      if (more) begin_to_unpack(next, pairs * PRODUCTS * steps);
      if (more && !items.advance(fetched)) fetched = items.of(next.chunk + 1);
    }
    const bool fetch = items.valid(fetched);
    const char* source = fetch ? Stored::at(panel_of(fetched), fetched.slice * Plan::SLICE * STEP) : panel;
    const long lines = ceil_div(FETCHED, pairs * 64), share = max_of(2, ceil_div(2 * AMX_ROWS, steps * PRODUCTS));
    const bool done = now.slice + 1 == Plan::SLICES;
    float* panel_sums = sums + (SLICED ? (now.panel - now.begin) * PRODUCTS * S::PANEL_SUMS : 0);
    for (long begin = 0; begin < tiles; begin += 2 * Plan::BLOCK_PAIRS, turn ^= 1) {
      const long end = min_of(begin + 2 * Plan::BLOCK_PAIRS, tiles);
      float* acc = panel_sums + (SLICED ? begin : 2 * turn) * TILE_SUMS;
      auto tile = [&](long i) {
        return Plan::COPY ? i * steps * Plan::STEP_X : min_of(i * AMX_ROWS, held - AMX_ROWS) * Plan::PITCH;
      };
      for (long p = 0; p < PRODUCTS; p++)
        for (long s = 0; s < steps; s += Plan::NEAR_STEPS)
          for (long t = begin; t < end; t += 2) {
            const bool two = t + 1 < end;
            const long fetched_before = (t / 2 * steps + s) * lines * 64;
            AmxArgs a = {block + tile(t) + s * X_STEP, two ? tile(t + 1) - tile(t) : 0, Plan::PITCH, &tap, 1,
                         (int)min_of(Plan::NEAR_STEPS, steps - s), X_STEP,
                         panel + p * (S::UNPACK ? S::UNPACKED : Plan::PRODUCT_BYTES) + s * STEP_BYTES, STEP_BYTES,
                         acc + (t - begin) * TILE_SUMS + p * S::PANEL_SUMS, now.slice > 0 || s > 0,
                         source + p * Plan::PRODUCT_BYTES + fetched_before,
                         fetch && fetched_before < steps * FETCHED ? (int)lines : 0, &waiting, (int)share};
            if constexpr (S::UNPACK) amx_pair<false, 1, STREAM>(two, a, ahead);
            else {
              NoAmxWork work;
              amx_pair<false, 1, STREAM>(two, a, work);
            }
          }
      if (!done) continue;
      amx_finish(waiting);
      waiting.sums = acc, waiting.rows = rows + begin * AMX_ROWS, waiting.count = (int)((end - begin) * AMX_ROWS);
      waiting.next = 0, waiting.row = now.image * D::M + at, waiting.col = now.panel * PANEL, waiting.shift = 0;
    }
    if (SLICED && done && !same_chunk) amx_finish(waiting);  // the next chunk overwrites the sums
    if constexpr (S::UNPACK) ahead.finish();
    now = next;
    if (more && !items.advance(next)) next = items.claim();
  }
  amx_finish(waiting);
  Amx::release();
}

// Prefetches the first panel of this thread while it waits for the previous phase to end.
template <class D, class TW> NPU_INLINE void amx_prefetch(const char* weights, const Thread& th) {
  using Plan = AmxPanelPlan<D, TW>;
  Thread self = th;
  int none = 0;
  const AmxItems<Plan> items(self, &none);
  if (th.n > MAX_OWNERS || items.count < th.n) return;
  const AmxItem first = items.of(items.count * th.tid / th.n);
  const char* from = weights + first.image * Plan::W_IMAGE_BYTES + first.panel * Plan::PRODUCTS * Plan::PRODUCT_BYTES;
  const long bytes = min_of(Plan::PRODUCTS * Plan::PRODUCT_BYTES, 128 << 10);
  for (long at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

}  // namespace npu
#endif
