// Warpgroup matrix products (Hopper's wgmma): four warps multiply 64 rows by up to 256 columns with operands in shared
// memory.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

// Accumulators of a thread: C [64, N] of a warpgroup. Element i is in row lane / 4 (+ 8 if i % 4 >= 2) of the warp's 16
// rows, in column i / 4 * 8 + lane % 4 * 2 + i % 2.
template <int N, class Sum = float> struct WgmmaC { Sum v[N / 2]; };

// wgmma_k16(c, a, b, T*): C [64, N] += A [64, 16] B [N, 16]^T; a and b are descriptors of operands in shared memory. K
// counts b16 elements: T is f16, bf16, two elements of 8 bits (u8s8, e4m3x2), or half of a float (tf32_half).
// wgmma_k16(c, a, b, NMajor<T>*): B is [16, N].
// wgmma_k16(c, a, b): A from registers, and B is [16, N].
// wgmma_k16(c, a, b, accumulate): A from registers, of signed 8-bit elements if B has unsigned ones; if not
// `accumulate`, C is overwritten. FragA<float>: A [64, 8], and B is [N, 8].
template <class T> struct NMajor;
#define R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R24 R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define R28 R24 ", %24, %25, %26, %27"
#define R32 R28 ", %28, %29, %30, %31"
#define R48 R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R56 R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define R64 R48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R72 R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define R96 R72 ", " \
  "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, " \
  "%92, %93, %94, %95"
#define R128 R96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define C4(i) REGISTER(c.v[i]), REGISTER(c.v[i + 1]), REGISTER(c.v[i + 2]), REGISTER(c.v[i + 3])
#define C8(i) C4(i), C4(i + 4)
#define C16() C8(0), C8(8)
#define C24() C16(), C8(16)
#define C28() C24(), C4(24)
#define C32() C24(), C8(24)
#define C48() C32(), C8(32), C8(40)
#define C56() C48(), C8(48)
#define C64() C56(), C8(56)
#define C72() C64(), C8(64)
#define C96() C72(), C8(72), C8(80), C8(88)
#define C128() C96(), C8(96), C8(104), C8(112), C8(120)
// FORM: shape and types of the instruction; FLAGS: its immediate operands. If not `accumulate`, C is overwritten.
#define WGMMA(T, SUM, FORM, FLAGS, N, R, C, A, B, P)                                                                \
  INLINE void wgmma_k16(WgmmaC<N, SUM>& c, uint64_t a, uint64_t b, const T*, int accumulate = 1) {                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N FORM " {" R "}, " A ", " B ", p" FLAGS ";\n}"               \
                 : C() : "l"(a), "l"(b), "r"(accumulate));                                                          \
  }
#define WGMMA_WIDTHS(T, SUM, FORM, FLAGS)                               \
  WGMMA(T, SUM, FORM, FLAGS, 32, R16, C16, "%16", "%17", "%18")         \
  WGMMA(T, SUM, FORM, FLAGS, 48, R24, C24, "%24", "%25", "%26")         \
  WGMMA(T, SUM, FORM, FLAGS, 64, R32, C32, "%32", "%33", "%34")         \
  WGMMA(T, SUM, FORM, FLAGS, 96, R48, C48, "%48", "%49", "%50")         \
  WGMMA(T, SUM, FORM, FLAGS, 128, R64, C64, "%64", "%65", "%66")        \
  WGMMA(T, SUM, FORM, FLAGS, 144, R72, C72, "%72", "%73", "%74")        \
  WGMMA(T, SUM, FORM, FLAGS, 192, R96, C96, "%96", "%97", "%98")        \
  WGMMA(T, SUM, FORM, FLAGS, 256, R128, C128, "%128", "%129", "%130")
