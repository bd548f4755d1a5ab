// Operand kinds: how x stored as TX is multiplied by weights stored as TW. bf16 are multiplied in pairs, double as double,
// all other types as float. A weight format has a storage for either kind of operand.
#pragma once
#include "tile.h"

namespace npu {

template <class TX, class TW> struct Operands {
  static_assert(!is_same<TW, bf16>::value, "bf16 weights need bf16 activations");
  using Kind = F32;
  using Stored = Plain<F32>;
  static constexpr bool WIDEN = !is_same<TX, float>::value;
  static constexpr int SEGMENT = SEGMENT_F32;
};
template <class TX> struct Operands<TX, f16> {
  using Kind = F16W;
  using Stored = Plain<F16W>;
  static constexpr bool WIDEN = !is_same<TX, float>::value;
  static constexpr int SEGMENT = WIDEN ? SEGMENT_16 : SEGMENT_F32;
};
struct PairOperands {
  using Kind = BF16P;
  using Stored = Plain<BF16P>;
  static constexpr bool WIDEN = false;
  static constexpr int SEGMENT = SEGMENT_16;
};
#if NPU_BF16_DOT && !NPU_SLOW_BF16_DOT
template <> struct Operands<bf16, bf16> : PairOperands {};
#else
// Panels of pairs as floats, for CPUs that multiply pairs more slowly than floats.
struct bf16_pairs {
  static constexpr int BLOCK = 0, HEAD_BYTES = 0, K_BYTES = PANEL * 2;
  static constexpr long panel_bytes(long k) { return ceil_div(k, 2) * 2 * K_BYTES; }
  NPU_INLINE vf value(const char* panel, long k, int v) {
    const vi32 pair = load_bytes<vi32>(panel + k / 2 * 2 * K_BYTES + v * VL * 4);
    return (vf)(k % 2 ? pair & (int32_t)0xffff0000 : pair << 16);
  }
};
template <> struct Operands<bf16, bf16> {
  using Kind = BF16F;
  using Stored = Values<bf16_pairs, BF16F>;
  static constexpr bool WIDEN = true;
  static constexpr int SEGMENT = SEGMENT_16;
};
#endif
template <> struct Operands<double, double> {
  using Kind = F64;
  using Stored = Plain<F64>;
  static constexpr bool WIDEN = false;
  static constexpr int SEGMENT = SEGMENT_F32;
};
template <> struct Operands<uint8_t, int8_t> {
#if NPU_INT8_DOT
  using Kind = U8S8;
#else
  using Kind = U8S8W;
#endif
  using Stored = Plain<Kind>;
  static constexpr bool WIDEN = !NPU_INT8_DOT;
  static constexpr int SEGMENT = SEGMENT_16;
};
template <class TX, class Format> struct Operands<TX, stored<Format>> : Operands<TX, float> {
  using Stored = typename Format::template Storage<F32>;
};
#if NPU_BF16_DOT
template <class Format> struct Operands<bf16, stored<Format>> : PairOperands {
  using Stored = typename Format::template Storage<BF16P>;
};
#else
// How rows of bf16 are multiplied by weights in a format.
template <class Format, class = void> struct BF16Rows { using Kind = BF16F; };
template <class Format> struct Operands<bf16, stored<Format>> {
  using Kind = typename BF16Rows<Format>::Kind;
  using Stored = typename Format::template Storage<Kind>;
  static constexpr bool WIDEN = true;
  static constexpr int SEGMENT = SEGMENT_16;
};
#endif

// Bytes of a panel of weights stored as TW for operands stored as TX, with k elements of the reduced dim.
template <class TX, class TW> constexpr long panel_bytes(long k) {
  return Operands<TX, TW>::Stored::panel_bytes(ceil_div(k, Operands<TX, TW>::Kind::X_PER_UNIT));
}

// Copies n elements as units: widened to float, or as bf16 or uint8 with zeros appended up to a whole unit.
template <class Kind, class TX> NPU_INLINE void copy_units(char* out, const TX* x, long n) {
  if constexpr (is_same<Kind, BF16P>::value) {
    memcpy(out, x, (size_t)n * 2);
    if (n % 2) memset(out + n * 2, 0, 2);
  } else if constexpr (is_same<Kind, U8S8>::value) {
    memcpy(out, x, (size_t)n);
    if (n % 4) memset(out + n, 0, (size_t)(4 - n % 4));
  } else if constexpr (Kind::INTEGERS) {
    long i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
      typename vec_of<uint8_t, 2 * VL>::type bytes;
      memcpy(&bytes, x + i, sizeof bytes);
      store_bytes(out + 2 * i, __builtin_convertvector(bytes, typename vec_of<uint16_t, 2 * VL>::type));
    }
    for (; i < n; i++) ((uint16_t*)out)[i] = x[i];
    if (n % 4) memset(out + 2 * n, 0, (size_t)(8 - n % 4 * 2));
  } else if constexpr (Kind::WHOLE_BLOCKS) {
    Kind::write(out, x, n);
  } else if constexpr (is_same<TX, typename Kind::Sum>::value) {
    memcpy(out, x, (size_t)n * sizeof *x);
  } else {
    long i = 0;
    for (; i + VL <= n; i += VL) st((float*)out + i, ld(x + i, Full{}), Full{});
    if (i < n) st((float*)out + i, ld(x + i, (int)(n - i)), (int)(n - i));
  }
}

}  // namespace npu
