// Attention of many float32 queries on the matrix unit: each operand is the sum of two TF32 numbers, `high` and `low`,
// which hold 22 of its 24 bits. The product is high high + (high low + low high). The matrix unit truncates sums, so
// that long chains would shrink: the small products have accumulators of their own, and float additions add up the
// others, every two products of scores and every tile of values. An infinite operand gives NaN.
//
// A workgroup processes ROWS query rows of a head, a subgroup 16 of them, as in flash.h.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from tensor cores while surpassing the FP32
// theoretical peak performance" (2022), https://arxiv.org/abs/2203.03341.
// Constants: those of flash.h.
#pragma once
#include "flash.h"

INLINE void split_mma(FragC& sum, FragC& small, const FragA<tf32x2>& a, const FragB<tf32x2>& b) {
  frag_mma_small(small, a, b);
  frag_mma(sum, a.high, b.high);
}

template <class C> struct FlashTf32 {
  // Of tiles: a row begins 16 banks after the row before, for loads of 16 bytes; a pair of values 8 banks.
  CONSTANTS int LD = C::D + 16, SIZE = C::KEYS * LD, VALUE_LD = C::DV + 4, VALUES = C::KEYS * VALUE_LD;
  CONSTANTS int COLUMNS = 4;  // fragments of results that are computed together
  FlashRows<C> rows;
  const float* q;
  const float* k;
  const float* v;
  float* qs;  // [ROWS, LD]
  float* ks;  // [2, KEYS, LD]: two tiles
  float* vs;  // [2, KEYS, VALUE_LD]

  INLINE void copy_tile(int step, int slot) {
    const int64_t b = rows.b, hk = rows.hk;
    rows.template copy_rows<C::KEYS, C::KEY_SIZE, C::D, LD>(
        ks + slot * SIZE, k + (b * C::K_B + hk * C::K_H), C::K_S, step * C::KEYS, C::SK);
    rows.template copy_rows<C::KEYS, C::VALUE_SIZE, C::DV, VALUE_LD>(
        vs + slot * VALUES, v + (b * C::V_B + hk * C::V_H), C::V_S, step * C::KEYS, C::SK);
  }

  // Of 16 columns, a lane's four are columns t and t + 4 of two products.
  INLINE void scores(FragC* s, const float* keys) {
    const int g = rows.at.lane / 4, t = rows.at.lane % 4;
    const float* const own = qs + (rows.at.subgroup * 16 + g) * LD + t * 4;
    FragC small[C::KEYS / 8];
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; j++) {
      frag_zero(s[j]);
      frag_zero(small[j]);
    }
#pragma unroll
    for (int n = 0; n < C::D / 16; n++) {
      const float4 x[2] = {*(const float4*)(own + n * 16), *(const float4*)(own + 8 * LD + n * 16)};
      FragA<tf32x2> a[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        split_tf32(x[r].x, a[0].high.v[r], a[0].low.v[r]);
        split_tf32(x[r].y, a[0].high.v[2 + r], a[0].low.v[2 + r]);
        split_tf32(x[r].z, a[1].high.v[r], a[1].low.v[r]);
        split_tf32(x[r].w, a[1].high.v[2 + r], a[1].low.v[2 + r]);
      }
      FragB<tf32x2> b[C::KEYS / 8][2];
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j++) {
        const float4 y = *(const float4*)(keys + (j * 8 + g) * LD + n * 16 + t * 4);
        split_tf32(y.x, b[j][0].high.v[0], b[j][0].low.v[0]);
        split_tf32(y.y, b[j][0].high.v[1], b[j][0].low.v[1]);
        split_tf32(y.z, b[j][1].high.v[0], b[j][1].low.v[0]);
        split_tf32(y.w, b[j][1].high.v[1], b[j][1].low.v[1]);
      }
      FragC sum[C::KEYS / 8];
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j++) frag_zero(sum[j]);
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int j = 0; j < C::KEYS / 8; j++) split_mma(sum[j], small[j], a[e], b[j][e]);
#pragma unroll
      for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[j].v[e] += sum[j].v[e];
    }
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[j].v[e] += small[j].v[e];
  }

  // Rescales results and adds the weighted values of a tile. Of 8 keys, keys 2 t and 2 t + 1 are terms t and t + 4 of a
  // product, because a lane has their weights.
  INLINE void add_values(FragC* o, const FragC* s, const float* rescaling, const float* values) {
    const int g = rows.at.lane / 4, t = rows.at.lane % 4;
    FragA<tf32x2> w[C::KEYS / 8];
#pragma unroll
    for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        split_tf32(s[n].v[i], w[n].high.v[i % 2 * 2 + i / 2], w[n].low.v[i % 2 * 2 + i / 2]);
#pragma unroll
    for (int first = 0; first < C::DV / 8; first += COLUMNS) {
      FragC sum[COLUMNS], small[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        frag_zero(sum[c]);
        frag_zero(small[c]);
      }
#pragma unroll
      for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < COLUMNS && first + c < C::DV / 8; c++) {
          const float* const from = values + (n * 8 + t * 2) * VALUE_LD + (first + c) * 8 + g;
          FragB<tf32x2> b;
          split_tf32(from[0], b.high.v[0], b.low.v[0]);
          split_tf32(from[VALUE_LD], b.high.v[1], b.low.v[1]);
          split_mma(sum[c], small[c], w[n], b);
        }
#pragma unroll
      for (int c = 0; c < COLUMNS && first + c < C::DV / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          o[first + c].v[e] = o[first + c].v[e] * rescaling[e / 2] + (sum[c].v[e] + small[c].v[e]);
    }
  }

  INLINE void run(float* out) {
    const int tiles = (C::SQ + C::ROWS - 1) / C::ROWS;
    rows.q0 = (tiles - 1 - rows.at.workgroup / (C::H * C::B)) * C::ROWS;  // tiles with the most keys first
    rows.h = rows.at.workgroup % C::H;
    rows.b = rows.at.workgroup % (C::H * C::B) / C::H;
    rows.hk = rows.h / C::HEADS_PER_KV;
    rows.range();
    rows.template copy_rows<C::ROWS, C::KEY_SIZE, C::D, LD>(
        qs, q + ((int64_t)rows.b * C::Q_B + (int64_t)rows.h * C::Q_H), C::Q_S, rows.q0, C::SQ);
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
      scores(s, ks + (step & 1) * SIZE);
      float rescaling[2];
      rows.softmax(s, rescaling, step);
      add_values(o, s, rescaling, vs + (step & 1) * VALUES);
    }
    rows.store(o, out);
  }
};

template <class C>
INLINE void flash_tf32(
    const float* q, const float* k, const float* v, const typename C::Mask* mask, const int64_t* positions, float* out,
    float* qs, float* ks, float* vs, int* limit, Thread at) {
  FlashTf32<C> f;
  f.q = q; f.k = k; f.v = v; f.qs = qs; f.ks = ks; f.vs = vs;
  f.rows.mask = mask; f.rows.positions = positions; f.rows.limit = limit; f.rows.at = at;
  f.run(out);
}
