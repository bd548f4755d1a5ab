// Attention of one query position to a cache: a decode step's rotary embedding, cache update, attention and the
// combination of its parts in one launch.
//
// A workgroup processes the HEADS_PER_KV query heads of a key/value head and a range of the keys, a tile of TILE keys
// at a time. A subgroup computes the scores of 16 keys; the maxima and then the weights of all keys are exchanged
// through shared memory. After that a subgroup adds 16 elements of every PARTS-th 16 values of the tile, so that no
// more than PARTS sums of an element have to be added up. What earlier kernels cannot have written, keys and values of
// earlier positions, is loaded before pdl_wait(): keys directly into fragments of the matrix unit (the order of
// elements along a summed dim does not matter, so every lane loads 16 contiguous bytes), and values into shared
// memory. The workgroup whose range contains this position computes its new row. Workgroups without keys exit at once.
// The others wait at a grid barrier, and then each adds up its share of the results from all parts, in order. (If the
// last workgroup added up all of them, it would take long, because the next kernel's prefetches come first.) Results
// do not depend on which workgroup adds up which share.
//
// Types of C: T. Constants: HK, SK, D (64 or 128), HEADS_PER_KV; SPLITS: workgroups of a key/value head; SUBGROUPS;
// MIN_KEYS: the fewest keys of a workgroup; STATE: words of a grid barrier's state; K_H K_S V_H V_S O_H O_D: strides of
// keys, values and output. SCALE: of the scores, times log2(e), because the kernel computes powers of two.
//
// Queries, Row: rendered functors that compute elements of the queries, and of the key or the value at the position.
// locate(i, point) computes the addresses of a point's operands, load(i) loads them into slot i, make(i, point) returns
// its value from them, and place(point, position) is the offset of a Row's element in the cache.
#pragma once

