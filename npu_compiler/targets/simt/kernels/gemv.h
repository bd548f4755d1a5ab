// Products of a few rows (a decode step): weights are streamed once, 16 bytes a load, before the inputs are awaited.
//
// A workgroup of THREADS makes ROWS results, one a row of the weight, for each of M rows of the left operand: partial sums
// of its threads are added in shared memory, in a fixed order. In a paired product (LANES 2) the rows of the weight
// alternate between two products, which make one result.
//
// Constants of C: M; N, rows of the weight; K; LDA, elements between rows of the left operand; ROWS, LANES, THREADS; ITEM:
// columns that a thread multiplies at once; PIECES of ITEM columns in a row; VECTORS: pieces of a thread; UNITS of ROWS;
// STEP: resident workgroups, which take units in turns. Types: X, of the left operand in registers.
//
// Weights: a reader of one weight format. load(unit, at) reads the weights of a unit into registers, before the inputs are
// awaited; load_rest(at) what it left for later; multiply(sum, left, x, operand, at) adds up sums [M][ROWS]; reduce(sum,
// part, at) adds those of a subgroup into part [ROWS * M]. Its type Operand is what all units need of the left operand
// beside x: make(left, x, at) is called once.
// Left: the left operand. prefetch(at) reads before the inputs are awaited, fetch(at) after it, make(x, at) fills
// x [M][VECTORS], and element(k) is element k of row 0 as a float; put(k, ..) keeps what make() made for it.
// Epilogue: a rendered functor. fetch_weights and fetch(row, column, guard) read what store(row, column, sums) needs.
#pragma once

template <class C> struct GemvLeft {
  Vec<typename C::X, C::ITEM> x[C::M][C::VECTORS];
};

// The left operand as it lies in memory, in vectors if ALIGNED. Constants and X are C's.
template <class C> struct LoadedLeft {
  DEVICE const typename C::X* a;
  INLINE void prefetch(Thread) {}
  INLINE void fetch(THREAD GemvLeft<C>& left, Thread at) {
#pragma unroll
    for (int v = 0; v < C::VECTORS; v++) load(left, v, v * C::THREADS + at.tid);
  }
  INLINE void make(THREAD GemvLeft<C>&, Thread) {}
  INLINE void load(THREAD GemvLeft<C>& left, int v, int piece) {
#pragma unroll
    for (int m = 0; m < C::M; m++) {
      DEVICE const typename C::X* const from = a + m * C::LDA + piece * C::ITEM;
      if (C::VECTORS * C::THREADS > C::PIECES && piece >= C::PIECES) {
        for (int e = 0; e < C::ITEM; e++) left.x[m][v].v[e] = narrow<typename C::X>(0.0f);
      } else if (C::ALIGNED) {
        left.x[m][v] = *(DEVICE const Vec<typename C::X, C::ITEM>*)from;
      } else {
        for (int e = 0; e < C::ITEM; e++) left.x[m][v].v[e] = from[e];
      }
    }
  }
  CONSTANTS bool PUTS = false;
  INLINE float element(int k) const { return to_f32(a[k]); }
  INLINE void put(int, float) {}
  INLINE void put(int, uint4) {}
};

