// Products and convolutions of half and float numbers on AMX tiles, which multiply bfloat16 only.
//
// A number is the exact sum of P limbs of 8 bits: half of two, float of three. A product of two numbers is the sum of
// the products of their limbs, of which those below the last bit are left out: 3 of 4 for half, 6 of 9 for float
// (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision
// Computations", 2019).
//
// The reduced dim is in groups of 32 elements, the last one with zeros; each step of a tile is one group. A group has
// its limbs one after the other, in copied rows and pixels and unpacked panels. The order of its elements is free if
// both operands have the same: a unit is the pair (u, u + 16), as two vectors make 16 such units without a shuffle.
// A block or panel with an infinity or NaN is computed with floats, because an infinity times a limb that is zero is
// NaN. Limbs below the smallest normal number count as zero.
#pragma once
#include "amx_blocked.h"

#if NPU_AMX
namespace npu {

template <class T> constexpr int limbs_of() { return is_same<T, f16>::value ? 2 : 3; }

// Returns the next limb of v in the upper 16 bits of each lane, and subtracts it unless it is the last. The rest of an
// infinity or NaN is NaN, or 0 if SPECIAL. Half numbers are rounded, which halves the product that is left out; float
// numbers, whose largest would become infinite, are cut off.
template <class T, bool SPECIAL> NPU_INLINE vi32 take_limb(vf& v, bool last) {
  vi32 limb = (vi32)v;
  if (last) return limb;
  if (SPECIAL) limb = select(v != v, splat<vi32>(0x7fc00000), limb);
  if (is_same<T, f16>::value) limb += 0x7fff;
  limb &= (int32_t)0xffff0000;
  v -= (vf)limb;
  if (SPECIAL) v = select(v == v, v, vf{});
  return limb;
}

// Splits the elements of two vectors into units whose limbs are `limb` bytes apart. `spoiled` becomes NaN in lanes
// with an infinity or NaN unless SPECIAL.
template <class T, bool SPECIAL> NPU_INLINE void split_pairs(vf low, vf high, char* out, long limb, vf& spoiled) {
  constexpr int P = limbs_of<T>();
#pragma GCC unroll 3
  for (int p = 0; p < P; p++) {
    const vi32 a = take_limb<T, SPECIAL>(low, p == P - 1), b = take_limb<T, SPECIAL>(high, p == P - 1);
    store_bytes(out + p * limb, (a >> 16 & 0xffff) | (b & (int32_t)0xffff0000));
  }
  spoiled = fma(low, vf{}, fma(high, vf{}, spoiled));
}

constexpr long SPLIT_GROUP = 2 * AMX_UNITS;  // elements
constexpr long split_groups(long n) { return ceil_div(n, SPLIT_GROUP); }

// Splits n elements, which become whole groups.
template <class T, bool SPECIAL> NPU_INLINE void split_row(const T* x, long n, char* out, vf& spoiled) {
  long i = 0;
  for (; i + SPLIT_GROUP <= n; i += SPLIT_GROUP, out += limbs_of<T>() * AMX_X_LIMB)
    for (int v = 0; v < AMX_UNITS; v += VL)
      split_pairs<T, SPECIAL>(ld(x + i + v, Full{}), ld(x + i + AMX_UNITS + v, Full{}), out + v * 4, AMX_X_LIMB,
                              spoiled);
  if (i == n) return;
  for (int v = 0; v < AMX_UNITS; v += VL) {
    auto lanes = [&](long at) { return (int)max_of(0, min_of(VL, n - at)); };
    const vf low = ld(x + i + v, lanes(i + v)), high = ld(x + i + AMX_UNITS + v, lanes(i + AMX_UNITS + v));
    split_pairs<T, SPECIAL>(low, high, out + v * 4, AMX_X_LIMB, spoiled);
  }
}

template <bool S> struct Special { static constexpr bool value = S; };

// Calls split(special, spoiled) for finite operands; again for operands of any kind if there was an infinity or NaN.
// Returns whether all are finite.
template <class Split> NPU_INLINE bool split_finite(Split split) {
  vf spoiled = {};
  split(Special<false>{}, spoiled);
  if (!any(spoiled != spoiled)) return true;
  split(Special<true>{}, spoiled);
  return false;
}

// Storage of weights [TAPS][C][32] that are unpacked into units [TAPS][group][limb][16][32][2].
template <class T, long TAPS, long C> struct SplitPanel {
  static constexpr bool PLAIN = false;
  static constexpr int BLOCK_UNITS = 0;
  static constexpr long BYTES = TAPS * C * PANEL * (long)sizeof(T), UNIT_BYTES = 2 * PANEL * (long)sizeof(T);
  static constexpr long panel_bytes(long) { return BYTES; }
  NPU_INLINE const char* at(const char* panel, long unit) { return panel + unit * UNIT_BYTES; }
  static constexpr long UNITS = TAPS * split_groups(C) * AMX_UNITS;
  // Splits a panel; returns whether all weights are finite.
  static NPU_NOINLINE bool split(const char* panel, char* out) {
    return split_finite([&](auto special, vf& spoiled) {
      split_units<special.value>(panel, 0, UNITS, out, spoiled);
    });
  }
  // Splits units first .. first + n of a panel into `out`, which holds all of them.
  template <bool SPECIAL>
  static NPU_NOINLINE void split_units(const char* panel, long first, long n, char* out, vf& spoiled) {
    vf bad = spoiled;
    for (long unit = first; unit < first + n; unit++) {
      const long group = unit / AMX_UNITS, u = unit % AMX_UNITS, c = group % split_groups(C) * SPLIT_GROUP + u;
      const T* w = (const T*)panel + (group / split_groups(C) * C + c) * PANEL;
      char* to = out + group * limbs_of<T>() * AMX_W_LIMB + u * BF16P::W_BYTES;
      const bool low = c < C, high = c + AMX_UNITS < C;
      for (int v = 0; v < PANEL; v += VL)
        split_pairs<T, SPECIAL>(low ? ld(w + v, Full{}) : vf{}, high ? ld(w + AMX_UNITS * PANEL + v, Full{}) : vf{},
                                to + v * 4, AMX_W_LIMB, bad);
    }
    spoiled = bad;
  }
};

// Weights that were split when the program was loaded (npu_compiler/weights/packing.py): a panel has the units of a
// SplitPanel, and then a line whose first number is 1 if a weight is an infinity or NaN, else 0.
template <class T> struct limbs;
template <class T, long TAPS, long C> struct SplitPanel<limbs<T>, TAPS, C> {
  static constexpr bool PLAIN = true;
  static constexpr int BLOCK_UNITS = 0;
  static constexpr long UNIT_BYTES = limbs_of<T>() * BF16P::W_BYTES, LINE = 64;
  static constexpr long UNITS = TAPS * split_groups(C) * AMX_UNITS, BYTES = UNITS * UNIT_BYTES + LINE;
  static constexpr long panel_bytes(long) { return BYTES; }
  NPU_INLINE const char* at(const char* panel, long unit) { return panel + unit * UNIT_BYTES; }
  NPU_INLINE const char* unpack(const char* panel, long, long first, long, char*) { return at(panel, first); }
  NPU_INLINE bool finite(const char* panel) {
    uint16_t special;
    memcpy(&special, at(panel, UNITS), 2);
    return special == 0;
  }
};

// Splits a share of the weights of a panel, or of two panels.
template <class Plan> NPU_NOINLINE void amx_split(AmxSplit& a) {
  using Stored = typename Plan::Stored;
  constexpr long BUFFER = AmxScratch<Plan>::UNPACKED;
  vf spoiled = load_bytes<vf>(a.spoiled);
  if (a.next == 0) spoiled = vf{};
  for (long n = min_of(a.share, a.count - a.next); n > 0;) {
    const long product = a.next / a.units, first = a.next % a.units, some = min_of(n, a.units - first);
    const char* panel = a.panel + product * Stored::BYTES;
    Stored::template split_units<false>(panel, first, some, a.to + product * BUFFER, spoiled);
    a.next += some, n -= some;
  }
  store_bytes(a.spoiled, spoiled);
  if (a.next < a.count) return;
  a.finite = !any(spoiled != spoiled);
  for (long p = 0; p <= Plan::DUAL && !a.finite; p++)
    Stored::template split_units<true>(a.panel + p * Stored::BYTES, 0, a.units, a.to + p * BUFFER, spoiled);
}

// Whether a product of x and weights stored as TX and TW has limbs.
template <class TX, class TW> constexpr bool has_limbs() {
  return is_same<TX, TW>::value && (is_same<TX, float>::value || is_same<TX, f16>::value);
}

// Cycles of one core, measured: the vector kernels multiply 32 weights in 1.25; two threads copy each block.
template <class Plan, class T> constexpr bool limbs_are_faster(long rows, long k) {
  if (Plan::COPY_BYTES + AmxScratch<Plan>::UNPACKED > 2 << 20) return false;  // an L2 cache
  const double blocks = (double)Plan::IMAGES * Plan::BLOCKS, copies = Plan::PG < Plan::NP ? 2 : 1;
  constexpr int PRODUCTS = AmxLimbs<Plan::LIMBS>::COUNT;
  const double multiply = 48.0 * Plan::TILES * Plan::NTAPS * Plan::STEPS.count * PRODUCTS * Plan::NP;
  const double split = 50.0 * k * Plan::NP + copies * (double)Plan::COPY_BYTES / 8;
  return blocks * (multiply + split) < 1.25 * 0.95 * (double)Plan::IMAGES * rows * Plan::NP * k;
}

// The sums of a tile in float arithmetic: acc[AMX_ROWS][PANEL] of positions from x on. `panel`: as unpacked.
template <class Plan>
NPU_NOINLINE void multiply_as_floats(const char* x, const AmxTap* taps, const char* panel, float* acc) {
  constexpr long P = Plan::LIMBS, GROUPS = Plan::STEPS.count;
  for (long row = 0; row < AMX_ROWS; row++, x += Plan::PITCH, acc += PANEL)
    for (int v = 0; v < PANEL; v += VL) {
      vf sum = {};
      for (long g = 0; g < Plan::NTAPS * GROUPS; g++)
        for (long e = 0; e < SPLIT_GROUP; e++) {
          const char* from = x + taps[g / GROUPS].x + g % GROUPS * P * AMX_X_LIMB + e * 2;
          const char* unit = panel + g * P * AMX_W_LIMB + e / 2 * BF16P::W_BYTES + v * 4;
          float number = 0;
          vf weights = {};
          for (long p = 0; p < P; p++, from += AMX_X_LIMB, unit += AMX_W_LIMB) {
            uint16_t bits;
            memcpy(&bits, from, 2);
            number += bf16_to_float(bits);
            const vi32 words = load_bytes<vi32>(unit);
            weights += (vf)(e % 2 ? words & (int32_t)0xffff0000 : words << 16);
          }
          sum = fma(splat<vf>(number), weights, sum);
        }
      store_bytes(acc + v, sum);
    }
}

// The plans are those of a product of bfloat16 rows, or pixels, that hold all limbs.
template <class D, int P> struct LimbRows : D {
  static constexpr long K = P * split_groups(D::K) * SPLIT_GROUP, lda = K;
};
template <class D, class TW> struct CopiedRows {
  static constexpr bool COPY = true;
  static constexpr long QUANTUM = 12 * AMX_ROWS;  // each block splits its weights again
};
template <class D, class T> struct CopiedRows<D, limbs<T>> {
  static constexpr bool COPY = true;
  static constexpr long QUANTUM = (D::M >= 32 * AMX_ROWS ? 2 : 1) * AMX_ROWS;
};
// Source::at(a, image, row): the address of a row of A.
template <class D> struct MatrixRow {
  template <class T> static const T* at(const T* a, long image, long row) {
    return a + image * D::batch_a + row * D::lda;
  }
};
template <class D, class T, template <class, class, class> class Base, class Source = MatrixRow<D>, class TW = T>
struct LimbGemmPlan : Base<LimbRows<D, limbs_of<T>()>, bf16, CopiedRows<D, TW>> {
  using Rows = Base<LimbRows<D, limbs_of<T>()>, bf16, CopiedRows<D, TW>>;
  using Stored = SplitPanel<TW, 1, D::K>;
  static constexpr int LIMBS = limbs_of<T>(), PART = AMX_PART;
  static constexpr AmxSteps STEPS = {AMX_UNITS, split_groups(D::K), false};
  static constexpr long UNITS = STEPS.count * AMX_UNITS, SLICES = 1, SLICE = STEPS.count;
  static constexpr long W_IMAGE_BYTES = D::shared_w ? 0 : Rows::NP * (1 + D::dual) * Stored::BYTES;
  // Copies the limbs of a block's rows; returns whether all are finite.
  static bool split(const T* a, long image, long block, char* copy) {
    const long first = block * Rows::Q, rows = min_of(Rows::Q, D::M - first);
    return split_finite([&](auto special, vf& spoiled) {
      split_rows<special.value>(a, image, first, rows, copy, spoiled);
    });
  }
  template <bool SPECIAL>
  static NPU_NOINLINE void split_rows(const T* a, long image, long first, long rows, char* out, vf& spoiled) {
    vf bad = spoiled;
    for (long q = first; q < first + rows; q++, out += Rows::PITCH)
      split_row<T, SPECIAL>(Source::at(a, image, q), D::K, out, bad);
    spoiled = bad;
  }
};

template <class D, int P> struct LimbPixels : D {
  static constexpr long C = P * split_groups(D::C) * SPLIT_GROUP;
};
template <class D, class T, template <class, class> class Base, class TW = T>
struct LimbConvPlan : Base<LimbPixels<D, limbs_of<T>()>, bf16> {
  using Image = Base<LimbPixels<D, limbs_of<T>()>, bf16>;
  static constexpr int LIMBS = limbs_of<T>(), NTAPS = (int)(D::R * D::S);
  // Of few taps, libraries have short chains of additions (conv_segment()).
  static constexpr int PART = NTAPS <= 3 ? AMX_PART / 2 : AMX_PART;
  using Stored = SplitPanel<TW, NTAPS, D::C>;
  static constexpr AmxSteps STEPS = {AMX_UNITS, split_groups(D::C), false};
  static constexpr long UNITS = NTAPS * STEPS.count * AMX_UNITS, SLICES = 1, SLICE = STEPS.count;
  static void tap_offsets(AmxTap* taps) {
    for (long t = 0; t < NTAPS; t++)
      taps[t] = {(t / D::S * D::dil_h * Image::WIDTH + t % D::S * D::dil_w) * Image::PIXEL, t};
  }
  static bool split(const T* x, long, long block, char* copy) {
    const auto b = Image::block_of(block);
    const long first = b.row * D::stride_h - D::pad_t, rows = (b.rows - 1) * D::stride_h + (D::R - 1) * D::dil_h + 1;
    return split_finite([&](auto special, vf& spoiled) {
      for (long n = 0; n < b.images; n++)
        split_pixels<special.value>(x + (b.image + n) * D::H * D::W * D::C, first, rows, copy + n * Image::IMAGE_BYTES,
                                    spoiled);
    });
  }
  template <bool SPECIAL>
  static NPU_NOINLINE void split_pixels(const T* image, long first, long rows, char* to, vf& spoiled) {
    vf bad = spoiled;
    for (long r = first; r < first + rows; r++)
      for (long c = -D::pad_l; c < Image::WIDTH - D::pad_l; c++, to += Image::PIXEL) {
        const bool inside = r >= 0 && r < D::H && c >= 0 && c < D::W;
        if (inside) split_row<T, SPECIAL>(image + (r * D::W + c) * D::C, D::C, to, bad);
        else memset(to, 0, (size_t)(LIMBS * STEPS.count * AMX_X_LIMB));
      }
    spoiled = bad;
  }
};

}  // namespace npu
#endif
