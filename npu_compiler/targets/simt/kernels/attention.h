// Attention in float arithmetic, for any mask and any strides. Query rows that share keys are processed together.
//
// A workgroup of THREADS processes up to ROWS query rows of one key/value head (of all heads of the GQA group) and a
// range of the keys, CHUNK keys at a time: scores, online softmax, weighted values. KEY_LANES lanes share a row of keys
// or of values, ITEM elements each. With SPLITS > 1 (split-K) the range is a part of the keys, and values, maximum and
// sum of each part are stored [SPLITS, B, H, SQ, DV + 2]; attention_combine combines them in order.
// Source: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691.
//
// Types of C: Q, K, V, Mask, Out. Constants: B H HK SQ SK D DV; the sizes above; the strides Q_B Q_H Q_S Q_D of the
// queries, K_* of the keys, V_* of the values, O_* of the output and M_* of the mask [B, H, SQ, SK]; LIMIT: stride of
// the positions. MASKED: there is a mask, boolean or added to the scores. BY_POSITION: a query attends to the keys up
// to its position. CAUSAL: up to its own row. LIMITED: keys beyond the largest position are not read. K_VECTORS,
// V_VECTORS: rows are read 16 bytes at a time, or 8 of 8-bit numbers. SCALED: keys and values are 8-bit numbers, and the
// scales of their rows are [B, HK, SK]. ROWS_PER_PASS: query rows whose partial sums fit in shared memory.
// SCALE: of the scores. m_max ignores NaN, but the weight of such a score is NaN, and so are its row's sum and results,
// as in PyTorch. The results of a row whose scores are all -inf are zeros.
#pragma once

INLINE float masked(float score, bool8 admits) { return admits != 0 ? score : -m_inf_float(); }
INLINE float masked(float score, float added) { return score + added; }
INLINE float masked(float score, f16 added) { return score + to_f32(added); }
INLINE float masked(float score, bf16 added) { return score + to_f32(added); }

// Loads 16 bytes of a row; rows of 8-bit numbers are loaded 8 bytes at a time.
template <class T> INLINE void unpack_row(DEVICE const T* from, THREAD float* x) {
  unpack(load16(from), x, (THREAD T*)nullptr);
}
INLINE void unpack_row(DEVICE const int8_t*, THREAD float*) {}
INLINE void unpack_row(DEVICE const e4m3*, THREAD float*) {}

// Loads this lane's ITEM elements of a row of DIM elements, from element first on; zeros beyond its end.
template <int ITEM, int DIM, int STRIDE, bool VECTORS, class T>
INLINE void load_row(THREAD float* x, DEVICE const T* row, int first) {
  if (VECTORS && sizeof(T) == 1) {
#pragma unroll
    for (int e = 0; e < ITEM; e += 8) {
      Vec<T, 8> eight = {};
      if (first + e < DIM) eight = *(DEVICE const Vec<T, 8>*)(row + first + e);
#pragma unroll
      for (int n = 0; n < 8; n++) x[e + n] = (float)widen(eight.v[n]);
    }
  } else if (VECTORS) {
    const int width = 16 / (int)sizeof(T);
#pragma unroll
    for (int e = 0; e < ITEM; e += width) {
      if (first + e < DIM) unpack_row(row + first + e, x + e);
      else for (int n = 0; n < width; n++) x[e + n] = 0.0f;
    }
  } else {
    for (int e = 0; e < ITEM; e++) x[e] = first + e < DIM ? (float)widen(row[(int64_t)(first + e) * STRIDE]) : 0.0f;
  }
}

