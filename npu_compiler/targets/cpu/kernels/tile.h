// The register tile shared by gemm, conv and attention: P positions x TILE_COLS output columns, float32 accumulators.
//
//   acc[p][c] = sum over taps t, units k:  x[taps[t] + off[p] + 4k] * w[t * len + k][c]
//
// A unit is 4 bytes of x: one float, a pair of bf16, or four uint8. Weights are stored in panels of 32 columns:
//   F32   [K][32] float      F16W  [K][32] f16, widened in registers      BF16P  [K/2][32][2] bf16
//   U8S8  [K/4][32][4] int8, whose sums are int32; their bits are in the lanes of float vectors
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

struct TileArgs {
  const char* x;
  const int32_t* off;  // byte offset of each position
  const long* taps;    // byte offset of each tap
  int ntaps, len;      // len: units per tap
  const char* w;
  float* acc;            // [P][PANEL]
  int segment;           // units that are summed before they are added to acc
  const char* prefetch;  // weights to prefetch into L2, one step for every two units
  long prefetch_step;    // bytes; 0 prefetches nothing
  bool add = false;      // add to the contents of acc
};
typedef void (*TileFn)(const TileArgs&);

NPU_INLINE float unit(const char* p) {
  float f;
  memcpy(&f, p, 4);
  return f;
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

struct F32 {
  static constexpr int W_BYTES = PANEL * 4;  // bytes of one unit of a panel
  static constexpr int X_PER_UNIT = 1;
  NPU_INLINE vf weights(const char* w, int v) { return load_bytes<vf>(w + v * VL * 4); }
  NPU_INLINE vf ones() { return splat<vf>(1.0f); }  // a unit of weights 1
  NPU_INLINE void step(vf& acc, vf w, vf x) { mul_add(acc, w, x); }
};

struct F16W {
  static constexpr int W_BYTES = PANEL * 2;
  static constexpr int X_PER_UNIT = 1;
  NPU_INLINE vf weights(const char* w, int v) { return ld((const f16*)w + v * VL, Full{}); }
  NPU_INLINE void step(vf& acc, vf w, vf x) { mul_add(acc, w, x); }
};

struct BF16P {
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

struct U8S8 {
  static constexpr int W_BYTES = PANEL * 4;
  static constexpr int X_PER_UNIT = 4;
  NPU_INLINE vf weights(const char* w, int v) { return load_bytes<vf>(w + v * VL * 4); }
  NPU_INLINE void step(vf& acc, vf w, vf x) {
    vi32 sums = (vi32)acc;
    dot_u8s8(sums, (vi32)x, (vi32)w);
    acc = (vf)sums;
  }
};

// Adds two vectors of sums.
template <class Kind> NPU_INLINE vf add_sums(vf a, vf b) {
  if constexpr (is_same<Kind, U8S8>::value) return (vf)((vi32)a + (vi32)b);
  else return a + b;
}

template <class Kind, int P, int V> NPU_INLINE void tile_step(vf (&acc)[P][V], const char* const (&xp)[P], long xk,
                                                             const char* w) {
  vf wv[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) wv[v] = Kind::weights(w, v);
#pragma GCC unroll 14
  for (int p = 0; p < P; p++) {
    vf x = splat<vf>(unit(xp[p] + xk));
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) Kind::step(acc[p][v], wv[v], x);
  }
}

// Stores acc to `to`, or adds it if `add`.
template <class Kind, int P, int V> NPU_INLINE void add_to(float* to, const vf (&acc)[P][V], bool add) {
  if (add) {
#pragma GCC unroll 14
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* q = to + p * PANEL + v * VL;
        store_bytes(q, add_sums<Kind>(acc[p][v], load_bytes<vf>(q)));
      }
  } else {
#pragma GCC unroll 14
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store_bytes(to + p * PANEL + v * VL, acc[p][v]);
  }
}

