// Attention of one query position to a cache: a decode step's rotary embedding, cache update, attention and the
// combination of its parts in one launch.
//
// A workgroup processes the HEADS_PER_KV query heads of a key/value head and a range of the keys, a tile of TILE keys
// at a time. A subgroup computes the scores of 16 keys; the maxima and then the weights of all keys are exchanged
// through shared memory. After that a subgroup adds 32 elements of PART_KEYS values, and PARTS sums of each element are
// added up at the end. What earlier kernels cannot have written, keys and values of earlier positions, is loaded into
// registers before pdl_wait(): every lane loads 16 contiguous bytes, since the order of elements along a summed dim does
// not matter, nor that of the results. The workgroup whose range contains this position computes its new row.
// Workgroups without keys exit at once. The others wait at a grid barrier, and then each adds up its share of the
// results from all parts, in order. (If the last workgroup added up all of them, it would take long, because the next
// kernel's prefetches come first.) Results do not depend on which workgroup adds up which share.
//
// Shared memory holds little, because it is a part of the L1 cache, in which the weights of the next kernels arrive.
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
  CONSTANTS int KP = C::D / 32;        // 16-byte vectors of a key that a lane has
  CONSTANTS int TILE = C::SUBGROUPS * KEYS, THREADS = C::SUBGROUPS * 32;
  CONSTANTS int SLICES = C::D / 32, PARTS = C::SUBGROUPS / SLICES;  // subgroups have slices of the elements, and parts
  CONSTANTS int PART_KEYS = TILE / PARTS, VP = PART_KEYS / 8;       // vectors of values that a lane has
  CONSTANTS int QUERIES = C::HEADS_PER_KV * C::D;                   // elements of the queries
  CONSTANTS int ROUNDS = (HEADS * C::D + THREADS - 1) / THREADS;
  CONSTANTS int WEIGHTS_LD = TILE + 8;  // a row in shared memory, padded: no bank conflicts
  CONSTANTS int SLOT = 32 * 8 + HEADS;  // floats of the sums of a subgroup
  CONSTANTS int PAIRS = C::D / 2, ITEMS = C::HEADS_PER_KV * PAIRS;      // pairs of results, of a head and of all
  CONSTANTS int PART = C::D + 4, ALL = C::HK * C::HEADS_PER_KV * PART;  // floats of a row, of a split

  DEVICE const T* keys;
  DEVICE const T* values;
  DEVICE T* out;
  DEVICE float* parts;   // [SPLITS, HK * HEADS_PER_KV, PART]
  SMEM T* new_rows;      // [2, D]: this position's key and value
  SMEM float* maxima;    // [SUBGROUPS, HEADS]
  SMEM T* qs;            // [HEADS, D]: queries
  SMEM T* weights;       // [HEADS, WEIGHTS_LD]
  SMEM float* partials;  // [(PARTS - 1) * SLICES, SLOT], in place of queries and weights
  Thread at;
  int hk, split, position_row, valid, active, begin, end, row, column;
  uint4 k[2][KP], v[VP];
  FragC o[2], total;  // sums of weighted values and of weights, of heads 2 * column and 2 * column + 1
  float row_max[2];   // of these heads

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

  // Loads 16 keys from `first` on. A lane has the keys `row` and row + 8, and vectors 32 elements apart, from column * 8
  // on. insert_new_key() replaces that of this position.
  INLINE void load_keys(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int key = first + row + 8 * i, t = key < valid ? key : position_row;
#pragma unroll
      for (int j = 0; j < KP; j++) k[i][j] = stream16(keys + (int64_t)t * C::K_S + j * 32 + column * 8);
    }
  }
  // Loads the subgroup's part of a tile's values; zeros for keys beyond the end. Vector i of a lane is that of key `row`
  // of the i-th eight keys, and elements from column * 8 on of the subgroup's slice.
  INLINE int part_of(int tile) const { return tile + at.subgroup / SLICES * PART_KEYS; }
  INLINE int vector_at() const { return at.subgroup % SLICES * 32 + column * 8; }
  INLINE void load_values(int tile) {
#pragma unroll
    for (int i = 0; i < VP; i++) {
      const int t = part_of(tile) + i * 8 + row;
      v[i] = t < end ? stream16(values + (int64_t)t * C::V_S + vector_at()) : zero16();
    }
  }

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
        if (first + row + 8 * i == position_row) k[i][j] = *(SMEM const uint4*)(new_rows + j * 32 + column * 8);
  }
  INLINE void insert_new_value(int tile) {
#pragma unroll
    for (int i = 0; i < VP; i++)
      if (part_of(tile) + i * 8 + row == position_row) v[i] = *(SMEM const uint4*)(new_rows + C::D + vector_at());
  }

  // Computes the scores of 16 keys and 8 heads: a lane has keys `row` and row + 8, heads 2 * column and 2 * column + 1.
  INLINE void scores(THREAD FragC& s, int first) {
    FragC odd;
    frag_zero(s);
    frag_zero(odd);
#pragma unroll
    for (int j = 0; j < KP; j++) {
      const uint4 q = *(SMEM const uint4*)(qs + row * C::D + j * 32 + column * 8);
      FragA<T> x, y;
      FragB<T> a, b;
      frag_b_from(a, q.x, q.y, at.lane);
      frag_b_from(b, q.z, q.w, at.lane);
      frag_a_from(x, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y, at.lane);
      frag_a_from(y, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w, at.lane);
      frag_mma(s, x, a);
      frag_mma(odd, y, b);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float x = (s.v[e] + odd.v[e]) * C::SCALE;
      s.v[e] = first + row + e / 2 * 8 < end ? x : -m_inf_float();
    }
  }
  // The maximum over all rows of fragments: lanes of the same column.
  INLINE float over_rows(float x) {
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) x = m_max(x, subgroup_xor(x, m));
    return x;
  }
  // Stores the maxima of a subgroup's scores, which are -infinity if it has no keys.
  INLINE void store_maxima(THREAD const FragC& s) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float x = over_rows(m_max(s.v[c], s.v[c + 2]));
      if (row == 0) maxima[at.subgroup * HEADS + 2 * column + c] = x;
    }
  }
  // Stores the weights of the subgroup's keys, relative to the maxima of all, to which earlier sums are scaled.
  INLINE void store_weights(THREAD const FragC& s, bool is_first) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int head = 2 * column + c;
      float maximum = row_max[c];
