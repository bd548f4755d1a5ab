// Trigonometric functions on half lane vectors of doubles, and their inverses. Accuracy and FULL are those of double.h.
#pragma once
#include "double.h"

namespace npu {

constexpr double SIN_TAIL_D[] = {-0x1.5555555555548p-3, 0x1.111111110f73p-7, -0x1.a01a019be921cp-13,
                                 0x1.71de35552bb8p-19, -0x1.ae5e4b844587ep-26, 0x1.5d8b55b73a0dap-33};
constexpr double COS_TAIL_D[] = {0x1.555555555554bp-5, -0x1.6c16c16c15014p-10, 0x1.a01a019c8ef7dp-16,
                                 -0x1.27e4f7f163eaep-22, 0x1.1ee9dba8b7bddp-29, -0x1.8fa66d52c7293p-37};
constexpr double TWO_OVER_PI = 0x1.45f306dc9c883p-1;
// pi/2 in three parts; the first two have 33 bits, so that their products with a multiple below 2^20 are exact.
constexpr double PIO2_1 = 0x1.921fb54400000p+0, PIO2_2 = 0x1.0b4611a600000p-34, PIO2_3 = 0x1.3198a2e037073p-69;
constexpr double TURN_LIMIT = 0x1p20;  // the argument reduction loses accuracy beyond it

// x = n pi/2 + head + tail with |head| <= pi/4, for |x| <= TURN_LIMIT; sine and cosine of head + tail.
struct Turn { HeadTail sine, cosine; half_vi64 n; };
NPU_INLINE Turn turn(half_vd x) {
  half_vd n;
  half_vi64 quarter = nearest_int(x * TWO_OVER_PI, &n);
  half_vd a = x - n * PIO2_1, b = n * PIO2_2;
  half_vd r = a - b, a_part = r + b, b_part = a_part - r;  // Knuth's two-sum
  half_vd low = ((a - a_part) + (b_part - b)) - n * PIO2_3;
  half_vd head = r + low, tail = (r - head) + low;
  half_vd z = head * head, half = 0.5 * z;
  HeadTail sine = fast_sum(head, head * z * polynomial(SIN_TAIL_D, z) + tail * (1.0 - half));
  half_vd one = 1.0 - half;
  HeadTail cosine = fast_sum(one, ((1.0 - one) - half) + (z * z * polynomial(COS_TAIL_D, z) - head * tail));
  return {sine, cosine, quarter};
}
NPU_INLINE half_vd sine_of(const Turn& t, half_vi64 n) {  // of t with n in place of t.n
  half_vd y = choose((n & 1) != 0, t.cosine.hi, t.sine.hi);
  return (half_vd)((half_vi64)y ^ ((n & 2) << 62));
}
NPU_INLINE half_vd sin(half_vd x) {
  Turn t = turn(x);
  return choose(x == 0.0, x, sine_of(t, t.n));
}
NPU_INLINE half_vd cos(half_vd x) {
  Turn t = turn(x);
  return sine_of(t, t.n + 1);
}
template <bool FULL = true> NPU_INLINE half_vd tan(half_vd x) {
  Turn t = turn(x);
  half_vi64 odd = (t.n & 1) != 0;
  HeadTail over = {choose(odd, -t.cosine.hi, t.sine.hi), choose(odd, -t.cosine.lo, t.sine.lo)};
  HeadTail under = {choose(odd, t.sine.hi, t.cosine.hi), choose(odd, t.sine.lo, t.cosine.lo)};
  return choose(x == 0.0, x, FULL ? quotient(over, under) : over.hi / under.hi);
}

constexpr double ATAN_TAIL_D[] = {-0x1.555555555554dp-2, 0x1.9999999998c65p-3, -0x1.249249245769bp-3,
                                  0x1.c71c71b650d88p-4, -0x1.745d15d2cbd75p-4, 0x1.3b139bec408ddp-4,
                                  -0x1.1110335a58bfcp-4, 0x1.e1d4928792ae3p-5, -0x1.aeda86b22c571p-5,
                                  0x1.84b50c45e9718p-5, -0x1.5f26323bffbe3p-5, 0x1.3908e2ae7996ep-5,
                                  -0x1.0c9c0d8fcb64p-5, 0x1.ac8e4e6fdb6f3p-6, -0x1.3111de5ead159p-6,
                                  0x1.730454511d06cp-7, -0x1.7004d3abd5084p-8, 0x1.1a34c857f1f1dp-9,
                                  -0x1.371918c3b2c27p-11, 0x1.b412d12a70c9ap-14, -0x1.22b016ee99787p-17};
constexpr double ATAN_TAIL_F[] = {-0x1.5555510444107p-2, 0x1.9997e03664dbfp-3, -0x1.2473739c470f5p-3,
                                  0x1.c4f1e24c532e2p-4, -0x1.68e70235eb55cp-4, 0x1.1422d3bde3d8bp-4,
                                  -0x1.6e19cea1b82fp-5, 0x1.714b7aa0e6926p-6, -0x1.df97dcdd26b7ap-8,
                                  0x1.23f9edaf74fe4p-10};
constexpr double PI_2_HI = 0x1.921fb54442d18p+0, PI_2_LO = 0x1.1a62633145c07p-54;

// Returns atan(low / high) for 0 <= low and 0 <= high, or pi/2 minus it where `swapped`.
template <bool FULL> NPU_INLINE half_vd atan_of_ratio(half_vd low, half_vd high, half_vi64 swapped) {
  half_vd t = low / high, z = t * t;
  half_vd rest = t * z * polynomial<FULL>(ATAN_TAIL_D, ATAN_TAIL_F, z);
  if constexpr (FULL) {  // what the division lost
    half_vd lost = fused(-t, high, low) / high;
    rest += choose(high < INFINITY_D, lost / (1.0 + z), half_vd{});
  }
  return choose(swapped, PI_2_HI - (t + (rest - PI_2_LO)), t + rest);
}
template <bool FULL = true> NPU_INLINE half_vd atan(half_vd x) {
  half_vd a = abs(x);
  half_vi64 large = a > 1.0;
  return copysign(atan_of_ratio<FULL>(choose(large, splat_d(1.0), a), choose(large, a, splat_d(1.0)), large), x);
}
template <bool FULL = true> NPU_INLINE half_vd atan2(half_vd y, half_vd x) {
  half_vd a = abs(y), b = abs(x), one = splat_d(1.0), zero{};
  half_vi64 swapped = a > b;
  half_vd low = choose(swapped, b, a), high = choose(swapped, a, b);
  half_vi64 equal = low == high;  // two zeros or two infinities have no quotient
  low = choose(equal, choose(high == zero, zero, one), low);
  high = choose(equal, one, high);
  half_vd angle = atan_of_ratio<FULL>(low, high, swapped);
  angle = choose((half_vi64)x < 0, 2 * PI_2_HI - (angle - 2 * PI_2_LO), angle);
  return copysign(choose((x == x) & (y == y), angle, x + y), y);
}

constexpr double ASIN_TAIL_D[] = {0x1.5555555555577p-3, 0x1.333333332e132p-4, 0x1.6db6db72125ap-5,
                                  0x1.f1c71a94f7e84p-6, 0x1.6e8bdedfbe4bap-6, 0x1.1c49f0655b7eap-6,
                                  0x1.ca1f8cad3451dp-7, 0x1.75858fcc33397p-7, 0x1.613c698aef112p-7,
                                  0x1.e5f7ac0bfdb52p-9, 0x1.639bc20ceeec8p-6, -0x1.57fc71db652cdp-6,
                                  0x1.0b4664231d045p-5};
// asin(x) = t + t^3 P(t^2) for |x| <= 1/2; further out pi/2 - 2 asin(sqrt((1 - |x|) / 2)).
struct ArcSine { half_vd t, rest; half_vi64 far; };
NPU_INLINE ArcSine arc_sine(half_vd x) {
  half_vd a = abs(x);
  half_vi64 far = a > 0.5;
  half_vd z = choose(far, 0.5 - 0.5 * a, a * a), root = sqrt(z), t = choose(far, root, a);
  half_vd rest = t * z * polynomial(ASIN_TAIL_D, z);
  rest += choose(far & (z > 0.0), fused(-root, root, z) / (root + root), half_vd{});
  return {t, rest, far};
}
NPU_INLINE half_vd asin(half_vd x) {
  ArcSine s = arc_sine(x);
  half_vd outer = PI_2_HI - (2.0 * s.t + (2.0 * s.rest - PI_2_LO));
  return copysign(choose(s.far, outer, s.t + s.rest), x);
}
NPU_INLINE half_vd acos(half_vd x) {
  ArcSine s = arc_sine(x);
  half_vi64 negative = x < 0.0;
  half_vd twice = 2.0 * (s.t + s.rest);
  half_vd signed_t = choose(negative, -s.t, s.t), signed_rest = choose(negative, -s.rest, s.rest);
  half_vd inner = PI_2_HI - (signed_t + (signed_rest - PI_2_LO));
  return choose(s.far, choose(negative, 2 * PI_2_HI - (twice - 2 * PI_2_LO), twice), inner);
}

}  // namespace npu