// STREAM: the weights are read once, so all of them are prefetched, starting at the prefetch pointer. V: vectors of a
// row that are computed.
template <class Kind, int P, bool STREAM = false, int V = TILE_VECS> NPU_NOINLINE void tile(const TileArgs& a) {
  vf acc[P][V];
  const char* w = a.w;
  const char* prefetch = a.prefetch;
  const long prefetch_step = a.prefetch_step;
  bool partial = a.add;  // a.acc holds the sum of earlier segments
  int remaining = a.segment;
#pragma GCC unroll 14
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[p][v] = vf{};
  for (int t = 0; t < a.ntaps; t++) {
    const char* xp[P];
#pragma GCC unroll 14
    for (int p = 0; p < P; p++) xp[p] = a.x + a.taps[t] + a.off[p];
    for (long k = 0, end; k < a.len;) {
      if (remaining <= 0) {
        add_to<Kind>(a.acc, acc, partial);
        partial = true;
        remaining = a.segment;
#pragma GCC unroll 14
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) acc[p][v] = vf{};
      }
      end = min_of(a.len, k + remaining);
      remaining -= (int)(end - k);
      for (; k + 4 <= end; k += 4) {
        if constexpr (STREAM) {
#pragma GCC unroll 8
          for (int line = 0; line < 4 * Kind::W_BYTES; line += 64) __builtin_prefetch(prefetch + line, 0, 2);
        } else {
          __builtin_prefetch(prefetch, 0, 2);
          __builtin_prefetch(prefetch + prefetch_step, 0, 2);
        }
        tile_step<Kind>(acc, xp, k * 4, w);
        tile_step<Kind>(acc, xp, k * 4 + 4, w + Kind::W_BYTES);
        tile_step<Kind>(acc, xp, k * 4 + 8, w + 2 * Kind::W_BYTES);
        tile_step<Kind>(acc, xp, k * 4 + 12, w + 3 * Kind::W_BYTES);
        w += 4 * Kind::W_BYTES;
        prefetch += STREAM ? 4 * Kind::W_BYTES : 2 * prefetch_step;
      }
      for (; k < end; k++, w += Kind::W_BYTES) tile_step<Kind>(acc, xp, k * 4, w);
    }
  }
  add_to<Kind>(a.acc, acc, partial);
}

// Q positions as the fewest tiles of nearly equal height: `tall` tiles of `rows + 1` positions, then tiles of `rows`.
// N: columns. The functions for narrow tiles compute one vector of a row: the last columns may need no more.
struct Tiling {
  TileFn tall_fn, fn, tall_narrow, narrow;
  int tall, count, rows;
};
template <class Kind, long Q, bool STREAM = false, long N = 0> NPU_INLINE Tiling tiling() {
  constexpr int count = (int)((Q + TILE_ROWS - 1) / TILE_ROWS), rows = (int)(Q / count), tall = (int)(Q % count);
  constexpr int high = rows + (tall > 0), V = N % TILE_COLS > 0 && N % TILE_COLS <= VL ? 1 : TILE_VECS;
  return {tile<Kind, high, STREAM>, tile<Kind, rows, STREAM>, tile<Kind, high, STREAM, V>, tile<Kind, rows, STREAM, V>,
          tall, count, rows};
}