#define REGISTER "+f"
WGMMA_WIDTHS(f16, float, "k16.f32.f16.f16", ", 1, 1, 0, 0")
WGMMA(f16, float, "k16.f32.f16.f16", ", 1, 1, 0, 0", 56, R28, C28, "%28", "%29", "%30")
WGMMA_WIDTHS(bf16, float, "k16.f32.bf16.bf16", ", 1, 1, 0, 0")
WGMMA(bf16, float, "k16.f32.bf16.bf16", ", 1, 1, 0, 0", 56, R28, C28, "%28", "%29", "%30")
#define WGMMA_N_MAJOR(T, FORM)                                                       \
  WGMMA(NMajor<T>, float, FORM, ", 1, 1, 0, 1", 64, R32, C32, "%32", "%33", "%34")   \
  WGMMA(NMajor<T>, float, FORM, ", 1, 1, 0, 1", 128, R64, C64, "%64", "%65", "%66")  \
  WGMMA(NMajor<T>, float, FORM, ", 1, 1, 0, 1", 192, R96, C96, "%96", "%97", "%98")  \
  WGMMA(NMajor<T>, float, FORM, ", 1, 1, 0, 1", 256, R128, C128, "%128", "%129", "%130")
WGMMA_N_MAJOR(f16, "k16.f32.f16.f16")
WGMMA_N_MAJOR(bf16, "k16.f32.bf16.bf16")
WGMMA_WIDTHS(e4m3x2, float, "k32.f32.e4m3.e4m3", ", 1, 1")
WGMMA(e4m3x2, float, "k32.f32.e4m3.e4m3", ", 1, 1", 56, R28, C28, "%28", "%29", "%30")
#undef REGISTER
#define REGISTER "+r"
WGMMA_WIDTHS(u8s8, int, "k32.s32.u8.s8", "")  // the widths of sums of integers are multiples of 16
#undef REGISTER
#define REGISTER "+f"
#define WGMMA_REGISTERS(T, N, R, C, A, B)                                                                            \
  INLINE void wgmma_k16(WgmmaC<N>& c, const FragA<T>& a, uint64_t b) {                                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" R "}, {" A "}, " B ", 1, 1, 1, 1;" \
                 : C() : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(b));                                  \
  }
WGMMA_REGISTERS(f16, 48, R24, C24, "%24, %25, %26, %27", "%28")
WGMMA_REGISTERS(bf16, 48, R24, C24, "%24, %25, %26, %27", "%28")
WGMMA_REGISTERS(f16, 64, R32, C32, "%32, %33, %34, %35", "%36")
WGMMA_REGISTERS(bf16, 64, R32, C32, "%32, %33, %34, %35", "%36")
WGMMA_REGISTERS(f16, 96, R48, C48, "%48, %49, %50, %51", "%52")
WGMMA_REGISTERS(bf16, 96, R48, C48, "%48, %49, %50, %51", "%52")
WGMMA_REGISTERS(f16, 128, R64, C64, "%64, %65, %66, %67", "%68")
WGMMA_REGISTERS(bf16, 128, R64, C64, "%64, %65, %66, %67", "%68")
WGMMA_REGISTERS(f16, 192, R96, C96, "%96, %97, %98, %99", "%100")
WGMMA_REGISTERS(bf16, 192, R96, C96, "%96, %97, %98, %99", "%100")
WGMMA_REGISTERS(f16, 256, R128, C128, "%128, %129, %130, %131", "%132")
WGMMA_REGISTERS(bf16, 256, R128, C128, "%128, %129, %130, %131", "%132")
#define WGMMA_LEFT(T, SUM, FORM, FLAGS, N, R, C, A, B, P)                                                           \
  INLINE void wgmma_k16(WgmmaC<N, SUM>& c, const FragA<T>& a, uint64_t b, int accumulate) {                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N FORM " {" R "}, {" A "}, " B ", p" FLAGS ";\n}"             \
                 : C() : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(b), "r"(accumulate));              \
  }
#define WGMMA_LEFT_WIDTHS(T, SUM, FORM, FLAGS)                                                     \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 32, R16, C16, "%16, %17, %18, %19", "%20", "%21")                \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 48, R24, C24, "%24, %25, %26, %27", "%28", "%29")                \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 64, R32, C32, "%32, %33, %34, %35", "%36", "%37")                \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 96, R48, C48, "%48, %49, %50, %51", "%52", "%53")                \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 112, R56, C56, "%56, %57, %58, %59", "%60", "%61")               \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 128, R64, C64, "%64, %65, %66, %67", "%68", "%69")
#define WGMMA_LEFT_OTHERS(T, SUM, FORM, FLAGS)                                                              \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 56, R28, C28, "%28, %29, %30, %31", "%32", "%33")                         \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 144, R72, C72, "%72, %73, %74, %75", "%76", "%77")                        \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 192, R96, C96, "%96, %97, %98, %99", "%100", "%101")                      \
  WGMMA_LEFT(T, SUM, FORM, FLAGS, 256, R128, C128, "%128, %129, %130, %131", "%132", "%133")