template <class C> struct DecodeAttention {
  typedef typename C::T T;
  CONSTANTS int KEYS = 16, HEADS = 8;  // of a product on the matrix unit
  CONSTANTS int KP = C::D / 32;        // 16-byte pieces of a key that a lane has
  CONSTANTS int TILE = C::SUBGROUPS * KEYS, THREADS = C::SUBGROUPS * 32;
  CONSTANTS int SLICES = C::D / 16, PARTS = C::SUBGROUPS / SLICES;  // subgroups have slices of the elements, and parts
  CONSTANTS int QUERIES = C::HEADS_PER_KV * C::D;  // elements of the queries
  CONSTANTS int ROUNDS = (HEADS * C::D + THREADS - 1) / THREADS;
  CONSTANTS int LD = C::D + 8, WEIGHTS_LD = TILE + 8;   // rows in shared memory, padded: no bank conflicts
  CONSTANTS int SLOT = 32 * 6;                          // floats of the sums of a subgroup
  CONSTANTS int ITEMS = C::HEADS_PER_KV * C::D / 4;     // four results each
  CONSTANTS int PART = C::D + 4, ALL = C::HK * C::HEADS_PER_KV * PART;  // floats of a row, of a split

  DEVICE const T* keys;
  DEVICE const T* values;
  DEVICE T* out;
  DEVICE float* parts;  // [SPLITS, HK * HEADS_PER_KV, PART]
  SMEM T* qs;            // [HEADS, D]: queries
  SMEM T* new_rows;      // [2, D]: this position's key and value
  SMEM T* vs;            // [TILE, LD]: values
  SMEM T* weights;       // [HEADS, WEIGHTS_LD]
  SMEM float* maxima;    // [SUBGROUPS, HEADS]
  SMEM float* factors;   // [2, HEADS]: of the sums of earlier tiles; the maxima of all tiles so far
  SMEM float* partials;  // [(PARTS - 1) * SLICES, SLOT]
  Thread at;
  int hk, split, position_row, valid, active, begin, end, row, column;
  uint4 k[2][KP];
  FragC o[2], total;  // sums of the heads, in the first eight rows: of weighted values, and of weights
  float row_max[2];   // of two heads

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

  // The position of row i of a lane's keys. A lane's pieces of a key are 32 elements apart, from column * 8 on.
  INLINE int key_at(int first, int i) const { return first + row + 8 * i; }

  // Loads 16 keys from `first` on. insert_new_key() replaces that of this position.
  INLINE void load_keys(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = key_at(first, i) < valid ? key_at(first, i) : position_row;
#pragma unroll
      for (int j = 0; j < KP; j++) k[i][j] = stream16(keys + (int64_t)t * C::K_S + j * 32 + column * 8);
    }
  }
  // Copies the values of a tile to shared memory, followed by zeros. insert_new_value() adds that of this position.
  INLINE void copy_values(int tile) {
    const int pieces = C::D / 8, rows = (tile_end(tile) - tile + KEYS - 1) / KEYS * KEYS;
    for (int n = at.tid; n < rows * pieces; n += THREADS) {
      const int t = tile + n / pieces, e = n % pieces * 8;
      const bool ok = t < end;
      if (t != position_row)
        copy_async16(vs + n / pieces * LD + e, values + (int64_t)(ok ? t : position_row) * C::V_S + e, ok);
    }
    copy_async_commit();
  }
  INLINE int tile_end(int tile) const { return tile + TILE < end ? tile + TILE : end; }

  // The element of the key, or from D on of the value, that a thread computes: the last 2 D threads have one.
  INLINE int new_element() const { return at.tid - (THREADS - 2 * C::D); }
  INLINE uint new_point() const { return (uint)(hk * C::D + new_element() % C::D); }

  // Computes the addresses of all operands of make_rows(), which takes as long as loading them.
  template <class Queries, class Key, class Value>
  INLINE void locate_rows(THREAD Queries& queries, THREAD Key& key, THREAD Value& value) const {
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
      if (i * THREADS + at.tid < QUERIES) queries.locate(i, (uint)(hk * QUERIES + i * THREADS + at.tid));
    if (new_element() >= 0 && new_element() < C::D) key.locate(0, new_point());
    if (new_element() >= C::D) value.locate(0, new_point());
  }
  // Computes qs, the queries of this workgroup followed by zero rows, and new_rows, which are also stored in the caches
  // by the workgroup whose range contains this position. All loads are issued before the first value is computed, so
  // that their latencies overlap.
  template <class Queries, class Key, class Value>
  INLINE void make_rows(THREAD Queries& queries, THREAD Key& key, THREAD Value& value, DEVICE T* key_out,
                        DEVICE T* value_out, int64_t position) {
    const int e = new_element();
    const uint point = new_point();
    const bool stores = position_row >= begin && position_row < end;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
      if (i * THREADS + at.tid < QUERIES) queries.load(i);
    if (e >= 0 && e < C::D) key.load(0);
    if (e >= C::D) value.load(0);
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int n = i * THREADS + at.tid;
      if (n < QUERIES) qs[n] = narrow<T>(queries.make(i, (uint)(hk * QUERIES + n)));
      else if (n < HEADS * C::D) qs[n] = narrow<T>(0.0f);
    }
    if (e >= 0 && e < C::D && stores) {
      const T made = narrow<T>(key.make(0, point));
      new_rows[e] = made;
      key_out[key.place(point, position)] = made;
    }
    if (e >= C::D && stores) {
      const T made = narrow<T>(value.make(0, point));
      new_rows[e] = made;
      value_out[value.place(point, position)] = made;
    }
  }

  // Insert the rows of this position.
  INLINE void insert_new_key(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < KP; j++)
        if (key_at(first, i) == position_row) k[i][j] = *(SMEM const uint4*)(new_rows + j * 32 + column * 8);
  }
  INLINE void insert_new_value(int tile) {
    if (position_row >= tile && position_row < tile_end(tile) && at.tid < C::D)
      vs[(position_row - tile) * LD + at.tid] = new_rows[C::D + at.tid];
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

  // Masks and scales the scores, into s[0], and stores their maxima. A lane has two heads, and keys row and row + 8.
  INLINE void store_maxima(THREAD FragC (&s)[2], int first) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int e = c; e < 4; e += 2) {
        const float x = (s[0].v[e] + s[1].v[e]) * C::SCALE;
        s[0].v[e] = key_at(first, e / 2) < end ? x : -m_inf_float();
      }
      const float maximum = over_rows(m_max(s[0].v[c], s[0].v[c + 2]));
      if (row == 0) maxima[at.subgroup * HEADS + 2 * column + c] = maximum;
    }
  }
  // The maxima of a subgroup without keys.
  INLINE void store_no_maxima() {
    if (at.lane < HEADS) maxima[at.subgroup * HEADS + at.lane] = -m_inf_float();
  }
  INLINE float over_rows(float maximum) {
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) maximum = m_max(maximum, subgroup_xor(maximum, m));
    return maximum;
  }

  // Stores the weights of the subgroup's keys, and the factors of the sums of earlier tiles.
  INLINE void store_weights(THREAD const FragC& s) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int head = 2 * column + c;
      float maximum = row_max[c];
#pragma unroll
      for (int n = 0; n < C::SUBGROUPS / 8; n++) maximum = m_max(maximum, maxima[(n * 8 + row) * HEADS + head]);
      maximum = over_rows(maximum);
      if (at.subgroup == 0 && row == 0) {
        factors[head] = m_exp2(row_max[c] - maximum);
        factors[HEADS + head] = maximum;
      }
      row_max[c] = maximum;
      SMEM T* const to = weights + head * WEIGHTS_LD + at.subgroup * KEYS + row;
      to[0] = narrow<T>(m_exp2_fast(s.v[c] - maximum));
      to[8] = narrow<T>(m_exp2_fast(s.v[c + 2] - maximum));
    }
  }

  // Adds the weighted values of 16 elements, and the weights, of the subgroup's part of `count` keys.
  INLINE void add_values(int count, bool first) {
    if (!first) {
      const float factor = factors[row];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        o[0].v[c] *= factor;
        o[1].v[c] *= factor;
        total.v[c] *= factor;
      }
    }
    FragB<T> ones;
    const uint one = pack_pair(1.0f, 1.0f, (THREAD T*)nullptr);
    frag_b_from(ones, one, one, at.lane);
    SMEM const T* const pairs = weights + row * WEIGHTS_LD + 2 * column;
