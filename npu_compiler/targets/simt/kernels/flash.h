// Attention of many queries on the matrix unit: scores never leave the registers.
//
// A workgroup takes ROWS query rows of one head, a subgroup 16 of them; keys and values come in tiles of KEYS through
// shared memory, the next while this one is used. Tiles beyond the last key that some row sees are skipped.
// Sources: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691; Milakov and Gimelshein, "Online normalizer
// calculation for softmax" (2018).
//
// Types of C: T, Mask. Constants: B H SQ SK D; SHARE: query heads of a key/value head; the strides Q_B Q_H Q_S of the
// queries, K_*, V_*, O_* of the output, M_* (also M_D) of the mask; LIMIT: stride of the positions; THREADS that know the
// range of keys. MASKED: the mask is boolean (BOOLEAN) or added to the scores. TILED: a boolean mask travels with the
// keys. BY_POSITION: a query sees the keys up to its position. CAUSAL: up to its own row. LIMITED: keys beyond the
// largest position are not read. GIVEN: positions are the caller's, no kernel before this one writes them. scale: of the
// scores, with log2(e): exponents are of two. LATE: scores are scaled when they become exponents, in one instruction.
#pragma once

INLINE float added_to(float score, bool8) { return score; }
template <class T> INLINE float added_to(float score, T mask) { return score + to_f32(mask) * 1.44269504f; }
INLINE bool is_set(bool8 x) { return x != 0; }
template <class T> INLINE bool is_set(T) { return true; }

// What a lane of a workgroup knows of its two query rows; the products are the kernels' that hold it.
template <class C> struct FlashRows {
  typedef typename C::T T;
  DEVICE const typename C::Mask* mask;
  DEVICE const int64_t* positions;
  SMEM int* ms;     // tiles of the mask, two in turns
  SMEM int* limit;  // [2, subgroups that know the range]
  Thread at;
  int tile, h, b, hk, q0;
  int valid, least;  // keys that some row sees; the position of the row that sees the fewest
  int mine[2];       // the last key that each of the lane's rows sees
  float top[2], sum[2];

  INLINE int row(int r) { return q0 + at.sid * 16 + frag_row(at.lane, 2 * r); }

  // How many keys the workgroup sees; what the caller gives is read before the kernel waits for others.
  INLINE void range() {
    if (!C::GIVEN) pdl_wait();
    valid = C::SK;
    if (C::LIMITED) {
      const int subgroups = C::THREADS / 32;
      int last = -1;
      least = C::SK;
      for (int i = q0 + at.tid; i < q0 + C::ROWS && i < C::SQ; i += C::THREADS) {
        const int64_t position = positions[i * C::LIMIT];
        last = position > last ? (int)(position < C::SK ? position : C::SK - 1) : last;
        least = position < least ? (int)position : least;
      }
#pragma unroll
      for (int m = 16; m > 0; m >>= 1) {
        const int x = subgroup_xor(last, m), y = subgroup_xor(least, m);
        last = x > last ? x : last;
        least = y < least ? y : least;
      }
      if (at.lane == 0) {
        limit[at.sid] = last;
        limit[subgroups + at.sid] = least;
      }
      barrier();
      valid = 0;
#pragma unroll
      for (int s = 0; s < subgroups; s++) {
        valid = limit[s] + 1 > valid ? limit[s] + 1 : valid;
        least = limit[subgroups + s] < least ? limit[subgroups + s] : least;
      }
    }
    if (C::CAUSAL) valid = q0 + C::ROWS < valid ? q0 + C::ROWS : valid;
    if (C::GIVEN) pdl_wait();
  }

  INLINE void start() {
    top[0] = top[1] = -m_inf_float();
    sum[0] = sum[1] = 0.0f;
    if (!C::BY_POSITION) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row(r);
      const int64_t position = positions[(i < C::SQ ? i : C::SQ - 1) * C::LIMIT];
      mine[r] = position < 0 ? -1 : position < C::SK ? (int)position : C::SK - 1;
    }
  }

  // Whether some row of the workgroup may not see some key of the tile.
  INLINE bool partly(int step) {
    const int end = (step + 1) * C::KEYS;
    if (C::MASKED) return true;
    if (C::BY_POSITION) return end > least + 1;
    return C::CAUSAL ? end > valid || end > q0 + 1 : end > valid;
  }

  INLINE typename C::Mask mask_of(int i, int t) {
    return mask[(int64_t)b * C::M_B + (int64_t)h * C::M_H + (int64_t)(i < C::SQ ? i : C::SQ - 1) * C::M_S +
                (int64_t)(t < valid ? t : 0) * C::M_D];
  }

  // The score of row i, number r of the lane's, for key t, column c of the tile; -inf if the row does not see the key.
  INLINE float visible(float x, int r, int i, int step, int c) {
    const int t = step * C::KEYS + c;
    bool seen = t < valid;
    if (C::CAUSAL) seen = seen && t <= i;
    if (C::BY_POSITION) seen = seen && t <= mine[r];
    if (C::MASKED) {
      const int whole = C::SK - C::SK % 16;  // what is in tiles
      if (C::TILED) {
        const int inside = (step & 1) * (C::ROWS * C::KEYS) + (i - q0) * C::KEYS + c;
        if (whole == C::SK) seen = seen && ((SMEM const bool8*)ms)[inside] != 0;
        else seen = seen && (t < whole ? ((SMEM const bool8*)ms)[inside] != 0 : is_set(mask_of(i, t)));
      } else if (C::BOOLEAN) {
        seen = seen && is_set(mask_of(i, t));
      } else {
        x = added_to(x, mask_of(i, t));
      }
    }
    return seen ? x : -m_inf_float();
  }

  // Scores to weights, in place; o and sum are scaled to the new maximum.
  INLINE void softmax(THREAD FragC* s, THREAD FragC* o, int step) {
    const float now = C::LATE ? 1.0f : C::scale, later = C::LATE ? C::scale : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row(r);
      float most = top[r];
      if (partly(step)) {
#pragma unroll
        for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; e++) {
            const float x = visible(s[j].v[e] * now, r, i, step, j * 8 + frag_column(at.lane, e));
            s[j].v[e] = x;
            most = m_max(most, x);
          }
      } else {
#pragma unroll
        for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; e++) {
            s[j].v[e] *= now;
            most = m_max(most, s[j].v[e]);
          }
      }
      most = frag_row_max(most);
      const float base = most == -m_inf_float() ? 0.0f : most * later;
      const float keep = m_exp2(top[r] * later - base);
      float more = 0.0f;
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++) more += s[j].v[e] = m_exp2_fast(s[j].v[e] * later - base);
      top[r] = most;
      sum[r] = sum[r] * keep + more;
