// Attention of many queries on the matrix unit; scores stay in registers (flash attention).
//
// A workgroup processes ROWS query rows of one head, a subgroup 16 of them. Keys and values are loaded in tiles of KEYS
// into shared memory, double-buffered. Tiles beyond the last key that some row attends to are skipped.
// Sources: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691; Milakov and Gimelshein, "Online normalizer
// calculation for softmax" (2018).
//
// Types of C: T, Mask. Constants: B H SQ SK; KEY_SIZE, VALUE_SIZE: elements of a key and of a value; D, DV: the same,
// padded with zeros to whole products; HEADS_PER_KV: query heads of a key/value head; the strides Q_B Q_H Q_S of the queries, K_*, V_*, O_* of the output, M_* (also M_D) of the mask;
// LIMIT: stride of the positions; THREADS: those that compute the range of keys. MASKED: there is a mask, boolean
// (BOOLEAN) or added to the scores. TILED: a boolean mask is loaded in tiles with the keys. BY_POSITION: a query
// attends to the keys up to its position. CAUSAL: up to its own row. LIMITED: keys beyond the largest position are not
// read. POSITIONS_ARE_INPUTS: no preceding kernel writes the positions. SCALE: of the scores, times log2(e), because
// the kernel computes powers of two. SCALE_LATE: the scale is applied when exponents are computed, in one instruction
// with the subtraction.
#pragma once

INLINE float added_to(float score, bool8) { return score; }
template <class T> INLINE float added_to(float score, T mask) { return score + to_f32(mask) * 1.44269504f; }
INLINE bool is_set(bool8 x) { return x != 0; }
template <class T> INLINE bool is_set(T) { return true; }

