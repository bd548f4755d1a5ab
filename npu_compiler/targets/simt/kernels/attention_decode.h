// Attention of one query position to a cache: a decode step's rotary embedding, cache update, attention and the
// combination of its parts in one launch.
//
// A workgroup processes the HEADS_PER_KV query heads of a key/value head and a range of the keys; its subgroups process
// 16 keys at a time. Keys and values are loaded directly into fragments of the matrix unit. The order of elements along
// a summed dim does not matter, so every lane loads 16 contiguous bytes. Keys of earlier positions are loaded before
// pdl_wait(). The workgroup whose range contains this position computes its new row. Workgroups without keys exit at
// once. The others wait at a grid barrier, and then each adds up its share of the results from all parts, in order. (If
// the last workgroup added up all of them, it would take long, because the next kernel's prefetches come first.)
// Results do not depend on which workgroup adds up which share.
//
// Types of C: T. Constants: HK, SK, D (64 or 128), HEADS_PER_KV; SPLITS: workgroups of a key/value head; SUBGROUPS;
// MIN_KEYS: the fewest keys of a workgroup; STATE: words of a grid barrier's state; K_H K_S V_H V_S O_H O_D: strides of
// keys, values and output. SCALE: of the scores, times log2(e), because the kernel computes powers of two.
//
// Queries, Row: rendered functors that compute elements of the queries, and of the key or the value at the position.
// load(i, point) loads the operands of a point into slot i, make(i, point) returns its value from them, and
// place(point, position) is the offset of a Row's element in the cache.
#pragma once

template <class C> struct DecodeAttention {
  typedef typename C::T T;
  CONSTANTS int KEYS = 16, HEADS = 8;                // of a product on the matrix unit
  CONSTANTS int KP = C::D / 32, VP = C::D / 64;      // 16-byte pieces of a lane: of each key, of each value
  CONSTANTS int STEP = C::SUBGROUPS * KEYS, THREADS = C::SUBGROUPS * 32, HALF = C::SUBGROUPS / 2;
  CONSTANTS int PITCH = 4 * 32 + 1;                  // floats of shared memory for 16 elements of all lanes, padded
  CONSTANTS int SLOT = C::D / 16 * PITCH;            // floats of shared memory for the sums of a subgroup
  CONSTANTS int ITEMS = C::HEADS_PER_KV * C::D / 4;         // four results each
  CONSTANTS int PART = C::D + 4, ALL = C::HK * C::HEADS_PER_KV * PART;  // floats of a row, of a split

  DEVICE const T* keys;
  DEVICE const T* values;
  DEVICE T* out;
  DEVICE float* parts;  // [SPLITS, HK * HEADS_PER_KV, PART]
  SMEM T* qs;            // [HEADS, D]: queries
  SMEM T* new_rows;      // [2, D]: this position's key and value
  SMEM float* partials;  // [HALF, SLOT]
  SMEM float* maxima;    // [HALF, HEADS]
  SMEM float* sums;      // [HALF, HEADS]
  Thread at;
  int hk, split, position_row, valid, active, begin, end, row, column;
  uint4 k[2][KP], v[4][VP];
  FragC o[C::D / 16];
  float row_max[2], sum[2];

  // Keys begin .. end - 1 are those of this workgroup; `active` workgroups of its key/value head have keys.
  INLINE void range(int64_t position) {
    hk = at.workgroup % C::HK;
    split = at.workgroup / C::HK;
    position_row = position < 0 ? 0 : position < C::SK ? (int)position : C::SK - 1;
    valid = position_row + 1;
    int share = (valid + C::SPLITS * KEYS - 1) / (C::SPLITS * KEYS) * KEYS;
    share = share > C::MIN_KEYS ? share : C::MIN_KEYS;
    active = (valid + share - 1) / share;
    begin = split * share;
    end = begin + share < valid ? begin + share : valid;
    row = at.lane >> 2;
    column = at.lane & 3;
  }

  // The position of row i of a lane's keys and values. A lane's pieces of a key are 32 elements apart, from column * 8
  // on; those of a value are 64 elements apart, from row * 8 on.
  INLINE int key_at(int first, int i) const { return first + row + 8 * i; }
  INLINE int value_at(int first, int i) const { return first + 2 * column + (i & 1) + 8 * (i >> 1); }

  // Load 16 keys or values from `first` on. insert_new_rows() replaces those from this position on.
  INLINE void load_keys(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = key_at(first, i) < valid ? key_at(first, i) : position_row;
#pragma unroll
      for (int j = 0; j < KP; j++) k[i][j] = stream16(keys + (int64_t)t * C::K_S + j * 32 + column * 8);
    }
  }
  INLINE void load_values(int first) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int t = value_at(first, i) < valid ? value_at(first, i) : position_row;