// Weights as they are, row by row, PITCH elements apart. STREAMED: nobody writes them. W: their type.
template <class C> struct DenseWeights {
  struct Operand {
    template <class Left> INLINE void make(THREAD Left&, THREAD const GemvLeft<C>&, Thread) {}
  };
  DEVICE const typename C::W* rows;
  uint4 w[C::ROWS][C::VECTORS];

  INLINE uint4 piece(int first, int r, int n) {
    const int row = C::N % C::ROWS == 0 || first + r < C::N ? first + r : C::N - 1;
    DEVICE const typename C::W* const from = rows + (int64_t)row * C::PITCH + n * C::ITEM;
    return C::STREAMED ? stream16(from) : load16(from);
  }
  INLINE void load(int unit, Thread at) {
    if (!C::STREAMED) pdl_wait();
#pragma unroll
    for (int r = 0; r < C::ROWS; r++)
#pragma unroll
      for (int v = 0; v < C::VECTORS; v++) {
        const int n = v * C::THREADS + at.tid;
        if (C::VECTORS * C::THREADS == C::PIECES || n < C::PIECES) w[r][v] = piece(unit * C::ROWS, r, n);
        else w[r][v] = zero16();
      }
  }
  INLINE void load_rest(Thread) {}
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

// The results of a unit: which one a thread stores, and whether it has one.
template <class C> struct GemvResults {
  CONSTANTS int COLUMNS = C::ROWS / C::LANES, SUBGROUPS = C::THREADS / 32, SUMS = C::ROWS * C::M;
  int row, column;
  bool mine;
  INLINE GemvResults(int unit, int tid) {
    row = tid / COLUMNS;
    column = unit * C::ROWS / C::LANES + tid % COLUMNS;
    mine = tid < COLUMNS * C::M && (C::N % C::ROWS == 0 || column < C::N / C::LANES);
  }
  // Turns use different memory: one barrier for each is enough.
  template <class Weights, class Epilogue>
  INLINE void store(THREAD Weights& weights, THREAD float (&sum)[C::M][C::ROWS], THREAD Epilogue& epilogue, SMEM float* part,
                    Thread at) {
    weights.reduce(sum, part + at.sid * SUMS, at);
    barrier();
    if (mine) {
      float total[C::LANES];
#pragma unroll
      for (int n = 0; n < C::LANES; n++) {
        total[n] = 0.0f;
#pragma unroll
        for (int s = 0; s < SUBGROUPS; s++) total[n] += part[s * SUMS + at.tid * C::LANES + n];
      }
      epilogue.store(row, column, total);
    }
  }
};

// A workgroup for each unit. part: [THREADS / 32, ROWS * M].
template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv(Weights weights, Left left, Epilogue epilogue, SMEM float* part, Thread at) {
  GemvResults<C> results(at.gid, at.tid);
  GemvLeft<C> x;
  float sum[C::M][C::ROWS] = {};
  weights.load(at.gid, at);
  left.prefetch(at);
  epilogue.fetch_weights(results.row, results.column, results.mine);
  pdl_wait();
  left.fetch(x, at);
  epilogue.fetch(results.row, results.column, results.mine);
  weights.load_rest(at);
  left.make(x, at);
  typename Weights::Operand operand;
  operand.make(left, x, at);
  weights.multiply(sum, left, x, operand, at);
  results.store(weights, sum, epilogue, part, at);
}

// Rows so long that a thread reads its pieces of them in a loop. VECTORS is 1.
template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv_long_rows(Weights weights, Left left, Epilogue epilogue, SMEM float* part, Thread at) {
  GemvResults<C> results(at.gid, at.tid);
  GemvLeft<C> x;
  float sum[C::M][C::ROWS] = {};
  pdl_wait();
#pragma unroll 4
  for (int piece = at.tid; piece < C::PIECES; piece += C::THREADS) {
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) weights.w[r][0] = weights.piece(at.gid * C::ROWS, r, piece);
    left.load(x, 0, piece);
    weights.multiply_piece(sum, x, 0);
  }
  results.store(weights, sum, epilogue, part, at);
}

template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv_turn(
    THREAD Weights& weights, int unit, THREAD Left& left, THREAD const GemvLeft<C>& x,
    THREAD const typename Weights::Operand& operand, THREAD Epilogue& epilogue, SMEM float* part, Thread at) {
  if (unit >= C::UNITS) return;
  GemvResults<C> results(unit, at.tid);
  float sum[C::M][C::ROWS] = {};
  epilogue.fetch(results.row, results.column, results.mine);
  weights.multiply(sum, left, x, operand, at);
  if (unit + 2 * C::STEP < C::UNITS) weights.load(unit + 2 * C::STEP, at);
  results.store(weights, sum, epilogue, part, at);
}

// STEP resident workgroups take units in turns: the left operand is made once, and while one unit is multiplied the
// weights of the next are loaded. part: [2, THREADS / 32, ROWS * M].
template <class C, class Weights, class Left, class Epilogue>
INLINE void gemv_resident(Weights even, Left left, Epilogue epilogue, SMEM float* part, Thread at) {
  Weights odd = even;
  GemvLeft<C> x;
  if (at.gid < C::UNITS) even.load(at.gid, at);
  if (at.gid + C::STEP < C::UNITS) odd.load(at.gid + C::STEP, at);
  left.prefetch(at);
  pdl_wait();
  left.fetch(x, at);
  left.make(x, at);
  typename Weights::Operand operand;
  operand.make(left, x, at);
  for (int unit = at.gid; unit < C::UNITS; unit += 2 * C::STEP) {
    gemv_turn<C>(even, unit, left, x, operand, epilogue, part, at);
    gemv_turn<C>(odd, unit + C::STEP, left, x, operand, epilogue,
                 part + GemvResults<C>::SUBGROUPS * GemvResults<C>::SUMS, at);
  }
}
