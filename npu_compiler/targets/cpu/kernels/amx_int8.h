// Products of uint8 by int8 on AMX tiles (`tdpbusd`). A unit has four bytes of each operand, as many as a pair of bf16,
// and a panel of int8 weights is two B tiles in VNNI order as well. The plans for bf16 therefore serve them: two uint8
// take the place of one bf16, so a row has half as many elements.
#pragma once
#include "amx_blocked.h"

#if NPU_AMX
namespace npu {

// Sizes in pairs of bytes.
template <class D> struct GemmInPairs : D {
  static constexpr long K = D::K / 2, lda = D::lda / 2, batch_a = D::batch_a / 2;
};
template <class D> struct ConvInPairs : D { static constexpr long C = D::C / 2; };

template <class Plan> struct Integers : Plan {};
template <class Plan> constexpr bool amx_integers<Integers<Plan>> = true;

template <class TX, class TW> constexpr bool are_bytes = is_same<TX, uint8_t>::value && is_same<TW, int8_t>::value;

// Whether a product of bytes runs on tiles; of few rows, vectors read the weights as fast.
template <class D, class TA, class TW> constexpr bool gemm_of_bytes() {
  return are_bytes<TA, TW> && D::M > 4 && D::K % 2 == 0 && D::lda % 2 == 0 && D::batch_a % 2 == 0 && !D::dual;
}
// The rows of filters that are rows of bytes (BYTE_ROWS in conv.h) have no layout in pairs.
template <class D, class TX, class TW> constexpr bool conv2d_of_bytes() {
  constexpr long CG = D::C / D::G;
  return are_bytes<TX, TW> && D::N * D::OH * D::OW > 4 && (CG % 4 == 0 || (CG % 2 == 0 && (D::G > 1 || D::dil_w > 1)));
}

}  // namespace npu
#endif
