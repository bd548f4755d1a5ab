// Attention on float arithmetic, for any mask and any strides: query rows that share keys are taken together.
//
// A workgroup of THREADS takes up to ROWS query rows of one key/value head (the heads of a GQA group side by side) and a
// range of the keys, CHUNK of them a step: scores, running maximum, weighted values. A row of keys or of values is shared
// by a team of TEAM lanes, ITEM elements each. With SPLITS > 1 the range is a part of the keys, and values, maximum and
// sum of each part go to memory [SPLITS, B, H, SQ, DV + 2], where attention_merge combines them in order.
// Source: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691.
//
// Types of C: Q, K, V, Mask, Out. Constants: B H HK SQ SK D DV; the sizes above; the strides Q_B Q_H
// Q_S Q_D of the queries, K_*, V_*, O_* of the output and M_* of the mask [B, H, SQ, SK]; LIMIT: stride of the positions. MASKED: the
// mask is boolean or added to the scores. BY_POSITION: a query sees the keys up to its position. CAUSAL: up to its own
// row. LIMITED: keys beyond the largest position are not read. K_VECTORS, V_VECTORS: rows are read 16 bytes at a time.
// MERGED: rows of ROWS whose sums are put together at once. scale: of the scores.
#pragma once

INLINE float masked(float score, bool8 admits) { return admits != 0 ? score : -m_inf_float(); }
INLINE float masked(float score, float added) { return score + added; }
INLINE float masked(float score, f16 added) { return score + to_f32(added); }
INLINE float masked(float score, bf16 added) { return score + to_f32(added); }

// This lane's ITEM elements of a row of DIM, from element first on; zeros behind the row.
template <int ITEM, int DIM, int STRIDE, bool VECTORS, class T>
INLINE void load_row(THREAD float* x, DEVICE const T* row, int first) {
  if (VECTORS) {
    const int piece = 16 / (int)sizeof(T);
#pragma unroll
    for (int e = 0; e < ITEM; e += piece) {
      if (first + e < DIM) unpack(load16(row + first + e), x + e, (THREAD T*)nullptr);
      else for (int n = 0; n < piece; n++) x[e + n] = 0.0f;
    }
  } else {
    for (int e = 0; e < ITEM; e++) x[e] = first + e < DIM ? to_f32(row[(int64_t)(first + e) * STRIDE]) : 0.0f;
  }
}

