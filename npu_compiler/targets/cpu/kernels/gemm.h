// Matrix product with packed weights: out[m][n] = epi(sum over k of a[m][k] * w[k][n]).
//
//   struct D : GemmDims { static constexpr long M, N, K, lda; };       rows of A have unit inner stride
//   gemm<D>(a, w, epi, th, counter)
//
// Weights are [ceil(N/32)][K][32] float, f16 or double, or [ceil(N/32)][ceil(K/2)][32][2] bf16, or [..][ceil(K/4)][32][4] int8
// (for uint8 rows), zero padded, or panels of a weight format (storage.h), or in_place (pack.h). epi(acc, row, col, lanes)
// receives VL neighbouring columns of row b * M + m.
#pragma once
#include "amx_blocked.h"
#include "amx_gemm.h"
#include "amx_int8.h"
#include "amx_limbs.h"
#include "blocked.h"
#include "gemv.h"
#include "pack.h"

namespace npu {

struct GemmDims {
  static constexpr long B = 1;            // batch size: product b reads a + b * batch_a and the b-th weight matrix
  static constexpr long batch_a = 0;      // elements between two matrices of A
  static constexpr long batch_b = 0;      // and of right operands that are in_place
  static constexpr bool shared_w = true;  // all products of the batch read the same weights
  static constexpr bool dual = false;     // two products whose weight panels alternate: epi(acc, acc1, row, ...)
};

// Chooses the rows of a block and the panels of a chunk, for `rows` of row_bytes and `panels` of panel_bytes. The rows
// of a block are a multiple of `quantum`. Blocks share no input unless `halo`, so they may be small enough for the L1
// cache.
struct Blocking { long block_rows, chunk_panels; };
constexpr long choose_chunk(const BlockLimits& limits, long blocks, long panels, long block_panel_macs) {
  // Chunks of one block copy the same input, so on AMX a block is divided only if there are few.
  const long groups = limits.least_chunks > 0 ? max_of(1, limits.chunks / blocks) : ceil_div(limits.chunks, blocks);
  const long max_groups = max_of(1, panels * block_panel_macs / limits.chunk_macs);
  return ceil_div(panels, min_of(min_of(groups, max_groups), panels));
}
constexpr Blocking choose_blocking(const BlockLimits& limits, long images, long rows, long quantum, long row_bytes,
                                   bool halo, long panels, long panel_bytes, long row_panel_macs) {
  const long fit = max_of(1, limits.block_bytes / (quantum * row_bytes)) * quantum;
  long block = min_of(ceil_div(rows, quantum) * quantum, fit);
  if (panels * panel_bytes <= limits.resident_bytes) {  // smaller blocks add no weight traffic
    long wanted = ceil_div(ceil_div(rows * images, limits.chunks), quantum) * quantum;
    if (!halo) wanted = min_of(wanted, max_of(1, limits.near_bytes / (quantum * row_bytes)) * quantum);
    long min_block = ceil_div(ceil_div(limits.chunk_macs, row_panel_macs * panels), quantum) * quantum;
    block = min_of(block, max_of(wanted, max_of(min_block, limits.quanta * quantum)));
  } else {
    block = min_of(block, ceil_div(rows, max_of(1, limits.least_chunks / (panels * images))));
  }
  const long blocks = ceil_div(rows, block);
  block = min_of(rows, ceil_div(ceil_div(rows, blocks), quantum) * quantum);  // equal blocks
  return {block, choose_chunk(limits, blocks * images, panels, row_panel_macs * block)};
}

constexpr long SLICED_ROWS = 10 * TILE_ROWS;
constexpr long SLICE_BYTES = 384 << 10;  // of x
constexpr long choose_panels(long images, long panels) {
  return max_of(1, min_of(4, ceil_div(panels * images, CHUNKS)));
}

template <class D, class TA, class TW> struct GemmPlan {
  using Kind = typename Operands<TA, TW>::Kind;
  using Stored = typename Operands<TA, TW>::Stored;
  static constexpr long UNITS = ceil_div(D::K, Kind::X_PER_UNIT), UNITS_BYTES = UNITS * Kind::UNIT;
  // Rows a multiple of 4096 bytes apart map to one set of the L1 cache, so they are copied with another pitch.
  static constexpr bool COPY = Operands<TA, TW>::WIDEN || D::K % Kind::X_PER_UNIT != 0 ||
                               (D::lda * (long)sizeof(TA) % 4096 == 0 && D::M > 8);
  static constexpr long ROW_BYTES = COPY ? UNITS_BYTES + (UNITS_BYTES % 4096 == 0 ? 64 : 0) : D::lda * (long)sizeof(TA);
  static constexpr long NP = ceil_div(D::N, PANEL), N = D::N, G = 1, IMAGES = D::B;
  static constexpr bool DUAL = D::dual;
  static constexpr long PRODUCTS = 1 + DUAL, PANEL_BYTES = PRODUCTS * Stored::panel_bytes(UNITS);
  // Long rows are processed in slices, see sliced(): a block would hold so few that weights are read too often.
  static constexpr long TALL = min_of(D::M, SLICED_ROWS);
  static constexpr bool SLICED = D::M > 2 * TILE_ROWS && TALL * UNITS_BYTES > SLICE_BYTES;
  static constexpr long SLICE = ceil_div(ceil_div(UNITS, ceil_div(TALL * UNITS_BYTES, SLICE_BYTES)), 16) * 16;
  // Every block unpacks the weights again.
  static constexpr BlockLimits LIMITS = Stored::PLAIN ? VECTOR_LIMITS : VECTOR_LIMITS.with_blocks(448 << 10);
  static constexpr Blocking BLOCKING =
      SLICED ? Blocking{ceil_div(D::M, ceil_div(D::M, SLICED_ROWS)), choose_panels(D::B, NP)}
             : choose_blocking(LIMITS, D::B, D::M, TILE_ROWS, UNITS_BYTES, false, NP, PANEL_BYTES,
                               PRODUCTS * D::K * PANEL);
  static constexpr bool RESIDENT = NP * PANEL_BYTES <= LIMITS.resident_bytes;
  static constexpr Division ROWS = divide(D::M, SLICED ? 1 : TILE_ROWS, BLOCKING.block_rows, RESIDENT && !SLICED);
  static constexpr long BLOCKS = ROWS.blocks, Q = ROWS.largest();
  static constexpr long Q_FIRST = ROWS.size(0), Q_LAST = ROWS.size(BLOCKS - 1);
  static constexpr long PG =
      SLICED ? BLOCKING.chunk_panels : choose_chunk(LIMITS, BLOCKS * D::B, NP, PRODUCTS * D::K * PANEL * Q);
  static constexpr int NTAPS = 1, LEN = (int)UNITS, SEGMENT = Operands<TA, TW>::SEGMENT;
  static constexpr long GROUP_BYTES = 0, COPY_BYTES = COPY ? Q * ROW_BYTES : 0;
  static constexpr long W_IMAGE_BYTES =
      packs<Stored> ? D::batch_b * (long)sizeof(TW) : D::shared_w ? 0 : NP * PANEL_BYTES;

  static void tables(int32_t* off, long* taps) {
    for (long q = 0; q < Q; q++) off[q] = (int32_t)(q * ROW_BYTES);
    taps[0] = 0;
  }
  static long positions(long block) { return ROWS.size(block); }
  static long first_row(long image, long block) { return image * D::M + ROWS.begin(block); }
  static constexpr TapRange inner_taps(long, long, long) { return {0, NTAPS}; }
  static const char* rows_at(const TA* a, long image, long block) {
    return (const char*)(a + image * D::batch_a + ROWS.begin(block) * D::lda);
  }
  static const char* prepare(const TA* a, long image, long block, char* copy) {
    a += image * D::batch_a + ROWS.begin(block) * D::lda;
    if (!COPY) return (const char*)a;
    for (long q = 0; q < positions(block); q++) copy_units<Kind>(copy + q * ROW_BYTES, a + q * D::lda, D::K);
    return copy;
  }
};

#if NPU_AMX
// The rows of A, as they are or copied: copy(a, image, row, rows, out, pitch) makes `rows` rows from `row` on, pitch
// bytes apart. Bytes of a row beyond the last unit are zero.
template <class D> struct MatrixRows {
  static constexpr long QUANTUM = 2 * AMX_ROWS;  // the rows of a block are a multiple of it
  static constexpr bool COPY = D::M < AMX_ROWS || D::K % 2 != 0;
  NPU_INLINE void copy(const bf16* a, long image, long row, long rows, char* out, long pitch) {
    a += image * D::batch_a + row * D::lda;
    for (long q = 0; q < rows; q++, a += D::lda, out += pitch) {
      if constexpr (amx_steps(ceil_div(D::K, 2)).padded) memset(out + D::K / 2 * 4, 0, (size_t)(pitch - D::K / 2 * 4));
      copy_units<BF16P>(out, a, D::K);
    }
  }
};

template <class D, class TW, class Source = MatrixRows<D>> struct AmxGemmPlan {
  using Stored = typename Operands<bf16, TW>::Stored;
  static constexpr long UNITS = ceil_div(D::K, 2), NP = ceil_div(D::N, PANEL), N = D::N, G = 1, IMAGES = D::B;
  static constexpr bool DUAL = D::dual;
  static constexpr int LIMBS = 1;
  static constexpr long PRODUCTS = 1 + DUAL, PANEL_BYTES = PRODUCTS * Stored::panel_bytes(UNITS);
  static constexpr AmxSteps STEPS = amx_steps(UNITS);
  static constexpr bool COPY = Source::COPY || STEPS.padded;
  static constexpr long COPIED_ROW = STEPS.count * STEPS.units * 4;
  static constexpr long PITCH = COPY ? COPIED_ROW + (COPIED_ROW % 4096 == 0 ? 64 : 0) : D::lda * 2;
  // A block of long rows is processed in slices, which stay in L2 while the weights are streamed.
  static constexpr long TALL = min_of(D::M, 256), SLICE_BYTES = 768 << 10;
  static constexpr bool SLICED = D::M > 64 && TALL * UNITS * 4 > SLICE_BYTES;
  static constexpr long SLICE =  // an even number of units, as weight formats need
      SLICED ? ceil_div(ceil_div(STEPS.count, ceil_div(TALL * UNITS * 4, SLICE_BYTES)), 2) * 2 : STEPS.count;
  static constexpr long SLICES = ceil_div(STEPS.count, SLICE), PAIR_BYTES = 2 * AMX_ROWS * SLICE * STEPS.units * 4;
  static constexpr Blocking BLOCKING =
      SLICED ? Blocking{ceil_div(ceil_div(D::M, ceil_div(D::M, TALL)), 2 * AMX_ROWS) * 2 * AMX_ROWS,
                        max_of(1, min_of(4, ceil_div(NP * D::B, AMX_LIMITS.chunks)))}
             : choose_blocking(AMX_LIMITS, D::B, D::M, Source::QUANTUM, UNITS * 4, false, NP, PANEL_BYTES,
                               PRODUCTS * D::K * PANEL);
  static constexpr bool RESIDENT = NP * PANEL_BYTES <= AMX_LIMITS.resident_bytes;
  // If L2 does not hold x and the results, or if the results have rows that compete for few sets of L1.
  static constexpr bool ROWS_FIRST = D::B * D::M * (D::K + D::N) * 2 > AMX_L2_BYTES || D::N % 1024 == 0;
  // A panel that stays in L1 is multiplied by as many rows as L2 holds: each block loads it again.
  static constexpr bool LARGE = Stored::PLAIN && RESIDENT && !COPY && !SLICED && !ROWS_FIRST && D::B == 1 &&
                                D::K > D::N && STEPS.count > 8 && UNITS * BF16P::W_BYTES <= 40 << 10;
  static constexpr long SMALL_BLOCKS = ceil_div(D::M, BLOCKING.block_rows), LARGE_BYTES = 512 << 10;
  static constexpr long LARGE_BLOCKS = max_of(ceil_div(D::M * UNITS * 4, LARGE_BYTES),
                                              ceil_div(AMX_LIMITS.least_chunks, NP));
  static constexpr long FEWEST = LARGE ? min_of(SMALL_BLOCKS, LARGE_BLOCKS) : SMALL_BLOCKS;
  // A few blocks are an even number of equal ones: two threads then have the rows that they had in the kernels before,
  // and need not read what is in the other one's cache. Weights that leave the cache are read for as few as fit.
  static constexpr bool EVEN = FEWEST > 1 && FEWEST <= 8 && RESIDENT;
  static constexpr long Q = EVEN ? ceil_div(D::M, (FEWEST + 1) / 2 * 2) : min_of(BLOCKING.block_rows, D::M);
  static constexpr long BLOCKS = ceil_div(D::M, Q);
  static constexpr long PG =
      LARGE ? choose_chunk(AMX_LIMITS, BLOCKS, NP, PRODUCTS * D::K * PANEL * Q) : BLOCKING.chunk_panels;
  // Tiles of equal heights: products of fewer rows take less time. Those of two steps have weights in all tiles.
  static constexpr long TILES = ceil_div(Q, AMX_ROWS);
  static constexpr long HEIGHT = STEPS.count == 2 ? AMX_ROWS : max_of(AMX_LEAST_ROWS, ceil_div(Q, TILES));
  static constexpr int NTAPS = 1;
  static constexpr long GROUP_BYTES = 0, W_IMAGE_BYTES = D::shared_w ? 0 : NP * PANEL_BYTES;
  static constexpr long COPY_BYTES = COPY ? TILES * AMX_ROWS * PITCH : 0;

  static void tap_offsets(AmxTap* taps) { taps[0] = {0, 0}; }
  // Rows that are not copied end where A does, so the last tile may begin among those of the tile before.
  static long positions(long block) { return min_of(Q, D::M - block * Q); }
  static int tiles(long block, int32_t* first, int32_t* rows) {
    const long count = positions(block), tiles = ceil_div(count, HEIGHT);
    for (long t = 0; t < tiles; t++) {
      const long at = COPY ? t * HEIGHT : min_of(t * HEIGHT, count - HEIGHT);
      first[t] = (int32_t)(at * PITCH);
      for (long r = 0; r < AMX_ROWS; r++, rows++)
        *rows = r < HEIGHT && at + r >= t * HEIGHT && at + r < count ? (int32_t)(at + r) : -1;
    }
    return (int)tiles;
  }
  static long first_row(long image, long block) { return image * D::M + block * Q; }
  static const char* prepare(const bf16* a, long image, long block, char* copy) {
    if (!COPY) return (const char*)(a + image * D::batch_a + block * Q * D::lda);
    Source::copy(a, image, block * Q, min_of(Q, D::M - block * Q), copy, PITCH);
    return copy;
  }
};

// Whether a product of `rows` rows runs on tiles of AMX.
template <class TA, class TW> constexpr bool amx_runs(long rows) {
  return is_same<typename Operands<TA, TW>::Kind, BF16P>::value && gemv_streams(rows) == 0;
}

// Whether each thread multiplies its panels by all rows: weights that are unpacked, or read from memory, are read once.
template <class D, class TW> constexpr bool amx_by_panels() {
  using S = AmxScratch<AmxGemmPlan<D, TW>>;
  return S::UNPACK || S::LEAVE || D::N > D::M;
}

// Whether a product of half or float numbers runs on tiles in limbs.
template <class D, class TA, class TW> constexpr bool gemm_in_limbs() {
  if constexpr (!has_limbs<TA, TW>() || gemv_streams(D::M) > 0) return false;
  else return limbs_are_faster<LimbGemmPlan<D, TA, AmxGemmPlan>, TA>(D::M, D::K);
}
#endif

// Whether a product of D::M rows reads weights in streams (gemv.h).
template <class D, class TA, class TW> constexpr bool gemv_runs() {
  using Kind = typename Operands<TA, TW>::Kind;
  return gemv_streams(D::M, PANEL / LANES<Kind>) > 0 && !Kind::INTEGERS;
}

template <class D, class TA, class TW> constexpr long gemm_scratch_bytes() {
#if NPU_AMX
  if constexpr (amx_runs<TA, TW>(D::M)) {
    if constexpr (amx_by_panels<D, TW>()) return AmxPanelScratch<AmxPanelPlan<D, TW>>::END;
    else return AmxScratch<AmxGemmPlan<D, TW>>::END;
  }
  if constexpr (gemm_of_bytes<D, TA, TW>()) return AmxScratch<Integers<AmxGemmPlan<GemmInPairs<D>, bf16>>>::END;
  if constexpr (gemm_in_limbs<D, TA, TW>()) return AmxScratch<LimbGemmPlan<D, TA, AmxGemmPlan>>::END;
#endif
  using Plan = GemmPlan<D, TA, TW>;
  if constexpr (gemv_runs<D, TA, TW>())
    return align64(Plan::COPY_BYTES) + digits_bytes<typename Plan::Stored>(D::M, D::K);
  return Plan::SLICED ? sliced_scratch_bytes<Plan>() : blocked_scratch_bytes<Plan>();
}

// Prefetches the first weights of this thread while it waits for the previous phase to end.
template <class D, class TA, class TW> NPU_INLINE void gemm_prefetch(const void* weights, const Thread& th) {
  if constexpr (gemv_runs<D, TA, TW>()) gemv_prefetch<GemmPlan<D, TA, TW>, D>((const char*)weights, th);
#if NPU_AMX
  else if constexpr (amx_runs<TA, TW>(D::M)) {
    if constexpr (amx_by_panels<D, TW>()) amx_prefetch<D, TW>((const char*)weights, th);
  }
#endif
  else (void)weights, (void)th;
}

template <class D, class TA, class TW, class Epi>
NPU_NOINLINE void gemm(const TA* a, const TW* w, Epi& epi, Thread& th, int* counter) {
  if constexpr (gemv_runs<D, TA, TW>()) gemv<GemmPlan<D, TA, TW>, D>(a, w, epi, th, counter);
#if NPU_AMX
  else if constexpr (amx_runs<TA, TW>(D::M)) {
    if constexpr (amx_by_panels<D, TW>()) amx_panels<D>(a, w, epi, th, counter);
    else amx_blocked<AmxGemmPlan<D, TW>>(a, w, epi, th, counter);
  }
  else if constexpr (gemm_of_bytes<D, TA, TW>())
    amx_blocked<Integers<AmxGemmPlan<GemmInPairs<D>, bf16>>>((const bf16*)a, (const bf16*)w, epi, th, counter);
  else if constexpr (gemm_in_limbs<D, TA, TW>())
    amx_blocked<LimbGemmPlan<D, TA, AmxGemmPlan>>(a, w, epi, th, counter);
#endif
  else if constexpr (GemmPlan<D, TA, TW>::SLICED) sliced<GemmPlan<D, TA, TW>>(a, w, epi, th, counter);
  else blocked<GemmPlan<D, TA, TW>>(a, w, epi, th, counter);
}

}  // namespace npu
