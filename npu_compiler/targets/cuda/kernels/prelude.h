// The SIMT vocabulary in CUDA C++. It includes no header, so that NVRTC compiles it without a toolkit.
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint;
typedef unsigned char bool8;
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
struct e4m3x2 { uint16_t bits; };  // two elements of an operand
struct b32 { uint bits; };  // any element of 32 bits
struct tf32x2 { float x; };  // a float32 operand that the matrix unit multiplies as the sum of two TF32 numbers
struct tf32_half { uint16_t bits; };  // half of a float32 operand of which the matrix unit reads 19 bits
struct u8s8 { uint16_t bits; };  // two elements of an operand: uint8 on the left, int8 on the right

#define HAS_DOUBLE 1
#define DEVICE
#define SMEM
#define THREAD
#define CONSTANT __device__ const
#define CONSTANTS static constexpr
#define ASSUME(condition) __builtin_assume(condition)
#define INLINE __device__ __forceinline__

INLINE float to_f32(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
INLINE float to_f32(bf16 x) { return __uint_as_float((uint)x.bits << 16); }
INLINE f16 to_f16(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
INLINE bf16 to_bf16(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }

#define HAS_ROUND_BF16 1
// Converts a pair, whose other number is zero: conversions of pairs are four times as fast as those of single numbers.
INLINE float round_bf16(float x) {
  uint y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x), "f"(0.0f));
  return __uint_as_float(y);
}

INLINE float subgroup_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
INLINE int subgroup_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
INLINE uint subgroup_from(uint x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
INLINE double subgroup_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
INLINE float subgroup_sum(float x) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x += subgroup_xor(x, m);
  return x;
}
INLINE void subgroup_barrier() { __syncwarp(); }
INLINE void barrier() { __syncthreads(); }

INLINE void set_flag(int* flag) { *flag = 1; }
INLINE int atomic_load(const int* p) { return *(const volatile int*)p; }
INLINE void atomic_max(int* p, int x) { atomicMax(p, x); }
INLINE void atomic_add(int* p, int x) { atomicAdd(p, x); }
INLINE void atomic_add(int64_t* p, int64_t x) { atomicAdd((unsigned long long*)p, (unsigned long long)x); }

// A grid barrier with a bounded wait: other kernels may occupy the SMs that workgroups of this one still need. state[0]
// counts the workgroups that have arrived (10 bits), those that have exited (10 bits) and completed barriers. A
// workgroup sets its bit in state[1..] before it increments the count of exits, so the last one to arrive sees these
// bits. If a workgroup that is about to exit finds that all have arrived, it undoes both and stays.
INLINE uint atomic_add_acq_rel(int* p, uint x) {
  uint before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
  return before;
}
INLINE int grid_barrier(int* state, int number, int count, bool waits) {
  const uint before = atomic_add_acq_rel(state, 1);
  if ((before & 1023) == count - 1) {
    const uint exited = before >> 10 & 1023;
    atomic_add_acq_rel(state, (1u << 20) - count - (exited << 10));
    return exited ? 2 : 1;
  }
  if (!waits) return 0;
  for (int i = 0; i < 256; i++) {
    uint now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(state) : "memory");
    if (now >> 20 != before >> 20) return 1;
  }
  const uint mine = 1u << (number & 31);
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" :: "l"(state + 1 + (number >> 5)), "r"(mine) : "memory");
  const uint now = atomic_add_acq_rel(state, 1u << 10);
  if (now >> 20 == before >> 20 && (now & 1023) < count) return 0;
  asm volatile("red.relaxed.gpu.global.and.b32 [%0], %1;" :: "l"(state + 1 + (number >> 5)), "r"(~mine) : "memory");
  atomic_add_acq_rel(state, 0u - (1u << 10));
  return 1;
}