#pragma unroll
      for (int j = 0; j < VP; j++) v[i][j] = stream16(values + (int64_t)t * C::V_S + j * 64 + row * 8);
    }
  }

  // Computes qs, the queries of this workgroup followed by zero rows, and new_rows, which are also stored in the
  // caches. All loads are issued before the first value is computed, so that their latencies overlap.
  template <class Queries, class Key, class Value>
  INLINE void make_rows(Queries queries, Key key, Value value, DEVICE T* key_out, DEVICE T* value_out,
                        int64_t position) {
    const int rounds = (HEADS * C::D + THREADS - 1) / THREADS, count = C::HEADS_PER_KV * C::D;
    float made[rounds];
#pragma unroll
    for (int i = 0; i < rounds; i++) queries.load(i, query_point(i, count));
    const uint point = (uint)(hk * C::D + at.tid % C::D);
    key.load(0, point);
    value.load(0, point);
    pdl_launch_dependents();  // not earlier: the next kernel's prefetches would delay the loads above
    const float new_key = key.make(0, point), new_value = value.make(0, point);
#pragma unroll
    for (int i = 0; i < rounds; i++) made[i] = queries.make(i, query_point(i, count));
#pragma unroll
    for (int i = 0; i < rounds; i++) {
      const int n = i * THREADS + at.tid;
      if (n < HEADS * C::D) qs[n] = narrow<T>(n < count ? made[i] : 0.0f);
    }
    if (position_row >= begin && position_row < end && at.tid / C::D == 0) {
      new_rows[at.tid] = narrow<T>(new_key);
      key_out[key.place(point, position)] = narrow<T>(new_key);
    }
    if (position_row >= begin && position_row < end && at.tid / C::D == 1) {
      new_rows[at.tid] = narrow<T>(new_value);
      value_out[value.place(point, position)] = narrow<T>(new_value);
    }
  }
  INLINE uint query_point(int i, int count) const {
    const int n = i * THREADS + at.tid;
    return (uint)(hk * count + (n < count ? n : 0));
  }

  // Inserts this position's rows. Values beyond it are undefined and become zero.
  INLINE void insert_new_rows(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < KP; j++)
        if (key_at(first, i) == position_row) k[i][j] = *(SMEM const uint4*)(new_rows + j * 32 + column * 8);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < VP; j++) {
        if (value_at(first, i) == position_row) v[i][j] = *(SMEM const uint4*)(new_rows + C::D + j * 64 + row * 8);
        if (value_at(first, i) > position_row) v[i][j] = zero16();
      }
  }

  // Computes the scores s of 16 keys and 8 heads, as two sums over different elements.
  INLINE void scores(THREAD FragC (&s)[2]) {
    frag_zero(s[0]);
    frag_zero(s[1]);
#pragma unroll
    for (int j = 0; j < KP; j++) {
      const uint4 q = *(SMEM const uint4*)(qs + row * C::D + j * 32 + column * 8);
      FragA<T> x, y;
      FragB<T> a, b;
      frag_b_from(a, q.x, q.y, at.lane);
      frag_b_from(b, q.z, q.w, at.lane);
      frag_a_from(x, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y, at.lane);
      frag_a_from(y, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w, at.lane);
      frag_mma(s[0], x, a);
      frag_mma(s[1], y, b);
    }
  }

  // Computes the weights from the scores, in s[0]. A lane has two heads, and keys row and row + 8.
  INLINE void softmax(THREAD FragC (&s)[2], int first) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int e = c; e < 4; e += 2) {
        const float x = (s[0].v[e] + s[1].v[e]) * C::SCALE;
        s[0].v[e] = first + row + 4 * (e - c) < end ? x : -m_inf_float();
      }
      float maximum = m_max(row_max[c], m_max(s[0].v[c], s[0].v[c + 2]));
