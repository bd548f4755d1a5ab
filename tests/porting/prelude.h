// The SIMT vocabulary in C++. The threads of a workgroup are fibres that run alternately on one host thread.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
typedef unsigned int uint;
typedef unsigned char bool8;
struct uint2 { uint x, y; };
struct uint4 { uint x, y, z, w; };
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

#define HAS_DOUBLE 1
#define DEVICE
#define SMEM
#define THREAD
#define CONSTANT static const
#define CONSTANTS static constexpr
#define ASSUME(condition)
#define INLINE inline

INLINE float f32_of_bits(uint u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint bits_of_f32(float x) { uint u; memcpy(&u, &x, 4); return u; }
INLINE int64_t bits_of_f64(double x) { int64_t u; memcpy(&u, &x, 8); return u; }
INLINE f16 f16_of_bits(uint16_t u) { f16 x; x.bits = u; return x; }
INLINE float to_f32(f16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
INLINE f16 to_f16(float x) { _Float16 h = (_Float16)x; f16 y; memcpy(&y, &h, 2); return y; }
INLINE float to_f32(bf16 x) { return f32_of_bits((uint)x.bits << 16); }
INLINE bf16 to_bf16(float x) {
  bf16 y;
  const uint u = bits_of_f32(x);
  y.bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
  return y;
}

// -- fibres: the threads of a workgroup run until each waits for its subgroup or its workgroup
enum State { READY, AT_SUBGROUP, AT_WORKGROUP, DONE };
struct Fibre { ucontext_t context; State state; char* stack; };
static Fibre fibres[1024];
static ucontext_t scheduler;
static int current, workgroup_now, backwards;
static uint64_t mailbox[2][1024];
static unsigned char turn_of[1024];
alignas(128) static unsigned char shared_memory[256 << 10];

INLINE void wait_as(State s) {
  fibres[current].state = s;
  swapcontext(&fibres[current].context, &scheduler);
}
INLINE void barrier() { wait_as(AT_WORKGROUP); }
INLINE void subgroup_barrier() { wait_as(AT_SUBGROUP); }
template <class T> INLINE T exchange(T x, int mask) {
  const int me = current, box = turn_of[me] ^= 1;
  uint64_t bits = 0, other;
  memcpy(&bits, &x, sizeof(T));
  mailbox[box][me] = bits;
  wait_as(AT_SUBGROUP);
  other = mailbox[box][me ^ mask];
  memcpy(&x, &other, sizeof(T));
  return x;
}
INLINE float subgroup_xor(float x, int mask) { return exchange(x, mask); }
INLINE int subgroup_xor(int x, int mask) { return exchange(x, mask); }
INLINE double subgroup_xor(double x, int mask) { return exchange(x, mask); }
INLINE float subgroup_sum(float x) {
  for (int m = 16; m > 0; m >>= 1) x += subgroup_xor(x, m);
  return x;
}

static void run_groups(void (*kernel)(void*, int, int), void* arguments, int groups, int threads) {
  struct Start {
    static void go(uint low, uint high, uint alow, uint ahigh) {
      auto f = (void (*)(void*, int, int))(((uint64_t)high << 32) | low);
      f((void*)(((uint64_t)ahigh << 32) | alow), workgroup_now, current);
      fibres[current].state = DONE;
    }
  };
  for (workgroup_now = 0; workgroup_now < groups; workgroup_now++) {
    memset(shared_memory, 0xff, sizeof shared_memory);
    for (int t = 0; t < threads; t++) {
      Fibre& f = fibres[t];
      if (!f.stack) f.stack = (char*)malloc(64 << 10);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack;
      f.context.uc_stack.ss_size = 64 << 10;
      f.context.uc_link = &scheduler;
      const uint64_t k = (uint64_t)kernel, a = (uint64_t)arguments;
      makecontext(&f.context, (void (*)())Start::go, 4, (uint)k, (uint)(k >> 32), (uint)a, (uint)(a >> 32));
      f.state = READY;
    }
    for (int done = 0; done < threads;) {
      bool moved = false;
      for (int n = 0; n < threads; n++) {
        const int t = backwards ? threads - 1 - n : n;
        if (fibres[t].state != READY) continue;
        current = t;
        swapcontext(&scheduler, &fibres[t].context);
        done += fibres[t].state == DONE;
        moved = true;
      }
      int at_group = 0;
      for (int s = 0; s < threads; s += 32) {
        int waiting = 0, alive = 0;
        for (int t = s; t < s + 32 && t < threads; t++) {
          waiting += fibres[t].state == AT_SUBGROUP;
          alive += fibres[t].state != DONE;
          at_group += fibres[t].state == AT_WORKGROUP;
        }
        if (waiting && waiting == alive)
          for (int t = s; t < s + 32 && t < threads; t++)
            if (fibres[t].state == AT_SUBGROUP) fibres[t].state = READY;
      }
      if (at_group && at_group == threads - done)
        for (int t = 0; t < threads; t++)
          if (fibres[t].state == AT_WORKGROUP) fibres[t].state = READY;
      bool ready = false;
      for (int t = 0; t < threads; t++) ready |= fibres[t].state == READY;
      if (!moved && !ready && done < threads) { fprintf(stderr, "deadlock\n"); abort(); }
    }
  }
}

INLINE void set_flag(int* flag) { *flag = 1; }
INLINE uint byte_permute(uint low, uint high, uint which) {
  uint x = 0;
  for (int n = 0; n < 4; n++) {
    const uint at = which >> (4 * n);
    x |= (((at & 4) != 0 ? high : low) >> (8 * (at & 3)) & 0xffu) << (8 * n);
  }
  return x;
}
INLINE uint4 load16(const void* p) { if ((uint64_t)p % 16) abort(); uint4 v; memcpy(&v, p, 16); return v; }
INLINE uint4 stream16(const void* p) { return load16(p); }
INLINE uint2 stream8(const void* p) { if ((uint64_t)p % 8) abort(); uint2 v; memcpy(&v, p, 8); return v; }
INLINE uint stream4(const void* p) { if ((uint64_t)p % 4) abort(); uint v; memcpy(&v, p, 4); return v; }
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
INLINE uint half_of_e4m3(uint code) { return to_f16(f32_of_bits(bf16_of_e4m3(code & 0xff) << 16)).bits; }
INLINE uint pair_max_magnitude(uint a, uint b) {
  const uint low = b & 0x7fffu, high = b & 0x7fff0000u;
  return ((a & 0xffffu) > low ? a & 0xffffu : low) | ((a & 0xffff0000u) > high ? a & 0xffff0000u : high);
}
INLINE uint2 halves_of_e4m3(uint codes) {
  uint2 x;
  x.x = half_of_e4m3(codes) | half_of_e4m3(codes >> 8) << 16;
  x.y = half_of_e4m3(codes >> 16) | half_of_e4m3(codes >> 24) << 16;
  return x;
}
INLINE void pdl_launch_dependents() {}
INLINE void pdl_wait() {}
INLINE void await_load(uint) {}
INLINE void copy_async16(void* to, const void* from, bool valid) {
  if ((uint64_t)to % 16 || (valid && (uint64_t)from % 16)) abort();
  if (valid) memcpy(to, from, 16); else memset(to, 0, 16);
}
INLINE void copy_async_commit() {}
template <int N> INLINE void copy_async_wait() {}

INLINE int grid_barrier(int* state, int number, int count, bool waits) {  // one runs after the other: only the last stays
  if (++*state < count) {
    if (waits) state[1 + number / 32] |= 1 << number % 32;
    return 0;
  }
  *state = 0;
  return 2;
}

// The matrix unit: lanes hold results as a 16 x 8 x 16 unit spreads them, and each lane keeps whole operands.
template <class T> struct FragA { T v[16][16]; };
template <class T> struct FragB { T v[8][16]; };
struct FragC { float v[4]; };
template <class T> INLINE void frag_load_a(FragA<T>& f, const T* p, int ld, int) {
  for (int i = 0; i < 16; i++) memcpy(f.v[i], p + i * ld, sizeof f.v[i]);
}
template <class T> INLINE void frag_load_b(FragB<T>& f, const T* p, int ld, int) {
  for (int i = 0; i < 8; i++) memcpy(f.v[i], p + i * ld, sizeof f.v[i]);
}
INLINE void frag_zero(FragC& c) { c.v[0] = c.v[1] = c.v[2] = c.v[3] = 0; }
INLINE int frag_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
INLINE int frag_column(int lane, int i) { return lane % 4 * 2 + i % 2; }
template <class T> INLINE void frag_mma(FragC& c, const FragA<T>& a, const FragB<T>& b) {
  const int lane = current & 31;
  for (int i = 0; i < 4; i++) {
    const T *x = a.v[frag_row(lane, i)], *y = b.v[frag_column(lane, i)];
    for (int k = 0; k < 16; k++) c.v[i] += to_f32(x[k]) * to_f32(y[k]);
  }
}
// Pairs of bytes, without sign on the left, summed as integers.
struct u8s8 { uint8_t bytes[2]; };
struct FragI { int v[4]; };
INLINE void frag_zero(FragI& c) { c.v[0] = c.v[1] = c.v[2] = c.v[3] = 0; }
INLINE void frag_mma(FragI& c, const FragA<u8s8>& a, const FragB<u8s8>& b) {
  const int lane = current & 31;
  for (int i = 0; i < 4; i++) {
    const u8s8 *x = a.v[frag_row(lane, i)], *y = b.v[frag_column(lane, i)];
    for (int k = 0; k < 32; k++) c.v[i] += x[k / 2].bytes[k % 2] * (int8_t)y[k / 2].bytes[k % 2];
  }
}

// Distributes the part of a fragment that a lane loads to all lanes of its subgroup.
static uint lanes[32][32][4];
INLINE const uint (*share_words(uint x0, uint x1, uint x2, uint x3))[4] {
  uint* mine = lanes[current >> 5][current & 31];
  subgroup_barrier();
  mine[0] = x0, mine[1] = x1, mine[2] = x2, mine[3] = x3;
  subgroup_barrier();
  return lanes[current >> 5];
}
template <class T> INLINE void frag_a_from(FragA<T>& f, uint x0, uint x1, uint x2, uint x3, int) {
  const uint (*all)[4] = share_words(x0, x1, x2, x3);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++) memcpy(&f.v[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8], &all[l][i], 4);
}
template <class T> INLINE void frag_b_from(FragB<T>& f, uint x0, uint x1, int) {
  const uint (*all)[4] = share_words(x0, x1, 0, 0);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 2; i++) memcpy(&f.v[l / 4][l % 4 * 2 + i * 8], &all[l][i], 4);
}
INLINE void round_to(f16& y, float x) { y = to_f16(x); }
INLINE void round_to(bf16& y, float x) { y = to_bf16(x); }
template <class T> INLINE uint pack_pair(float low, float high, T*) {
  T x[2];
  uint pair;
  round_to(x[0], low), round_to(x[1], high);
  memcpy(&pair, x, 4);
  return pair;
}
template <class T> INLINE void frag_b_transposed(FragB<T>& f, const FragC& c, int) {
  const uint (*all)[4] = share_words(bits_of_f32(c.v[0]), bits_of_f32(c.v[1]), bits_of_f32(c.v[2]), bits_of_f32(c.v[3]));
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++) round_to(f.v[frag_column(l, i)][frag_row(l, i)], f32_of_bits(all[l][i]));
}
template <class T> INLINE void frag_a_from_c(FragA<T>& f, const FragC& left, const FragC& right) {
  for (int half = 0; half < 2; half++) {
    const float* c = half ? right.v : left.v;
    const uint (*all)[4] = share_words(bits_of_f32(c[0]), bits_of_f32(c[1]), bits_of_f32(c[2]), bits_of_f32(c[3]));
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) round_to(f.v[frag_row(l, i)][half * 8 + frag_column(l, i)], f32_of_bits(all[l][i]));
  }
}
template <class T> INLINE void frag_load_b2(FragB<T>& x, FragB<T>& y, const T* p, int ld, int lane) {
  frag_load_b(x, p, ld, lane);
  frag_load_b(y, p + 8 * ld, ld, lane);
}
template <class T> INLINE void frag_load_transposed(FragB<T>& x, FragB<T>& y, const T* p, int ld, int) {
  for (int n = 0; n < 8; n++)
    for (int k = 0; k < 16; k++) x.v[n][k] = p[k * ld + n], y.v[n][k] = p[k * ld + 8 + n];
}
INLINE uint transpose_8x8(uint x) {
  const uint (*all)[4] = share_words(x, 0, 0, 0);
  const int row = (current & 31) / 4, column = (current & 31) % 4, shift = row % 2 * 16;
  return (all[8 * column + row / 2][0] >> shift & 0xffff) | (all[8 * column + 4 + row / 2][0] >> shift) << 16;
}
INLINE float frag_row_max(float x) {
  for (int m = 1; m < 4; m <<= 1) x = fmaxf(x, subgroup_xor(x, m));
  return x;
}
INLINE float frag_row_sum(float x) {
  for (int m = 1; m < 4; m <<= 1) x += subgroup_xor(x, m);
  return x;
}
INLINE float m_exp2_fast(float x) { return exp2f(x); }
template <class Sum, class C> INLINE void frag_store(Sum* p, int ld, const C& c, int lane) {
  for (int i = 0; i < 4; i++) p[(lane / 4 + i / 2 * 8) * ld + lane % 4 * 2 + i % 2] = c.v[i];
}

