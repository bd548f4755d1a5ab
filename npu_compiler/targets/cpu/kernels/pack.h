// Right operands of products that are computed at run time, packed into the panels that the register tile reads: by
// pack_b(), a kernel of its own, or panel by panel inside the product, if its weights are of type in_place.
#pragma once
#include "operands.h"
#include "transpose.h"

namespace npu {

// Packs `rows` of up to UNIT rows, `cols` of up to PANEL columns, into columns of UNIT elements; the rest is zero.
template <int UNIT, class T>
NPU_INLINE void pack_rows(const T* from, long stride_k, long stride_n, long rows, long cols, T* to) {
  if (rows == UNIT && cols == PANEL && stride_n == 1) {
    if constexpr (UNIT == 2 && sizeof(T) == 2) {
      typedef typename vec_of<uint16_t, 16>::type Half;
      for (long c = 0; c < PANEL; c += 16) {
        const Half even = load_bytes<Half>(from + c), odd = load_bytes<Half>(from + stride_k + c);
        store_bytes(to + 2 * c, interleave_low(even, odd));
        store_bytes(to + 2 * c + 16, interleave_high(even, odd));
      }
      return;
    }
    for (long c = 0; c < PANEL; c++)
      for (long r = 0; r < UNIT; r++) to[c * UNIT + r] = from[r * stride_k + c];
    return;
  }
  if (rows < UNIT || cols < PANEL) memset((void*)to, 0, UNIT * PANEL * sizeof(T));
  for (long r = 0; r < rows; r++)
    for (long c = 0; c < cols; c++) to[c * UNIT + r] = from[r * stride_k + c * stride_n];
}

// Packs a panel: `rows` rows and up to PANEL columns of a matrix, which are stride_k and stride_n elements apart. If
// rows are dense, units of a row are transposed in registers.
template <int UNIT, class T>
NPU_INLINE void pack_panel(const T* from, long stride_k, long stride_n, long rows, long cols, T* to) {
  typedef typename Raw<UNIT * sizeof(T)>::type E;
  long k = 0;
  if (stride_k == 1 && stride_n % UNIT == 0) {
    k = rows / UNIT * UNIT;
    if (cols < PANEL) memset((void*)to, 0, (size_t)k * PANEL * sizeof(T));
    transpose_part<E>((const E*)from, stride_n / UNIT, (E*)to, PANEL, cols, k / UNIT);
  }
  for (; k < rows; k += UNIT)
    pack_rows<UNIT>(from + k * stride_k, stride_k, stride_n, min_of(UNIT, rows - k), cols, to + k * PANEL);
}

// Packs b[k][n] (strides in elements, usually one of them 1) into panels. All threads share the work; the caller puts a
// barrier between pack_b() and gemm(). D has B, N, K and batch_b (elements).
template <class D, class T> NPU_NOINLINE void pack_b(const T* b, long stride_k, long stride_n, T* out, Thread& th) {
  constexpr int UNIT = is_same<T, int8_t>::value ? 4 : is_same<T, bf16>::value ? 2 : 1;
  constexpr long NP = ceil_div(D::N, PANEL), KP = ceil_div(D::K, UNIT) * UNIT;
  const long panels = D::B * NP;
  for (long i = panels * th.tid / th.n; i < panels * (th.tid + 1) / th.n; i++) {
    const long image = i / NP, col = i % NP * PANEL;
    pack_panel<UNIT>(b + image * D::batch_b + col * stride_n, stride_k, stride_n, D::K, min_of(PANEL, D::N - col),
                     out + i * KP * PANEL);
  }
}

// An element of a right operand [K][N] that is not packed, whose rows and columns are SK and SN elements apart.
template <class T, long K, long SK, long SN> struct in_place { T element; };

// Its storage: a panel is its first column, and is packed into the buffer that formats are unpacked to.
template <class Kind, class T, long K, long SK, long SN> struct InPlace {
  static constexpr bool PLAIN = false, ODD_UNITS = true, HAS_BASE = false;
  static constexpr int UNIT_BYTES = 0, BLOCK_UNITS = 0;
  static constexpr long panel_bytes(long) { return PANEL * SN * (long)sizeof(T); }
  static constexpr bool WIDEN = is_same<T, bf16>::value && Kind::X_PER_UNIT == 1;
  static_assert(WIDEN || Kind::W_BYTES == PANEL * Kind::X_PER_UNIT * sizeof(T), "other elements are not converted");
  static NPU_NOINLINE const char* pack(const char* panel, long cols, char* buffer) {
    T* packed = (T*)buffer + (WIDEN ? K * PANEL : 0);
    pack_panel<Kind::X_PER_UNIT>((const T*)panel, SK, SN, K, cols, packed);
    if constexpr (WIDEN)
      for (long k = 0; k < K; k++) {  // the last row overwrites itself
        vf row[PANEL / VL];
        for (int v = 0; v < PANEL / VL; v++) row[v] = ld(packed + k * PANEL + v * VL, Full{});
        memcpy(buffer + k * Kind::W_BYTES, row, sizeof row);
      }
    return buffer;
  }
};
template <class Kind, class T, long K, long SK, long SN> constexpr bool packs<InPlace<Kind, T, K, SK, SN>> = true;

template <class TX, class T, long K, long SK, long SN>
struct Operands<TX, in_place<T, K, SK, SN>> : Operands<TX, T> {
  using Stored = InPlace<typename Operands<TX, T>::Kind, T, K, SK, SN>;
};

}  // namespace npu