#pragma unroll
      for (int m = 4; m < 32; m <<= 1) maximum = m_max(maximum, subgroup_xor(maximum, m));
      const float rescaling = m_exp2(row_max[c] - maximum);
      row_max[c] = maximum;
      s[0].v[c] = m_exp2(s[0].v[c] - maximum);
      s[0].v[c + 2] = m_exp2(s[0].v[c + 2] - maximum);
      sum[c] = sum[c] * rescaling + s[0].v[c] + s[0].v[c + 2];
#pragma unroll
      for (int n = 0; n < C::D / 16; n++) {
        o[n].v[c] *= rescaling;
        o[n].v[c + 2] *= rescaling;
      }
    }
  }

  // Adds weighted values to o, whose fragments have 16 elements and 8 heads.
  INLINE void add_values(THREAD const FragC& weights) {
    FragB<T> w;
    frag_b_transposed(w, weights, at.lane);
#pragma unroll
    for (int j = 0; j < VP; j++) {
      add_pairs(o[4 * j], w, v[0][j].x, v[1][j].x, v[2][j].x, v[3][j].x);
      add_pairs(o[4 * j + 1], w, v[0][j].y, v[1][j].y, v[2][j].y, v[3][j].y);
      add_pairs(o[4 * j + 2], w, v[0][j].z, v[1][j].z, v[2][j].z, v[3][j].z);
      add_pairs(o[4 * j + 3], w, v[0][j].w, v[1][j].w, v[2][j].w, v[3][j].w);
    }
  }
  INLINE void add_pairs(THREAD FragC& sums_of, THREAD const FragB<T>& w, uint a, uint b, uint c, uint d) {
    FragA<T> x;
    frag_a_from(x, pair_low(a, b), pair_high(a, b), pair_low(c, d), pair_high(c, d), at.lane);
    frag_mma(sums_of, x, w);
  }

  // The place where a lane stores fragment n of its column c. Neither writing by lanes nor reading by rows has bank
  // conflicts (even n come first, because a thread reads n and n + 1).
  INLINE SMEM float* slot(int n, int c) const {
    return partials + at.subgroup % HALF * SLOT + at.lane + (n % 2 * (C::D / 32) + n / 2) * PITCH + c * 64;
  }
  INLINE void store_partials() {
    const int mine = at.subgroup % HALF * HEADS + 2 * column;
    if (row == 0) {
      maxima[mine] = row_max[0];
      maxima[mine + 1] = row_max[1];
      sums[mine] = sum[0];
      sums[mine + 1] = sum[1];
    }
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int n = 0; n < C::D / 16; n++) {
        slot(n, c)[0] = o[n].v[c];
        slot(n, c)[32] = o[n].v[c + 2];
      }
  }
  // Combines the sums of the subgroups in shared memory: the lower half adds those of the upper half to its own.
  INLINE void combine_subgroups() {
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int m = 4; m < 32; m <<= 1) sum[c] += subgroup_xor(sum[c], m);
    if (at.subgroup >= HALF) store_partials();
    barrier();
    if (at.subgroup < HALF) {
      subgroup_barrier();
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int mine = at.subgroup % HALF * HEADS + 2 * column + c;
        const float other = maxima[mine], maximum = m_max(row_max[c], other);
        const float base = maximum == -m_inf_float() ? 0.0f : maximum;  // if neither had keys
        const float a = m_exp2(row_max[c] - base), b = m_exp2(other - base);
        row_max[c] = maximum;
        sum[c] = sum[c] * a + sums[mine] * b;
#pragma unroll
        for (int n = 0; n < C::D / 16; n++) {
          o[n].v[c] = o[n].v[c] * a + slot(n, c)[0] * b;
          o[n].v[c + 2] = o[n].v[c + 2] * a + slot(n, c)[32] * b;
        }
      }
      subgroup_barrier();
      store_partials();
    }
    barrier();
  }

  INLINE void store(int item, Vec<float, 4> x, float total) {
    const int head = hk * C::HEADS_PER_KV + item / (C::D / 4), e = item % (C::D / 4) * 4;
#pragma unroll
    for (int n = 0; n < 4; n++) out[head * C::O_H + (e + n) * C::O_D] = narrow<T>(x.v[n] / total);
  }

  // Adds up the workgroup's own sums; a thread computes 4 elements of a row. Returns true if they are the result, or
  // else stores them as a part.
  INLINE bool own_part(THREAD Vec<float, 4>& x, THREAD float& total) {
    const int item = at.tid % ITEMS, r = item / (C::D / 4), e0 = item % (C::D / 4) * 4;
    SMEM const float* const theirs =
        partials + (e0 / 64 * 2 + e0 % 8 / 4) * PITCH + r % 2 * 64 + e0 % 64 / 8 * 4 + r / 2;
    float maximum = maxima[r];
#pragma unroll
    for (int s = 1; s < HALF; s++) maximum = m_max(maximum, maxima[s * HEADS + r]);
    if (at.tid < ITEMS) {
#pragma unroll
      for (int s = 0; s < HALF; s++) {
        const float w = m_exp2(maxima[s * HEADS + r] - maximum);
        total += w * sums[s * HEADS + r];
#pragma unroll
        for (int e = 0; e < 4; e++) x.v[e] += w * theirs[s * SLOT + e / 2 * (C::D / 32 * PITCH) + e % 2 * 32];
      }
      if (C::SPLITS > 1 && active > 1) {
        DEVICE float* const part = parts + (hk * C::HEADS_PER_KV + r) * PART + split * ALL;
        *(DEVICE Vec<float, 4>*)(part + e0) = x;
        const Vec<float, 4> extent = {{maximum, total, 0.0f, 0.0f}};
        if (e0 == 0) *(DEVICE Vec<float, 4>*)(part + C::D) = extent;
      }
    }
    return C::SPLITS == 1 || active == 1;
  }

  // Computes the results of share `which`, which has `each` items of four results. A subgroup computes an item; its
  // lanes share the parts.
  INLINE void add_up(int which, int each) {
    const int rounds = (C::SPLITS + 31) / 32, item_end = (which + 1) * each < ITEMS ? (which + 1) * each : ITEMS;
    for (int i = which * each + at.subgroup; i < item_end; i += C::SUBGROUPS) {
      const int r = i / (C::D / 4), e = i % (C::D / 4) * 4;
      DEVICE const float* const row_of = parts + (hk * C::HEADS_PER_KV + r) * PART;
      Vec<float, 4> a[rounds], extent[rounds], x = {};
#pragma unroll
      for (int n = 0; n < rounds; n++) {
        const int s = n * 32 + at.lane;
        DEVICE const float* const part = row_of + (s < active ? s : 0) * ALL;
        a[n] = *(DEVICE const Vec<float, 4>*)(part + e);
        extent[n] = *(DEVICE const Vec<float, 4>*)(part + C::D);
      }
      float maximum = -m_inf_float(), total = 0.0f;
#pragma unroll
      for (int n = 0; n < rounds; n++) maximum = m_max(maximum, extent[n].v[0]);
      maximum = subgroup_max(maximum);
#pragma unroll
      for (int n = 0; n < rounds; n++) {
        const float w = n * 32 + at.lane < active ? m_exp2(extent[n].v[0] - maximum) : 0.0f;
        total += w * extent[n].v[1];
#pragma unroll
        for (int q = 0; q < 4; q++) x.v[q] += w * a[n].v[q];
      }
      total = subgroup_sum(total);
#pragma unroll
      for (int q = 0; q < 4; q++) x.v[q] = subgroup_sum(x.v[q]);
      if (at.lane == 0) store(i, x, total);
    }
  }

  // Waits for the workgroups of a key/value head. Each computes its share of the results, and the last one also the
  // shares of workgroups that have exited.
  INLINE void add_up_shares(DEVICE int* states, SMEM int* outcome) {
    DEVICE int* const state = states + hk * C::STATE;
    const int each = (ITEMS + active - 1) / active;
    barrier();
    if (at.tid == 0) outcome[0] = grid_barrier(state, split, active, split * each < ITEMS);
    barrier();
    if (outcome[0] == 0) return;
    if (outcome[0] == 1) {
      add_up(split, each);
    } else {
      for (int other = 0; other < active; other++) {
        if (other != split && (state[1 + other / 32] >> other % 32 & 1) == 0) continue;
        add_up(other, each);
      }
    }
    if (outcome[0] == 2) {
      barrier();
      if (at.tid > 0 && at.tid < C::STATE) state[at.tid] = 0;
    }
  }
};