#pragma unroll
      for (int n = 0; n < C::SUBGROUPS; n += 8)
        if (n + row < C::SUBGROUPS) maximum = m_max(maximum, maxima[(n + row) * HEADS + head]);
      maximum = over_rows(maximum);
      if (!is_first) {
        const float factor = m_exp2_fast(row_max[c] - maximum);
#pragma unroll
        for (int n = 0; n < 2; n++) {
          o[n].v[c] *= factor;
          o[n].v[c + 2] *= factor;
        }
        total.v[c] *= factor;
      }
      row_max[c] = maximum;
      SMEM T* const to = weights + head * WEIGHTS_LD + at.subgroup * KEYS + row;
      to[0] = narrow<T>(m_exp2_fast(s.v[c] - maximum));
      to[8] = narrow<T>(m_exp2_fast(s.v[c + 2] - maximum));
    }
  }

  // Adds the weighted values of the subgroup's part of a tile, and the weights.
  INLINE void add_values(int tile) {
    FragA<T> ones;
    const uint one = pack_pair(1.0f, 1.0f, (THREAD T*)nullptr);
    frag_a_from(ones, one, one, one, one, at.lane);
    SMEM const T* const pairs = weights + row * WEIGHTS_LD + at.subgroup / SLICES * PART_KEYS + 2 * column;
#pragma unroll
    for (int i = 0; i < VP; i += 2) {
      if (part_of(tile) + i * 8 >= end) break;
      FragA<T> x, y;
      FragB<T> w;
      frag_b_from(w, *(SMEM const uint*)(pairs + i * 8), *(SMEM const uint*)(pairs + i * 8 + 8), at.lane);
      frag_a_from(x, transpose_8x8(v[i].x), transpose_8x8(v[i].y), transpose_8x8(v[i + 1].x),
                  transpose_8x8(v[i + 1].y), at.lane);
      frag_a_from(y, transpose_8x8(v[i].z), transpose_8x8(v[i].w), transpose_8x8(v[i + 1].z),
                  transpose_8x8(v[i + 1].w), at.lane);
      frag_mma(o[0], x, w);
      frag_mma(o[1], y, w);
      frag_mma(total, ones, w);
    }
  }

  // Adds up the parts, in the subgroups of the first part.
  INLINE void combine_parts() {
    const int part = at.subgroup / SLICES;
    SMEM float* const slots = partials + at.subgroup % SLICES * SLOT;
    barrier();
    if (part > 0) {
      SMEM float* const mine = slots + (part - 1) * (SLICES * SLOT);
#pragma unroll
      for (int e = 0; e < 8; e++) mine[e * 32 + at.lane] = o[e / 4].v[e % 4];
      if (row == 0)
        for (int c = 0; c < 2; c++) mine[256 + 2 * column + c] = total.v[c];
    }
    barrier();
    if (part > 0) return;
#pragma unroll
    for (int p = 0; p < PARTS - 1; p++) {
      SMEM const float* const from = slots + p * (SLICES * SLOT);
#pragma unroll
      for (int e = 0; e < 8; e++) o[e / 4].v[e % 4] += from[e * 32 + at.lane];
      for (int c = 0; c < 2; c++) total.v[c] += from[256 + 2 * column + c];
    }
  }

  INLINE void store(int head, int e, float x) { out[head * C::O_H + e * C::O_D] = narrow<T>(x); }

  // Stores the results if this workgroup has all keys, and else its sums for them to be combined. Returns whether they
  // have to be combined.
  INLINE bool store_part() {
    const bool is_part = C::SPLITS > 1 && active > 1;
    if (at.subgroup >= SLICES) return is_part;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      if (2 * column + c >= C::HEADS_PER_KV) continue;
      const int head = hk * C::HEADS_PER_KV + 2 * column + c;
      DEVICE float* const part = parts + head * PART + split * ALL;
      const float scale = 1.0f / total.v[c];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int e = at.subgroup * 32 + row / 2 * 8 + n * 2 + row % 2;
        const float x = o[n / 2].v[n % 2 * 2 + c];
        if (is_part) part[e] = x;
        else store(head, e, x * scale);
      }
      if (is_part && at.subgroup == 0 && row == 0) {
        part[C::D] = row_max[c];
        part[C::D + 1] = total.v[c];
      }
    }
    return is_part;
  }

  // Computes the results of share `which`, which has `each` pairs of them. Up to 32 threads share the parts of a pair, as
  // many as the pairs of a share leave.
  INLINE void add_up(int which, int each) {
    int sharers = 1;
    while (sharers < 32 && 2 * sharers * each <= THREADS) sharers *= 2;
    const int mine = at.tid / sharers, pair = which * each + mine, first = at.tid % sharers;
    const bool ok = mine < each && pair < ITEMS;
    const int head = hk * C::HEADS_PER_KV + (ok ? pair / PAIRS : 0), e = pair % PAIRS * 2;
    float maximum = -m_inf_float(), sum = 0.0f, x = 0.0f, y = 0.0f;
    for (int s = first; ok && s < active; s += sharers) {
      DEVICE const float* const part = parts + s * ALL + head * PART;
      const Vec<float, 2> a = *(DEVICE const Vec<float, 2>*)(part + e);
      const Vec<float, 2> extent = *(DEVICE const Vec<float, 2>*)(part + C::D);
      const float before = maximum;
      maximum = m_max(before, extent.v[0]);
      const float f = m_exp2_fast(before - maximum), w = m_exp2_fast(extent.v[0] - maximum);
      sum = sum * f + extent.v[1] * w;
      x = x * f + a.v[0] * w;
      y = y * f + a.v[1] * w;
    }
    float most = maximum;
    for (int m = 1; m < sharers; m <<= 1) most = m_max(most, subgroup_xor(most, m));
    const float f = sum > 0.0f ? m_exp2_fast(maximum - most) : 0.0f;  // a thread without parts adds zeros
    sum *= f;
    x *= f;
    y *= f;
    for (int m = 1; m < sharers; m <<= 1) {
      sum += subgroup_xor(sum, m);
      x += subgroup_xor(x, m);
      y += subgroup_xor(y, m);
    }
    if (!ok || first > 0) return;
    store(head, e, x / sum);
    store(head, e + 1, y / sum);
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
    DEVICE int* states, Queries queries, Key key, Value value, SMEM typename C::T* new_rows, SMEM float* maxima,
    SMEM float* partials, SMEM int* outcome, Thread at) {
  DecodeAttention<C> a;
  a.at = at;
  const int64_t here = position[0];
  a.range(here);
  if (a.split >= a.active) return;
  a.keys = keys + a.hk * C::K_H;
  a.values = values + a.hk * C::V_H;
  a.out = out; a.parts = parts;
  a.new_rows = new_rows; a.maxima = maxima; a.partials = partials;
  a.qs = (SMEM typename C::T*)partials; a.weights = a.qs + DecodeAttention<C>::HEADS * C::D;
  const int tile = DecodeAttention<C>::TILE;
  a.load_keys(a.begin + at.subgroup * DecodeAttention<C>::KEYS);
  a.load_values(a.begin);
  a.locate_rows(queries, key, value);
  pdl_launch_dependents();  // not earlier: the next kernels' prefetches would delay the loads above
  pdl_wait();
  a.make_rows(queries, key, value, key_out, value_out, here);
  barrier();
  frag_zero(a.o[0]);
  frag_zero(a.o[1]);
  frag_zero(a.total);
  a.row_max[0] = a.row_max[1] = -m_inf_float();
  for (int n = a.begin; n < a.end; n += tile) {
    const int first = n + at.subgroup * DecodeAttention<C>::KEYS;
    const bool has_keys = first < a.end;  // all subgroups but those at the end of the last tile
    FragC s;
    s.v[0] = s.v[1] = s.v[2] = s.v[3] = -m_inf_float();
    if (has_keys) {
      a.insert_new_key(first);
      a.scores(s, first);
    }
    a.store_maxima(s);
    barrier();
    a.store_weights(s, n == a.begin);
    a.insert_new_value(n);
    barrier();
    a.add_values(n);
    if (n + tile < a.end) {
      a.load_keys(first + tile);
      a.load_values(n + tile);
      barrier();
    }
  }
  a.combine_parts();
  if (a.store_part()) a.add_up_shares(states, outcome);
}
