// Attention of one query position against a cache: a decode step's rotary embedding, cache update, attention and merge
// in one launch.
//
// A workgroup takes the SHARE heads of a key/value head and a range of the keys; its subgroups take 16 keys at a time.
// Keys and values go from memory into the registers that the matrix unit reads (which element is which along a summed dim
// does not matter, so every lane loads 16 bytes in a row), those of earlier positions before the inputs are awaited. The
// row of this position is made by the workgroup whose range holds it. Workgroups without keys leave at once. Those with
// keys meet at a grid barrier, and each adds up its share of the results, from the parts of all, in order: the last alone
// would take long, behind all that the next kernel prefetches. Results do not depend on which workgroup adds what.
//
// Types of C: T. Constants: HK, SK, D (64 or 128), SHARE; SPLITS: workgroups of a key/value head; SUBGROUPS; MIN_KEYS of
// a workgroup: fewer are not worth a meeting; STATE: words of a grid barrier's state; K_H K_S V_H V_S O_H O_D: strides of
// keys, values and output. scale: of the scores, with log2(e): exponents are of two.
//
// Queries, Row: rendered functors that make elements of the queries, and of the key or the value at the position.
// load(i, point) reads what point needs from memory, make(i, point) returns its value, both for the same i;
// place(point, position) is where a Row's element goes in the cache.
#pragma once

template <class C> struct DecodeAttention {
  typedef typename C::T T;
  CONSTANTS int KEYS = 16, HEADS = 8;                // of a product on the matrix unit
  CONSTANTS int KP = C::D / 32, VP = C::D / 64;      // 16-byte pieces of a lane: of each key, of each value
  CONSTANTS int STEP = C::SUBGROUPS * KEYS, THREADS = C::SUBGROUPS * 32, HALF = C::SUBGROUPS / 2;
  CONSTANTS int PITCH = 4 * 32 + 1, SLOT = C::D / 16 * PITCH;  // shared memory of a lane's values of 16 elements; of all
  CONSTANTS int ITEMS = C::SHARE * C::D / 4;         // four results each
  CONSTANTS int PART = C::D + 4, ALL = C::HK * C::SHARE * PART;  // a row of parts: values, maximum, sum; a split's parts

  DEVICE const T* keys;
  DEVICE const T* values;
  DEVICE T* out;
  DEVICE float* parts;  // [SPLITS, HK * SHARE, PART]
  SMEM T* qs;          // [HEADS, D]
  SMEM T* fresh;       // [2, D]: this position's key and value
  SMEM float* meet;    // [HALF, SLOT]
  SMEM float* tops;    // [HALF, HEADS]
  SMEM float* sums;
  Thread at;
  int hk, split, now, valid, active, begin, end, row, column;
  uint4 k[2][KP], v[4][VP];
  FragC o[C::D / 16];
  float top[2], sum[2];

  // begin to end: the keys of this workgroup; active: the workgroups of its key/value head that have some.
  INLINE void range(int64_t position) {
    hk = at.gid % C::HK;
    split = at.gid / C::HK;
    now = position < 0 ? 0 : position < C::SK ? (int)position : C::SK - 1;
    valid = now + 1;
    int share = (valid + C::SPLITS * KEYS - 1) / (C::SPLITS * KEYS) * KEYS;
    share = share > C::MIN_KEYS ? share : C::MIN_KEYS;
    active = (valid + share - 1) / share;
    begin = split * share;
    end = begin + share < valid ? begin + share : valid;
    row = at.lane >> 2;
    column = at.lane & 3;
  }

  // The position of row i of a lane's keys and values. A lane's pieces of a key are 32 elements apart, from column * 8 on; those of a value
  // 64, from row * 8 on.
  INLINE int key_at(int first, int i) const { return first + row + 8 * i; }
  INLINE int value_at(int first, int i) const { return first + 2 * column + (i & 1) + 8 * (i >> 1); }

  // 16 keys and values from first on; those from this position on are put right by insert_fresh.
  INLINE void load_keys(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = key_at(first, i) < valid ? key_at(first, i) : now;
#pragma unroll
      for (int j = 0; j < KP; j++) k[i][j] = stream16(keys + (int64_t)t * C::K_S + j * 32 + column * 8);
    }
  }
  INLINE void load_values(int first) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int t = value_at(first, i) < valid ? value_at(first, i) : now;
