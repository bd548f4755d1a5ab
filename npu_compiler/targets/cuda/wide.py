"""Hopper's matrix unit in CUDA C++: four simds multiply 64 rows by up to 256 columns straight from group memory.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (wgmma); both operands have the 128-byte swizzle.
"""

from __future__ import annotations

COLUMNS = (64, 128, 256)

_HEAD = """
// Four simds and the wide matrix unit: C [64, N] += A [64, 64] B [N, 64]^T, tiles of 128-byte rows, swizzled.
template <int N> struct WideC { float v[N / 2]; };
INLINE int wide_at(int row, int chunk) { return row * 64 + ((chunk ^ (row & 7)) * 8); }
INLINE void wide_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void wide_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
INLINE uint64_t wide_tile(const void* p) {  // rows of 128 bytes, 8 of them a swizzled block of 1024
  return (uint64_t)((group_address(p) & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
template <int N> INLINE void wide_zero(WideC<N>& c) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) c.v[i] = 0.0f;
}
template <int N> INLINE void wide_store(float* p, int ld, const WideC<N>& c, int lane) {  // a simd has 16 of the rows
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float* at = p + (lane >> 2) * ld + j * 8 + (lane & 3) * 2;
    *(Vec<float, 2>*)at = Vec<float, 2>{{c.v[4 * j], c.v[4 * j + 1]}};
    *(Vec<float, 2>*)(at + 8 * ld) = Vec<float, 2>{{c.v[4 * j + 2], c.v[4 * j + 3]}};
  }
}
"""


def wide_words() -> str:
    """The definitions, and ``wide_mma(c, T* a, T* b)`` for each width and type."""
    return _HEAD + "".join(_product(n, t) for n in COLUMNS for t in ("f16", "bf16"))


def _product(n: int, dtype: str) -> str:
    registers = ", ".join(f"%{i}" for i in range(n // 2))
    bound = ", ".join(f'"+f"(c.v[{i}])' for i in range(n // 2))
    a, b = n // 2, n // 2 + 1
    return f"""
INLINE void wide_mma(WideC<{n}>& c, const {dtype}* x, const {dtype}* y) {{
  const uint64_t a = wide_tile(x), b = wide_tile(y);
#pragma unroll
  for (int k = 0; k < 4; k++)
    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
                 "{{{registers}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
                 : {bound} : "l"(a + 2 * k), "l"(b + 2 * k));
}}
"""
