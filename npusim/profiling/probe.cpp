// What a CPU can do at best: reading memory, and the multiplications that the kernels are made of.
#include "amx_tile.h"
#include "tile.h"
using namespace npu;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int CHAINS = 10;  // independent sums: enough to hide the latency of a multiplication

template <class Kind, class V> float multiply(long steps, float seed) {
  V acc[CHAINS] = {}, w = V{} + seed, x = V{} + 1.0f / 3;
  for (long i = 0; i < steps; i++)
#pragma GCC unroll 10
    for (int k = 0; k < CHAINS; k++) Kind::step(acc[k], w, x);
#pragma GCC unroll 10  // all of them, or the compiler keeps the sums in memory
  for (int k = 1; k < CHAINS; k++) acc[0] += acc[k];
  return (float)acc[0][0];
}

#if !NPU_INT8_DOT
struct PairsOfWords {
  NPU_INLINE void step(vf& acc, vf w, vf x) {
    vi32 sums = (vi32)acc;
    dot_words(sums, (vi32)w, (vi32)x);
    acc = (vf)sums;
  }
};
#endif

#if NPU_AMX
// A step multiplies four pairs of tiles, which have 16 rows of 64 bytes.
template <bool INTEGERS> float multiply_tiles(long steps) {
  if (!Amx::request()) return 0;
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, 16, 64);
  Amx::configure(shapes);
  for (long i = 0; i < steps; i++) {
    amx_product<INTEGERS, 0, 4, 6>();
    amx_product<INTEGERS, 1, 4, 7>();
    amx_product<INTEGERS, 2, 5, 6>();
    amx_product<INTEGERS, 3, 5, 7>();
  }
  Amx::release();
  return 0;
}
#endif
}  // namespace

EXPORT float multiply_float32(long steps, float seed) { return multiply<F32, vf>(steps, seed); }
EXPORT float multiply_float64(long steps, float seed) { return multiply<F64, half_vd>(steps, seed); }
EXPORT int step_flops_float32() { return 2 * VL * CHAINS; }
EXPORT int step_flops_float64() { return VL * CHAINS; }
#if NPU_AMX
EXPORT float multiply_bfloat16(long steps, float) { return multiply_tiles<false>(steps); }
EXPORT float multiply_int8(long steps, float) { return multiply_tiles<true>(steps); }
EXPORT int step_flops_bfloat16() { return 4 * 2 * 16 * 16 * 32; }
EXPORT int step_flops_int8() { return 4 * 2 * 16 * 16 * 64; }
#else
#if NPU_BF16_DOT
EXPORT float multiply_bfloat16(long steps, float seed) { return multiply<BF16P, vf>(steps, seed); }
EXPORT int step_flops_bfloat16() { return 4 * VL * CHAINS; }
#else
EXPORT float multiply_bfloat16(long steps, float seed) { return multiply<BF16F, vf>(steps, seed); }
EXPORT int step_flops_bfloat16() { return 2 * VL * CHAINS; }
#endif
#if NPU_INT8_DOT
EXPORT float multiply_int8(long steps, float seed) { return multiply<U8S8, vf>(steps, seed); }
EXPORT int step_flops_int8() { return 8 * VL * CHAINS; }
#else
EXPORT float multiply_int8(long steps, float seed) { return multiply<PairsOfWords, vf>(steps, seed); }
EXPORT int step_flops_int8() { return 4 * VL * CHAINS; }
#endif
#endif

// Sums `bytes` of memory, a multiple of 4096, in `streams` sequential streams; the result depends on all of it.
EXPORT float read_all(const char* p, long bytes, int streams) {
  vf sum[8] = {};
  const long each = bytes / streams;
  for (long i = 0; i < each; i += 512 / streams)
    for (int k = 0; k < 8; k++) {
      const char* at = p + (k % streams) * each + i + k / streams * 64;
      __builtin_prefetch(at + 4096);
      for (int h = 0; h < 64; h += VL * 4) sum[k] += load_bytes<vf>(at + h);
    }
  for (int k = 1; k < 8; k++) sum[0] += sum[k];
  return sum[0][0];
}