#pragma unroll
      for (int j = 0; j < VP; j++) v[i][j] = stream16(values + (int64_t)t * C::V_S + j * 64 + row * 8);
    }
  }

  // qs: the queries of this workgroup, zeros below; fresh: the rows of this position, which go to memory, too. All loads
  // come before the first value, so that no load waits for another.
  template <class Queries, class Key, class Value>
  INLINE void make_rows(Queries queries, Key key, Value value, DEVICE T* key_out, DEVICE T* value_out, int64_t position) {
    const int turns = (HEADS * C::D + THREADS - 1) / THREADS, count = C::SHARE * C::D;
    float made[turns];
#pragma unroll
    for (int i = 0; i < turns; i++) queries.load(i, query_point(i, count));
    const uint point = (uint)(hk * C::D + at.tid % C::D);
    key.load(0, point);
    value.load(0, point);
    pdl_launch_dependents();  // the next kernel's weights would delay the loads above
    const float fresh_key = key.make(0, point), fresh_value = value.make(0, point);
#pragma unroll
    for (int i = 0; i < turns; i++) made[i] = queries.make(i, query_point(i, count));
#pragma unroll
    for (int i = 0; i < turns; i++) {
      const int n = i * THREADS + at.tid;
      if (n < HEADS * C::D) qs[n] = narrow<T>(n < count ? made[i] : 0.0f);
    }
    if (now >= begin && now < end && at.tid / C::D == 0) {
      fresh[at.tid] = narrow<T>(fresh_key);
      key_out[key.place(point, position)] = narrow<T>(fresh_key);
    }
    if (now >= begin && now < end && at.tid / C::D == 1) {
      fresh[at.tid] = narrow<T>(fresh_value);
      value_out[value.place(point, position)] = narrow<T>(fresh_value);
    }
  }
  INLINE uint query_point(int i, int count) const {
    const int n = i * THREADS + at.tid;
    return (uint)(hk * count + (n < count ? n : 0));
  }

  // This position's rows where they belong; zeros for values beyond it, which may be anything.
  INLINE void insert_fresh(int first) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < KP; j++)
        if (key_at(first, i) == now) k[i][j] = *(SMEM const uint4*)(fresh + j * 32 + column * 8);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < VP; j++) {
        if (value_at(first, i) == now) v[i][j] = *(SMEM const uint4*)(fresh + C::D + j * 64 + row * 8);
        if (value_at(first, i) > now) v[i][j] = zero16();
      }
  }

  // s: 16 keys by 8 heads. Element 2t of a sum is the same element of a piece in keys and in queries.
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

  // Scores to weights, in s[0]. A lane has two heads, of keys row and row + 8.
  INLINE void softmax(THREAD FragC (&s)[2], int first) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int e = c; e < 4; e += 2) {
        const float x = (s[0].v[e] + s[1].v[e]) * C::scale;
        s[0].v[e] = first + row + 4 * (e - c) < end ? x : -m_inf_float();
      }
      float most = m_max(top[c], m_max(s[0].v[c], s[0].v[c + 2]));
#pragma unroll
      for (int m = 4; m < 32; m <<= 1) most = m_max(most, subgroup_xor(most, m));
      const float keep = m_exp2(top[c] - most);
      top[c] = most;
      s[0].v[c] = m_exp2(s[0].v[c] - most);
      s[0].v[c + 2] = m_exp2(s[0].v[c + 2] - most);
      sum[c] = sum[c] * keep + s[0].v[c] + s[0].v[c + 2];