WGMMA_LEFT_WIDTHS(float, float, "k8.f32.tf32.tf32", ", 1, 1")
WGMMA_LEFT_OTHERS(float, float, "k8.f32.tf32.tf32", ", 1, 1")
WGMMA_LEFT_WIDTHS(f16, float, "k16.f32.f16.f16", ", 1, 1, 0")
WGMMA_LEFT_WIDTHS(bf16, float, "k16.f32.bf16.bf16", ", 1, 1, 0")
WGMMA_LEFT(bf16, float, "k16.f32.bf16.bf16", ", 1, 1, 0", 144, R72, C72, "%72, %73, %74, %75", "%76", "%77")
#undef REGISTER
#define REGISTER "+r"
WGMMA_LEFT_WIDTHS(u8s8, int, "k32.s32.s8.u8", "")
#undef WGMMA
#undef WGMMA_LEFT
#undef WGMMA_LEFT_WIDTHS
#undef WGMMA_LEFT_OTHERS
#undef WGMMA_WIDTHS
#undef WGMMA_N_MAJOR
#undef WGMMA_REGISTERS
#undef REGISTER
#undef C4
#undef C8
#undef R16
#undef C16
#undef R24
#undef C24
#undef R28
#undef C28
#undef R32
#undef R56
#undef C56
#undef C32
#undef R48
#undef C48
#undef R64
#undef C64
#undef R72
#undef C72
#undef R96
#undef C96
#undef R128
#undef C128

// Changes the number of registers of a thread; all warps of a warpgroup call it.
template <int N> INLINE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> INLINE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
INLINE void defined_here(float& x) { asm volatile("" : "+f"(x)::"memory"); }
INLINE void defined_here(int& x) { asm volatile("" : "+r"(x)::"memory"); }
INLINE void defined_here(uint& x) { asm volatile("" : "+r"(x)::"memory"); }
INLINE void defined_here(uint64_t& x) { asm volatile("" : "+l"(x)::"memory"); }
// The compiler cannot move reads of c before this.
template <int N, class Sum> INLINE void wgmma_here(WgmmaC<N, Sum>& c) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) defined_here(c.v[i]);
}
// Waits for all products but the last LATER.
template <int LATER = 0, int N, class Sum> INLINE void wgmma_finish(WgmmaC<N, Sum>& c) {
  wgmma_wait<LATER>();
  wgmma_here(c);
}
template <int N, class Sum> INLINE void wgmma_zero(WgmmaC<N, Sum>& c) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) c.v[i] = 0;
}

// The element offset of 16-byte chunk `chunk` of a row of 64 b16 elements, in a tile with the 128-byte swizzle.
INLINE int swizzle_128(int row, int chunk) { return row * 64 + ((chunk ^ (row & 7)) * 8); }

// The descriptor of an operand [rows, K] of b16 elements, K-major and swizzled: K = 64 (rows of 128 bytes) or 32.
template <int K> INLINE uint64_t wgmma_descriptor(const void* p) {
  const uint64_t swizzle = K == 64 ? 1 : 2;
  return (uint64_t)((shared_address(p) & 0x3ffff) >> 4) | (1ull << 16) | ((uint64_t)K << 32) | (swizzle << 62);
}
// A descriptor whose blocks of 8 rows are PITCH bytes apart: rows of SWIZZLE (64 or 128) swizzled bytes, or, if that is
// 0, overlapping rows that begin 16 bytes apart.
template <int PITCH, int SWIZZLE> INLINE uint64_t wgmma_pitched_descriptor(const void* p) {
  return (uint64_t)((shared_address(p) & 0x3ffff) >> 4) | (1ull << 16) | ((uint64_t)(PITCH / 16) << 32) |
         ((uint64_t)(SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 0) << 62);
}
// The descriptor of an operand [K, N], N-major: consecutive tiles of K rows of 64 elements.
template <int K> INLINE uint64_t wgmma_transposed_descriptor(const void* p) {
  return (uint64_t)((shared_address(p) & 0x3ffff) >> 4) | ((uint64_t)(K * 8) << 16) | (64ull << 32) | (1ull << 62);
}

