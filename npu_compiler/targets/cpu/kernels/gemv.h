// Matrix product with few rows of A (decoding), limited by the bandwidth of the weights. Several panels are read side
// by side; each is a sequential stream and prefetched. A stream goes on with the panel that follows in memory, because
// a CPU recognises each new stream anew. Layouts and epilogue are those of gemm.h.
#pragma once
#include "blocked.h"

namespace npu {

// Whether blocks of small codes are multiplied as integers (gemv_digits.h).
#if NPU_AVX512 && defined(__AVX512VNNI__)
#define NPU_DIGITS 1
#else
#define NPU_DIGITS 0
#endif
template <class Stored> struct Digits {
  static constexpr bool USED = false;
};
template <class Stored> constexpr long digits_bytes(long rows, long k) {
  if constexpr (Digits<Stored>::USED) return rows * Digits<Stored>::row_bytes(k);
  else return 0;
}

constexpr int PANEL_VECS = PANEL / VL;
// Panels that are read side by side for M rows: as many as the registers hold, at most 4. 0: use tiles instead.
constexpr int gemv_streams(long m, int panel_vecs = PANEL_VECS) {
  return m > 4 ? 0 : (int)min_of(4, TILE_ROWS * TILE_VECS / (m * panel_vecs));
}
// Units in one chain of additions (see SEGMENT_F32). Shorter than in a tile: each chain is in one lane, while libraries
// sum a row in many lanes.
template <class Kind> constexpr bool HAS_LONG_RESULTS = is_same<Kind, F32>::value || is_same<Kind, F64>::value;
template <class Kind> constexpr long gemv_segment = HAS_LONG_RESULTS<Kind> ? 16 : 128;
constexpr long GEMV_PREFETCH_DISTANCE = 8192;  // prefetch distance in bytes, all streams together
constexpr long GEMV_PREFETCH_BYTES = 4096;  // bytes of each stream that are prefetched before the kernel starts

template <class Sum> struct GemvArgs {
  const char* x;      // M rows, row_bytes apart
  long row_bytes;
  long len;           // units
  const char* w;
  long panel_bytes;
  long stride;        // bytes between the panels that are read side by side
  Sum* acc;           // [panels][M][PANEL]
  long jump = 0;      // from the end of these panels to those that this thread reads next
  // Bytes from `at`, an address in the first panel, to what is prefetched.
  template <int PANELS> __attribute__((always_inline)) long ahead(const char* at) const {
    constexpr long DISTANCE = GEMV_PREFETCH_DISTANCE / PANELS;
    return DISTANCE + (at + DISTANCE - w >= panel_bytes ? jump : 0);
  }
};

// Whether the scales of a panel follow its codes, as a stream of their own.
template <class Stored> constexpr auto has_fields(int) -> decltype(Stored::Encoding::FIELD_BYTES, true) { return true; }
template <class Stored> constexpr bool has_fields(...) { return false; }
// Prefetches the fields of the block that is two after `block`, at the end of a panel that of the panel to be read next.
template <class Stored, int PANELS> NPU_INLINE void prefetch_fields(const GemvArgs<float>& a, long block) {
  constexpr long AHEAD = 2, BYTES = Stored::Encoding::FIELD_BYTES;
  const long blocks = ceil_div(a.len, Stored::BLOCK_UNITS);
  long at = block + AHEAD, beyond = 0;
  if (at >= blocks) at = min_of(at - blocks, blocks - 1), beyond = a.panel_bytes + a.jump;
#pragma GCC unroll 4
  for (int s = 0; s < PANELS; s++) {
    const char* fields = Stored::fields(a.w + s * a.stride, a.len, at) + beyond;
#pragma GCC unroll 4
    for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(fields + line, 0, 3);
  }
}

template <class Kind, class Stored, int M, int PANELS>
NPU_NOINLINE void gemv_tile(const GemvArgs<typename Kind::Sum>& a) {
  using Vec = typename Kind::Vec;
  constexpr int VECS = PANEL / LANES<Kind>;
  constexpr long BLOCK = Stored::BLOCK_UNITS, LONGEST = is_same<Kind, F32>::value ? 32 : 64;
  constexpr long SEGMENT = BLOCK > 0 ? min_of(BLOCK, LONGEST) : gemv_segment<Kind>;
  Reader<Stored> w[PANELS];
#pragma GCC unroll 4
  for (int s = 0; s < PANELS; s++) w[s] = Reader<Stored>::of(a.w + s * a.stride);
  const char* x = a.x;
  Vec acc[PANELS][VECS][M];
  Vec sum[M];  // of x in a block, which bases are multiplied by
  auto multiply = [&](int s, const Vec (&wv)[VECS], const Vec (&xv)[M]) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++)
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) Kind::step(acc[s][v][m], wv[v], xv[m]);
  };
  auto splat_x = [&](int u, Vec (&xv)[M]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) xv[m] = Kind::splat_unit(x + m * a.row_bytes + u * Kind::UNIT);
  };
  for (long k = 0; k < a.len;) {
    const bool first = k == 0;
    const long end = min_of(a.len, k + SEGMENT);
#pragma GCC unroll 4
    for (int s = 0; s < PANELS; s++)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; v++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) acc[s][v][m] = Vec{};
    if constexpr (Stored::HAS_BASE)
      for (int m = 0; m < M; m++) sum[m] = Vec{};
    if constexpr (BLOCK > 0)