template <class C, class Queries, class Key, class Value>
INLINE void attention_decode(
    DEVICE const typename C::T* keys, DEVICE const typename C::T* values, DEVICE const int64_t* position,
    DEVICE typename C::T* out, DEVICE typename C::T* key_out, DEVICE typename C::T* value_out, DEVICE float* parts,
    DEVICE int* states, Queries queries, Key key, Value value, SMEM typename C::T* qs, SMEM typename C::T* new_rows,
    SMEM float* partials, SMEM float* maxima, SMEM float* sums, SMEM int* outcome, Thread at) {
  DecodeAttention<C> a;
  a.at = at;
  const int64_t here = position[0];
  a.range(here);
  if (a.split >= a.active) return;
  a.keys = keys + a.hk * C::K_H;
  a.values = values + a.hk * C::V_H;
  a.out = out; a.parts = parts;
  a.qs = qs; a.new_rows = new_rows; a.partials = partials; a.maxima = maxima; a.sums = sums;
  const int step = DecodeAttention<C>::STEP, first = a.begin + at.subgroup * 16;
  const int known = a.end < a.position_row ? a.end : a.position_row;  // end of the keys of earlier positions
  a.load_keys(first);
  a.load_values(first);
  pdl_wait();
  a.make_rows(queries, key, value, key_out, value_out, here);
  barrier();
#pragma unroll
  for (int n = 0; n < C::D / 16; n++) frag_zero(a.o[n]);
  a.row_max[0] = a.row_max[1] = -m_inf_float();
  a.sum[0] = a.sum[1] = 0.0f;
  for (int n = first; n < a.end; n += step) {
    if (n + 16 > a.position_row) a.insert_new_rows(n);
    FragC s[2];
    a.scores(s);
    if (n + step < known) a.load_keys(n + step);
    a.softmax(s, n);
    a.add_values(s[0]);
    if (n + step < known) a.load_values(n + step);
  }
  a.combine_subgroups();
  Vec<float, 4> x = {};
  float total = 0.0f;
  if (a.own_part(x, total)) {
    if (at.tid < DecodeAttention<C>::ITEMS) a.store(at.tid, x, total);
  } else {
    a.add_up_shares(states, outcome);
  }
}
