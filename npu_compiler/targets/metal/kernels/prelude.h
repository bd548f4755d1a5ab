// The SIMT vocabulary in the Metal Shading Language (3.1 or newer, for bfloat; COHERENT and is_last: 3.2). Compile with mathMode safe, because NaN
// and infinities are meaningful. Names of Metal's own library are qualified with metal::, so that they do not hide
// ours.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>

typedef uchar bool8;
typedef half f16;
typedef bfloat bf16;

#define DEVICE device
#define COHERENT coherent(device) device
#define SMEM threadgroup
#define THREAD thread
#define CONSTANT constant
#define CONSTANTS static constant constexpr const
#define ASSUME(condition)
#define INLINE inline

INLINE float f32_of_bits(uint u) { return as_type<float>(u); }
INLINE uint bits_of_f32(float x) { return as_type<uint>(x); }
INLINE f16 f16_of_bits(uint16_t u) { return as_type<f16>(u); }
INLINE float to_f32(f16 x) { return (float)x; }
INLINE float to_f32(bf16 x) { return (float)x; }
INLINE f16 to_f16(float x) { return (f16)x; }
INLINE bf16 to_bf16(float x) { return (bf16)x; }

INLINE float subgroup_xor(float x, int mask) { return metal::simd_shuffle_xor(x, (ushort)mask); }
INLINE int subgroup_xor(int x, int mask) { return metal::simd_shuffle_xor(x, (ushort)mask); }
INLINE float subgroup_sum(float x) { return metal::simd_sum(x); }
INLINE void subgroup_barrier() { metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup); }
INLINE void barrier() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }
INLINE void device_barrier() {
  metal::threadgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup);
}
INLINE void set_flag(DEVICE int* flag) {
  metal::atomic_store_explicit((DEVICE metal::atomic_int*)flag, 1, metal::memory_order_relaxed);
}
INLINE int atomic_load(DEVICE int* p) {
  return metal::atomic_load_explicit((DEVICE metal::atomic_int*)p, metal::memory_order_relaxed);
}
INLINE void atomic_max(DEVICE int* p, int x) {
  metal::atomic_fetch_max_explicit((DEVICE metal::atomic_int*)p, x, metal::memory_order_relaxed);
}
INLINE void atomic_add(DEVICE int* p, int x) {
  metal::atomic_fetch_add_explicit((DEVICE metal::atomic_int*)p, x, metal::memory_order_relaxed);
}
// Adds the words one after the other, the high one with the carry of the low one: the sum of all additions is exact.
INLINE void atomic_add(DEVICE int64_t* p, int64_t x) {
  DEVICE metal::atomic_uint* const words = (DEVICE metal::atomic_uint*)p;
  const uint low = (uint)x, before = metal::atomic_fetch_add_explicit(words, low, metal::memory_order_relaxed);
  const uint high = (uint)(x >> 32) + (before + low < low ? 1u : 0u);
  if (high != 0) metal::atomic_fetch_add_explicit(words + 1, high, metal::memory_order_relaxed);
}
#if __METAL_VERSION__ >= 320
// Atomics are relaxed, so the first fence publishes what the workgroup wrote, and the second one makes visible what the
// others published before they incremented the counter.
INLINE void device_fence() {
  metal::atomic_thread_fence(metal::mem_flags::mem_device, metal::memory_order_seq_cst, metal::thread_scope_device);
}
INLINE bool is_last(DEVICE int* counter, int count) {
  DEVICE metal::atomic_int* const arrived = (DEVICE metal::atomic_int*)counter;
  device_fence();
  const bool last = metal::atomic_fetch_add_explicit(arrived, 1, metal::memory_order_relaxed) == count - 1;
  device_fence();
  if (last) metal::atomic_store_explicit(arrived, 0, metal::memory_order_relaxed);
  return last;
}
#endif

INLINE uint byte_permute(uint low, uint high, uint which) {
  uint x = 0;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const uint at = which >> (4 * n);
    x |= (((at & 4) != 0 ? high : low) >> (8 * (at & 3)) & 0xffu) << (8 * n);
  }
  return x;
}
// Subtracts pairs of bfloat16, whose differences are exact.
INLINE uint pair_subtract(uint a, uint b) {
  const uint low = bits_of_f32(f32_of_bits(a << 16) - f32_of_bits(b << 16));
  return low >> 16 | (bits_of_f32(f32_of_bits(a & 0xffff0000u) - f32_of_bits(b & 0xffff0000u)) & 0xffff0000u);
}
INLINE uint masked_or(uint x, uint mask, uint rest) { return (x & mask) | rest; }
INLINE uint bf16_of_e4m3(uint code) {
  const uint magnitude = code & 0x7f, normal = (magnitude << 4) + (120u << 7);
  const uint subnormal = bits_of_f32((float)magnitude * 0.001953125f) >> 16;
  return (magnitude < 8 ? subnormal : normal) | (code & 0x80) << 8;
}
// Two e4m3 numbers, 16 bits apart, as bfloat16.
INLINE uint pair_of_e4m3(uint codes) { return bf16_of_e4m3(codes & 0xff) | bf16_of_e4m3(codes >> 16 & 0xff) << 16; }
// Four e4m3 numbers as pairs of float16.
INLINE half half_of_e4m3(uint code) { return half(f32_of_bits(bf16_of_e4m3(code & 0xff) << 16)); }
INLINE uint2 halves_of_e4m3(uint codes) {
  return uint2(as_type<uint>(half2(half_of_e4m3(codes), half_of_e4m3(codes >> 8))),
               as_type<uint>(half2(half_of_e4m3(codes >> 16), half_of_e4m3(codes >> 24))));
}
INLINE uint4 load16(DEVICE const void* p) { return *(DEVICE const uint4*)p; }
INLINE uint4 stream16(DEVICE const void* p) { return *(DEVICE const uint4*)p; }
INLINE uint2 stream8(DEVICE const void* p) { return *(DEVICE const uint2*)p; }
INLINE uint stream4(DEVICE const void* p) { return *(DEVICE const uint*)p; }
INLINE void pdl_launch_dependents() {}
INLINE void pdl_wait() {}
INLINE void await_load(uint) {}
INLINE void copy_async16(SMEM void* to, DEVICE const void* from, bool valid) {
  uint4 v = uint4(0);
  if (valid) v = *(DEVICE const uint4*)from;
  *(SMEM uint4*)to = v;
}
INLINE void copy_async_commit() {}
template <int N> INLINE void copy_async_wait() {}

