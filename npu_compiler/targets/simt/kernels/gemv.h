// Products of few rows (a decode step). Weights are streamed once, 16 bytes per load, starting before the kernel waits
// for its inputs (pdl_wait).
//
// A workgroup of THREADS computes a tile: ROWS rows of the weight times M rows of the left operand. The partial sums of
// its threads are added in shared memory, in a fixed order. In a dual product (PRODUCTS 2) the rows of the weight
// alternate between two products that the epilogue combines into one result.
//
// Constants of C: M; N, rows of the weight; K; LDA, elements between rows of the left operand; ROWS, PRODUCTS, THREADS;
// ITEM: columns that a thread multiplies at once; PIECES of ITEM columns in a row; VECTORS: pieces of a thread in a row of
// the weight, LEFT_VECTORS: in a row of the left operand; TILES; STEP: persistent workgroups, each of which computes every
// STEP-th tile. GROUPS: groups of THREADS in a workgroup, each of which computes a tile; SHARED_VECTORS: pieces of the
// left operand that a thread computes for all that share it. SETTLES: whether weights must have arrived before the
// kernel waits for its inputs, which are then not queued behind them.
// Types: X, of the left operand in registers.
//
// Weights: a reader of one weight format. load(tile, at) loads the weights of a tile into registers before pdl_wait(),
// and load_rest(at) loads the rest after it. settle() waits until what load() requested has arrived.
// multiply(sum, left, x, operand, at) adds to the sums [M][ROWS], and reduce(sum, part, at) adds up those of a subgroup
// in part [ROWS * M]. Its type Operand holds data that all tiles need in addition to x; its make(weights, left, x, at)
// is called once.
// Left: the left operand. load_weights(at) is called before pdl_wait() and load_inputs(x, at) after it; make(x, at)
// completes x [M][LEFT_VECTORS]. element(k) returns element k of row 0 as a float, from the copy that put(k, ..) stored if
// PUTS. If it is SHARED, threads compute pieces for others, and put(k, piece) and piece(k) exchange them.
// Epilogue: a rendered functor. load_weights and load_inputs(row, column, guard) load the operands of store(row,
// column, sums).
#pragma once

// Piece v of a thread is v * THREADS + tid.
template <class C> struct GemvLeft {
  Vec<typename C::X, C::ITEM> x[C::M][C::LEFT_VECTORS];
};

// The pieces of the left operand that a thread computes for all threads of its workgroup.
template <class C> struct SharedLeft {
  Vec<float, C::ITEM> x[1][C::SHARED_VECTORS];
};

// The position of a thread in its group, which counts as a workgroup.
template <class C> INLINE Thread in_group(Thread all) {
  if (C::GROUPS == 1) return all;
  const Thread at = {all.workgroup * C::GROUPS + all.tid / C::THREADS, all.tid % C::THREADS, all.lane,
                     all.subgroup % (C::THREADS / 32)};
  return at;
}

// Completes the left operand. Threads that need the same pieces of it share it through shared memory.
template <class C, bool SHARED> struct LeftMaker {
  template <class Left> static INLINE void make(THREAD Left& left, THREAD GemvLeft<C>& x, Thread at, Thread all) {
    const int all_threads = C::THREADS * C::GROUPS;
    SharedLeft<C> mine;
    left.make(mine, all);
#pragma unroll
    for (int v = 0; v < C::SHARED_VECTORS; v++) {
      const int piece = v * all_threads + all.tid;
      if (C::SHARED_VECTORS * all_threads == C::PIECES || piece < C::PIECES) left.put(piece * C::ITEM, mine.x[0][v]);
    }
    barrier();
#pragma unroll
    for (int v = 0; v < C::LEFT_VECTORS; v++) {
      const int piece = v * C::THREADS + at.tid;
      const bool ok = C::LEFT_VECTORS * C::THREADS == C::PIECES || piece < C::PIECES;
      x.x[0][v] = left.piece(ok ? piece * C::ITEM : 0);
      if (!ok)
        for (int e = 0; e < C::ITEM; e++) x.x[0][v].v[e] = to_bf16(0.0f);
    }
  }
};
template <class C> struct LeftMaker<C, false> {
  template <class Left> static INLINE void make(THREAD Left& left, THREAD GemvLeft<C>& x, Thread at, Thread) {
    left.make(x, at);
  }
};