#pragma unroll
      for (int n = 0; n < C::D / 16; n++) {
        o[n].v[c] *= keep;
        o[n].v[c + 2] *= keep;
      }
    }
  }

  // o: 16 elements by 8 heads; lane `row` has elements e and e + 1 of its pieces, from four values each.
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

  // Where a lane leaves values 16 n of its column c: lane by lane, and shifted so that a row is read without bank
  // conflicts, too (even n first: a thread reads n and n + 1).
  INLINE SMEM float* slot(int n, int c) const {
    return meet + at.sid % HALF * SLOT + at.lane + (n % 2 * (C::D / 32) + n / 2) * PITCH + c * 64;
  }
  INLINE void leave() {
    const int mine = at.sid % HALF * HEADS + 2 * column;
    if (row == 0) {
      tops[mine] = top[0];
      tops[mine + 1] = top[1];
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
  // The subgroups' values in shared memory: those of the upper half join those of the lower half.
  INLINE void join() {
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int m = 4; m < 32; m <<= 1) sum[c] += subgroup_xor(sum[c], m);
    if (at.sid >= HALF) leave();
    barrier();
    if (at.sid < HALF) {
      subgroup_barrier();
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int mine = at.sid % HALF * HEADS + 2 * column + c;
        const float other = tops[mine], most = m_max(top[c], other);
        const float base = most == -m_inf_float() ? 0.0f : most;  // neither may have had keys
        const float a = m_exp2(top[c] - base), b = m_exp2(other - base);
        top[c] = most;
        sum[c] = sum[c] * a + sums[mine] * b;
#pragma unroll
        for (int n = 0; n < C::D / 16; n++) {
          o[n].v[c] = o[n].v[c] * a + slot(n, c)[0] * b;
          o[n].v[c + 2] = o[n].v[c + 2] * a + slot(n, c)[32] * b;
        }
      }
      subgroup_barrier();
      leave();
    }
    barrier();
  }

  INLINE void store(int item, Vec<float, 4> x, float total) {
    const int head = hk * C::SHARE + item / (C::D / 4), e = item % (C::D / 4) * 4;
#pragma unroll
    for (int n = 0; n < 4; n++) out[head * C::O_H + (e + n) * C::O_D] = narrow<T>(x.v[n] / total);
  }

  // The workgroup's own part, then its share of the results. A thread has 4 elements of a row. False: nothing is left.
  INLINE bool own_part(THREAD Vec<float, 4>& x, THREAD float& total) {
    const int item = at.tid % ITEMS, r = item / (C::D / 4), e0 = item % (C::D / 4) * 4;
    SMEM const float* const theirs = meet + (e0 / 64 * 2 + e0 % 8 / 4) * PITCH + r % 2 * 64 + e0 % 64 / 8 * 4 + r / 2;
    float most = tops[r];
#pragma unroll
    for (int s = 1; s < HALF; s++) most = m_max(most, tops[s * HEADS + r]);
    if (at.tid < ITEMS) {
#pragma unroll
      for (int s = 0; s < HALF; s++) {
        const float w = m_exp2(tops[s * HEADS + r] - most);
        total += w * sums[s * HEADS + r];
#pragma unroll
        for (int e = 0; e < 4; e++) x.v[e] += w * theirs[s * SLOT + e / 2 * (C::D / 32 * PITCH) + e % 2 * 32];
      }
      if (C::SPLITS > 1 && active > 1) {
        DEVICE float* const part = parts + (hk * C::SHARE + r) * PART + split * ALL;
        *(DEVICE Vec<float, 4>*)(part + e0) = x;
        const Vec<float, 4> extent = {{most, total, 0.0f, 0.0f}};
        if (e0 == 0) *(DEVICE Vec<float, 4>*)(part + C::D) = extent;
      }
    }
    return C::SPLITS == 1 || active == 1;
  }

  // Results of share `which`, `each` items of four: a subgroup for an item, each lane has some of the parts.
  INLINE void add_up(int which, int each) {
    const int turns = (C::SPLITS + 31) / 32, behind = (which + 1) * each < ITEMS ? (which + 1) * each : ITEMS;
    for (int i = which * each + at.sid; i < behind; i += C::SUBGROUPS) {
      const int r = i / (C::D / 4), e = i % (C::D / 4) * 4;
      DEVICE const float* const row_of = parts + (hk * C::SHARE + r) * PART;
      Vec<float, 4> a[turns], extent[turns], x = {};
#pragma unroll
      for (int n = 0; n < turns; n++) {
        const int s = n * 32 + at.lane;
        DEVICE const float* const part = row_of + (s < active ? s : 0) * ALL;
        a[n] = *(DEVICE const Vec<float, 4>*)(part + e);
        extent[n] = *(DEVICE const Vec<float, 4>*)(part + C::D);
      }
      float most = -m_inf_float(), total = 0.0f;
#pragma unroll
      for (int n = 0; n < turns; n++) most = m_max(most, extent[n].v[0]);
      most = subgroup_max(most);
#pragma unroll
      for (int n = 0; n < turns; n++) {
        const float w = n * 32 + at.lane < active ? m_exp2(extent[n].v[0] - most) : 0.0f;
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

  // Workgroups of a key/value head meet; each adds up its share, and the last one also those of workgroups that left.
  INLINE void add_up_shares(DEVICE int* states, SMEM int* role) {
    DEVICE int* const state = states + hk * C::STATE;
    const int each = (ITEMS + active - 1) / active;
    barrier();
    if (at.tid == 0) role[0] = grid_barrier(state, split, active, split * each < ITEMS);
    barrier();
    if (role[0] == 0) return;
    if (role[0] == 1) {
      add_up(split, each);
    } else {
      for (int other = 0; other < active; other++) {
        if (other != split && (state[1 + other / 32] >> other % 32 & 1) == 0) continue;
        add_up(other, each);
      }
    }
    if (role[0] == 2) {
      barrier();
      if (at.tid > 0 && at.tid < C::STATE) state[at.tid] = 0;
    }
  }
};

template <class C, class Queries, class Key, class Value>
INLINE void attention_decode(
    DEVICE const typename C::T* keys, DEVICE const typename C::T* values, DEVICE const int64_t* position,
    DEVICE typename C::T* out, DEVICE typename C::T* key_out, DEVICE typename C::T* value_out, DEVICE float* parts,
    DEVICE int* states, Queries queries, Key key, Value value, SMEM typename C::T* qs, SMEM typename C::T* fresh,
    SMEM float* meet, SMEM float* tops, SMEM float* sums, SMEM int* role, Thread at) {
  DecodeAttention<C> a;
  a.at = at;
  const int64_t here = position[0];
  a.range(here);
  if (a.split >= a.active) return;
  a.keys = keys + a.hk * C::K_H;
  a.values = values + a.hk * C::V_H;
  a.out = out; a.parts = parts;
  a.qs = qs; a.fresh = fresh; a.meet = meet; a.tops = tops; a.sums = sums;
  const int step = DecodeAttention<C>::STEP, first = a.begin + at.sid * 16, known = a.end < a.now ? a.end : a.now;
  a.load_keys(first);
  a.load_values(first);
  pdl_wait();
  a.make_rows(queries, key, value, key_out, value_out, here);
  barrier();
#pragma unroll
  for (int n = 0; n < C::D / 16; n++) frag_zero(a.o[n]);
  a.top[0] = a.top[1] = -m_inf_float();
  a.sum[0] = a.sum[1] = 0.0f;
  for (int n = first; n < a.end; n += step) {
    if (n + 16 > a.now) a.insert_fresh(n);
    FragC s[2];
    a.scores(s);
    if (n + step < known) a.load_keys(n + step);
    a.softmax(s, n);
    a.add_values(s[0]);
    if (n + step < known) a.load_values(n + step);
  }
  a.join();
  Vec<float, 4> x = {};
  float total = 0.0f;
  if (a.own_part(x, total)) {
    if (at.tid < DecodeAttention<C>::ITEMS) a.store(at.tid, x, total);
  } else {
    a.add_up_shares(states, role);
  }
}