// Applies the epilogue to `rows` rows of a panel of sums. N is the number of columns of a group, col the panel's first
// column in its group, shift the group's first column. The sums of the second of two products are `second` floats after
// those of the first.
template <long N, bool DUAL = false, class Epi>
NPU_INLINE void apply_epilogue(const float* acc, long second, int rows, long row, long col, long shift,
                               const Epi& from) {
  const Epi epi = from;  // a local copy stays in registers: stores of bytes could change an object in memory
  const bool whole = N % PANEL == 0 || col + PANEL <= N;
  auto apply = [&](int v, auto lanes) __attribute__((always_inline)) {
    if constexpr (DUAL) epi(load_bytes<vf>(acc + v), load_bytes<vf>(acc + second + v), row, shift + col + v, lanes);
    else epi(load_bytes<vf>(acc + v), row, shift + col + v, lanes);
  };
  for (int p = 0; p < rows; p++, acc += PANEL, row++) {
    if (whole) {
#if NPU_PAIRED_STORES
      static_assert(PANEL == 2 * VL, "a row of a panel is two vectors");
      vf first;
      apply(0, FirstOfTwo{{}, &first});
      apply(VL, SecondOfTwo{{}, &first});
#else
#pragma GCC unroll 8
      for (int v = 0; v < PANEL; v += VL) apply(v, Full{});
#endif
    } else {
      for (int v = 0; v < PANEL && col + v < N; v += VL) {
        if (col + v + VL <= N) apply(v, Full{});
        else apply(v, (int)(N - col - v));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- blocked driver
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

// A matrix product is divided into chunks: a chunk is a block of positions times PG panels of weights. Plan defines the
// constants Kind, IMAGES, BLOCKS, Q (positions of the largest block), Q_FIRST and Q_LAST (of the first and the last
// one; each block has one of these sizes), G (groups), N and NP (columns and panels of a group), PG, DUAL (two
// products, so two panels of weights for each panel of results), NTAPS, LEN, SEGMENT, GROUP_BYTES (of x),
// W_IMAGE_BYTES, RESIDENT (L2 holds all weights), COPY (prepare() copies), the storage of the weights Stored, and
//   positions(block)                     Q, Q_FIRST or Q_LAST
//   tables(off, taps)                    fills in the offsets of a block's positions and of the taps
//   first_row(image, block)              the output row of the block's first position
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
// BY_PANELS: blocks vary fastest, so that a thread reads its weights again while they are in the cache.
template <class Plan, bool BY_PANELS = false> struct Chunk {
  static constexpr long GROUPS = ceil_div(Plan::G * Plan::NP, Plan::PG), COUNT = Plan::IMAGES * Plan::BLOCKS * GROUPS;
  long image, block, begin, end;  // panels begin..end
  NPU_INLINE Chunk of(long i) {
    const long image = i / (GROUPS * Plan::BLOCKS), block = BY_PANELS ? i % Plan::BLOCKS : i / GROUPS % Plan::BLOCKS;
    const long begin = (BY_PANELS ? i / Plan::BLOCKS % GROUPS : i % GROUPS) * Plan::PG;
    return {image, block, begin, min_of(begin + Plan::PG, Plan::G * Plan::NP)};
  }
};

// Computes tile t of a block. a.off is the entry of its first position, w the panel, of which `columns` are needed;
// `after`: the weights of the next tiles or null.
template <class Kind, class Stored>
NPU_INLINE void run_tile(const Tiling& tiles, int t, TileArgs a, const char* w, const char* after,
                         long columns, float* acc) {
  const bool fetch = after && t < Stored::UNIT_BYTES / 32;  // a tile prefetches 32 bytes per unit
  a.prefetch = fetch ? after + (long)t * a.ntaps * a.len * 32 : w;
  a.prefetch_step = fetch ? 64 : 0;
  for (long done = 0; done < min_of(columns, PANEL); done += TILE_COLS) {
    a.w = w + done * (Kind::W_BYTES / PANEL);
    a.acc = acc + done;
    const bool narrow = columns - done <= VL;
    (t < tiles.tall ? narrow ? tiles.tall_narrow : tiles.tall_fn : narrow ? tiles.narrow : tiles.fn)(a);
  }
}

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
  return copy_end<Plan>() + (1 + Plan::DUAL) * (align64(TapSlices<Plan>::SUMS * 4) +
                                                unpacked_bytes<Plan>((long)Plan::NTAPS * Plan::LEN));
}

// Processes long rows (LEN units of the reduced dim) in slices of SLICE units, so that a slice of a block's x and the
// sums of a chunk stay in the L2 cache while the weights are streamed. Plan has one tap and one group.
template <class Plan> constexpr long sliced_sums_bytes() { return Plan::PG * Plan::PRODUCTS * Plan::Q * PANEL * 4; }
template <class Plan> constexpr long sliced_scratch_bytes() {
  return copy_end<Plan>() + align64(sliced_sums_bytes<Plan>()) + unpacked_bytes<Plan>(Plan::SLICE);
}

template <class Plan, class TX, class TW, class Epi>
NPU_INLINE void sliced(const TX* x, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Kind = typename Plan::Kind;
  using Stored = typename Plan::Stored;
  constexpr long PRODUCTS = Plan::PRODUCTS, PRODUCT_BYTES = Stored::panel_bytes(Plan::LEN), SUMS = Plan::Q * PANEL;
  int32_t* off = (int32_t*)th.scratch;
  long* taps = (long*)(th.scratch + align64(Plan::Q * 4));
  char* copy = th.scratch + blocked_tables_bytes<Plan>();
  float* sums = (float*)(th.scratch + copy_end<Plan>());
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
      for (long h = c.begin * PRODUCTS; h < c.end * PRODUCTS; h++) {
        const char* panel = Stored::unpack(w + h * PRODUCT_BYTES, Plan::LEN, at, len, unpacked);
        const char* next = Stored::at(w + (h + (h + 1 < c.end * PRODUCTS)) * PRODUCT_BYTES, at);
        for (int t = 0, done = 0; t < tiles.count; t++) {
          TileArgs a{block + at * 4, off + done, taps, 1, len, nullptr, nullptr, Plan::SEGMENT, nullptr, 0, at > 0};
          run_tile<Kind, Stored>(tiles, t, a, panel, next, PANEL, sums + (h - c.begin * PRODUCTS) * SUMS + done * PANEL);
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
  using Stored = typename Plan::Stored;
  using Slices = TapSlices<Plan>;
  using Chunks = Chunk<Plan, !Plan::RESIDENT && !Plan::COPY>;
  constexpr long UNITS = (long)Plan::NTAPS * Plan::LEN, PRODUCTS = 1 + Plan::DUAL, SUMS = Slices::SUMS;
  constexpr long PRODUCT_BYTES = Stored::panel_bytes(UNITS), PANEL_BYTES = PRODUCTS * PRODUCT_BYTES;
  int32_t* off = (int32_t*)th.scratch;
  long* taps = (long*)(th.scratch + align64(Plan::Q * 4));
  char* copy = th.scratch + blocked_tables_bytes<Plan>();
  float* acc = (float*)(th.scratch + copy_end<Plan>());
  char* unpacked = (char*)acc + PRODUCTS * align64(SUMS * 4);
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
      const long group = pn / Plan::NP, col = pn % Plan::NP * PANEL, row = Plan::first_row(c.image, c.block);
      const char* from = block + group * Plan::GROUP_BYTES;
      const char* plain[PRODUCTS];
      for (long i = 0; i < PRODUCTS; i++)
        plain[i] =
            Stored::unpack(panel + i * PRODUCT_BYTES, UNITS, 0, UNITS, unpacked + i * unpacked_bytes<Plan>(UNITS));
      for (int tap = 0; tap < Plan::NTAPS; tap += Slices::TAPS) {
        const bool last = tap + Slices::TAPS >= Plan::NTAPS;
        const char* after = last ? next : panel + (tap + Slices::TAPS) * Slices::TAP_BYTES;
        for (int t = 0, done = 0; t < tiles.count; t++) {
          const int rows = tiles.rows + (t < tiles.tall), ntaps = (int)min_of(Slices::TAPS, Plan::NTAPS - tap);
          TileArgs a{from, off + done, taps + tap, ntaps, Plan::LEN, nullptr, nullptr, Plan::SEGMENT, nullptr, 0};
          a.add = tap > 0;
          float* sums = acc + (Slices::DIVIDED ? done * PANEL : 0);
          for (long i = 0; i < PRODUCTS; i++)
            run_tile<Kind, Stored>(tiles, t, a, plain[i] + tap * Slices::TAP_BYTES,
                                   after ? after + i * PRODUCT_BYTES : nullptr, Plan::N - col, sums + i * SUMS);
          if (last) apply_epilogue<Plan::N, Plan::DUAL>(sums, SUMS, rows, row + done, col, group * Plan::N, epi);
          done += rows;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- operand kinds
// How x stored as TX is multiplied by weights stored as TW: bf16 in pairs, all other types as float. A weight format
// has a storage for either kind of operand.
template <class TX, class TW> struct Operands {
  static_assert(!is_same<TW, bf16>::value, "bf16 weights need bf16 activations");
  using Kind = F32;
  using Stored = Plain<F32>;
  static constexpr bool WIDEN = !is_same<TX, float>::value;
  static constexpr int SEGMENT = SEGMENT_F32;
};
template <class TX> struct Operands<TX, f16> {
  using Kind = F16W;
  using Stored = Plain<F16W>;
  static constexpr bool WIDEN = !is_same<TX, float>::value;
  static constexpr int SEGMENT = WIDEN ? SEGMENT_16 : SEGMENT_F32;
};
struct PairOperands {
  using Kind = BF16P;
  using Stored = Plain<BF16P>;
  static constexpr bool WIDEN = false;
  static constexpr int SEGMENT = SEGMENT_16;
};
#if NPU_SLOW_BF16_DOT
// Panels of pairs as floats, for CPUs whose `vdpbf16ps` is slower than two multiply-adds.
struct bf16_pairs {
  static constexpr int BLOCK = 0, HEAD_BYTES = 0, K_BYTES = PANEL * 2;
  static constexpr long panel_bytes(long k) { return ceil_div(k, 2) * 2 * K_BYTES; }
  NPU_INLINE vf value(const char* panel, long k, int v) {
    const vi32 pair = load_bytes<vi32>(panel + k / 2 * 2 * K_BYTES + v * VL * 4);
    return (vf)(k % 2 ? pair & (int32_t)0xffff0000 : pair << 16);
  }
};
template <> struct Operands<bf16, bf16> {
  using Kind = F32;
  using Stored = Values<bf16_pairs, F32>;
  static constexpr bool WIDEN = true;
  static constexpr int SEGMENT = SEGMENT_16;
};
#else
template <> struct Operands<bf16, bf16> : PairOperands {};
#endif
template <> struct Operands<uint8_t, int8_t> {
  using Kind = U8S8;
  using Stored = Plain<U8S8>;
  static constexpr bool WIDEN = false;
  static constexpr int SEGMENT = SEGMENT_16;
};
template <class TX, class Format> struct Operands<TX, stored<Format>> : Operands<TX, float> {
  using Stored = typename Format::template Storage<F32>;
};
template <class Format> struct Operands<bf16, stored<Format>> : PairOperands {
  using Stored = typename Format::template Storage<BF16P>;
};

// Bytes of a panel of weights stored as TW for operands stored as TX, with k elements of the reduced dim.
template <class TX, class TW> constexpr long panel_bytes(long k) {
  return Operands<TX, TW>::Stored::panel_bytes(ceil_div(k, Operands<TX, TW>::Kind::X_PER_UNIT));
}

// Copies n elements as units: widened to float, or as bf16 or uint8 with zeros appended up to a whole unit.
template <class Kind, class TX> NPU_INLINE void copy_units(char* out, const TX* x, long n) {
  if constexpr (is_same<Kind, BF16P>::value) {
    memcpy(out, x, (size_t)n * 2);
    if (n % 2) memset(out + n * 2, 0, 2);
  } else if constexpr (is_same<Kind, U8S8>::value) {
    memcpy(out, x, (size_t)n);
    if (n % 4) memset(out + n, 0, (size_t)(4 - n % 4));
  } else if constexpr (is_same<TX, float>::value) {
    memcpy(out, x, (size_t)n * 4);
  } else {
    long i = 0;
    for (; i + VL <= n; i += VL) st((float*)out + i, ld(x + i, Full{}), Full{});
    if (i < n) st((float*)out + i, ld(x + i, (int)(n - i)), (int)(n - i));
  }
}

}  // namespace npu
