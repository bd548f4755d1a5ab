// Matrix products on AMX tiles whose weights are read once: each thread multiplies neighbouring panels by all rows.
//
// Panels in a weight format are unpacked, and plain ones prefetched, between the products of the panel before; for many
// rows, before their own products. The rows of a block, or a slice of them, stay in L2. Products whose weights stay in
// L2 run in amx_blocked().
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
  static constexpr int LIMBS = 1, NTAPS = 1;
  static constexpr long PRODUCTS = 1 + DUAL, PRODUCT_BYTES = Stored::panel_bytes(UNITS);
  static constexpr long W_IMAGE_BYTES = D::shared_w ? 0 : NP * PRODUCTS * PRODUCT_BYTES;
  static constexpr AmxSteps STEPS = amx_steps(UNITS);
  static constexpr long STEP_X = AMX_ROWS * STEPS.units * 4;  // bytes of a tile of x
  // A block has all rows if L2 holds them. Otherwise its rows are in slices, and its sums are kept for all panels.
  static constexpr long ROWS_BYTES = 1600 << 10, SLICE_BYTES = (Stored::PLAIN ? 640 : 768) << 10;
  static constexpr long SUMS_BYTES = 1536 << 10, MAX_ROWS = 512;
  static constexpr long ROW_BYTES = STEPS.count * STEPS.units * 4;
  static constexpr long FIT = max_of(MAX_ROWS, ROWS_BYTES / ROW_BYTES), BLOCKS = ceil_div(D::M, FIT);
  static constexpr long Q = min_of(D::M, ceil_div(ceil_div(D::M, BLOCKS), 2 * AMX_ROWS) * 2 * AMX_ROWS);
  static constexpr long TILES = ceil_div(Q, AMX_ROWS);
  static constexpr long FITTING = max_of(2, SLICE_BYTES / (TILES * STEP_X) / 2 * 2);  // steps; formats need pairs
  static constexpr long SLICES = Q * ROW_BYTES <= ROWS_BYTES ? 1 : ceil_div(STEPS.count, FITTING);
  static constexpr long SLICE = SLICES == 1 ? STEPS.count : ceil_div(ceil_div(STEPS.count, SLICES), 2) * 2;
  // Of many rows, unpacking takes a small part of the time. Weights without scales are unpacked quickly.
  static constexpr bool MANY = TILES >= 16, QUICK = Stored::BLOCK_UNITS == 0;
  // A slice is multiplied in parts of PART steps: L1 keeps a part of a panel while all rows are multiplied by it, and
  // their sums are loaded again for each part. This pays for plain panels that have at least two long parts, and for
  // others if they are unpacked right there and have no second product.
  static constexpr long WANTED = Stored::PLAIN ? 20 : 8, LONG = 32;
  static constexpr bool PARTS = Stored::PLAIN ? SLICES > 1 || (SLICE >= LONG && TILES >= 8 && !STEPS.padded)
                                              : QUICK && !DUAL && !MANY && TILES >= 8;
  static constexpr bool NEAR = SLICE > WANTED && PARTS;
  static constexpr long PART = NEAR ? ceil_div(ceil_div(SLICE, ceil_div(SLICE, WANTED)), 2) * 2 : SLICE;
  static constexpr bool KEPT = SLICES > 1 || NEAR;  // the sums of all rows of a panel
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

// A part of a panel and of the rows of a chunk. The parts of a slice are the innermost loop, then the panels of a
// chunk, then its slices.
struct AmxItem {
  long chunk = -1, image, block, begin, end, slice, panel, part = 0;
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
  static long slice_steps(const AmxItem& i) { return min_of(Plan::SLICE, Plan::STEPS.count - i.slice * Plan::SLICE); }
  // Moves to the next item of the chunk, if there is one.
  bool advance(AmxItem& i) const {
    if (++i.part * Plan::PART < slice_steps(i)) return true;
    i.part = 0;
    if (++i.panel < i.end) return true;
    i.panel = i.begin;
    return ++i.slice < Plan::SLICES;
  }
};

