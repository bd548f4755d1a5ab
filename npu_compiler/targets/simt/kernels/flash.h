// Attention on the matrix unit; scores stay in registers (flash attention).
//
// A workgroup processes ROWS query rows, a subgroup 16 of them. The rows are those of a head or, if there are few
// queries, of a group of GROUP heads that share keys. SHARES subgroups process the same rows and share the keys of a
// tile. Keys and values are loaded in tiles of KEYS into shared memory, double-buffered. Tiles beyond the last key that
// some row attends to are skipped. With SPLITS > 1 (flash decoding) workgroups share the tiles, and each stores the
// values, maximum and sum of its part [SPLITS, B, H, SQ, VALUE_SIZE + 2]; attention_combine combines them in order.
// Sources: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691; Milakov and Gimelshein, "Online normalizer
// calculation for softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023).
//
// Types of C: T, Mask, Out. Constants: B H SQ SK; KEY_SIZE, VALUE_SIZE: elements of a key and of a value; D, DV: the
// same, padded with zeros to whole products; HEADS_PER_KV: query heads of a key/value head; the strides Q_B Q_H Q_S of
// the queries, K_*, V_*, O_* of the output, M_* (also M_D) of the mask; LIMIT: stride of the positions; THREADS: those
// that compute the range of keys. MASKED: there is a mask, boolean (BOOLEAN) or added to the scores. TILED: the mask is
// loaded in tiles with the keys. MASK_PAIRS: two adjacent elements of it can be loaded at once. BY_POSITION: a query attends to the keys up to its position. CAUSAL: up to its own row.
// LIMITED: keys beyond the largest position are not read. POSITIONS_ARE_INPUTS: no preceding kernel writes the
// positions. SCALE: of the scores, times log2(e), because the kernel computes powers of two. SCALE_LATE: the scale is
// applied when exponents are computed, in one instruction with the subtraction.
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
  int h, b, hk, q0;  // the tile's first head, its batch, its key/value head, its first row
  int valid, min_position;  // keys that some row attends to; the smallest position of a row
  int last_key[2];          // the last key that each of the lane's rows attends to
  float row_max[2], row_sum[2];

  CONSTANTS int QUERIES = C::GROUP * C::SQ;  // rows of a group of heads
  CONSTANTS int MASK_VECTOR = 16 / (int)sizeof(typename C::Mask);
  CONSTANTS int MASK_LD = C::KEYS + MASK_VECTOR;  // of a tile of the mask: rows begin in different banks

  INLINE int row(int r) { return q0 + at.subgroup / C::SHARES * 16 + frag_row(at.lane, 2 * r); }
  INLINE static int existing(int i) { return i < QUERIES ? i : QUERIES - 1; }
  INLINE int head(int i) const { return C::GROUP == 1 ? h : h + i / C::SQ; }
  INLINE static int query(int i) { return C::GROUP == 1 ? i : i % C::SQ; }

  // Computes how many keys the workgroup and the lane's rows read. Positions that are inputs are read before pdl_wait().
  INLINE void range() {
    if (!C::POSITIONS_ARE_INPUTS) pdl_wait();
    valid = C::SK;
    if (C::LIMITED) {
      const int subgroups = C::THREADS / 32;
      int last = -1;
      min_position = C::SK;
      for (int i = q0 + at.tid; i < q0 + C::ROWS && i < QUERIES; i += C::THREADS) {
        const int64_t position = positions[query(i) * C::LIMIT];
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
    if (C::CAUSAL && C::GROUP == 1) valid = q0 + C::ROWS < valid ? q0 + C::ROWS : valid;
    if (C::CAUSAL && C::GROUP > 1) valid = C::SQ < valid ? C::SQ : valid;
    if (C::BY_POSITION) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int64_t position = positions[query(existing(row(r))) * C::LIMIT];
        last_key[r] = position < 0 ? -1 : position < C::SK ? (int)position : C::SK - 1;
      }
    }
    if (C::POSITIONS_ARE_INPUTS) pdl_wait();
  }

  // Copies COUNT rows of ELEMENTS, `step` elements apart, from row `first` of `count` on, to rows PITCH elements apart,
  // padded to WIDTH.
  template <int COUNT, int ELEMENTS, int WIDTH, int PITCH>
  INLINE void copy_rows(SMEM T* to, DEVICE const T* base, int64_t step, int first, int count) const {
    const int each = 16 / (int)sizeof(T), vectors = WIDTH / each;
#pragma unroll
    for (int c = at.tid; c < COUNT * vectors; c += C::THREADS) {
      const int r = c / vectors, d = c % vectors * each, i = first + r;
      const bool ok = i < count && d < ELEMENTS;
      copy_async16(to + r * PITCH + d, base + (ok ? i * step + d : 0), ok);
    }
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
    return C::CAUSAL ? end > valid || end > (C::GROUP == 1 ? q0 : 0) + 1 : end > valid;
  }

  INLINE int64_t mask_place(int i, int t) const {
    return (int64_t)b * C::M_B + (int64_t)head(i) * C::M_H + (int64_t)query(i) * C::M_S + (int64_t)t * C::M_D;
  }

  // Loads the masks of row i and keys t and t + 1, columns c and c + 1 of the tile.
  INLINE void load_masks(THREAD typename C::Mask (&m)[2], int i, int step, int t, int c) {
    typedef Vec<typename C::Mask, 2> Pair;
    const int whole = C::SK - C::SK % MASK_VECTOR;  // keys whose masks are in tiles
    SMEM const typename C::Mask* const tile = (SMEM const typename C::Mask*)ms + (step & 1) * (C::ROWS * MASK_LD);
    if (C::TILED && (whole == C::SK || t < whole)) {
      const Pair pair = *(SMEM const Pair*)(tile + (i - q0) * MASK_LD + c);
      m[0] = pair.v[0];
      m[1] = pair.v[1];
    } else if (C::MASK_PAIRS) {
      const Pair pair = *(DEVICE const Pair*)(mask + mask_place(existing(i), t < valid ? t : 0));
      m[0] = pair.v[0];
      m[1] = pair.v[1];
    } else {
#pragma unroll
      for (int e = 0; e < 2; e++) m[e] = mask[mask_place(existing(i), t + e < valid ? t + e : 0)];
    }
  }

  // Masks the scores x of keys t and t + 1, columns c and c + 1 of the tile, and row i, the lane's row r.
  INLINE void apply_masks(THREAD float* x, int r, int i, int step, int c) {
    const int t = step * C::KEYS + c;
    typename C::Mask m[2];
    if (C::MASKED) load_masks(m, i, step, t, c);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      bool seen = C::BY_POSITION || t + e < valid;  // no row attends to keys beyond the last that some row attends to
      if (C::CAUSAL) seen = seen && t + e <= query(i);
      if (C::BY_POSITION) seen = seen && t + e <= last_key[r];
      if (C::MASKED) {
        seen = seen && is_set(m[e]);
        x[e] = added_to(x[e], m[e]);
      }
      x[e] = seen ? x[e] : -m_inf_float();
    }
  }

  // Replaces scores by weights, and rescales row_sum to the new maximum. `rescaling`: the factors of the lane's rows of
  // earlier results.
  INLINE void softmax(THREAD FragC* s, THREAD float* rescaling, int step) {
    const float now = C::SCALE_LATE ? 1.0f : C::SCALE, later = C::SCALE_LATE ? C::SCALE : 1.0f;
    const int i[2] = {row(0), row(1)}, first = at.subgroup % C::SHARES * (C::KEYS / C::SHARES);
    float maximum[2] = {row_max[0], row_max[1]}, base[2], weight_sum[2] = {0.0f, 0.0f};
    // the two rows in turns, because each is a chain of instructions that wait for one another
    if (is_partly_masked(step)) {
#pragma unroll
      for (int j = 0; j < C::KEYS / C::SHARES / 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          THREAD float* const x = s[j].v + 2 * r;
          x[0] *= now;
          x[1] *= now;
          apply_masks(x, r, i[r], step, first + j * 8 + frag_column(at.lane, 0));
          maximum[r] = m_max(maximum[r], m_max(x[0], x[1]));
        }
    } else {
#pragma unroll
      for (int j = 0; j < C::KEYS / C::SHARES / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[j].v[e] *= now;
          maximum[e / 2] = m_max(maximum[e / 2], s[j].v[e]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      maximum[r] = frag_row_max(maximum[r]);
      const float most = maximum[r] == -m_inf_float() ? 0.0f : maximum[r];
      base[r] = most * later;
      rescaling[r] = m_exp2((row_max[r] - most) * later);  // exactly 1 if the maximum stays
      row_max[r] = maximum[r];
    }
#pragma unroll
    for (int j = 0; j < C::KEYS / C::SHARES / 8; j++)
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
      if (i >= QUERIES) continue;
      DEVICE T* const to = out + ((int64_t)b * C::O_B + (int64_t)head(i) * C::O_H + (int64_t)query(i) * C::O_S);
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
  CONSTANTS int SHARE = C::KEYS / C::SHARES;                        // keys of a subgroup in a tile
  CONSTANTS int SUMS_LD = C::DV + 2;                                // of sums: values, maximum, sum of weights
  FlashRows<C> rows;
  DEVICE const T* q;
  DEVICE const T* k;
  DEVICE const T* v;
  SMEM T* ks;  // [2, KEYS, LD]: two tiles
  SMEM T* vs;  // [2, KEYS, VALUE_LD]; in the end the sums of subgroups
  int split;

  INLINE void copy_queries() {
    const int vectors = C::D / 8;
#pragma unroll
    for (int c = rows.at.tid; c < C::ROWS * vectors; c += C::THREADS) {
      const int r = c / vectors, d = c % vectors * 8, i = FlashRows<C>::existing(rows.q0 + r);
      const int64_t row = (int64_t)rows.b * C::Q_B + (int64_t)rows.head(i) * C::Q_H + (int64_t)rows.query(i) * C::Q_S;
      const bool ok = rows.q0 + r < FlashRows<C>::QUERIES && d < C::KEY_SIZE;
      copy_async16(ks + r * LD + d, q + (ok ? row + d : 0), ok);
    }
  }

  INLINE void copy_mask(int step, int slot) {
    typedef typename C::Mask Mask;
    const int width = FlashRows<C>::MASK_VECTOR, vectors = C::KEYS / width;
    SMEM Mask* const to = (SMEM Mask*)rows.ms + slot * (C::ROWS * FlashRows<C>::MASK_LD);
    for (int c = rows.at.tid; c < C::ROWS * vectors; c += C::THREADS) {
      const int r = c / vectors, i = rows.q0 + r, column = c % vectors * width, t = step * C::KEYS + column;
      const bool ok = i < FlashRows<C>::QUERIES && t < C::SK - C::SK % width;
      copy_async16(to + r * FlashRows<C>::MASK_LD + column, rows.mask + (ok ? rows.mask_place(i, t) : 0), ok);
    }
  }

  INLINE void copy_tile(int step, int slot) {
    const int64_t b = rows.b, hk = rows.hk;
    rows.template copy_rows<C::KEYS, C::KEY_SIZE, C::D, LD>(
        ks + slot * SIZE, k + (b * C::K_B + hk * C::K_H), C::K_S, step * C::KEYS, C::SK);
    rows.template copy_rows<C::KEYS, C::VALUE_SIZE, C::DV, VALUE_LD>(
        vs + slot * VALUES, v + (b * C::V_B + hk * C::V_H), C::V_S, step * C::KEYS, C::SK);
    if (C::TILED) copy_mask(step, slot);
  }

  INLINE void scores(THREAD FragC* s, THREAD const FragA<T>* x, SMEM const T* keys) {
#pragma unroll
    for (int j = 0; j < SHARE / 8; j++) frag_zero(s[j]);
#pragma unroll
    for (int n = 0; n < C::D / 16; n++)
#pragma unroll
      for (int j = 0; j < SHARE / 8; j += 2) {
        FragB<T> left, right;
        frag_load_b2(left, right, keys + j * (8 * LD) + n * 16, LD, rows.at.lane);
        frag_mma(s[j], x[n], left);
        frag_mma(s[j + 1], x[n], right);
      }
  }

  INLINE void add_values(THREAD FragC* o, THREAD const FragC* s, SMEM const T* values) {
#pragma unroll
    for (int n = 0; n < SHARE / 16; n++) {
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

  // Adds up what subgroups have of the same rows, in a fixed order, and stores the results, or a part of them.
  INLINE void store_sums(THREAD const FragC* o, DEVICE typename C::Out* out) {
    SMEM float* const sums = (SMEM float*)vs;  // [subgroups, 16, SUMS_LD]
    barrier();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      SMEM float* const to = sums + (rows.at.subgroup * 16 + frag_row(rows.at.lane, 2 * r)) * SUMS_LD;
      const float total = frag_row_sum(rows.row_sum[r]);
#pragma unroll
      for (int n = 0; n < C::DV / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) to[n * 8 + frag_column(rows.at.lane, e)] = o[n].v[2 * r + e];
      to[C::DV] = rows.row_max[r] * (C::SCALE_LATE ? C::SCALE : 1.0f);
      to[C::DV + 1] = total;
    }
    barrier();
    for (int c = rows.at.tid; c < C::ROWS * C::VALUE_SIZE; c += C::THREADS) {
      const int r = c / C::VALUE_SIZE, d = c % C::VALUE_SIZE, i = rows.q0 + r;
      if (i >= FlashRows<C>::QUERIES) return;
      SMEM const float* const from = sums + (r / 16 * (C::SHARES * 16) + r % 16) * SUMS_LD;
      float maximum = -m_inf_float(), x = 0.0f, total = 0.0f;
#pragma unroll
      for (int n = 0; n < C::SHARES; n++) maximum = m_max(maximum, from[n * 16 * SUMS_LD + C::DV]);
#pragma unroll
      for (int n = 0; n < C::SHARES; n++) {
        SMEM const float* const share = from + n * 16 * SUMS_LD;
        const float w = maximum == -m_inf_float() ? 1.0f : m_exp2(share[C::DV] - maximum);
        x += w * share[d];
        total += w * share[C::DV + 1];
      }
      const int64_t h = rows.head(i), s = rows.query(i);
      if (C::SPLITS > 1) {
        DEVICE typename C::Out* const part =
            out + ((((int64_t)split * C::B + rows.b) * C::H + h) * C::SQ + s) * (C::VALUE_SIZE + 2);
        part[d] = narrow<typename C::Out>(x);
        if (d == 0) {
          part[C::VALUE_SIZE] = narrow<typename C::Out>(maximum * 0.693147181f);  // in units of attention_combine
          part[C::VALUE_SIZE + 1] = narrow<typename C::Out>(total);
        }
      } else {
        out[(int64_t)rows.b * C::O_B + h * C::O_H + s * C::O_S + d] =
            narrow<typename C::Out>(x * (total > 0.0f ? 1.0f / total : 0.0f));
      }
    }
  }

  INLINE void run(DEVICE typename C::Out* out) {
    const int tiles = (FlashRows<C>::QUERIES + C::ROWS - 1) / C::ROWS, groups = C::H / C::GROUP;
    rows.q0 = (tiles - 1 - rows.at.workgroup % tiles) * C::ROWS;  // tiles with the most keys first
    split = rows.at.workgroup / tiles % C::SPLITS;
    rows.h = rows.at.workgroup / (tiles * C::SPLITS) % groups * C::GROUP;
    rows.b = rows.at.workgroup / (tiles * C::SPLITS * groups);
    rows.hk = rows.h / C::HEADS_PER_KV;
    rows.range();
    copy_queries();  // they pass through the first tile of keys
    copy_async_commit();
    copy_async_wait<0>();
    barrier();
    const int own = rows.at.subgroup / C::SHARES, share = rows.at.subgroup % C::SHARES * SHARE;
    FragA<T> x[C::D / 16];
#pragma unroll
    for (int n = 0; n < C::D / 16; n++) frag_load_a(x[n], ks + own * (16 * LD) + n * 16, LD, rows.at.lane);
    barrier();
    FragC o[C::DV / 8];
#pragma unroll
    for (int n = 0; n < C::DV / 8; n++) frag_zero(o[n]);
    rows.start();
    const int steps = (rows.valid + C::KEYS - 1) / C::KEYS, part = (steps + C::SPLITS - 1) / C::SPLITS;
    const int begin = split * part, end = begin + part < steps ? begin + part : steps;
    if (begin < end) copy_tile(begin, begin & 1);
    copy_async_commit();
    for (int step = begin; step < end; step++) {
      copy_async_wait<0>();
      barrier();
      if (step + 1 < end) copy_tile(step + 1, (step + 1) & 1);
      copy_async_commit();
      FragC s[SHARE / 8];
      scores(s, x, ks + (step & 1) * SIZE + share * LD);
      float rescaling[2];
      rows.softmax(s, rescaling, step);
      rows.rescale(o, rescaling);
      add_values(o, s, vs + (step & 1) * VALUES + share * VALUE_LD);
    }
    if constexpr (C::SPLITS > 1 || C::SHARES > 1) store_sums(o, out);
    else rows.store(o, out);
  }
};

template <class C>
INLINE void flash(
    DEVICE const typename C::T* q, DEVICE const typename C::T* k, DEVICE const typename C::T* v,
    DEVICE const typename C::Mask* mask, DEVICE const int64_t* positions, DEVICE typename C::Out* out,
    SMEM typename C::T* ks, SMEM typename C::T* vs, SMEM int* ms, SMEM int* limit, Thread at) {
  Flash<C> f;
  f.q = q; f.k = k; f.v = v; f.ks = ks; f.vs = vs;
  f.rows.mask = mask; f.rows.positions = positions; f.rows.ms = ms; f.rows.limit = limit; f.rows.at = at;
  f.run(out);
}