#define UNARY(name, single, twice)                      \
  INLINE float m_##name(float x) { return single(x); }  \
  INLINE double m_##name(double x) { return twice(x); }
#define UNARY_F(name) UNARY(name, name##f, name)
UNARY_F(sqrt) UNARY_F(exp) UNARY_F(exp2) UNARY_F(expm1) UNARY_F(log) UNARY_F(log2) UNARY_F(log10) UNARY_F(log1p)
UNARY_F(sin) UNARY_F(cos) UNARY_F(tan) UNARY_F(asin) UNARY_F(acos) UNARY_F(atan) UNARY_F(sinh) UNARY_F(cosh)
UNARY_F(tanh) UNARY_F(asinh) UNARY_F(acosh) UNARY_F(atanh) UNARY_F(erf) UNARY_F(floor) UNARY_F(ceil) UNARY_F(trunc)
UNARY(abs, fabsf, fabs) UNARY(round, rintf, rint)
INLINE float m_rsqrt(float x) { return 1.0f / sqrtf(x); }
INLINE double m_rsqrt(double x) { return 1.0 / sqrt(x); }
#define BINARY(name, single, twice)                                     \
  INLINE float m_##name(float a, float b) { return single(a, b); }      \
  INLINE double m_##name(double a, double b) { return twice(a, b); }
BINARY(pow, powf, pow) BINARY(atan2, atan2f, atan2) BINARY(fmod, fmodf, fmod)
INLINE float m_max(float a, float b) { return fmaxf(a, b); }
INLINE bool m_isinf(float x) { return isinf(x) != 0; }
INLINE bool m_isinf(double x) { return isinf(x) != 0; }
INLINE float m_nan_float() { return NAN; }
INLINE double m_nan_double() { return NAN; }
INLINE float m_inf_float() { return INFINITY; }
INLINE double m_inf_double() { return INFINITY; }
