// Decoding (attention_decode.h) from a cache of bf16 where `vdpbf16ps` is as fast as a multiply-add. It multiplies pairs
// of numbers of a key, and in sums of values the pairs of neighbouring keys, whose weights are rounded to bf16 as in
// PyTorch's kernel. Memory is slower than both, so lines are prefetched in the order of their addresses.
#pragma once
#include "tile.h"

#if defined(__AVX512BF16__) && NPU_AVX512 && !NPU_AMX && !NPU_SLOW_BF16_DOT
namespace npu {

template <class D, class E, class T>
constexpr bool decode_in_pairs = is_same<E, bf16>::value && is_same<T, bf16>::value && D::DH % 32 == 0 && D::DV % 32 == 0;

// Prefetches COUNT lines of rows of WIDTH numbers, `stride` apart: from line `first` of the rows 0 .. last on.
template <long WIDTH, int COUNT> NPU_INLINE void prefetch_lines(const bf16* rows, long stride, long first, long last) {
  constexpr long LINES = WIDTH / 32;
#pragma GCC unroll 24
  for (long line = first; line < first + COUNT; line++)
    __builtin_prefetch(rows + min_of(line / LINES, last) * stride + line % LINES * 32, 0, 2);
}

// Plan: DecodePlan<D>.
template <class D, class Plan> struct DecodePairs {
  static constexpr long AHEAD = 32;  // rows between that which is multiplied and that which is prefetched
  static constexpr long BLOCK = 32;  // keys whose values stay in L1 while all columns are summed

  // Computes scores[row][j] = scale * q[row] . k[j] for all rows and keys. `spread`: memory for the queries.
  NPU_INLINE void scores(const bf16* k, long keys, const bf16* const* q, float* spread, float* scores) {
    constexpr int FIRST = Plan::ROWS > 6 ? Plan::ROWS / 2 : Plan::ROWS;  // accumulators for 16 keys fill the registers
    static_assert(Plan::ROWS * QUERY <= (Plan::S - Plan::Q) * 4, "memory for queries and widened keys");
    char* queries = (char*)spread;
    for (int r = 0; r < Plan::ROWS; r++)  // each 16 bytes of a query four times
      for (long i = 0; i < D::DH; i += 8)
        _mm512_storeu_si512(queries + r * QUERY + i * 8,
                            _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(q[r] + i))));
    score_rows<FIRST>(k, keys, queries, scores);
    if constexpr (FIRST < Plan::ROWS)
      score_rows<Plan::ROWS - FIRST>(k, keys, queries + FIRST * QUERY, scores + FIRST * Plan::KEYS);
  }

  // Stores weights as bf16 at element j of the memory of a row of scores, and returns them as floats.
  NPU_INLINE vf store_weights(float* row, long j, vf weights) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
    _mm256_storeu_si256((__m256i*)((char*)row + j * 2), rounded);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
  }

  // Sums the values of all keys and stores the rows, multiplied by their factors.
  template <class T>
  NPU_INLINE void sum_values(const bf16* v, long keys, const float* weights, const float* factors, float* sums,
                             T* const* out) {
    constexpr int STEP = (int)max_of(2, Plan::V_BLOCK / 2 * 2), REST = Plan::DV_VECS % STEP;
    for (long j = 0; j == 0 || j < keys; j += BLOCK) {
      int c = 0;
      for (; c + STEP <= Plan::DV_VECS; c += STEP) add_values<STEP>(v, j, keys, weights, c, sums);
      if constexpr (REST > 0) add_values<REST>(v, j, keys, weights, c, sums);
    }
    for (int r = 0; r < Plan::ROWS; r++)
      for (int c = 0; c < Plan::DV_VECS; c += 2) {
        const float* from = sums + (r * Plan::DV_VECS + c) * VL;
        vf low = load_bytes<vf>(from) * factors[r], high = load_bytes<vf>(from + VL) * factors[r];
        order_columns(low, high);
        st(out[r] + c * VL, low, Full{});
        st(out[r] + (c + 1) * VL, high, Full{});
      }
  }

 private:
  static constexpr long QUERY = D::DH * 8;  // bytes of a query that is spread

  // Returns a vector whose lane 4 * b + i is the sum of block b, four lanes, of v[i].
  NPU_INLINE vf sum_blocks(const vf (&v)[4]) {
    vf half[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
      half[i] = (vf)_mm512_unpacklo_ps(a, b) + (vf)_mm512_unpackhi_ps(a, b);
    }
    const __m512d a = (__m512d)half[0], b = (__m512d)half[1];
    return (vf)_mm512_unpacklo_pd(a, b) + (vf)_mm512_unpackhi_pd(a, b);
  }

  // A register holds 16 bytes of each of four keys. Their sums need fewer shuffles than those of a key in a register.
  template <int ROWS> NPU_INLINE void score_rows(const bf16* k, long keys, const char* queries, float* scores) {
    for (long j0 = 0; j0 < keys; j0 += VL) {
      const bf16* from[VL];
#pragma GCC unroll 16
      for (int j = 0; j < VL; j++) from[j] = k + min_of(j0 + j, keys - 1) * D::k_s;
      vf acc[ROWS][4] = {};
      for (long c = 0; c < D::DH; c += 8) {
        prefetch_lines<D::DH, 4>(k, D::k_s, (j0 + AHEAD) * (D::DH / 32) + c / 2, keys - 1);
        vf kv[4];  // kv[i]: keys i, i + 4, i + 8, i + 12
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(from[i] + c)));
          x = _mm512_mask_broadcast_i32x4(x, 0x00f0, _mm_loadu_si128((const __m128i*)(from[i + 4] + c)));
          x = _mm512_mask_broadcast_i32x4(x, 0x0f00, _mm_loadu_si128((const __m128i*)(from[i + 8] + c)));
          kv[i] = (vf)_mm512_mask_broadcast_i32x4(x, 0xf000, _mm_loadu_si128((const __m128i*)(from[i + 12] + c)));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const vf q = load_bytes<vf>(queries + r * QUERY + c * 8);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) BF16P::step(acc[r][i], kv[i], q);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) store_bytes(scores + r * Plan::KEYS + j0, sum_blocks(acc[r]) * D::scale);
    }
  }

  // Adds the values of a block of keys to VECS vectors of the sums of all rows, from vector c on. Each two of these have
  // their columns in the order of `vpunpcklwd` and `vpunpckhwd`.
  template <int VECS>
  NPU_INLINE void add_values(const bf16* v, long begin, long keys, const float* weights, int c, float* sums) {
    const long end = min_of(keys, begin + BLOCK);
    vf acc[Plan::ROWS][VECS];
    auto at = [&](int r, int i) { return sums + (r * Plan::DV_VECS + c + i) * VL; };
#pragma GCC unroll 8
    for (int r = 0; r < Plan::ROWS; r++)
#pragma GCC unroll 24
      for (int i = 0; i < VECS; i++) acc[r][i] = begin ? load_bytes<vf>(at(r, i)) : vf{};
    auto add = [&](long j, auto second) __attribute__((always_inline)) {
      const bf16* from = v + j * D::v_s + c * VL;
#pragma GCC unroll 12
      for (int i = 0; i < VECS; i += 2) {
        const __m512i a = _mm512_loadu_si512(from + i * VL), b = second(from + D::v_s + i * VL);
        const vf low = (vf)_mm512_unpacklo_epi16(a, b), high = (vf)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
        for (int r = 0; r < Plan::ROWS; r++) {
          const vf w = BF16P::splat_unit((const char*)(weights + r * Plan::KEYS) + j * 2);
          BF16P::step(acc[r][i], low, w);
          BF16P::step(acc[r][i + 1], high, w);
        }
      }
    };
    // Half of the columns of these keys take as long as half of all lines of the block that is prefetched.
    long j = begin, line = (begin + AHEAD) * (D::DV / 32) + (end - begin) * c / 2;
    for (; j + 2 <= end; j += 2, line += VECS) {
      prefetch_lines<D::DV, VECS>(v, D::v_s, line, keys - 1);
      add(j, [](const bf16* row) __attribute__((always_inline)) { return _mm512_loadu_si512(row); });
    }
    if (j < end) add(j, [](const bf16*) __attribute__((always_inline)) { return _mm512_setzero_si512(); });
#pragma GCC unroll 8
    for (int r = 0; r < Plan::ROWS; r++)
#pragma GCC unroll 24
      for (int i = 0; i < VECS; i++) store_bytes(at(r, i), acc[r][i]);
  }

  NPU_INLINE void order_columns(vf& low, vf& high) {
    alignas(64) static constexpr int32_t ORDER[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const __m512i order = _mm512_load_si512(ORDER), beyond = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    const vf first = (vf)_mm512_permutex2var_ps((__m512)low, order, (__m512)high);
    high = (vf)_mm512_permutex2var_ps((__m512)low, beyond, (__m512)high);
    low = first;
  }
};

}  // namespace npu
#else
namespace npu {
template <class D, class E, class T> constexpr bool decode_in_pairs = false;
template <class D, class Plan> struct DecodePairs;
}  // namespace npu
#endif