// The state of a lane's two query rows. The kernels that use it compute the products.
template <class C> struct FlashRows {
  typedef typename C::T T;
  DEVICE const typename C::Mask* mask;
  DEVICE const int64_t* positions;
  SMEM int* ms;     // two tiles of the mask
  SMEM int* limit;  // [2, subgroups that compute the range]
  Thread at;
  int tile, h, b, hk, q0;
  int valid, min_position;  // keys that some row attends to; the smallest position of a row
  int last_key[2];          // the last key that each of the lane's rows attends to
  float row_max[2], row_sum[2];

  INLINE int row(int r) { return q0 + at.subgroup * 16 + frag_row(at.lane, 2 * r); }

  // Computes how many keys the workgroup and the lane's rows read. Positions that are inputs are read before pdl_wait().
  INLINE void range() {
    if (!C::POSITIONS_ARE_INPUTS) pdl_wait();
    valid = C::SK;
    if (C::LIMITED) {
      const int subgroups = C::THREADS / 32;
      int last = -1;
      min_position = C::SK;
      for (int i = q0 + at.tid; i < q0 + C::ROWS && i < C::SQ; i += C::THREADS) {
        const int64_t position = positions[i * C::LIMIT];
        last = position > last ? (int)(position < C::SK ? position : C::SK - 1) : last;
        min_position = position < min_position ? (int)position : min_position;
      }
#pragma unroll
      for (int m = 16; m > 0; m >>= 1) {
        const int x = subgroup_xor(last, m), y = subgroup_xor(min_position, m);
        last = x > last ? x : last;
        min_position = y < min_position ? y : min_position;
      }
      if (at.lane == 0) {
        limit[at.subgroup] = last;
        limit[subgroups + at.subgroup] = min_position;
      }
      barrier();
      valid = 0;
#pragma unroll
      for (int s = 0; s < subgroups; s++) {
        valid = limit[s] + 1 > valid ? limit[s] + 1 : valid;
        min_position = limit[subgroups + s] < min_position ? limit[subgroups + s] : min_position;
      }
    }
    if (C::CAUSAL) valid = q0 + C::ROWS < valid ? q0 + C::ROWS : valid;
    if (C::BY_POSITION) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int i = row(r);
        const int64_t position = positions[(i < C::SQ ? i : C::SQ - 1) * C::LIMIT];
        last_key[r] = position < 0 ? -1 : position < C::SK ? (int)position : C::SK - 1;
      }
    }
    if (C::POSITIONS_ARE_INPUTS) pdl_wait();
  }

  INLINE void start() {
    row_max[0] = row_max[1] = -m_inf_float();
    row_sum[0] = row_sum[1] = 0.0f;
  }

  // Whether a key of the tile may be masked for some row of the workgroup.
  INLINE bool is_partly_masked(int step) {
    const int end = (step + 1) * C::KEYS;
    if (C::MASKED) return true;
    if (C::BY_POSITION) return end > min_position + 1;
    return C::CAUSAL ? end > valid || end > q0 + 1 : end > valid;
  }

  INLINE typename C::Mask mask_of(int i, int t) {
    return mask[(int64_t)b * C::M_B + (int64_t)h * C::M_H + (int64_t)(i < C::SQ ? i : C::SQ - 1) * C::M_S +
                (int64_t)(t < valid ? t : 0) * C::M_D];
  }

  // Returns the score x of row i, the lane's row r, and column c of the tile, or -inf if this key is masked.
  INLINE float masked_score(float x, int r, int i, int step, int c) {
    const int t = step * C::KEYS + c;
    bool seen = C::BY_POSITION || t < valid;  // no row attends to keys beyond the last one that some row attends to
    if (C::CAUSAL) seen = seen && t <= i;
    if (C::BY_POSITION) seen = seen && t <= last_key[r];
    if (C::MASKED) {
      const int whole = C::SK - C::SK % 16;  // keys whose masks are in tiles
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

  // Replaces scores by weights, and rescales row_sum to the new maximum. `rescaling`: the factors of the lane's rows of
  // earlier results.
  INLINE void softmax(THREAD FragC* s, THREAD float* rescaling, int step) {
    const float now = C::SCALE_LATE ? 1.0f : C::SCALE, later = C::SCALE_LATE ? C::SCALE : 1.0f;
    const int i[2] = {row(0), row(1)};
    float maximum[2] = {row_max[0], row_max[1]}, base[2], weight_sum[2] = {0.0f, 0.0f};
    // the two rows in turns, because each is a chain of instructions that wait for one another
    if (is_partly_masked(step)) {
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int r = e / 2;
          s[j].v[e] = masked_score(s[j].v[e] * now, r, i[r], step, j * 8 + frag_column(at.lane, e));
          maximum[r] = m_max(maximum[r], s[j].v[e]);
        }
    } else {
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[j].v[e] *= now;
          maximum[e / 2] = m_max(maximum[e / 2], s[j].v[e]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      maximum[r] = frag_row_max(maximum[r]);
      base[r] = maximum[r] == -m_inf_float() ? 0.0f : maximum[r] * later;
      rescaling[r] = m_exp2(row_max[r] * later - base[r]);
      row_max[r] = maximum[r];
    }
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) weight_sum[e / 2] += s[j].v[e] = m_exp2_fast(s[j].v[e] * later - base[e / 2]);
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = row_sum[r] * rescaling[r] + weight_sum[r];
  }
  INLINE void rescale(THREAD FragC* o, THREAD const float* rescaling) const {
#pragma unroll
    for (int n = 0; n < C::DV / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n].v[e] *= rescaling[e / 2];
  }

  INLINE void store(THREAD const FragC* o, DEVICE T* out) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row(r);
      const float total = frag_row_sum(row_sum[r]), scale = total > 0.0f ? 1.0f / total : 0.0f;
      if (i >= C::SQ) continue;
      DEVICE T* const to = out + ((int64_t)b * C::O_B + (int64_t)h * C::O_H + (int64_t)i * C::O_S);
#pragma unroll
      for (int n = 0; n < C::VALUE_SIZE / 8; n++) {
        const Vec<T, 2> pair = {{narrow<T>(o[n].v[2 * r] * scale), narrow<T>(o[n].v[2 * r + 1] * scale)}};
        *(DEVICE Vec<T, 2>*)(to + n * 8 + frag_column(at.lane, 2 * r)) = pair;
      }
    }
  }
};