// A left operand in memory, loaded as vectors if ALIGNED.
template <class C> struct LoadedLeft {
  DEVICE const typename C::X* a;
  INLINE void load_weights(Thread) {}
  INLINE void load_inputs(THREAD GemvLeft<C>& left, Thread at) {
#pragma unroll
    for (int v = 0; v < C::LEFT_VECTORS; v++) load(left, v, v * C::THREADS + at.tid);
  }
  INLINE void make(THREAD GemvLeft<C>&, Thread) {}
  INLINE void load(THREAD GemvLeft<C>& left, int v, int piece) {
#pragma unroll
    for (int m = 0; m < C::M; m++) {
      DEVICE const typename C::X* const from = a + m * C::LDA + piece * C::ITEM;
      if (C::LEFT_VECTORS * C::THREADS > C::PIECES && piece >= C::PIECES) {
        for (int e = 0; e < C::ITEM; e++) left.x[m][v].v[e] = narrow<typename C::X>(0.0f);
      } else if (C::ALIGNED) {
        left.x[m][v] = *(DEVICE const Vec<typename C::X, C::ITEM>*)from;
      } else {
        for (int e = 0; e < C::ITEM; e++) left.x[m][v].v[e] = from[e];
      }
    }
  }
  CONSTANTS bool PUTS = false, SHARED = false;
  INLINE float element(int k) const { return to_f32(a[k]); }
  INLINE void put(int, float) {}
  INLINE void put(int, uint4) {}
};

// Reader of plain weights, whose rows are PITCH elements apart. STREAMED: no kernel writes them. W: their type.
template <class C> struct DenseWeights {
  struct Operand {
    template <class Left>
    INLINE void make(THREAD const DenseWeights&, THREAD Left&, THREAD const GemvLeft<C>&, Thread) {}
  };
  DEVICE const typename C::W* rows;
  uint4 w[C::ROWS][C::VECTORS];

  INLINE uint4 piece(int first, int r, int n) {
    const int row = C::N % C::ROWS == 0 || first + r < C::N ? first + r : C::N - 1;
    DEVICE const typename C::W* const from = rows + (int64_t)row * C::PITCH + n * C::ITEM;
    return C::STREAMED ? stream16(from) : load16(from);
  }
  INLINE void load(int tile, Thread at) {
    if (!C::STREAMED) pdl_wait();
#pragma unroll
    for (int r = 0; r < C::ROWS; r++)
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        const int n = v * C::THREADS + at.tid;
        if (C::VECTORS * C::THREADS == C::PIECES || n < C::PIECES) w[r][v] = piece(tile * C::ROWS, r, n);
        else w[r][v] = zero16();
      }
  }
  INLINE void load_rest(Thread) {}
  INLINE void settle() const {
    for (int r = 0; r < C::ROWS; r++)
      for (int v = 0; v < C::VECTORS; v++) await_load(w[r][v].x);
  }
  template <class Left>
  INLINE void multiply(THREAD float (&sum)[C::M][C::ROWS], THREAD Left&, THREAD const GemvLeft<C>& left,
                       THREAD const Operand&, Thread) {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) multiply_piece(sum, left, v);
  }
  INLINE void multiply_piece(THREAD float (&sum)[C::M][C::ROWS], THREAD const GemvLeft<C>& left, int v) {
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) {
      float y[C::ITEM];
      unpack(w[r][v], y, (THREAD typename C::W*)nullptr);
#pragma unroll
      for (int e = 0; e < C::ITEM; e++)
#pragma unroll
        for (int m = 0; m < C::M; m++) sum[m][r] += to_f32(left.x[m][v].v[e]) * y[e];
    }
  }
  INLINE void reduce(THREAD float (&sum)[C::M][C::ROWS], SMEM float* part, Thread at) {
#pragma unroll
    for (int n = 0; n < C::ROWS * C::M; n++) {
      const float total = subgroup_sum(sum[n / C::ROWS][n % C::ROWS]);
      if (at.lane == 0) part[n] = total;
    }
  }
};

// The result of a tile that a thread stores. `active`: whether it has one.
template <class C> struct GemvResults {
  CONSTANTS int COLUMNS = C::ROWS / C::PRODUCTS, SUBGROUPS = C::THREADS / 32, SUMS = C::ROWS * C::M;
  int row, column;
  bool active;
  INLINE GemvResults(int tile, int tid) {
    row = tid / COLUMNS;
    column = tile * C::ROWS / C::PRODUCTS + tid % COLUMNS;
    active = tid < COLUMNS * C::M && (C::N % C::ROWS == 0 || column < C::N / C::PRODUCTS);
  }
  // Consecutive tiles of a workgroup use different memory, so one barrier per tile is enough.
  template <class Weights, class Epilogue>
  INLINE void store(THREAD Weights& weights, THREAD float (&sum)[C::M][C::ROWS], THREAD Epilogue& epilogue,
                    SMEM float* part, Thread at) {
    weights.reduce(sum, part + at.subgroup * SUMS, at);
    barrier();
    if (active) {
      float total[C::PRODUCTS];
#pragma unroll
      for (int n = 0; n < C::PRODUCTS; n++) {
        total[n] = 0.0f;
#pragma unroll
        for (int s = 0; s < SUBGROUPS; s++) total[n] += part[s * SUMS + at.tid * C::PRODUCTS + n];
      }
      epilogue.store(row, column, total);
    }
  }
};