// The scratch memory of a part of a slice.
template <class Plan> struct AmxPart : Plan {
  static constexpr long SLICE = Plan::PART, SLICES = Plan::KEPT ? 2 : 1, PG = Plan::SLICES > 1 ? Plan::PG : 1;
};
template <class Plan> struct AmxPanelScratch : AmxScratch<AmxPart<Plan>> {
  using Base = AmxScratch<AmxPart<Plan>>;
  // Whether parts are unpacked between the products of the one before. Their stores delay loads of tiles, which takes
  // longer than the unpacking if there are many rows or if it is quick.
  static constexpr bool AHEAD = Base::UNPACK && !Plan::MANY && !Plan::NEAR;
  static constexpr long END = Base::PANELS + (1 + AHEAD) * Base::SIDE;  // of the current item, and of the next one
  static constexpr bool BOTH = Base::UNPACK && !Base::BOTH_NEAR && (Plan::MANY || (Plan::QUICK && Plan::TILES >= 8));
  static constexpr AmxStream STREAM = Plan::NEAR ? STREAM_X : BOTH ? STREAM_BOTH : Base::STREAM;
};

template <class D, class TW, class Epi>
NPU_INLINE void amx_panels(const bf16* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Plan = AmxPanelPlan<D, TW>;
  using Stored = typename Plan::Stored;
  using S = AmxPanelScratch<Plan>;
  constexpr long PRODUCTS = Plan::PRODUCTS, STEP = Plan::STEPS.units, STEP_BYTES = STEP * BF16P::W_BYTES;
  constexpr long TILE_SUMS = AMX_ROWS * PANEL, FETCHED = STEP * Stored::UNIT_BYTES;  // bytes of a step
  constexpr bool SLICED = Plan::SLICES > 1, AT_ONCE = Plan::NEAR && S::UNPACK;  // AT_ONCE: no sums wait
  // All rows are multiplied by the first of two products before the second: L1 has room for a part of one.
  constexpr bool APART = Plan::DUAL && Plan::KEPT && !S::UNPACK;
  constexpr long TOGETHER = APART ? 1 : PRODUCTS;
  constexpr long X_STEP = Plan::COPY ? Plan::STEP_X : STEP * 4;
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
  auto first_step = [](const AmxItem& i) { return i.slice * Plan::SLICE + i.part * Plan::PART; };
  auto steps_of = [&](const AmxItem& i) { return min_of(Plan::PART, items.slice_steps(i) - i.part * Plan::PART); };
  int side = 0;
  AmxUnpack<AmxPart<Plan>> ahead;
  auto begin_to_unpack = [&](const AmxItem& i, long calls) {
    const long first = first_step(i) * STEP, units = min_of(steps_of(i) * STEP, Plan::UNITS - first);
    ahead.begin(panel_of(i), th.scratch + S::PANELS + side * S::SIDE, PRODUCTS, first, units, calls);
  };
  if constexpr (S::AHEAD) begin_to_unpack(now, 1), ahead.finish();

  AmxSums waiting;
  waiting.run = amx_epilogue<AmxPart<Plan>, Epi>, waiting.epi = &epi;
  long copied = -1, count = 0;  // the block and slice that were copied, and the rows in the table
  for (int turn = 0; items.valid(now);) {
    const long at = now.block * items.height, held = min_of(items.height, D::M - at);
    const long tiles = ceil_div(held, AMX_ROWS);
    const long steps = steps_of(now), slice_steps = items.slice_steps(now);
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
      if (copied != key) amx_copy_rows<D, Plan>((const bf16*)block, held, now.slice * Plan::SLICE, slice_steps, copy);
      copied = key, block = copy;
    }
    block += now.part * Plan::PART * X_STEP;
    const bool more = items.valid(next), same_chunk = next.chunk == now.chunk;
    const long pairs = ceil_div(tiles, 2);
    const char* panel = Stored::at(panel_of(now), first_step(now) * STEP);
    AmxItem fetched = next;  // the panels that are prefetched: those of the next item, or of the one after
    if constexpr (S::UNPACK) panel = th.scratch + S::PANELS + side * S::SIDE;
    if constexpr (S::UNPACK && !S::AHEAD) begin_to_unpack(now, 1), ahead.finish();
    if constexpr (S::AHEAD) {
      side ^= 1;
      if (more) begin_to_unpack(next, pairs * PRODUCTS * steps);
      if (more && !items.advance(fetched)) fetched = items.of(next.chunk + 1);
    }
    const bool fetch = items.valid(fetched);
    const char* source = fetch ? Stored::at(panel_of(fetched), first_step(fetched) * STEP) : panel;
    const long lines = ceil_div(FETCHED, pairs * 64), share = max_of(2, ceil_div(2 * AMX_ROWS, steps * TOGETHER));
    const bool done = first_step(now) + steps == Plan::STEPS.count;
    float* panel_sums = sums + (SLICED ? (now.panel - now.begin) * PRODUCTS * S::PANEL_SUMS : 0);
    auto tile = [&](long i) {
      return Plan::COPY ? i * slice_steps * Plan::STEP_X : min_of(i * AMX_ROWS, held - AMX_ROWS) * Plan::PITCH;
    };
    bool loaded = false;
    for (long first = 0; first < PRODUCTS; first += TOGETHER) {
      for (long t = 0; t < tiles; t += 2, turn ^= 1) {
        const bool two = t + 1 < tiles;
        float* acc = panel_sums + (Plan::KEPT ? t : 2 * turn) * TILE_SUMS;
        const long fetched_before = t / 2 * steps * lines * 64;
        for (long p = first; p < first + TOGETHER; p++) {
          AmxArgs a = {block + tile(t), two ? tile(t + 1) - tile(t) : 0, Plan::PITCH, &tap, 1, (int)steps, X_STEP,
                       panel + p * (S::UNPACK ? S::UNPACKED : Plan::PRODUCT_BYTES), STEP_BYTES,
                       acc + p * S::PANEL_SUMS, first_step(now) > 0, source + p * Plan::PRODUCT_BYTES + fetched_before,
                       fetch && fetched_before < steps * FETCHED ? (int)lines : 0, &waiting, (int)share};
          if constexpr (S::AHEAD) amx_pair<false, 1, S::STREAM, false>(two, a, ahead);
          else {
            if (TOGETHER == 1 && t + 2 < tiles) {
              a.next_x = block + tile(t + 2), a.next_second = t + 3 < tiles ? tile(t + 3) - tile(t + 2) : -1;
              a.next_w = a.w;
            }
            a.loaded = loaded, loaded = a.next_w != nullptr;
            NoAmxWork work;
            amx_pair<false, 1, S::STREAM, S::EARLY>(two, a, work);
          }
        }
        if (!done || first + TOGETHER < PRODUCTS) continue;
        amx_finish(waiting);
        waiting.sums = acc, waiting.rows = rows + t * AMX_ROWS, waiting.count = (two ? 2 : 1) * (int)AMX_ROWS;
        waiting.next = 0, waiting.row = now.image * D::M + at, waiting.col = now.panel * PANEL, waiting.shift = 0;
        if (Plan::MANY && !SLICED) {
          const bool last = t + 2 >= tiles;  // the first rows of the next panel are next
          const long from = last ? 0 : t + 2;
          waiting.after = rows + from * AMX_ROWS, waiting.after_col = waiting.col + (last ? PANEL : 0);
          waiting.after_count = last && now.panel + 1 == now.end ? 0 : (int)(min_of(2, tiles - from) * AMX_ROWS);
        }
        if (AT_ONCE) amx_finish(waiting);
      }
    }
    if (SLICED && done && !same_chunk) amx_finish(waiting);  // the next chunk overwrites the sums
    if constexpr (S::AHEAD) ahead.finish();
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