#pragma unroll
      for (int n = 0; n < C::D / 8; n++) {
        o[n].v[2 * r] *= keep;
        o[n].v[2 * r + 1] *= keep;
      }
    }
  }

  INLINE void store(THREAD const FragC* o, DEVICE T* out) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row(r);
      const float total = frag_row_sum(sum[r]), scale = total > 0.0f ? 1.0f / total : 0.0f;
      if (i >= C::SQ) continue;
      DEVICE T* const to = out + ((int64_t)b * C::O_B + (int64_t)h * C::O_H + (int64_t)i * C::O_S);
#pragma unroll
      for (int n = 0; n < C::D / 8; n++) {
        const Vec<T, 2> pair = {{narrow<T>(o[n].v[2 * r] * scale), narrow<T>(o[n].v[2 * r + 1] * scale)}};
        *(DEVICE Vec<T, 2>*)(to + n * 8 + frag_column(at.lane, 2 * r)) = pair;
      }
    }
  }
};

template <class C> struct Flash {
  typedef typename C::T T;
  CONSTANTS int LD = C::D + 8, SIZE = C::KEYS * LD;
  FlashRows<C> rows;
  DEVICE const T* q;
  DEVICE const T* k;
  DEVICE const T* v;
  SMEM T* ks;  // [2, KEYS, LD]: tiles of keys and of values, two in turns
  SMEM T* vs;

  // Copies of ROWS rows of D elements, `pitch` apart, from row `first` of `count` on.
  INLINE void copy_rows(SMEM T* to, DEVICE const T* base, int pitch, int first, int count) {
    const int pieces = C::D / 8;
#pragma unroll
    for (int c = rows.at.tid; c < C::ROWS * pieces; c += C::THREADS) {
      const int r = c / pieces, d = c % pieces * 8, i = first + r;
      const bool ok = i < count;
      copy_async16(to + r * LD + d, base + (int64_t)(ok ? i : 0) * pitch + d, ok);
    }
  }

  INLINE void copy_mask(int step, int slot) {
    const int pieces = C::KEYS / 16;
    for (int c = rows.at.tid; c < C::ROWS * pieces; c += C::THREADS) {
      const int r = c / pieces, i = rows.q0 + r, t = step * C::KEYS + c % pieces * 16;
      const bool ok = i < C::SQ && t < C::SK - C::SK % 16;
      const int64_t place = (int64_t)rows.b * C::M_B + (int64_t)rows.h * C::M_H + (int64_t)i * C::M_S + t;
      SMEM bool8* const to = (SMEM bool8*)rows.ms + slot * (C::ROWS * C::KEYS) + r * C::KEYS + c % pieces * 16;
      copy_async16(to, rows.mask + (ok ? place : 0), ok);
    }
  }

  INLINE void copy_tile(int step, int slot) {
    const int64_t b = rows.b, hk = rows.hk;
    copy_rows(ks + slot * SIZE, k + (b * C::K_B + hk * C::K_H), C::K_S, step * C::KEYS, C::SK);
    copy_rows(vs + slot * SIZE, v + (b * C::V_B + hk * C::V_H), C::V_S, step * C::KEYS, C::SK);
    if (C::TILED) copy_mask(step, slot);
  }

  INLINE void scores(THREAD FragC* s, THREAD const FragA<T>* x, SMEM const T* keys) {
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; j++) frag_zero(s[j]);
#pragma unroll
    for (int n = 0; n < C::D / 16; n++)
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j += 2) {
        FragB<T> left, right;
        frag_load_b2(left, right, keys + j * (8 * LD) + n * 16, LD, rows.at.lane);
        frag_mma(s[j], x[n], left);
        frag_mma(s[j + 1], x[n], right);
      }
  }

  INLINE void add_values(THREAD FragC* o, THREAD const FragC* s, SMEM const T* values) {
#pragma unroll
    for (int n = 0; n < C::KEYS / 16; n++) {
      FragA<T> w;
      frag_a_from_c(w, s[2 * n], s[2 * n + 1]);
#pragma unroll
      for (int e = 0; e < C::D / 8; e += 2) {
        FragB<T> left, right;
        frag_load_transposed(left, right, values + n * (16 * LD) + e * 8, LD, rows.at.lane);
        frag_mma(o[e], w, left);
        frag_mma(o[e + 1], w, right);
      }
    }
  }

  INLINE void run(DEVICE T* out) {
    const int tiles = (C::SQ + C::ROWS - 1) / C::ROWS;
    rows.tile = tiles - 1 - rows.at.gid % tiles;  // those with the most keys first
    rows.h = rows.at.gid / tiles % C::H;
    rows.b = rows.at.gid / (tiles * C::H);
    rows.hk = rows.h / C::SHARE;
    rows.q0 = rows.tile * C::ROWS;
    rows.range();
    // the queries pass through the first tile of keys
    copy_rows(ks, q + ((int64_t)rows.b * C::Q_B + (int64_t)rows.h * C::Q_H), C::Q_S, rows.q0, C::SQ);
    copy_async_commit();
    copy_async_wait<0>();
    barrier();
    FragA<T> x[C::D / 16];
#pragma unroll
    for (int n = 0; n < C::D / 16; n++) frag_load_a(x[n], ks + rows.at.sid * (16 * LD) + n * 16, LD, rows.at.lane);
    barrier();
    FragC o[C::D / 8];
#pragma unroll
    for (int n = 0; n < C::D / 8; n++) frag_zero(o[n]);
    rows.start();
    const int steps = (rows.valid + C::KEYS - 1) / C::KEYS;
    if (steps > 0) copy_tile(0, 0);
    copy_async_commit();
    for (int step = 0; step < steps; step++) {
      copy_async_wait<0>();
      barrier();
      if (step + 1 < steps) copy_tile(step + 1, (step + 1) & 1);
      copy_async_commit();
      FragC s[C::KEYS / 8];
      scores(s, x, ks + (step & 1) * SIZE);
      rows.softmax(s, o, step);
      add_values(o, s, vs + (step & 1) * SIZE);
    }
    rows.store(o, out);
  }
};

template <class C>
INLINE void flash(
    DEVICE const typename C::T* q, DEVICE const typename C::T* k, DEVICE const typename C::T* v,
    DEVICE const typename C::Mask* mask, DEVICE const int64_t* positions, DEVICE typename C::T* out,
    SMEM typename C::T* ks, SMEM typename C::T* vs, SMEM int* ms, SMEM int* limit, Thread at) {
  Flash<C> f;
  f.q = q; f.k = k; f.v = v; f.ks = ks; f.vs = vs;
  f.rows.mask = mask; f.rows.positions = positions; f.rows.ms = ms; f.rows.limit = limit; f.rows.at = at;
  f.run(out);
}