// The matrix unit: C [8, 8] += A [8, 8] B [8, 8]^T.
template <class T> struct FragA { metal::simdgroup_matrix<T, 8, 8> m; };
template <class T> struct FragB { metal::simdgroup_matrix<T, 8, 8> m; };
struct FragC { metal::simdgroup_matrix<float, 8, 8> m; };
template <class T> INLINE void frag_load_a(THREAD FragA<T>& f, SMEM const T* p, int ld, int) {
  metal::simdgroup_load(f.m, p, (ulong)ld);
}
template <class T> INLINE void frag_load_b(THREAD FragB<T>& f, SMEM const T* p, int ld, int) {
  metal::simdgroup_load(f.m, p, (ulong)ld, ulong2(0, 0), true);
}
INLINE void frag_zero(THREAD FragC& c) { c.m = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }
template <class T> INLINE void frag_mma(THREAD FragC& c, THREAD const FragA<T>& a, THREAD const FragB<T>& b) {
  metal::simdgroup_multiply_accumulate(c.m, a.m, b.m, c.m);
}
INLINE void frag_store(SMEM float* p, int ld, THREAD const FragC& c, int) {
  metal::simdgroup_store(c.m, p, (ulong)ld);
}

// mathMode safe selects precise:: anyway; it is explicit here in case the text is compiled with other options.
#define PRECISE(name) INLINE float m_##name(float x) { return metal::precise::name(x); }
PRECISE(sqrt) PRECISE(rsqrt) PRECISE(exp) PRECISE(exp2) PRECISE(log) PRECISE(log2) PRECISE(log10) PRECISE(sin) PRECISE(cos)
PRECISE(tan) PRECISE(asin) PRECISE(acos) PRECISE(atan) PRECISE(sinh) PRECISE(cosh) PRECISE(tanh) PRECISE(asinh)
PRECISE(acosh) PRECISE(atanh)
INLINE float m_pow(float a, float b) { return metal::precise::pow(a, b); }
INLINE float m_atan2(float a, float b) { return metal::precise::atan2(a, b); }
#define EXACT(name, metal_name) INLINE float m_##name(float x) { return metal::metal_name(x); }
EXACT(floor, floor) EXACT(ceil, ceil) EXACT(trunc, trunc) EXACT(abs, fabs) EXACT(round, rint)
INLINE float m_fmod(float a, float b) { return metal::fmod(a, b); }
INLINE float m_max(float a, float b) { return metal::fmax(a, b); }
INLINE bool m_isinf(float x) { return metal::isinf(x); }
INLINE float m_nan_float() { return as_type<float>(0x7fc00000u); }
INLINE float m_inf_float() { return as_type<float>(0x7f800000u); }

// Functions that Metal's library lacks. exp(x) - 1 and log(1 + x) use Kahan's corrections for the rounding of exp(x)
// and 1 + x.
INLINE float m_expm1(float x) {
  const float e = m_exp(x);
  if (e == 1.0f) return x;
  if (m_abs(x) > 0.7f) return e - 1.0f;
  return (e - 1.0f) * x / m_log(e);
}
INLINE float m_log1p(float x) {
  const float y = 1.0f + x;
  if (y == 1.0f) return x;
  if (m_isinf(y) || !(y > 0.0f)) return m_log(y);
  return m_log(y) * x / (y - 1.0f);
}
// An odd polynomial below 1, and 1 - exp(-polynomial) from 1 on; both fits have errors below one ulp.
INLINE float m_erf(float x) {
  const float a = m_abs(x);
  if (x != x) return x;
  if (a < 1.0f) {
    const float t = x * x;
    float p = 1.060116e-06f;
    p = metal::fma(p, t, -1.3914056e-05f);
    p = metal::fma(p, t, 0.0001195733f);
    p = metal::fma(p, t, -0.0008542703f);
    p = metal::fma(p, t, 0.0052237865f);
    p = metal::fma(p, t, -0.026866134f);
    p = metal::fma(p, t, 0.11283791f);
    p = metal::fma(p, t, -0.37612638f);
    p = metal::fma(p, t, 0.12837923f);
    return metal::fma(x, p, x);
  }
  const float s = metal::fmin(a, 4.0f);
  float p = -7.845266e-07f;
  p = metal::fma(p, s, 1.2452881e-05f);
  p = metal::fma(p, s, -6.4342144e-05f);
  p = metal::fma(p, s, -0.00010175754f);
  p = metal::fma(p, s, 0.0033602635f);
  p = metal::fma(p, s, -0.0238365f);
  p = metal::fma(p, s, 0.10696149f);
  p = metal::fma(p, s, 0.6341961f);
  p = metal::fma(p, s, 1.1292038f);
  p = metal::fma(p, s, -0.00012529295f);
  const float y = 1.0f - m_exp(-p);
  return x < 0.0f ? -y : y;
}