#pragma GCC unroll 4
      for (int s = 0; s < PANELS; s++) w[s].from = Stored::at(a.w + s * a.stride, k);
    if constexpr (has_fields<Stored>(0))
      if (k % BLOCK == 0) prefetch_fields<Stored, PANELS>(a, k / BLOCK);
    for (; k + 4 <= end; k += 4, x += 4 * Kind::UNIT) {
      const long ahead = a.template ahead<PANELS>(w[0].from);
#pragma GCC unroll 4
      for (int s = 0; s < PANELS; s++)
#pragma GCC unroll 8
        for (int line = 0; line < 4 * Stored::UNIT_BYTES; line += 64)
          __builtin_prefetch(w[s].from + ahead + line, 0, 3);
#pragma GCC unroll 2
      for (int u = 0; u < 4; u += 2) {
        Vec xv[2][M];
        splat_x(u, xv[0]);
        splat_x(u + 1, xv[1]);
        if constexpr (Stored::HAS_BASE)
#pragma GCC unroll 4
          for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) Kind::step(sum[m], Kind::ones(), xv[i][m]);
#pragma GCC unroll 4
        for (int s = 0; s < PANELS; s++) {
          Vec wv[2][VECS];
          w[s].load2(u, wv);
          multiply(s, wv[0], xv[0]);
          multiply(s, wv[1], xv[1]);
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < PANELS; s++) w[s].skip(4);
    }
    if constexpr (Stored::ODD_UNITS) {
      for (; k < end; k++, x += Kind::UNIT) {
        Vec xv[M];
        splat_x(0, xv);
        if constexpr (Stored::HAS_BASE)
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) Kind::step(sum[m], Kind::ones(), xv[m]);
#pragma GCC unroll 4
        for (int s = 0; s < PANELS; s++) {
          Vec wv[VECS];
          w[s].load(0, wv);
          multiply(s, wv, xv);
          w[s].skip(1);
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < PANELS; s++)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; v++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          typename Kind::Sum* to = a.acc + (s * M + m) * PANEL + v * LANES<Kind>;
          Vec total = first ? Vec{} : load_bytes<Vec>(to);
          const char* panel = a.w + s * a.stride;
          if constexpr (BLOCK > 0) total = fma(acc[s][v][m], Stored::scale(panel, a.len, (k - 1) / BLOCK, v), total);
          else total += acc[s][v][m];
          if constexpr (Stored::HAS_BASE) total = fma(Stored::base(panel, a.len, (k - 1) / BLOCK, v), sum[m], total);
          store_bytes(to, total);
        }
  }
  if constexpr (!Stored::PLAIN)
    for (int s = 0; s < PANELS; s++)
      Stored::template add_outliers<M>(a, a.w + s * a.stride, a.acc + s * M * PANEL);
}

template <class Kind, class Stored, int M, int PANELS>
NPU_INLINE void multiply_panels(const GemvArgs<typename Kind::Sum>& a) {
  if constexpr (Kind::WHOLE_BLOCKS) Kind::template tile<M, PANELS>(a);
  else if constexpr (Digits<Stored>::USED) Digits<Stored>::template tile<M, PANELS>(a);
  else gemv_tile<Kind, Stored, M, PANELS>(a);
}

template <class Kind, class Stored> constexpr int max_streams(long m) {
  if constexpr (Digits<Stored>::USED) return Digits<Stored>::streams(m);
  else return gemv_streams(m, PANEL / LANES<Kind>);
}

// Panels panel + s * steps + i for stream s and step i.
struct GemvChunk { long panel, steps; };

// Chunks become smaller: each of the first takes half of what is left, divided by the number of threads, so that streams
// are long and the threads' loads balance. Plan: a GemmPlan.
template <class Plan, class D> struct GemvPlan {
  static constexpr int MAX_STREAMS = max_streams<typename Plan::Kind, typename Plan::Stored>(D::M);
  static constexpr long PRODUCTS = Plan::PRODUCTS, PANELS = PRODUCTS * Plan::NP;
  static constexpr long PRODUCT_BYTES = Plan::Stored::panel_bytes(Plan::UNITS);
  static constexpr long LEAST = CHUNKS / 2;
  static constexpr int WANTED = MAX_STREAMS >= 4 && PANELS / 4 < LEAST ? (PANELS / 2 < LEAST ? 1 : 2) : MAX_STREAMS;
  static constexpr int STREAMS = WANTED > 1 ? WANTED / PRODUCTS * PRODUCTS : 1;
  static constexpr long GROUP = max_of(STREAMS, PRODUCTS), GROUPS = ceil_div(PANELS, GROUP);
  // Chunk i of the panels of an image.
  static GemvChunk chunk(long i, long threads) {
    long panel = 0;
    for (; D::B == 1 && STREAMS > 1;) {
      const long steps = (PANELS - panel) / (2 * STREAMS * threads) / PRODUCTS * PRODUCTS;
      if (steps < 2) break;
      if (i < threads) return {panel + i * STREAMS * steps, steps};
      panel += threads * STREAMS * steps, i -= threads;
    }
    return {panel + i * GROUP, 1};
  }
};