template <class C> struct Attention {
  CONSTANTS int SHARE = C::H / C::HK, QUERIES = SHARE * C::SQ, TEAMS = C::THREADS / C::TEAM;
  CONSTANTS int SUBGROUPS = C::THREADS / 32, DIM = C::TEAM * C::ITEM;

  DEVICE const typename C::Q* q;
  DEVICE const typename C::K* k;
  DEVICE const typename C::V* v;
  DEVICE const typename C::Mask* mask;
  DEVICE const int64_t* positions;
  DEVICE typename C::Out* out;
  SMEM float* score;  // [ROWS, CHUNK]: scores, then weights
  SMEM float* top;    // [ROWS]: the maximum so far, the sum of weights, and what earlier sums are worth now
  SMEM float* total;
  SMEM float* scale;
  SMEM float* meet;   // [MERGED, SUBGROUPS, DIM]
  Thread at;
  int tile, split, hk, b, member, d0;

  INLINE void place() {
    const int tiles = (QUERIES + C::ROWS - 1) / C::ROWS;
    tile = at.gid % tiles;
    split = at.gid / tiles % C::SPLITS;
    hk = at.gid / (tiles * C::SPLITS) % C::HK;
    b = at.gid / (tiles * C::SPLITS * C::HK);
    member = at.tid % C::TEAM;
    d0 = member * C::ITEM;
  }

  // Row r of the tile: its head and query. Rows behind the last one read the first.
  INLINE bool exists(int r) { return tile * C::ROWS + r < QUERIES; }
  INLINE int head(int r) { return hk * SHARE + (exists(r) ? (tile * C::ROWS + r) / C::SQ : 0); }
  INLINE int query(int r) { return exists(r) ? (tile * C::ROWS + r) % C::SQ : 0; }

  // How many keys some query of the tile sees.
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
    const int last = tile * C::ROWS + C::ROWS - 1;  // query of a tile of one head
    if (C::CAUSAL && SHARE == 1) valid = last + 1 < valid ? last + 1 : valid;
    return valid;
  }

  INLINE void load_queries(THREAD float (&x)[C::ROWS][C::ITEM]) {
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) {
      DEVICE const typename C::Q* row = q + (int64_t)b * C::Q_B + (int64_t)head(r) * C::Q_H + (int64_t)query(r) * C::Q_S;
#pragma unroll
      for (int e = 0; e < C::ITEM; e++)
        x[r][e] = exists(r) && d0 + e < C::D ? to_f32(row[(int64_t)(d0 + e) * C::Q_D]) * C::scale : 0.0f;
    }
  }

  // Key j of the chunk against all rows; each lane of the team finishes some of them.
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
      for (int m = C::TEAM / 2; m > 0; m >>= 1) s[r] += subgroup_xor(s[r], m);
    }
    for (int r = member; r < C::ROWS; r += C::TEAM) {
      const int i = query(r);
      float value = s[0];
#pragma unroll
      for (int n = 1; n < C::ROWS; n++) value = n == r ? s[n] : value;
      if (C::BY_POSITION && C::SQ > 1) value = t <= positions[i * C::LIMIT] ? value : -m_inf_float();
      if (C::MASKED)
        value = masked(value, mask[(int64_t)b * C::M_B + (int64_t)head(r) * C::M_H + (int64_t)i * C::M_S +
                                   (int64_t)t * C::M_D]);
      if (C::CAUSAL) value = t <= i ? value : -m_inf_float();
      score[r * C::CHUNK + j] = j < count && exists(r) ? value : -m_inf_float();
    }
  }

  // A subgroup takes a row: scores become weights.
  INLINE void softmax(int count) {
    for (int r = at.sid; r < C::ROWS; r += SUBGROUPS) {
      const float before = top[r];
      float most = before, sum = 0.0f;
      for (int j = at.lane; j < count; j += 32) most = m_max(most, score[r * C::CHUNK + j]);
      most = subgroup_max(most);
      for (int j = at.lane; j < count; j += 32) {
        const float x = score[r * C::CHUNK + j];
        const float w = x == -m_inf_float() ? 0.0f : m_exp(x - most);
        score[r * C::CHUNK + j] = w;
        sum += w;
      }
      sum = subgroup_sum(sum);
      const float keep = before == -m_inf_float() ? 0.0f : m_exp(before - most);
      subgroup_barrier();
      if (at.lane == 0) {
        top[r] = most;
        scale[r] = keep;
        total[r] = total[r] * keep + sum;
      }
    }
  }

  INLINE void add_values(THREAD float (&acc)[C::ROWS][C::ITEM], int j, int start) {
    const int t = start + j;
    float value[C::ITEM];
    load_row<C::ITEM, C::DV, C::V_D, C::V_VECTORS>(
        value, v + ((int64_t)b * C::V_B + (int64_t)hk * C::V_H + (int64_t)t * C::V_S), d0);
#pragma unroll
    for (int r = 0; r < C::ROWS; r++) {
      const float w = score[r * C::CHUNK + j];
#pragma unroll
      for (int e = 0; e < C::ITEM; e++) acc[r][e] += w * value[e];
    }
  }

  // The teams' values are added in shared memory, in one fixed order: as many rows at a time as it holds.
  INLINE void finish(THREAD float (&acc)[C::ROWS][C::ITEM]) {
    if (C::TEAM < 32) {  // first the teams of a subgroup
#pragma unroll
      for (int r = 0; r < C::ROWS; r++)
#pragma unroll
        for (int m = 16; m >= C::TEAM; m >>= 1)
#pragma unroll
          for (int e = 0; e < C::ITEM; e++) acc[r][e] += subgroup_xor(acc[r][e], m);
    }
#pragma unroll
    for (int first = 0; first < C::ROWS; first += C::MERGED) {
      const int rows = C::ROWS - first < C::MERGED ? C::ROWS - first : C::MERGED;
      if (first) barrier();
      if (at.lane < C::TEAM) {
#pragma unroll
        for (int r = 0; r < rows; r++)
#pragma unroll
          for (int e = 0; e < C::ITEM; e++) meet[(r * SUBGROUPS + at.sid) * DIM + d0 + e] = acc[r + first][e];
      }
      barrier();
      for (int n = at.tid; n < rows * C::DV; n += C::THREADS) {
        const int r = n / C::DV + first, d = n % C::DV;
        float x = 0.0f;
#pragma unroll
        for (int s = 0; s < SUBGROUPS; s++) x += meet[((r - first) * SUBGROUPS + s) * DIM + d];
        store(r, d, x);
      }
    }
  }

  INLINE void store(int r, int d, float x) {
    const int h = head(r), i = query(r);
    if (C::SPLITS > 1) {
      DEVICE typename C::Out* part = out + (((split * C::B + b) * C::H + h) * C::SQ + i) * (C::DV + 2);
      if (exists(r)) part[d] = narrow<typename C::Out>(x);
      if (d < 2 && exists(r)) part[C::DV + d] = narrow<typename C::Out>(d ? total[r] : top[r]);
      return;
    }
    const int64_t place = (int64_t)b * C::O_B + (int64_t)h * C::O_H + (int64_t)i * C::O_S + (int64_t)d * C::O_D;
    if (exists(r)) out[place] = narrow<typename C::Out>(total[r] > 0.0f ? x / total[r] : 0.0f);
  }

  INLINE void run() {
    place();
    const int team = at.tid / C::TEAM, valid = valid_keys();
    const int share = (valid + C::SPLITS * 32 - 1) / (C::SPLITS * 32) * 32;
    const int begin = C::SPLITS > 1 ? split * share : 0;
    const int end = C::SPLITS > 1 && begin + share < valid ? begin + share : valid;
    float x[C::ROWS][C::ITEM], acc[C::ROWS][C::ITEM] = {};
    load_queries(x);
    if (at.tid < C::ROWS) {
      top[at.tid] = -m_inf_float();
      total[at.tid] = 0.0f;
    }
    for (int start = begin; start < end; start += C::CHUNK) {
      const int count = end - start < C::CHUNK ? end - start : C::CHUNK;
      const int padded = (count + 31) / 32 * 32;  // whole subgroups
      barrier();
#pragma unroll 2
      for (int j = team; j < padded; j += TEAMS) scores(x, j, start, count);
      barrier();
      softmax(count);
      barrier();
#pragma unroll
      for (int r = 0; r < C::ROWS; r++)
#pragma unroll
        for (int e = 0; e < C::ITEM; e++) acc[r][e] *= scale[r];
#pragma unroll 4
      for (int j = team; j < count; j += TEAMS) add_values(acc, j, start);
    }
    finish(acc);
  }
};

