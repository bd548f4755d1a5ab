// Elementary functions on lane vectors of floats for every instruction set but AVX-512 (elementary_avx512.h). math.h
// includes this.
#pragma once

namespace npu {

// ---------------------------------------------------------------------------------------------- exponentials
NPU_INLINE vf exp(vf x) {
  Reduced r = reduce_ln2(clamp_keep_nan(x, -104.f, 89.f));
  Exponential e = exp_parts(r);
  return scale(e.head + e.tail, r.n, r.whole);
}

// Returns head and tail of exp(y), which must be neither above the largest float nor below exp(-104).
NPU_INLINE Exponential exp_sum(vf y) {
  Reduced r = reduce_ln2(y);
  Exponential e = exp_parts(r);
  vf head = e.head + e.tail;
  return {scale(head, r.n, r.whole), scale((e.head - head) + e.tail, r.n, r.whole)};
}

constexpr float TANH_TAIL[] = {-0x1.555552p-2f, 0x1.110e72p-3f, -0x1.b8d2p-5f, 0x1.460d44p-6f};

NPU_INLINE vf tanh(vf x) {
  vf a = abs(x), square = x * x, one = splat<vf>(1), two = splat<vf>(2);
  vf near = fma(x * square, polynomial(TANH_TAIL, square), x);
  // Far from zero: 1 - 2 / (exp(2a) + 1), which is 1 from 9.02 on.
  Exponential e = exp_sum(clamp_keep_nan(a + a, 0.5f, 20.f));
  vf d = e.head + one, d_error = ((e.head - d) + one) + e.tail;
  vf inverse = one / d, q = inverse + inverse;
  vf q_error = inverse * (fused(-q, d, two) - q * d_error);
  vf head = one - q;
  vf far = head + (((one - head) - q) - q_error);
  return copysign(select(a < 0.3f, near, far), x);
}

constexpr float ERF_NEAR[] = {0x1.06eba8p-3f, -0x1.81273ap-2f, 0x1.ce2acep-4f, -0x1.b7a75cp-6f, 0x1.4f188cp-8f,
                              -0x1.613e7cp-11f};
constexpr float ERF_FAR[] = {0x1.20e902p+0f, 0x1.456716p-1f, 0x1.b0466ap-4f, -0x1.7ae30ap-6f, 0x1.b3f40ap-9f,
                             -0x1.f9fbdap-13f, 0x1.6d8b62p-19f};

NPU_INLINE vf erf(vf x) {
  vf a = abs(x), one = splat<vf>(1);
  vf near = fma(x, polynomial(ERF_NEAR, x * x), x);
  // Far from zero: 1 - exp(-a p(a)), which is 1 from 3.92 on. The last two rounding errors of a p(a) are corrected.
  vf limited = clamp_keep_nan(a, 0.5f, 4.f), inner = polynomial(ERF_FAR, limited, 1), first = splat<vf>(ERF_FAR[0]);
  vf p = fma(limited, inner, first), p_error = fused(limited, inner, first - p);
  vf y = limited * p, y_error = fused(limited, p, -y) + limited * p_error;
  Reduced r = reduce_ln2(-y);
  r.tail -= y_error;
  Exponential e = exp_parts(r);
  vf s = pow2(r.n), q = e.head * s, head = one - q;
  vf far = head + (((one - head) - q) - e.tail * s);
  return select(a < 0.75f, near, copysign(far, x));
}

// ---------------------------------------------------------------------------------------------- logarithms
NPU_INLINE vf log(vf x) {
  Logarithm l = log_parts(x);
  return log_special(x, log_sum(l.exponent, LN2_HI, LN2_LO, l.head, l.tail));
}

// Returns the logarithm to another base, in which log(2) is hi + lo and log(e) is scale + scale_error.
NPU_INLINE vf log_base(vf x, float hi, float lo, float scale, float scale_error) {
  Logarithm l = log_parts(x);
  vf factor = splat<vf>(scale), part = l.head * factor;
  vf part_error = fused(l.head, factor, -part) + (l.head * scale_error + l.tail * scale);
  return log_special(x, log_sum(l.exponent, hi, lo, part, part_error));
}
NPU_INLINE vf log2(vf x) { return log_base(x, 1.f, 0.f, LOG2_E, 0x1.4ae0cp-26f); }
NPU_INLINE vf log10(vf x) { return log_base(x, 0x1.344p-2f, 0x1.3509f8p-18f, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f); }

// ---------------------------------------------------------------------------------------------- trigonometry
NPU_INLINE vf sin(vf x) { return sin_through_double(x); }
NPU_INLINE vf cos(vf x) { return cos_through_double(x); }
NPU_INLINE vf tan(vf x) { return tan_through_double(x); }
static NPU_NOINLINE __attribute__((unused)) vf atan(vf x) {
  return through_double([](half_vd v) NPU_HALF { return atan<false>(v); }, x);
}

}  // namespace npu