INLINE uint byte_permute(uint low, uint high, uint which) {
  uint x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(which));
  return x;
}
// (x & mask) | rest, as one instruction: the compiler would not keep `rest` in a register.
INLINE uint masked_or(uint x, uint mask, uint rest) {
  uint y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(rest));
  return y;
}
// Subtract and multiply pairs of bfloat16.
INLINE uint pair_subtract(uint a, uint b) {
  uint x;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(0x3f803f80u), "r"(b ^ 0x80008000u));
  return x;
}
INLINE uint pair_multiply(uint a, uint b) {
  uint x;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000u));
  return x;
}
// The larger magnitudes of pairs of bfloat16; those of `a` are positive.
INLINE uint pair_max_magnitude(uint a, uint b) {
  uint x;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b & 0x7fff7fffu));
  return x;
}
// Two e4m3 numbers, 16 bits apart, as bfloat16. Their exponents differ by 120.
INLINE uint pair_of_e4m3(uint codes) {
  uint x;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(x) : "r"((codes & 0x007f007fu) << 4 | (codes & 0x00800080u) << 8), "r"(0x7b807b80u), "r"(0x80008000u));
  return x;
}
// Four e4m3 numbers as pairs of float16.
#if __CUDA_ARCH__ >= 890
INLINE uint2 halves_of_e4m3(uint codes) {
  uint2 x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(x.x), "=r"(x.y) : "r"(codes));
  return x;
}
#else
INLINE uint halves_of_spread_e4m3(uint codes) {  // in the high bytes of halves; the exponents differ by 8
  uint x;
  asm("mul.rn.f16x2 %0, %1, %2;"
      : "=r"(x) : "r"((codes & 0x7f007f00u) >> 1 | (codes & 0x80008000u)), "r"(0x5c005c00u));
  return x;
}
INLINE uint2 halves_of_e4m3(uint codes) {
  uint2 x;
  x.x = halves_of_spread_e4m3(byte_permute(codes, 0u, 0x1404u));
  x.y = halves_of_spread_e4m3(byte_permute(codes, 0u, 0x3424u));
  return x;
}
#endif
INLINE uint4 load16(const void* p) { return *(const uint4*)p; }
// Not .nc: the compiler moves read-only loads after pdl_wait(), and weights would then be requested too late.
INLINE uint4 stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
INLINE uint2 stream8(const void* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
INLINE uint stream4(const void* p) {
  uint v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// The compiler waits for a value before an instruction that reads it.
INLINE void await_load(uint x) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9e3779b9; @p nanosleep.u32 1; }" :: "r"(x) : "memory");
}
INLINE void prefetch(const void* p, int bytes, int tid) {
  for (int i = tid * 128; i < bytes; i += (int)blockDim.x * 128)
    asm volatile("prefetch.global.L2 [%0];" :: "l"((const char*)p + i));
}
#if __CUDA_ARCH__ >= 900
INLINE void pdl_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
INLINE void pdl_launch_dependents() {}
INLINE void pdl_wait() {}
#endif

