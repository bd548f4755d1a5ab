// Matrix transposition of elements of 1, 2, 4 or 8 bytes, batched: out[b][n][m] = in[b][m][n].
//
//   struct D { static constexpr long B, M, N, in_b, in_m, out_b, out_n; };   element strides; n of in, m of out are dense
//   transpose<D>(in, out, th, counter)
//
// NCHW -> NHWC is M = C, N = H * W; NHWC -> NCHW the reverse.
#pragma once
#include "blocked.h"

namespace npu {

// Interleave the low (high) halves of two vectors. log2(n) rounds of this perfect shuffle transpose n rows.
template <class V> NPU_INLINE V interleave_low(V a, V b) {
  constexpr int n = sizeof(V) / sizeof(V{}[0]);
  if constexpr (n == 2) return __builtin_shufflevector(a, b, 0, 2);
  else if constexpr (n == 4) return __builtin_shufflevector(a, b, 0, 4, 1, 5);
  else if constexpr (n == 8) return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  else return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V> NPU_INLINE V interleave_high(V a, V b) {
  constexpr int n = sizeof(V) / sizeof(V{}[0]);
  if constexpr (n == 2) return __builtin_shufflevector(a, b, 1, 3);
  else if constexpr (n == 4) return __builtin_shufflevector(a, b, 2, 6, 3, 7);
  else if constexpr (n == 8) return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  else return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

template <int SIZE> struct Raw;
template <> struct Raw<1> { using type = uint8_t; };
template <> struct Raw<2> { using type = uint16_t; };
template <> struct Raw<4> { using type = uint32_t; };
template <> struct Raw<8> { using type = uint64_t; };

#if NPU_AVX512
template <int SIZE> constexpr int transpose_block() { return SIZE == 8 ? 8 : 16; }
#else
template <int SIZE> constexpr int transpose_block() { return 16 / SIZE; }
#endif

// Transposes n vectors of n elements in registers.
template <class V, int n> NPU_INLINE void transpose_registers(V (&rows)[n]) {
  V next[n];
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; i++) {
      next[2 * i] = interleave_low(rows[i], rows[i + n / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + n / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) rows[i] = next[i];
  }
}

// Transposes a block of n x n elements.
template <class E, int n> NPU_INLINE void transpose_square(const E* in, long in_m, E* out, long out_n) {
  typedef typename vec_of<E, n>::type V;
  V rows[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) rows[i] = load_bytes<V>(in + i * in_m);
  transpose_registers(rows);
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) store_bytes(out + i * out_n, rows[i]);
}

// Transposes rows x cols elements of `in`, for any sizes: blocks of n x n, then of 4 x 4, then single elements.
template <class E, int n>
NPU_INLINE void transpose_blocks(const E* in, long in_m, E* out, long out_n, long rows, long cols) {
  const long whole_rows = rows / n * n, whole_cols = cols / n * n;
  for (long c = 0; c < whole_cols; c += n)
    for (long r = 0; r < whole_rows; r += n)
      transpose_square<E, n>(in + r * in_m + c, in_m, out + c * out_n + r, out_n);
  if constexpr (n > 4 && sizeof(E) >= 4) {
    transpose_blocks<E, 4>(in + whole_cols, in_m, out + whole_cols * out_n, out_n, rows, cols - whole_cols);
    transpose_blocks<E, 4>(in + whole_rows * in_m, in_m, out + whole_rows, out_n, rows - whole_rows, whole_cols);
  } else {
    for (long c = 0; c < cols; c++)
      for (long r = c < whole_cols ? whole_rows : 0; r < rows; r++) out[c * out_n + r] = in[r * in_m + c];
  }
}
template <class E> NPU_NOINLINE void transpose_part(const E* in, long in_m, E* out, long out_n, long rows, long cols) {
  transpose_blocks<E, transpose_block<sizeof(E)>()>(in, in_m, out, out_n, rows, cols);
}

template <class D, class T> NPU_NOINLINE void transpose(const T* in, T* out, Thread& th, int* counter) {
  typedef typename Raw<sizeof(T)>::type E;
  // A part reads whole cache lines of `in` and writes whole cache lines of `out`; its source and its result fit in L1.
  constexpr long PART_M = min_of(D::M, 128 / (long)sizeof(T) * 2), PART_N = min_of(D::N, PART_M < 16 ? 1024 : 64);
  constexpr long PARTS_M = ceil_div(D::M, PART_M), PARTS_N = ceil_div(D::N, PART_N), PARTS = D::B * PARTS_M * PARTS_N;
  constexpr long PER_CHUNK = max_of(1, min_of(PARTS / CHUNKS, 65536 / (PART_M * PART_N)));
  for (long i; (i = next_chunk(th, counter)) * PER_CHUNK < PARTS;) {
    for (long part = i * PER_CHUNK; part < min_of(PARTS, (i + 1) * PER_CHUNK); part++) {
      const long b = part / (PARTS_M * PARTS_N), n = part / PARTS_M % PARTS_N * PART_N, m = part % PARTS_M * PART_M;
      const E* from = (const E*)in + b * D::in_b + m * D::in_m + n;
      E* to = (E*)out + b * D::out_b + n * D::out_n + m;
      const long rows = min_of(PART_M, D::M - m), cols = min_of(PART_N, D::N - n);
      if constexpr (D::M <= 4) {  // a few planes: interleave them element by element, all sizes known
        for (long c = 0; c < cols; c++)
          for (long r = 0; r < D::M; r++) to[c * D::out_n + r] = from[r * D::in_m + c];
      } else {
        transpose_part<E>(from, D::in_m, to, D::out_n, rows, cols);
      }
    }
  }
}

}  // namespace npu