template <class C>
INLINE void attention(
    DEVICE const typename C::Q* q, DEVICE const typename C::K* k, DEVICE const typename C::V* v,
    DEVICE const typename C::Mask* mask, DEVICE const int64_t* positions, DEVICE typename C::Out* out,
    SMEM float* score, SMEM float* top, SMEM float* total, SMEM float* scale, SMEM float* meet, Thread at) {
  Attention<C> a;
  a.q = q; a.k = k; a.v = v; a.mask = mask; a.positions = positions; a.out = out;
  a.score = score; a.top = top; a.total = total; a.scale = scale; a.meet = meet; a.at = at;
  a.run();
}

// Parts [SPLITS, B, H, SQ, D + 2] (values, maximum, sum) to the result [B, H, SQ, D]; a workgroup takes a row, and TEAMS
// teams share its parts. Constants: SPLITS B H SQ D O_B O_H O_S O_D TEAMS THREADS.
template <class C>
INLINE void attention_merge(
    DEVICE const float* parts, DEVICE typename C::Out* out, SMEM float* weight, SMEM float* total, SMEM float* meet,
    Thread at) {
  const int width = C::D + 2, step = C::B * C::H * C::SQ * width, row = at.gid;
  DEVICE const float* const part = parts + row * width;
  if (at.sid == 0) {  // one subgroup weighs the parts
    float most = -m_inf_float(), sum = 0.0f;
#pragma unroll
    for (int s = at.lane; s < C::SPLITS; s += 32) most = m_max(most, part[s * step + C::D]);
    most = subgroup_max(most);
#pragma unroll
    for (int s = at.lane; s < C::SPLITS; s += 32) {
      const float m = part[s * step + C::D], n = part[s * step + C::D + 1];
      const float w = m == -m_inf_float() ? 0.0f : m_exp(m - most);
      weight[s] = w;
      sum += w > 0.0f ? w * n : 0.0f;
    }
    sum = subgroup_sum(sum);
    if (at.lane == 0) total[0] = sum > 0.0f ? 1.0f / sum : 0.0f;
  }
  barrier();
  const int team = at.tid / (C::THREADS / C::TEAMS), d = at.tid % (C::THREADS / C::TEAMS);
  if (d < C::D) {
    float x = 0.0f;
#pragma unroll 16
    for (int s = team; s < C::SPLITS; s += C::TEAMS) x += weight[s] > 0.0f ? weight[s] * part[s * step + d] : 0.0f;
    meet[team * C::D + d] = x;
  }
  barrier();
  if (at.tid < C::D) {
    float x = 0.0f;
#pragma unroll
    for (int t = 0; t < C::TEAMS; t++) x += meet[t * C::D + at.tid];
    const int place = row / (C::H * C::SQ) * C::O_B + row / C::SQ % C::H * C::O_H + row % C::SQ * C::O_S;
    out[place + at.tid * C::O_D] = narrow<typename C::Out>(x * total[0]);
  }
}