INLINE uint shared_address(const void* p) { return (uint)__cvta_generic_to_shared(p); }
INLINE void copy_async16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
template <int BYTES> INLINE void copy_async(void* to, const void* from, bool valid) {
  if (BYTES == 16) copy_async16(to, from, valid);
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                    :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0) : "memory");
}
INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// The matrix unit: C [16, 8] += A [16, 16] B [8, 16]^T.
template <class T> struct FragA { uint v[4]; };
template <class T> struct FragB { uint v[2]; };
struct FragC { float v[4]; };
template <class T> INLINE void frag_load_a(FragA<T>& f, const T* p, int ld, int lane) {
  const uint at = shared_address(p + (lane & 15) * ld + (lane >> 4) * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.v[0]), "=r"(f.v[1]), "=r"(f.v[2]), "=r"(f.v[3]) : "r"(at) : "memory");
}
template <class T> INLINE void frag_load_b(FragB<T>& f, const T* p, int ld, int lane) {
  const uint at = shared_address(p + (lane & 7) * ld + (lane >> 3 & 1) * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(f.v[0]), "=r"(f.v[1]) : "r"(at) : "memory");
}
INLINE void frag_zero(FragC& c) { c.v[0] = c.v[1] = c.v[2] = c.v[3] = 0.0f; }
// c += a b, where the accumulators are in registers of this kind: "+f" (float) or "+r" (int).
#define MMA(SHAPE, ACCUMULATOR) \
  asm volatile("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : ACCUMULATOR(c.v[0]), ACCUMULATOR(c.v[1]), ACCUMULATOR(c.v[2]), ACCUMULATOR(c.v[3]) \
               : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[0]), "r"(b.v[1]))
INLINE void frag_mma(FragC& c, const FragA<f16>& a, const FragB<f16>& b) {
  MMA("m16n8k16.row.col.f32.f16.f16.f32", "+f");
}
INLINE void frag_mma(FragC& c, const FragA<bf16>& a, const FragB<bf16>& b) {
  MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "+f");
}
// Operands of TF32, in 32 bits: C [16, 8] += A [16, 8] B [8, 8]^T. ldmatrix moves an element as two halves.
INLINE void frag_load_a(FragA<b32>& f, const b32* p, int ld, int lane) {
  const uint at = shared_address(p + (lane & 15) * ld + (lane >> 4) * 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.v[0]), "=r"(f.v[1]), "=r"(f.v[2]), "=r"(f.v[3]) : "r"(at) : "memory");
}
INLINE void frag_load_b(FragB<b32>& f, const b32* p, int ld, int lane) {
  const uint at = shared_address(p + (lane & 7) * ld + (lane >> 3 & 1) * 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(f.v[0]), "=r"(f.v[1]) : "r"(at) : "memory");
}
INLINE void frag_mma(FragC& c, const FragA<float>& a, const FragB<float>& b) {
  MMA("m16n8k8.row.col.f32.tf32.tf32.f32", "+f");
}
// Rounds to TF32, of which the matrix unit ignores the last 13 bits. A NaN of all ones stays one.
INLINE uint round_tf32(uint x) { return isfinite(__uint_as_float(x)) ? x + 0x1000u : x; }
// Parts of float32 operands.
INLINE void split_tf32(float x, uint& high, uint& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // rounded to 11 bits
  low = __float_as_uint(x - __uint_as_float(high));      // NaN if x is
}
template <> struct FragA<tf32x2> { FragA<float> high, low; };
template <> struct FragB<tf32x2> { FragB<float> high, low; };
// If not `small`, only the high parts.
INLINE void frag_load_a(FragA<tf32x2>& f, const tf32x2* p, int ld, int lane, bool small = true) {
  FragA<b32> x;
  frag_load_a(x, (const b32*)p, ld, lane);
  for (int i = 0; i < 4; i++) {
    if (small) split_tf32(__uint_as_float(x.v[i]), f.high.v[i], f.low.v[i]);
    else f.high.v[i] = round_tf32(x.v[i]);
  }
}
INLINE void frag_load_b(FragB<tf32x2>& f, const tf32x2* p, int ld, int lane, bool small = true) {
  FragB<b32> x;
  frag_load_b(x, (const b32*)p, ld, lane);
  for (int i = 0; i < 2; i++) {
    if (small) split_tf32(__uint_as_float(x.v[i]), f.high.v[i], f.low.v[i]);
    else f.high.v[i] = round_tf32(x.v[i]);
  }
}
// c += the small terms of a b.
INLINE void frag_mma_small(FragC& c, const FragA<tf32x2>& a, const FragB<tf32x2>& b) {
  frag_mma(c, a.low, b.high);
  frag_mma(c, a.high, b.low);
}
// Pairs of 8-bit integers, summed in int32: C [16, 8] += A [16, 16] B [8, 16]^T in pairs.
struct FragI { int v[4]; };
INLINE void frag_zero(FragI& c) { c.v[0] = c.v[1] = c.v[2] = c.v[3] = 0; }
INLINE void frag_mma(FragI& c, const FragA<u8s8>& a, const FragB<u8s8>& b) {
  MMA("m16n8k32.row.col.s32.u8.s8.s32", "+r");
}
#undef MMA
template <class Sum, class C> INLINE void frag_store(Sum* p, int ld, const C& c, int lane) {
  Sum* at = p + (lane >> 2) * ld + (lane & 3) * 2;
  at[0] = c.v[0];
  at[1] = c.v[1];
  at[8 * ld] = c.v[2];
  at[8 * ld + 1] = c.v[3];
}