// Prefetches the first weights that this thread reads, while it waits for the previous phase to end.
template <class Plan, class D> NPU_INLINE void gemv_prefetch(const char* weights, const Thread& th) {
  using V = GemvPlan<Plan, D>;
  const GemvChunk first = V::chunk(th.tid, th.n);
  for (long at = 0; at < min_of(GEMV_PREFETCH_BYTES, V::PRODUCT_BYTES); at += 64)
    for (long s = 0, panel = first.panel; s < V::GROUP && panel < V::PANELS; s++, panel += first.steps)
      __builtin_prefetch(weights + panel * V::PRODUCT_BYTES + at, 0, 3);
}

// The first chunk of a thread is the one that gemv_prefetch() prefetched; the others are claimed dynamically.
template <class Plan, class D, class TA, class TW, class Epi>
NPU_INLINE void gemv(const TA* a, const TW* weights, Epi& epi, Thread& th, int* counter) {
  using Kind = typename Plan::Kind;
  using Sum = typename Kind::Sum;
  using Stored = typename Plan::Stored;
  using V = GemvPlan<Plan, D>;
  constexpr int STREAMS = V::STREAMS;
  constexpr long PRODUCTS = V::PRODUCTS, PANELS = V::PANELS, PRODUCT_BYTES = V::PRODUCT_BYTES, GROUP = V::GROUP;
  constexpr long SUMS = D::M * PANEL;
  constexpr long X_ROW_BYTES = Digits<Stored>::USED ? digits_bytes<Stored>(1, D::K) : Plan::ROW_BYTES;
  Sum acc[max_of(GROUP, STREAMS * PRODUCTS) * SUMS] __attribute__((aligned(64)));
  long prepared = -1;
  const char* x = nullptr;
  // Images have chunks of one step each, if there are several.
  auto image_of = [](long i) { return D::B == 1 ? 0 : i / V::GROUPS; };
  auto chunk_of = [&](long i) { return V::chunk(i - image_of(i) * V::GROUPS, th.n); };
  auto exists = [&](long i) { return image_of(i) < D::B && chunk_of(i).panel < PANELS; };
  auto address = [&](long i) {
    return (const char*)weights + image_of(i) * Plan::W_IMAGE_BYTES + chunk_of(i).panel * PRODUCT_BYTES;
  };
  auto epilogue = [&](long image, long panel, const Sum* sums, long second) __attribute__((always_inline)) {
    apply_epilogue<D::N, Plan::DUAL>(sums, second, (int)D::M, image * D::M, panel / PRODUCTS * PANEL, 0, epi);
  };
  for (long i = th.tid, next = 0; exists(i); i = next) {
    const long image = image_of(i);
    if (prepared != image) {
      x = Plan::prepare(a, image, 0, th.scratch);
      prepared = image;
      if constexpr (Digits<Stored>::USED) {
        char* digits = th.scratch + align64(Plan::COPY_BYTES);
        for (long m = 0; m < D::M; m++) Digits<Stored>::write(x + m * Plan::ROW_BYTES, D::K, digits + m * X_ROW_BYTES);
        x = digits;
      }
    }
    const GemvChunk chunk = chunk_of(i);
    GemvArgs<Sum> args{x, X_ROW_BYTES, Plan::UNITS, address(i), PRODUCT_BYTES, chunk.steps * PRODUCT_BYTES, acc};
    for (long step = 0; step < chunk.steps; step++, args.w += PRODUCT_BYTES) {
      if (step == chunk.steps - 1) {
        next = th.n + next_chunk(th, counter);
        if (exists(next)) args.jump = address(next) - args.w - PRODUCT_BYTES;
      }
      const long panel = chunk.panel + step, side = step % PRODUCTS;
      if (chunk.steps > 1) {
        args.acc = acc + side * STREAMS * SUMS;
        multiply_panels<Kind, Stored, D::M, STREAMS>(args);
        for (long s = 0; s < STREAMS && side == PRODUCTS - 1; s++)
          epilogue(image, panel + s * chunk.steps, acc + s * SUMS, STREAMS * SUMS);
        continue;
      }
      const long panels = min_of(GROUP, PANELS - panel);
      if (panels == STREAMS) {
        multiply_panels<Kind, Stored, D::M, STREAMS>(args);
      } else {
        GemvArgs<Sum> one = args;
        for (long s = 0; s < panels; s++, one.w += PRODUCT_BYTES, one.acc += SUMS)
          multiply_panels<Kind, Stored, D::M, 1>(one);
      }
      for (long s = 0; s < panels; s += PRODUCTS) epilogue(image, panel + s, acc + s * SUMS, SUMS);
    }
  }
}

}  // namespace npu