template <class C> struct Attention {
  CONSTANTS int HEADS_PER_KV = C::H / C::HK, QUERIES = HEADS_PER_KV * C::SQ, KEYS_AT_ONCE = C::THREADS / C::KEY_LANES;
  CONSTANTS int SUBGROUPS = C::THREADS / 32, DIM = C::KEY_LANES * C::ITEM;

  DEVICE const typename C::Q* q;
  DEVICE const typename C::K* k;
  DEVICE const typename C::V* v;
  DEVICE const typename C::Mask* mask;
  DEVICE const int64_t* positions;
  DEVICE typename C::Out* out;
  DEVICE const float* k_scales;
  DEVICE const float* v_scales;
  SMEM float* score;     // [ROWS, CHUNK]: scores, then weights
  SMEM float* row_max;   // [ROWS]: the maximum so far
  SMEM float* row_sum;   // [ROWS]: the sum of the weights so far
  SMEM float* rescale;   // [ROWS]: the factor of earlier sums, after an update of the maximum
  SMEM float* partials;  // [ROWS_PER_PASS, SUBGROUPS, DIM]
  Thread at;
  int tile, split, hk, b, key_lane, d0;

  INLINE void place() {
    const int tiles = (QUERIES + C::ROWS - 1) / C::ROWS;
    tile = at.workgroup % tiles;
    split = at.workgroup / tiles % C::SPLITS;
    hk = at.workgroup / (tiles * C::SPLITS) % C::HK;
    b = at.workgroup / (tiles * C::SPLITS * C::HK);
    key_lane = at.tid % C::KEY_LANES;
    d0 = key_lane * C::ITEM;
  }

  // Head and query of row r of the tile. Rows beyond the last one read the first.
  INLINE bool exists(int r) { return tile * C::ROWS + r < QUERIES; }
  INLINE int head(int r) { return hk * HEADS_PER_KV + (exists(r) ? (tile * C::ROWS + r) / C::SQ : 0); }
  INLINE int query(int r) { return exists(r) ? (tile * C::ROWS + r) % C::SQ : 0; }

  // The number of keys that some query of the tile attends to.
  INLINE int valid_keys() {
    int valid = C::SK;
    if (C::LIMITED) {
      valid = 0;
      for (int i = 0; i < C::SQ; i++) {
        const int64_t last = positions[i * C::LIMIT] + 1;
        valid = last > valid ? (int)last : valid;
      }
      valid = valid < C::SK ? valid : C::SK;
    }
    const int last = tile * C::ROWS + C::ROWS - 1;  // the last query, if the tile has one head
    if (C::CAUSAL && HEADS_PER_KV == 1) valid = last + 1 < valid ? last + 1 : valid;
    return valid;
  }

  INLINE void load_queries(THREAD float (&x)[C::ROWS][C::ITEM]) {
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) {
      DEVICE const typename C::Q* row =
          q + (int64_t)b * C::Q_B + (int64_t)head(r) * C::Q_H + (int64_t)query(r) * C::Q_S;
#pragma unroll
      for (int e = 0; e < C::ITEM; e++)
        x[r][e] = exists(r) && d0 + e < C::D ? to_f32(row[(int64_t)(d0 + e) * C::Q_D]) * C::SCALE : 0.0f;
    }
  }

  // Computes the scores of key j of the chunk for all rows. Each lane that shares the key completes some of them.
  INLINE void scores(THREAD const float (&x)[C::ROWS][C::ITEM], int j, int start, int count) {
    const int t = start + (j < count ? j : count - 1);
    float key[C::ITEM], s[C::ROWS];
    load_row<C::ITEM, C::D, C::K_D, C::K_VECTORS>(
        key, k + ((int64_t)b * C::K_B + (int64_t)hk * C::K_H + (int64_t)t * C::K_S), d0);
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) {
      s[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < C::ITEM; e++) s[r] += x[r][e] * key[e];
#pragma unroll
      for (int m = C::KEY_LANES / 2; m > 0; m >>= 1) s[r] += subgroup_xor(s[r], m);
    }
    for (int r = key_lane; r < C::ROWS; r += C::KEY_LANES) {
      const int i = query(r);
      float value = s[0];
#pragma unroll
      for (int n = 1; n < C::ROWS; n++) value = n == r ? s[n] : value;
      if (C::SCALED) value *= k_scales[((int64_t)b * C::HK + hk) * C::SK + t];
      if (C::BY_POSITION && C::SQ > 1) value = t <= positions[i * C::LIMIT] ? value : -m_inf_float();
      if (C::MASKED)
        value = masked(value, mask[(int64_t)b * C::M_B + (int64_t)head(r) * C::M_H + (int64_t)i * C::M_S +
                                   (int64_t)t * C::M_D]);
      if (C::CAUSAL) value = t <= i ? value : -m_inf_float();
      score[r * C::CHUNK + j] = j < count && exists(r) ? value : -m_inf_float();
    }
  }

  // Replaces scores by weights; each subgroup processes whole rows.
  INLINE void softmax(int count) {
    for (int r = at.subgroup; r < C::ROWS; r += SUBGROUPS) {
      const float before = row_max[r];
      float maximum = before, sum = 0.0f;
      for (int j = at.lane; j < count; j += 32) maximum = m_max(maximum, score[r * C::CHUNK + j]);
      maximum = subgroup_max(maximum);
      for (int j = at.lane; j < count; j += 32) {
        const float x = score[r * C::CHUNK + j];
        const float w = x == -m_inf_float() ? 0.0f : m_exp(x - maximum);
        score[r * C::CHUNK + j] = w;
        sum += w;
      }
      sum = subgroup_sum(sum);
      const float rescaling = before == -m_inf_float() ? 0.0f : m_exp(before - maximum);
      subgroup_barrier();
      if (at.lane == 0) {
        row_max[r] = maximum;
        rescale[r] = rescaling;
        row_sum[r] = row_sum[r] * rescaling + sum;
      }
    }
  }

  INLINE void add_values(THREAD float (&acc)[C::ROWS][C::ITEM], int j, int start) {
    const int t = start + j;
    float value[C::ITEM];
    load_row<C::ITEM, C::DV, C::V_D, C::V_VECTORS>(
        value, v + ((int64_t)b * C::V_B + (int64_t)hk * C::V_H + (int64_t)t * C::V_S), d0);
    const float scale = C::SCALED ? v_scales[((int64_t)b * C::HK + hk) * C::SK + t] : 1.0f;
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) {
      const float w = C::SCALED ? score[r * C::CHUNK + j] * scale : score[r * C::CHUNK + j];
#pragma unroll
      for (int e = 0; e < C::ITEM; e++) acc[r][e] += w * value[e];
    }
  }

  // Adds up the threads' partial sums in shared memory, in a fixed order, ROWS_PER_PASS rows at a time, and passes each
  // result to sink.store(r, d, x).
  template <class Sink> INLINE void finish(THREAD float (&acc)[C::ROWS][C::ITEM], THREAD Sink& sink) {
    if (C::KEY_LANES < 32) {  // first within a subgroup
#pragma unroll
      for (int r = 0; r < C::ROWS; r++)
#pragma unroll
        for (int m = 16; m >= C::KEY_LANES; m >>= 1)
#pragma unroll
          for (int e = 0; e < C::ITEM; e++) acc[r][e] += subgroup_xor(acc[r][e], m);
    }
#pragma unroll
    for (int first = 0; first < C::ROWS; first += C::ROWS_PER_PASS) {
      const int rows = C::ROWS - first < C::ROWS_PER_PASS ? C::ROWS - first : C::ROWS_PER_PASS;
      if (first) barrier();
      if (at.lane < C::KEY_LANES) {
#pragma unroll
        for (int r = 0; r < rows; r++)
#pragma unroll
          for (int e = 0; e < C::ITEM; e++) partials[(r * SUBGROUPS + at.subgroup) * DIM + d0 + e] = acc[r + first][e];
      }
      barrier();
      for (int n = at.tid; n < rows * C::DV; n += C::THREADS) {
        const int r = n / C::DV + first, d = n % C::DV;
        float x = 0.0f;
#pragma unroll
        for (int s = 0; s < SUBGROUPS; s++) x += partials[((r - first) * SUBGROUPS + s) * DIM + d];
        sink.store(r, d, x);
      }
    }
  }

  INLINE void store(int r, int d, float x) {
    const int h = head(r), i = query(r);
    if (C::SPLITS > 1) {
      DEVICE typename C::Out* part = out + (((split * C::B + b) * C::H + h) * C::SQ + i) * (C::DV + 2);
      if (exists(r)) part[d] = narrow<typename C::Out>(x);
      if (d == 0 && exists(r)) {
        part[C::DV] = narrow<typename C::Out>(row_max[r]);
        part[C::DV + 1] = narrow<typename C::Out>(row_sum[r]);
      }
      return;
    }
    const int64_t place = (int64_t)b * C::O_B + (int64_t)h * C::O_H + (int64_t)i * C::O_S + (int64_t)d * C::O_D;
    if (exists(r)) out[place] = narrow<typename C::Out>(row_sum[r] == 0.0f ? 0.0f : x / row_sum[r]);
  }

  INLINE void run() {
    place();
    const int valid = valid_keys();
    const int share = (valid + C::SPLITS * 32 - 1) / (C::SPLITS * 32) * 32;
    const int begin = C::SPLITS > 1 ? split * share : 0;
    const int end = C::SPLITS > 1 && begin + share < valid ? begin + share : valid;
    float x[C::ROWS][C::ITEM];
    load_queries(x);
    attend(x, begin, end, *this);
  }

  // Processes keys begin .. end - 1 for the queries x, and passes the sums of weighted values to `sink`.
  template <class Sink>
  INLINE void attend(THREAD const float (&x)[C::ROWS][C::ITEM], int begin, int end, THREAD Sink& sink) {
    const int first = at.tid / C::KEY_LANES;
    float acc[C::ROWS][C::ITEM] = {};
    if (at.tid < C::ROWS) {
      row_max[at.tid] = -m_inf_float();
      row_sum[at.tid] = 0.0f;
    }
    for (int start = begin; start < end; start += C::CHUNK) {
      const int count = end - start < C::CHUNK ? end - start : C::CHUNK;
      const int padded = (count + 31) / 32 * 32;  // whole subgroups
      barrier();
#pragma unroll 2
      for (int j = first; j < padded; j += KEYS_AT_ONCE) scores(x, j, start, count);
      barrier();
      softmax(count);
      barrier();
#pragma unroll
      for (int r = 0; r < C::ROWS; r++)
#pragma unroll
        for (int e = 0; e < C::ITEM; e++) acc[r][e] *= rescale[r];
#pragma unroll 4
      for (int j = first; j < count; j += KEYS_AT_ONCE) add_values(acc, j, start);
    }
    finish(acc, sink);
  }
};