// One group per tile. part: [GROUPS, THREADS / 32, ROWS * M].
template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv(Weights weights, Left left, Epilogue epilogue, SMEM float* part, Thread all) {
  const Thread at = in_group<C>(all);
  const bool active = C::TILES % C::GROUPS == 0 || at.workgroup < C::TILES;
  GemvResults<C> results(at.workgroup, at.tid);
  results.active = results.active && active;
  GemvLeft<C> x;
  float sum[C::M][C::ROWS] = {};
  weights.load(active ? at.workgroup : C::TILES - 1, at);
  left.load_weights(C::GROUPS == 1 ? at : all);
  epilogue.load_weights(results.row, results.column, results.active);
  if (C::SETTLES) weights.settle();
  pdl_wait();
  left.load_inputs(x, C::GROUPS == 1 ? at : all);
  epilogue.load_inputs(results.row, results.column, results.active);
  weights.load_rest(at);
  LeftMaker<C, Left::SHARED>::make(left, x, at, all);
  typename Weights::Operand operand;
  operand.make(weights, left, x, at);
  weights.multiply(sum, left, x, operand, at);
  const int group = all.tid / C::THREADS, size = GemvResults<C>::SUBGROUPS * GemvResults<C>::SUMS;
  results.store(weights, sum, epilogue, part + group * size, at);
}

// One workgroup per tile of long rows, whose pieces a thread loads in a loop. VECTORS is 1.
template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv_long_rows(Weights weights, Left left, Epilogue epilogue, SMEM float* part, Thread at) {
  GemvResults<C> results(at.workgroup, at.tid);
  GemvLeft<C> x;
  float sum[C::M][C::ROWS] = {};
  pdl_wait();
#pragma unroll 4
  for (int piece = at.tid; piece < C::PIECES; piece += C::THREADS) {
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) weights.w[r][0] = weights.piece(at.workgroup * C::ROWS, r, piece);
    left.load(x, 0, piece);
    weights.multiply_piece(sum, x, 0);
  }
  results.store(weights, sum, epilogue, part, at);
}

template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv_tile(
    THREAD Weights& weights, int tile, THREAD Left& left, THREAD const GemvLeft<C>& x,
    THREAD const typename Weights::Operand& operand, THREAD Epilogue& epilogue, SMEM float* part, Thread at) {
  if (tile >= C::TILES) return;
  GemvResults<C> results(tile, at.tid);
  float sum[C::M][C::ROWS] = {};
  epilogue.load_inputs(results.row, results.column, results.active);
  weights.multiply(sum, left, x, operand, at);
  if (tile + 2 * C::STEP < C::TILES) weights.load(tile + 2 * C::STEP, at);
  results.store(weights, sum, epilogue, part, at);
}

// STEP persistent workgroups, each of which computes every STEP-th tile. The left operand is computed once. While one
// tile is multiplied, the weights of the next are loaded. At first, the second tile's are requested when the first
// tile's have arrived: a longer queue would delay what the preceding kernels load and store.
// part: [2, THREADS / 32, ROWS * M].
template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv_persistent(Weights even, Left left, Epilogue epilogue, SMEM float* part, Thread at) {
  Weights odd = even;
  GemvLeft<C> x;
  if (at.workgroup < C::TILES) even.load(at.workgroup, at);
  left.load_weights(at);
  even.settle();
  if (at.workgroup + C::STEP < C::TILES) odd.load(at.workgroup + C::STEP, at);
  pdl_wait();
  left.load_inputs(x, at);
  LeftMaker<C, Left::SHARED>::make(left, x, at, at);
  typename Weights::Operand operand;
  operand.make(even, left, x, at);
  for (int tile = at.workgroup; tile < C::TILES; tile += 2 * C::STEP) {
    gemv_tile<C>(even, tile, left, x, operand, epilogue, part, at);
    gemv_tile<C>(odd, tile + C::STEP, left, x, operand, epilogue,
                 part + GemvResults<C>::SUBGROUPS * GemvResults<C>::SUMS, at);
  }
}