// C [64, N] += A [64, K] B [N, K]^T. If not `accumulate`, C is overwritten.
template <int K = 64, int N, class Sum, class T>
INLINE void wgmma(WgmmaC<N, Sum>& c, const T* x, const T* y, int accumulate = 1) {
  const uint64_t a = wgmma_descriptor<K>(x), b = wgmma_descriptor<K>(y);
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma_k16(c, a + 2 * k, b + 2 * k, x, k > 0 ? 1 : accumulate);
}
// C [64, N] += A [64, K] B [K, N], or = if not `accumulate`.
template <int K, int N, class T>
INLINE void wgmma_n_major(WgmmaC<N>& c, const T* x, const T* y, int accumulate) {
  const uint64_t a = wgmma_descriptor<K>(x), b = wgmma_transposed_descriptor<K>(y);
#pragma unroll
  for (int k = 0; k < K / 16; k++)
    wgmma_k16(c, a + 2 * k, b + k * (16 * 128 / 16), (const NMajor<T>*)nullptr, k > 0 ? 1 : accumulate);
}

// The 16 rows of a warp of A [64, K], floats that are rounded to TF32. K and addresses count b16 elements, two of which are
// one float.
template <int K> struct RoundedRows {
  FragA<float> x[K / 16];

  template <class T> INLINE void load(const T* rows, int lane) {
    const int row = lane & 15, turn = K == 64 ? row & 7 : row >> 1 & 3;  // of the swizzle
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
      ldmatrix_x4(x[k].v, rows + row * K + ((2 * k + (lane >> 4)) ^ turn) * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) x[k].v[i] = round_tf32(x[k].v[i]);
    }
  }
  // C [64, N] += A B [N, K]^T, or = if not `accumulate`.
  template <int N, class T> INLINE void multiply(WgmmaC<N>& c, const T* y, int accumulate) const {
    const uint64_t b = wgmma_descriptor<K>(y);
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma_k16(c, x[k], b + 2 * k, k > 0 ? 1 : accumulate);
  }
};

// Stores the 16 rows of a warp.
template <int N, class Sum> INLINE void wgmma_store(Sum* p, int ld, const WgmmaC<N, Sum>& c, int lane) {
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    Sum* at = p + (lane >> 2) * ld + j * 8 + (lane & 3) * 2;
    *(Vec<Sum, 2>*)at = Vec<Sum, 2>{{c.v[4 * j], c.v[4 * j + 1]}};
    *(Vec<Sum, 2>*)(at + 8 * ld) = Vec<Sum, 2>{{c.v[4 * j + 2], c.v[4 * j + 3]}};
  }
}

// Exchanges results among the four lanes of a row: each has two neighbours of each of 4 B blocks of 8, and then B whole
// blocks.
template <int B, class T> INLINE void quad_transpose(T* x, int lane) {
#pragma unroll
  for (int m = 1; m < 4; m *= 2) {
    const bool upper = (lane & m) != 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      if (s & m) continue;
#pragma unroll
      for (int j = 0; j < 2 * B; j++) {
        T& low = x[s * 2 * B + j];
        T& high = x[(s + m) * 2 * B + j];
        const T other = subgroup_xor(upper ? low : high, m);
        low = upper ? other : low;
        high = upper ? high : other;
      }
    }
  }
  if (B > 1) {
    T y[8 * B];
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int j = 0; j < 2 * B; j++) y[j / 2 * 8 + 2 * s + j % 2] = x[s * 2 * B + j];
#pragma unroll
    for (int i = 0; i < 8 * B; i++) x[i] = y[i];
  }
}