#pragma unroll 4
    for (int n = at.subgroup / SLICES * KEYS; n < count; n += PARTS * KEYS) {
      FragA<T> w;
      FragB<T> x, y;
      frag_load_transposed(x, y, (SMEM const T*)(vs + n * LD + at.subgroup % SLICES * 16), LD, at.lane);
      frag_a_from(w, *(SMEM const uint*)(pairs + n), 0u, *(SMEM const uint*)(pairs + n + 8), 0u, at.lane);
      frag_mma(o[0], w, x);
      frag_mma(o[1], w, y);
      frag_mma(total, w, ones);
    }
  }

  // Adds up the parts, in the subgroups of the first part.
  INLINE void combine_parts() {
    const int part = at.subgroup / SLICES;
    SMEM float* const mine = partials + at.subgroup % SLICES * SLOT + at.lane;
    if (part > 0) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        SMEM float* const to = mine + (part - 1) * (SLICES * SLOT) + c * 32;
        to[0] = o[0].v[c];
        to[64] = o[1].v[c];
        to[128] = total.v[c];
      }
    }
    barrier();
    if (part > 0) return;
#pragma unroll
    for (int p = 0; p < PARTS - 1; p++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        SMEM const float* const from = mine + p * (SLICES * SLOT) + c * 32;
        o[0].v[c] += from[0];
        o[1].v[c] += from[64];
        total.v[c] += from[128];
      }
  }

  INLINE void store(int head, int e, float x) { out[head * C::O_H + e * C::O_D] = narrow<T>(x); }

  // Stores the results if this workgroup has all keys, and else its sums for them to be combined. Returns whether they
  // have to be combined.
  INLINE bool store_part() {
    const bool is_part = C::SPLITS > 1 && active > 1;
    if (at.subgroup >= SLICES || row >= C::HEADS_PER_KV) return is_part;
    const int head = hk * C::HEADS_PER_KV + row;
    const float scale = 1.0f / total.v[0];
    DEVICE float* const part = parts + head * PART + split * ALL;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int e = at.subgroup * 16 + h * 8 + 2 * column + c;
        if (is_part) part[e] = o[h].v[c];
        else store(head, e, o[h].v[c] * scale);
      }
    if (is_part && at.subgroup == 0 && column == 0) {
      part[C::D] = factors[HEADS + row];
      part[C::D + 1] = total.v[0];
    }
    return is_part;
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
      if (at.lane == 0)
        for (int q = 0; q < 4; q++) store(hk * C::HEADS_PER_KV + r, e + q, x.v[q] / total);
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
    SMEM typename C::T* vs, SMEM typename C::T* weights, SMEM float* maxima, SMEM float* factors, SMEM float* partials,
    SMEM int* outcome, Thread at) {
  DecodeAttention<C> a;
  a.at = at;
  const int64_t here = position[0];
  a.range(here);
  if (a.split >= a.active) return;
  a.keys = keys + a.hk * C::K_H;
  a.values = values + a.hk * C::V_H;
  a.out = out; a.parts = parts;
  a.qs = qs; a.new_rows = new_rows; a.vs = vs; a.weights = weights;
  a.maxima = maxima; a.factors = factors; a.partials = partials;
  const int tile = DecodeAttention<C>::TILE;
  a.load_keys(a.begin + at.subgroup * 16);
  a.copy_values(a.begin);
  frag_zero(a.o[0]);
  frag_zero(a.o[1]);
  frag_zero(a.total);
  a.row_max[0] = a.row_max[1] = -m_inf_float();
  a.locate_rows(queries, key, value);
  pdl_launch_dependents();  // not earlier: the next kernels' prefetches would delay the loads above
  pdl_wait();
  a.make_rows(queries, key, value, key_out, value_out, here);
  barrier();
  for (int n = a.begin; n < a.end; n += tile) {
    const int first = n + at.subgroup * 16;
    if (n > a.begin) a.copy_values(n);
    const bool has_keys = first < a.end;  // all subgroups but those at the end of the last tile
    FragC s[2];
    if (has_keys) {
      if (first <= a.position_row && a.position_row < first + 16) a.insert_new_key(first);
      a.scores(s);
      if (n + tile < a.end) a.load_keys(first + tile);
      a.store_maxima(s, first);
    } else {
      a.store_no_maxima();
    }
    barrier();
    if (has_keys) a.store_weights(s[0]);
    a.insert_new_value(n);
    copy_async_wait<0>();
    barrier();
    a.add_values(a.tile_end(n) - n, n == a.begin);
    if (n + tile < a.end) barrier();
  }
  a.combine_parts();
  if (a.store_part()) a.add_up_shares(states, outcome);
}
