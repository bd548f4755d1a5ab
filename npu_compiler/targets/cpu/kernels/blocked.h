// The driver of matrix products and convolutions on the register tile (tile.h): chunks of positions and panels.
#pragma once
#include "tile.h"

namespace npu {

struct BlockLimits {
  long block_bytes;     // x of one block
  long near_bytes;      // x of a block that is cheap to convert, about one L1 cache
  long resident_bytes;  // weights that stay in L2 together with a block
  long chunk_macs;      // the smallest chunk worth claiming
  long chunks;          // the fewest chunks, so that the threads' loads balance
  long quanta;          // the fewest quanta of a block's rows
  long least_chunks;    // as `chunks`, even if blocks have to read weights again that leave the cache
  constexpr BlockLimits with_blocks(long bytes) const {
    return {bytes, near_bytes, resident_bytes, chunk_macs, chunks, quanta, least_chunks};
  }
};
// For the vector tile. A block leaves most of a 1 MB L2 cache to the weights; a chunk takes one core about 12 us.
constexpr BlockLimits VECTOR_LIMITS = {256 << 10, 48 << 10, 384 << 10, 400000, 16, 3, 0};
constexpr long CHUNK_MACS = VECTOR_LIMITS.chunk_macs, CHUNKS = VECTOR_LIMITS.chunks;

// Rows in blocks of nearly equal sizes: multiples of `quantum`, except for the last block.
struct Division {
  long rows, quantum, blocks;
  constexpr long begin(long block) const { return min_of(rows, block * ceil_div(rows, quantum) / blocks * quantum); }
  constexpr long size(long block) const { return begin(block + 1) - begin(block); }
  constexpr long largest() const { return min_of(rows, ceil_div(ceil_div(rows, quantum), blocks) * quantum); }
};
// `even`: as many blocks, or some more, as can be shared evenly by two threads, and by four or eight if there are many.
constexpr Division divide(long rows, long quantum, long block_rows, bool even) {
  const long blocks = ceil_div(rows, block_rows), share = blocks > 16 ? 8 : blocks > 4 ? 4 : blocks > 1 ? 2 : 1;
  return {rows, quantum, even ? min_of(ceil_div(blocks, share) * share, ceil_div(rows, quantum)) : blocks};
}

struct TapRange {
  long begin, end;
};
// The taps of which some window reads inside a dim of `size` positions. Windows begin at positions `first` to `last`.
constexpr TapRange taps_inside(long first, long last, long size, long taps, long dilation) {
  return {min_of(taps, max_of(0, ceil_div(-last, dilation))),
          first < size ? min_of(taps, ceil_div(size - first, dilation)) : 0};
}

// A matrix product is divided into chunks: a chunk is a block of positions times PG panels of weights. Plan defines the
// constants Kind, IMAGES, BLOCKS, Q (positions of the largest block), Q_FIRST and Q_LAST (of the first and the last
// one; each block has one of these sizes), G (groups), N and NP (columns and panels of a group), PG, DUAL (two
// products, so two panels of weights for each panel of results), NTAPS, LEN, SEGMENT, GROUP_BYTES (of x),
// W_IMAGE_BYTES, RESIDENT (L2 holds all weights), COPY (prepare() copies), the storage of the weights Stored, and
//   positions(block)                     Q, Q_FIRST or Q_LAST
//   tables(off, taps)                    fills in the offsets of a block's positions and of the taps
//   first_row(image, block)              the output row of the block's first position
//   inner_taps(block, position, count)   taps without which `count` positions of a block only miss padding
//   prepare(x, image, block, copy)       the address of the block's x, or `copy` if x was padded or converted into it
template <class Kind, class Plan, long N = 0> struct Tilings {
  const Tiling full = tiling<Kind, Plan::Q, false, N>(), first = tiling<Kind, Plan::Q_FIRST, false, N>(),
               last = tiling<Kind, Plan::Q_LAST, false, N>();
  const Tiling& of(long block) const {
    const long positions = Plan::positions(block);
    return positions == Plan::Q ? full : positions == Plan::Q_FIRST ? first : last;
  }
};
template <class Plan> constexpr long blocked_tables_bytes() { return align64(Plan::Q * 4) + align64(Plan::NTAPS * 8); }
// Groups of panels are of nearly equal size, at most Plan::PG. BY_PANELS: blocks vary fastest, so that a thread reads its
// weights again while they are in the cache.
template <class Plan, bool BY_PANELS = false> struct Chunk {
  static constexpr long GROUPS = ceil_div(Plan::G * Plan::NP, Plan::PG), COUNT = Plan::IMAGES * Plan::BLOCKS * GROUPS;
  long image, block, begin, end;  // panels begin..end
  NPU_INLINE Chunk of(long i) {
    const long image = i / (GROUPS * Plan::BLOCKS), block = BY_PANELS ? i % Plan::BLOCKS : i / GROUPS % Plan::BLOCKS;
    const long group = BY_PANELS ? i / Plan::BLOCKS % GROUPS : i % GROUPS, panels = Plan::G * Plan::NP;
    return {image, block, panels * group / GROUPS, panels * (group + 1) / GROUPS};
  }
};

// Computes tile t of a block. off is the entry of its first position, w the panel, of which `columns` are needed;
// `after`: the weights of the next tiles or null.
template <class Kind, class Stored>
NPU_INLINE void run_tile(const Tiling& tiles, int t, const TileArgs& a, const int32_t* off, const char* w,
                         const char* after, long columns, typename Kind::Sum* acc) {
  const bool fetch = after && t < Stored::UNIT_BYTES / 32;  // a tile prefetches 32 bytes per unit
  const Prefetch ahead = {fetch ? after + (long)t * a.ntaps * a.len * 32 : w, fetch ? 64 : 0};
  for (long done = 0; done < min_of(columns, PANEL); done += TILE_VECS * LANES<Kind>) {
    const bool narrow = columns - done <= LANES<Kind>;
    const TileFn compute = t < tiles.tall ? narrow ? tiles.tall_narrow : tiles.tall_fn : narrow ? tiles.narrow : tiles.fn;
    compute(a, off, w + done * (Kind::W_BYTES / PANEL), acc + done, ahead);
  }
}

// Whether a storage packs panels of a matrix (pack.h).
template <class Stored> constexpr bool packs = false;

// Prefetches n bytes in `parts` parts into L2: this one.
NPU_INLINE void prefetch_part(const char* from, long n, long part, long parts) {
  for (long at = n * part / parts / 64 * 64; at < n * (part + 1) / parts; at += 64) __builtin_prefetch(from + at, 0, 2);
}
// The matrices of the next chunk, of which each tile of the last panel prefetches a part: both are small, and are read
// in an order that no hardware prefetcher follows. Plan has a storage that packs.
template <class Plan> struct NextMatrices {
  const char *x = nullptr, *w = nullptr;
  static constexpr long MOST = 16 << 10, X_BYTES = Plan::Q * Plan::ROW_BYTES;
  __attribute__((always_inline)) void prefetch(long part, long parts) const {
    if (!x) return;
    prefetch_part(x, min_of(MOST, X_BYTES), part, parts);
    prefetch_part(w, min_of(MOST, Plan::W_IMAGE_BYTES), part, parts);
  }
};

template <class Plan> constexpr long copy_end() { return blocked_tables_bytes<Plan>() + align64(Plan::COPY_BYTES); }
template <class Plan> constexpr long unpacked_bytes(long units) {  // buffer for one unpacked panel
  return Plan::Stored::PLAIN ? 0 : units * Plan::Kind::W_BYTES;
}
// Taps that are processed at once. If a panel of all taps would take a large part of the L2 cache, it is divided, so
// that its weights stay there for all tiles of a block.
template <class Plan> struct TapSlices {
  static constexpr long TAP_BYTES = Plan::LEN * Plan::Kind::W_BYTES, LIMIT = 128 << 10;
  static constexpr bool DIVIDED = Plan::Stored::PLAIN && Plan::Q > TILE_ROWS && Plan::NTAPS * TAP_BYTES > 2 * LIMIT;
  static constexpr int TAPS = DIVIDED ? (int)min_of(Plan::NTAPS, max_of(1, LIMIT / TAP_BYTES)) : Plan::NTAPS;
  static constexpr long ROWS = DIVIDED ? Plan::Q : TILE_ROWS, SUMS = ROWS * PANEL;  // for each of the products
};
template <class Plan> constexpr long blocked_scratch_bytes() {
  return copy_end<Plan>() + (1 + Plan::DUAL) * (align64(TapSlices<Plan>::SUMS * sizeof(typename Plan::Kind::Sum)) +
                                                unpacked_bytes<Plan>((long)Plan::NTAPS * Plan::LEN));
}

// Processes long rows (LEN units of the reduced dim) in slices of SLICE units, so that a slice of a block's x and the
// sums of a chunk stay in the L2 cache while the weights are streamed. Plan has one tap and one group.
template <class Plan> constexpr long sliced_sums_bytes() {
  return Plan::PG * Plan::PRODUCTS * Plan::Q * PANEL * sizeof(typename Plan::Kind::Sum);
}
template <class Plan> constexpr long sliced_scratch_bytes() {
  return copy_end<Plan>() + align64(sliced_sums_bytes<Plan>()) + unpacked_bytes<Plan>(Plan::SLICE);
}

template <class Plan, class TX, class TW, class Epi>
NPU_INLINE void sliced(const TX* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Kind = typename Plan::Kind;
  using Sum = typename Kind::Sum;
  using Stored = typename Plan::Stored;
  constexpr long PRODUCTS = Plan::PRODUCTS, PRODUCT_BYTES = Stored::panel_bytes(Plan::LEN), SUMS = Plan::Q * PANEL;
  int32_t* off = (int32_t*)th.scratch;
  long* taps = (long*)(th.scratch + align64(Plan::Q * 4));
  char* copy = th.scratch + blocked_tables_bytes<Plan>();
  Sum* sums = (Sum*)(th.scratch + copy_end<Plan>());
  char* unpacked = th.scratch + copy_end<Plan>() + align64(sliced_sums_bytes<Plan>());
  Plan::tables(off, taps);
  const Tilings<Kind, Plan> tilings;
  for (long i, part = 0, prepared = -1; (i = own_chunk(th, counter, Chunk<Plan>::COUNT, part)) < Chunk<Plan>::COUNT;) {
    const Chunk<Plan> c = Chunk<Plan>::of(i);
    const char* block = copy;
    if (!Plan::COPY || prepared != c.image * Plan::BLOCKS + c.block) block = Plan::prepare(x, c.image, c.block, copy);
    prepared = c.image * Plan::BLOCKS + c.block;
    const Tiling& tiles = tilings.of(c.block);
    const char* w = (const char*)weights + c.image * Plan::W_IMAGE_BYTES;
    for (long at = 0; at < Plan::LEN; at += Plan::SLICE) {
      const int len = (int)min_of(Plan::SLICE, Plan::LEN - at);
      const TileArgs a{block + at * Kind::UNIT, taps, 1, len, Plan::SEGMENT, at > 0};
      for (long h = c.begin * PRODUCTS; h < c.end * PRODUCTS; h++) {
        const char* panel = Stored::unpack(w + h * PRODUCT_BYTES, Plan::LEN, at, len, unpacked);
        const char* next = Stored::at(w + (h + (h + 1 < c.end * PRODUCTS)) * PRODUCT_BYTES, at);
        for (int t = 0, done = 0; t < tiles.count; t++) {
          run_tile<Kind, Stored>(tiles, t, a, off + done, panel, next, PANEL,
                                 sums + (h - c.begin * PRODUCTS) * SUMS + done * PANEL);
          done += tiles.rows + (t < tiles.tall);
        }
      }
    }
    const int rows = (int)Plan::positions(c.block);
    for (long pn = c.begin; pn < c.end; pn++)
      apply_epilogue<Plan::N, Plan::DUAL>(sums + (pn - c.begin) * PRODUCTS * SUMS, SUMS, rows,
                                          Plan::first_row(c.image, c.block), pn * PANEL, 0, epi);
  }
}

template <class Plan, class TX, class TW, class Epi>
NPU_INLINE void blocked(const TX* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Kind = typename Plan::Kind;
  using Sum = typename Kind::Sum;
  using Stored = typename Plan::Stored;
  using Slices = TapSlices<Plan>;
  using Chunks = Chunk<Plan, !Plan::RESIDENT && !Plan::COPY>;
  constexpr long UNITS = (long)Plan::NTAPS * Plan::LEN, PRODUCTS = 1 + Plan::DUAL, SUMS = Slices::SUMS;
  constexpr long PRODUCT_BYTES = Stored::panel_bytes(UNITS), PANEL_BYTES = PRODUCTS * PRODUCT_BYTES;
  int32_t* off = (int32_t*)th.scratch;
  long* taps = (long*)(th.scratch + align64(Plan::Q * 4));
  char* copy = th.scratch + blocked_tables_bytes<Plan>();
  Sum* acc = (Sum*)(th.scratch + copy_end<Plan>());
  char* unpacked = (char*)acc + PRODUCTS * align64(SUMS * sizeof(Sum));
  long part = 0, prepared = -1, i = own_chunk(th, counter, Chunks::COUNT, part);
  if (i >= Chunks::COUNT) return;
  Plan::tables(off, taps);
  const char* block = nullptr;
  const Tilings<Kind, Plan, Plan::N> tilings;
  while (i < Chunks::COUNT) {
    const Chunks c = Chunks::of(i);
    if (prepared != c.image * Plan::BLOCKS + c.block) {
      block = Plan::prepare(x, c.image, c.block, copy);
      prepared = c.image * Plan::BLOCKS + c.block;
    }
    const Tiling& tiles = tilings.of(c.block);
    const char* w = (const char*)weights + c.image * Plan::W_IMAGE_BYTES;
    for (long pn = c.begin; pn < c.end; pn++) {
      const char *panel = w + pn * PANEL_BYTES, *next = panel + PANEL_BYTES;
      if (pn + 1 == c.end) {  // claim the next chunk early, to prefetch its first weights
        i = own_chunk(th, counter, Chunks::COUNT, part);
        const Chunks after = Chunks::of(i);
        next = (const char*)weights + after.image * Plan::W_IMAGE_BYTES + after.begin * PANEL_BYTES;
        if (i >= Chunks::COUNT || next == panel) next = nullptr;
      }
      NextMatrices<Plan> later;
      if constexpr (packs<Stored>) {
        if (pn + 1 == c.end && next) {
          const Chunks after = Chunks::of(i);
          later = {Plan::rows_at(x, after.image, after.block), next};
        }
      }
      const long group = pn / Plan::NP, col = pn % Plan::NP * PANEL, row = Plan::first_row(c.image, c.block);
      const char* from = block + group * Plan::GROUP_BYTES;
      const char* plain[PRODUCTS];
      for (long i = 0; i < PRODUCTS; i++) {
        char* buffer = unpacked + i * unpacked_bytes<Plan>(UNITS);
        if constexpr (packs<Stored>) plain[i] = Stored::pack(panel, min_of(PANEL, Plan::N - col), buffer);
        else plain[i] = Stored::unpack(panel + i * PRODUCT_BYTES, UNITS, 0, UNITS, buffer);
      }
      for (int tap = 0; tap < Plan::NTAPS; tap += Slices::TAPS) {
        const bool last = tap + Slices::TAPS >= Plan::NTAPS;
        const char* after = last ? next : panel + (tap + Slices::TAPS) * Slices::TAP_BYTES;
        const int ntaps = (int)min_of(Slices::TAPS, Plan::NTAPS - tap);
        const TileArgs a{from, taps + tap, ntaps, Plan::LEN, Plan::SEGMENT, tap > 0};
        for (int t = 0, done = 0; t < tiles.count; t++) {
          const int rows = tiles.rows + (t < tiles.tall);
          Sum* sums = acc + (Slices::DIVIDED ? done * PANEL : 0);
          if (last) prefetch_epilogue(rows, row + done, group * Plan::N + col, epi);
          if constexpr (packs<Stored>) later.prefetch(t, tiles.count);
          const TapRange inner = Plan::inner_taps(c.block, done, rows);
          const int skipped = (int)max_of(inner.begin - tap, 0), end = (int)min_of(inner.end - tap, ntaps);
          const bool add = inner.begin < tap;  // to sums of earlier taps
          for (long i = 0; i < PRODUCTS; i++) {
            const char *w = plain[i] + tap * Slices::TAP_BYTES, *fetched = after ? after + i * PRODUCT_BYTES : nullptr;
            if (skipped == 0 && end == ntaps && add == a.add) {
              run_tile<Kind, Stored>(tiles, t, a, off + done, w, fetched, Plan::N - col, sums + i * SUMS);
            } else if (skipped < end) {
              const TileArgs some{from, taps + tap + skipped, end - skipped, Plan::LEN, Plan::SEGMENT, add};
              run_tile<Kind, Stored>(tiles, t, some, off + done, w + skipped * Slices::TAP_BYTES, fetched,
                                     Plan::N - col, sums + i * SUMS);
            }
          }
          if (last) apply_epilogue<Plan::N, Plan::DUAL>(sums, SUMS, rows, row + done, col, group * Plan::N, epi);
          done += rows;
        }
      }
    }
  }
}

}  // namespace npu
