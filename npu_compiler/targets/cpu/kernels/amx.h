// Intel AMX: eight tile registers of up to 16 rows x 64 bytes, and products of tiles. Kernels use the struct Amx only.
//
//   TileShapes shapes;                     palette 1; shapes.set(tile, rows, bytes) for each tile in use
//   Amx::configure(shapes);                zeroes all tiles; once in each kernel and thread
//   Amx::zero<T>(), load<T>(p, stride), stream<T>(p, stride), store<T>(p, stride)
//   Amx::dpbf16ps<C, A, B>();              C[m][n] += sum over k of A[m][2k, 2k+1] . B[k][2n, 2n+1]
//   Amx::dpbssd<C, A, B>() ...             the same for four neighbouring int8; s: signed, u: unsigned, A's letter first
//   Amx::release();                        before the kernel ends, so that context switches stay cheap
//
// Strides are in bytes. A is [rows][K] as in memory; B is in VNNI order, [K/2][N][2] or [K/4][N][4]; C is float or
// int32. stream() loads data that is read once. dpbf16ps rounds to nearest even, treats denormals as zero in operands
// and results, and sums even and odd elements in two chains, which it adds to C at the end.
//
// Loads and products are spaced by eight nops. A core of an Emerald Rapids throttles at times, probably because of its
// power: a product of tiles of random numbers takes 17 ns then, and 10 with eight nops after it, but one of zeros takes 6
// as it always does; a step of four loads and four products takes 26 ns for each product, and 20. Fewer than six nops
// help less. At other times a product of random numbers takes 7.2 ns with or without them.
//
// Inline assembly, because the intrinsics of gcc declare neither the memory that they read nor that which they write.
// A test may define NPU_AMX_MODEL as a type with the same members, which computes them without AMX.
#pragma once
#include <stdint.h>

#if defined(NPU_AMX_MODEL)
#define NPU_AMX 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define NPU_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define NPU_AMX 0
#endif

namespace npu {

// The operand of `ldtilecfg`.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int row_count, int bytes) {
    rows[tile] = (uint8_t)row_count;
    row_bytes[tile] = (uint16_t)bytes;
  }
};
static_assert(sizeof(TileShapes) == 64, "the layout is fixed");

#if defined(NPU_AMX_MODEL)
using Amx = NPU_AMX_MODEL;
#elif NPU_AMX
#define NPU_SPACED "\n .rept 8\n nop\n .endr"
#define NPU_TILE_OP static inline __attribute__((always_inline)) void
struct Amx {
  // Linux grants the tile state to a process on demand. Returns false if it is refused.
  static bool request() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }
  NPU_TILE_OP configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
  NPU_TILE_OP release() { __asm__ volatile("tilerelease" ::: "memory"); }
  template <int T> NPU_TILE_OP zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
  template <int T> NPU_TILE_OP load(const void* p, long stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" NPU_SPACED ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> NPU_TILE_OP stream(const void* p, long stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" NPU_SPACED ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> NPU_TILE_OP store(void* p, long stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
#define NPU_TILE_PRODUCT(NAME)                                                                       \
  template <int C, int A, int B> NPU_TILE_OP NAME() {                                                \
    __asm__ volatile("t" #NAME " %%tmm%c2, %%tmm%c1, %%tmm%c0" NPU_SPACED ::"i"(C), "i"(A), "i"(B)); \
  }
  NPU_TILE_PRODUCT(dpbf16ps)
  NPU_TILE_PRODUCT(dpbssd)
  NPU_TILE_PRODUCT(dpbsud)
  NPU_TILE_PRODUCT(dpbusd)
  NPU_TILE_PRODUCT(dpbuud)
#undef NPU_TILE_PRODUCT
#undef NPU_TILE_OP
#undef NPU_SPACED
};
#else
struct Amx {
  static bool request() { return true; }
};
#endif

}  // namespace npu