template <class C> struct Flash {
  typedef typename C::T T;
  CONSTANTS int LD = C::D + 8, SIZE = C::KEYS * LD;          // of a tile of keys
  CONSTANTS int VALUE_LD = C::DV + 8, VALUES = C::KEYS * VALUE_LD;  // of a tile of values
  FlashRows<C> rows;
  DEVICE const T* q;
  DEVICE const T* k;
  DEVICE const T* v;
  SMEM T* ks;  // [2, KEYS, LD]: two tiles
  SMEM T* vs;  // [2, KEYS, VALUE_LD]

  // Copies ROWS rows of `size` elements, `pitch` elements apart, from row `first` of `count` on, padded to `width`.
  INLINE void copy_rows(SMEM T* to, DEVICE const T* base, int pitch, int first, int count, int size, int width) {
    const int vectors = width / 8;
#pragma unroll
    for (int c = rows.at.tid; c < C::ROWS * vectors; c += C::THREADS) {
      const int r = c / vectors, d = c % vectors * 8, i = first + r;
      const bool ok = i < count && d < size;
      copy_async16(to + r * (width + 8) + d, base + (ok ? (int64_t)i * pitch + d : 0), ok);
    }
  }

  INLINE void copy_mask(int step, int slot) {
    const int vectors = C::KEYS / 16;
    for (int c = rows.at.tid; c < C::ROWS * vectors; c += C::THREADS) {
      const int r = c / vectors, i = rows.q0 + r, t = step * C::KEYS + c % vectors * 16;
      const bool ok = i < C::SQ && t < C::SK - C::SK % 16;
      const int64_t place = (int64_t)rows.b * C::M_B + (int64_t)rows.h * C::M_H + (int64_t)i * C::M_S + t;
      SMEM bool8* const to = (SMEM bool8*)rows.ms + slot * (C::ROWS * C::KEYS) + r * C::KEYS + c % vectors * 16;
      copy_async16(to, rows.mask + (ok ? place : 0), ok);
    }
  }

  INLINE void copy_tile(int step, int slot) {
    const int64_t b = rows.b, hk = rows.hk;
    copy_rows(ks + slot * SIZE, k + (b * C::K_B + hk * C::K_H), C::K_S, step * C::KEYS, C::SK, C::KEY_SIZE, C::D);
    copy_rows(vs + slot * VALUES, v + (b * C::V_B + hk * C::V_H), C::V_S, step * C::KEYS, C::SK, C::VALUE_SIZE, C::DV);
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
      for (int e = 0; e < C::DV / 8; e += 2) {
        FragB<T> left, right;
        frag_load_transposed(left, right, values + n * (16 * VALUE_LD) + e * 8, VALUE_LD, rows.at.lane);
        frag_mma(o[e], w, left);
        frag_mma(o[e + 1], w, right);
      }
    }
  }

  INLINE void run(DEVICE T* out) {
    const int tiles = (C::SQ + C::ROWS - 1) / C::ROWS;
    rows.tile = tiles - 1 - rows.at.workgroup % tiles;  // tiles with the most keys first
    rows.h = rows.at.workgroup / tiles % C::H;
    rows.b = rows.at.workgroup / (tiles * C::H);
    rows.hk = rows.h / C::HEADS_PER_KV;
    rows.q0 = rows.tile * C::ROWS;
    rows.range();
    // the queries pass through the first tile of keys
    copy_rows(ks, q + ((int64_t)rows.b * C::Q_B + (int64_t)rows.h * C::Q_H), C::Q_S, rows.q0, C::SQ, C::KEY_SIZE, C::D);
    copy_async_commit();
    copy_async_wait<0>();
    barrier();
    FragA<T> x[C::D / 16];
#pragma unroll
    for (int n = 0; n < C::D / 16; n++) frag_load_a(x[n], ks + rows.at.subgroup * (16 * LD) + n * 16, LD, rows.at.lane);
    barrier();
    FragC o[C::DV / 8];
#pragma unroll
    for (int n = 0; n < C::DV / 8; n++) frag_zero(o[n]);
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
      float rescaling[2];
      rows.softmax(s, rescaling, step);
      rows.rescale(o, rescaling);
      add_values(o, s, vs + (step & 1) * VALUES);
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