template <class C>
INLINE void attention(
    DEVICE const typename C::Q* q, DEVICE const typename C::K* k, DEVICE const typename C::V* v,
    DEVICE const typename C::Mask* mask, DEVICE const int64_t* positions, DEVICE typename C::Out* out,
    DEVICE const float* k_scales, DEVICE const float* v_scales, SMEM float* score, SMEM float* row_max, SMEM float* row_sum, SMEM float* rescale, SMEM float* partials, Thread at) {
  Attention<C> a;
  a.q = q; a.k = k; a.v = v; a.mask = mask; a.positions = positions; a.out = out;
  a.k_scales = k_scales; a.v_scales = v_scales;
  a.score = score; a.row_max = row_max; a.row_sum = row_sum; a.rescale = rescale; a.partials = partials; a.at = at;
  a.run();
}

// Combines parts [SPLITS, B, H, SQ, D + 2] (values, maximum, sum) to the result [B, H, SQ, D]. A workgroup computes a
// row; PARTS_AT_ONCE groups of its threads share the parts. Constants: SPLITS B H SQ D O_B O_H O_S O_D PARTS_AT_ONCE
// THREADS.
template <class C>
INLINE void attention_combine(
    DEVICE const float* parts, DEVICE typename C::Out* out, SMEM float* weight, SMEM float* inverse_sum,
    SMEM float* partials, Thread at) {
  const int width = C::D + 2, step = C::B * C::H * C::SQ * width, row = at.workgroup;
  DEVICE const float* const part = parts + row * width;
  if (at.subgroup == 0) {  // one subgroup computes the weights of the parts
    float maximum = -m_inf_float(), sum = 0.0f;
#pragma unroll
    for (int s = at.lane; s < C::SPLITS; s += 32) maximum = m_max(maximum, part[s * step + C::D]);
    maximum = subgroup_max(maximum);
#pragma unroll
    for (int s = at.lane; s < C::SPLITS; s += 32) {
      const float m = part[s * step + C::D], n = part[s * step + C::D + 1];
      const float w = m == -m_inf_float() ? 0.0f : m_exp(m - maximum);
      weight[s] = w;
      sum += w * n;
    }
    sum = subgroup_sum(sum);
    if (at.lane == 0) inverse_sum[0] = sum == 0.0f ? 0.0f : 1.0f / sum;
  }
  barrier();
  const int first = at.tid / (C::THREADS / C::PARTS_AT_ONCE), d = at.tid % (C::THREADS / C::PARTS_AT_ONCE);
  if (d < C::D) {
    float x = 0.0f;
#pragma unroll 16
    for (int s = first; s < C::SPLITS; s += C::PARTS_AT_ONCE)
      x += weight[s] * part[s * step + d];
    partials[first * C::D + d] = x;
  }
  barrier();
  if (at.tid < C::D) {
    float x = 0.0f;
#pragma unroll
    for (int n = 0; n < C::PARTS_AT_ONCE; n++) x += partials[n * C::D + at.tid];
    const int place = row / (C::H * C::SQ) * C::O_B + row / C::SQ % C::H * C::O_H + row % C::SQ * C::O_S;
    out[place + at.tid * C::O_D] = narrow<typename C::Out>(x * inverse_sum[0]);
  }
}