INLINE int frag_row(int lane, int i) { return (lane >> 2) + (i >> 1) * 8; }
INLINE int frag_column(int lane, int i) { return (lane & 3) * 2 + (i & 1); }
INLINE float frag_row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
INLINE float frag_row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
INLINE float m_exp2_fast(float x) {  // error 2 ulp; subnormal results are flushed to zero
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#define HAS_ROUGH_LOG2 1
INLINE float m_log2_rough(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
INLINE float m_sigmoid_fast(float x) {  // relative error 1e-6
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + m_exp2_fast(x * -1.44269504f)));
  return y;
}
INLINE uint pack_pair(float low, float high, f16*) {
  uint x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
INLINE uint pack_pair(float low, float high, bf16*) {
  uint x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
INLINE uint pack_pair(int low, int high, uint8_t*) {  // saturates
  uint x;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(x) : "r"(high), "r"(low));
  return x;
}
template <class T> INLINE void frag_a_from_c(FragA<T>& a, const FragC& left, const FragC& right) {
  a.v[0] = pack_pair(left.v[0], left.v[1], (T*)nullptr);
  a.v[1] = pack_pair(left.v[2], left.v[3], (T*)nullptr);
  a.v[2] = pack_pair(right.v[0], right.v[1], (T*)nullptr);
  a.v[3] = pack_pair(right.v[2], right.v[3], (T*)nullptr);
}
template <class T> INLINE void frag_load_b2(FragB<T>& x, FragB<T>& y, const T* p, int ld, int lane) {
  const uint at = shared_address(p + ((lane & 7) + (lane >> 4) * 8) * ld + (lane >> 3 & 1) * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(y.v[0]), "=r"(y.v[1]) : "r"(at) : "memory");
}
template <class T> INLINE void frag_load_transposed(FragB<T>& x, FragB<T>& y, const T* p, int ld, int lane) {
  const uint at = shared_address(p + (lane & 15) * ld + (lane >> 4) * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(y.v[0]), "=r"(y.v[1]) : "r"(at) : "memory");
}

template <class T> INLINE void frag_a_from(FragA<T>& f, uint x0, uint x1, uint x2, uint x3, int) {
  f.v[0] = x0; f.v[1] = x1; f.v[2] = x2; f.v[3] = x3;
}
template <class T> INLINE void frag_b_from(FragB<T>& f, uint x0, uint x1, int) { f.v[0] = x0; f.v[1] = x1; }
INLINE uint transpose_8x8(uint x) {
  uint y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
template <class T> INLINE void frag_b_transposed(FragB<T>& f, const FragC& c, int) {
  f.v[0] = transpose_8x8(pack_pair(c.v[0], c.v[1], (T*)nullptr));
  f.v[1] = transpose_8x8(pack_pair(c.v[2], c.v[3], (T*)nullptr));
}

#define UNARY(name, single, twice)                      \
  INLINE float m_##name(float x) { return single(x); }  \
  INLINE double m_##name(double x) { return twice(x); }
#define UNARY_F(name) UNARY(name, name##f, name)
UNARY_F(sqrt) UNARY_F(rsqrt) UNARY_F(exp) UNARY_F(exp2) UNARY_F(expm1) UNARY_F(log) UNARY_F(log2) UNARY_F(log10)
UNARY_F(log1p) UNARY_F(sin) UNARY_F(cos) UNARY_F(tan) UNARY_F(asin) UNARY_F(acos) UNARY_F(atan) UNARY_F(sinh)
UNARY_F(cosh) UNARY_F(tanh) UNARY_F(asinh) UNARY_F(acosh) UNARY_F(atanh) UNARY_F(erf) UNARY_F(floor) UNARY_F(ceil)
UNARY_F(trunc) UNARY(abs, fabsf, fabs) UNARY(round, rintf, rint)
#define BINARY(name, single, twice)                                     \
  INLINE float m_##name(float a, float b) { return single(a, b); }      \
  INLINE double m_##name(double a, double b) { return twice(a, b); }
BINARY(pow, powf, pow) BINARY(atan2, atan2f, atan2) BINARY(fmod, fmodf, fmod)
INLINE float m_max(float a, float b) { return fmaxf(a, b); }
#define HAS_ROUND_TO_INT 1
INLINE int round_to_int(float x) { return __float2int_rn(x); }  // saturates; NaN becomes 0
#if __CUDA_ARCH__ >= 800
INLINE float m_maximum(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
INLINE float m_minimum(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
#endif
INLINE bool m_isinf(float x) { return fabsf(x) == __int_as_float(0x7f800000); }
INLINE bool m_isinf(double x) { return fabs(x) == __longlong_as_double(0x7ff0000000000000LL); }
INLINE float f32_of_bits(uint u) { return __uint_as_float(u); }
INLINE uint bits_of_f32(float x) { return __float_as_uint(x); }
INLINE int64_t bits_of_f64(double x) { return __double_as_longlong(x); }
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3 1
INLINE float f32_of_e4m3(uint code) {
  float y;
  asm("{\n.reg .b32 pair;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 pair, %1;\nmov.b32 {low, high}, pair;\n"
      "cvt.f32.f16 %0, low;\n}" : "=f"(y) : "h"((uint16_t)code));
  return y;
}
INLINE uint e4m3_of_f32(float x) {  // the instruction saturates
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return fabsf(x) <= 464.0f ? (uint)pair & 0xffu : 0x7fu;
}
INLINE uint e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif
INLINE f16 f16_of_bits(uint16_t u) { f16 x; x.bits = u; return x; }
INLINE float m_nan_float() { return __int_as_float(0x7fc00000); }
INLINE double m_nan_double() { return __longlong_as_double(0x7ff8000000000000LL); }
INLINE float m_inf_float() { return __int_as_float(0x7f800000); }
INLINE double m_inf_double() { return __longlong_as_double(0x7ff0000000000000LL); }
