// asin and acos on lane vectors of floats, within 0.7 ulp. Subnormals, NaN and signed zeros behave as in C.
#pragma once
#include "elementary.h"

namespace npu {

constexpr float ASIN_TAIL[] = {0x1.5555c8p-3f, 0x1.330204p-4f, 0x1.747bb8p-5f, 0x1.8c3e58p-6f, 0x1.595c4ep-5f};
constexpr float PI_2_F = 0x1.921fb6p+0f, PI_2_REST_F = -0x1.777a5cp-25f;

// asin(x) = t + t^3 P(t^2) for |x| <= 1/2; further out pi/2 - 2 asin(sqrt((1 - |x|) / 2)). `rest` is what t lacks.
struct FloatArcSine { vf t, rest; vi32 far; };
NPU_INLINE FloatArcSine float_arc_sine(vf x) {
  const vf a = abs(x), half = splat<vf>(0.5f);
  const vi32 far = a > half;
  const vf z = select(far, half - half * a, a * a), root = sqrt(z), t = select(far, root, a);
#if NPU_AVX512
  const vf inverse = (vf)_mm512_rsqrt14_ps((__m512)z);
#else
  const vf inverse = 1.f / root;
#endif
  const vf root_rest = fused(-root, root, z) * (half * inverse);  // a step of Newton's method
  return {t, t * z * polynomial(ASIN_TAIL, z) + select(far & (z > vf{}), root_rest, vf{}), far};
}

// base - x, where |base| >= |x| and the rests of both count.
NPU_INLINE vf difference(vf base, vf base_rest, vf x, vf x_rest) {
  const vf head = base - x, lost = (base - head) - x;
  return head + (lost + (base_rest - x_rest));
}
NPU_INLINE vf asin(vf x) {
  const FloatArcSine s = float_arc_sine(x);
  const vf outer = difference(splat<vf>(PI_2_F), splat<vf>(PI_2_REST_F), s.t + s.t, s.rest + s.rest);
  return copysign(select(s.far, outer, s.t + s.rest), x);
}
NPU_INLINE vf acos(vf x) {
  const FloatArcSine s = float_arc_sine(x);
  const vf base = splat<vf>(PI_2_F), rest = splat<vf>(PI_2_REST_F), twice = s.t + s.t, twice_rest = s.rest + s.rest;
  const vf y = difference(select(s.far, base + base, base), select(s.far, rest + rest, rest),
                          select(s.far, twice, x), select(s.far, twice_rest, copysign(s.rest, x)));
  return select(s.far & (x > vf{}), twice + twice_rest, y);
}

}  // namespace npu
