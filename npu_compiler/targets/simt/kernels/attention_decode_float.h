// Attention of one query position to a cache in float arithmetic: a decode step's rotary embedding, cache update,
// attention and the combination of its parts in one launch, without elements of fragments and without a grid barrier.
//
// A workgroup processes the query heads of a key/value head and a range of the keys (see attention.h). The workgroup
// whose range contains this position computes its new row. Workgroups without keys exit at once. The others store
// values, maximum and sum of each head as a part, and the last one to arrive combines the parts of the key/value head
// in order. No workgroup waits, so they need not be resident together, and results do not depend on which is the last.
//
// Types and constants of C: those of Attention, for one query row; MIN_KEYS: the fewest keys of a workgroup; PART:
// floats of a part, the values followed by maximum and sum; COUNTER: integers between the counters of two heads.
//
// Queries, Row: rendered functors that compute elements of the queries, and of the key or the value at the position.
// locate(0, point) and load(0) load the operands of a point, make(0, point) returns its value from them, and
// place(point, position) is the offset of a Row's element in the cache.
#pragma once
#include "attention.h"

template <class C> struct FloatDecodeAttention {
  typedef typename C::K T;
  CONSTANTS int HEADS_PER_KV = C::H / C::HK, ALL = C::H * C::PART;

  Attention<C> a;
  COHERENT float* parts;  // [SPLITS, H, PART]
  int position_row, active, begin, end;

  // Keys begin .. end - 1 are those of this workgroup; `active` workgroups of its key/value head have keys.
  INLINE void range(int64_t position) {
    position_row = position < 0 ? 0 : position < C::SK ? (int)position : C::SK - 1;
    const int valid = position_row + 1;
    int share = (valid + C::SPLITS * 32 - 1) / (C::SPLITS * 32) * 32;
    share = share > C::MIN_KEYS ? share : C::MIN_KEYS;
    active = (valid + share - 1) / share;
    begin = a.split * share;
    end = begin + share < valid ? begin + share : valid;
  }

  // Stores this position's row in a cache, rounded to its type.
  template <class Row> INLINE void make_row(Row row, DEVICE T* cache, int64_t position) {
    for (int n = a.at.tid; n < C::D; n += C::THREADS) {
      const uint point = (uint)(a.hk * C::D + n);
      row.locate(0, point);
      row.load(0);
      cache[row.place(point, position)] = narrow<T>(row.make(0, point));
    }
  }

  // Computes the queries, rounded to their type. `memory` has room for them.
  template <class Queries>
  INLINE void make_queries(Queries queries, SMEM float* memory, THREAD float (&x)[C::ROWS][C::ITEM]) {
    for (int n = a.at.tid; n < HEADS_PER_KV * C::D; n += C::THREADS) {
      const uint point = (uint)(a.hk * HEADS_PER_KV * C::D + n);
      queries.locate(0, point);
      queries.load(0);
      memory[n] = to_f32(narrow<T>(queries.make(0, point))) * C::SCALE;
    }
    device_barrier();  // the new rows are in memory, too
#pragma unroll
    for (int r = 0; r < C::ROWS; r++)
#pragma unroll
      for (int e = 0; e < C::ITEM; e++) x[r][e] = a.d0 + e < C::D ? memory[r * C::D + a.d0 + e] : 0.0f;
    barrier();
  }

  INLINE void store_result(int r, int d, float x) {
    a.out[(int64_t)a.head(r) * C::O_H + (int64_t)d * C::O_D] = narrow<typename C::Out>(x / a.row_sum[r]);
  }
  INLINE void store(int r, int d, float x) {
    if (C::SPLITS == 1 || active == 1) return store_result(r, d, x);
    COHERENT float* const part = parts + a.split * ALL + a.head(r) * C::PART;
    part[d] = x;
    if (d == 0) {
      part[C::D] = a.row_max[r];
      part[C::D + 1] = a.row_sum[r];
    }
  }

  // Combines the parts. A subgroup computes the weights of a row's parts.
  INLINE void combine() {
    for (int r = a.at.subgroup; r < HEADS_PER_KV; r += C::THREADS / 32) {
      COHERENT float* const extents = parts + a.head(r) * C::PART + C::D;
      SMEM float* const weight = a.score + r * C::CHUNK;
      float maximum = -m_inf_float(), sum = 0.0f;
      for (int s = a.at.lane; s < active; s += 32) maximum = m_max(maximum, extents[s * ALL]);
      maximum = subgroup_max(maximum);
      for (int s = a.at.lane; s < active; s += 32) {
        const float m = extents[s * ALL];
        weight[s] = m == -m_inf_float() ? 0.0f : m_exp(m - maximum);
        sum += weight[s] * extents[s * ALL + 1];
      }
      sum = subgroup_sum(sum);
      if (a.at.lane == 0) a.row_sum[r] = sum;
    }
    barrier();
    for (int n = a.at.tid; n < HEADS_PER_KV * C::D; n += C::THREADS) {
      const int r = n / C::D, d = n % C::D;
      COHERENT float* const values = parts + a.head(r) * C::PART + d;
      float x = 0.0f;
#pragma unroll 4
      for (int s = 0; s < active; s++) x += a.score[r * C::CHUNK + s] * values[s * ALL];
      store_result(r, d, x);
    }
  }
};

template <class C, class Queries, class Key, class Value>
INLINE void attention_decode_float(
    DEVICE typename C::K* keys, DEVICE typename C::V* values, DEVICE const int64_t* position,
    DEVICE typename C::Out* out, COHERENT float* parts, DEVICE int* counters, Queries queries, Key key, Value value,
    SMEM float* score, SMEM float* row_max, SMEM float* row_sum, SMEM float* rescale, SMEM float* partials,
    SMEM int* last, Thread at) {
  FloatDecodeAttention<C> s;
  s.a.at = at;
  s.a.place();
  const int64_t here = position[0];
  s.range(here);
  if (s.a.split >= s.active) return;
  s.a.k = keys; s.a.v = values; s.a.out = out; s.parts = parts;
  s.a.score = score; s.a.row_max = row_max; s.a.row_sum = row_sum; s.a.rescale = rescale; s.a.partials = partials;
  if (s.position_row >= s.begin && s.position_row < s.end) {
    s.make_row(key, keys, here);
    s.make_row(value, values, here);
  }
  float x[C::ROWS][C::ITEM];
  s.make_queries(queries, partials, x);
  s.a.attend(x, s.begin, s.end, s);
  if (C::SPLITS == 1 || s.active == 1) return;
  device_barrier();
  if (at.tid == 0) last[0] = is_last(counters + s.a.hk * C::COUNTER, s.active) ? 1 : 0;
  device_barrier();
  if (last[0] != 0) s.combine();
}
