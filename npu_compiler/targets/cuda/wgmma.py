"""Hopper's matrix unit in CUDA C++: four simds multiply 64 rows by up to 256 columns straight from group memory.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (wgmma); both operands have the 128-byte swizzle.
"""

from __future__ import annotations

from .tile_selection import ONE_TILE, WIDTHS

COLUMNS = (64, 128, 256)  # of the tiles that threads copy

_HEAD = """
// Four simds and the wide matrix unit: C [64, N] += A [64, 64] B [N, 64]^T, tiles of 128-byte rows, swizzled.
template <int N> struct WideC { float v[N / 2]; };
INLINE int wide_at(int row, int chunk) { return row * 64 + ((chunk ^ (row & 7)) * 8); }
INLINE void wide_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void wide_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
template <int N> INLINE void wide_settle(WideC<N>& c) {  // all has been added: nobody reads the results before
  wide_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(c.v[i])::"memory");
}
template <int K> INLINE uint64_t wide_tile(const void* p) {  // rows of K elements, 8 of them a swizzled block
  const uint64_t swizzle = K == 64 ? 1 : 2;
  return (uint64_t)((group_address(p) & 0x3ffff) >> 4) | (1ull << 16) | ((uint64_t)K << 32) | (swizzle << 62);
}
// Blocks of 8 rows, PITCH bytes apart: of 64 elements, swizzled, or of 16-byte pieces that follow each other.
template <int PITCH, bool SWIZZLED> INLINE uint64_t wide_pixels(const void* p) {
  return (uint64_t)((group_address(p) & 0x3ffff) >> 4) | (1ull << 16) | ((uint64_t)(PITCH / 16) << 32) |
         ((uint64_t)SWIZZLED << 62);
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


_PRODUCT = """
template <int K = 64, int N, class T> INLINE void wide_mma(WideC<N>& c, const T* x, const T* y) {
  const uint64_t a = wide_tile<K>(x), b = wide_tile<K>(y);
#pragma unroll
  for (int k = 0; k < K / 16; k++) wide_step(c, a + 2 * k, b + 2 * k, x);
}
"""


_TURNED = """
// B as [K, N]: tiles of K rows of 64 elements beside each other.
template <int K> INLINE uint64_t wide_turned_tile(const void* p) {
  return (uint64_t)((group_address(p) & 0x3ffff) >> 4) | ((uint64_t)(K * 8) << 16) | (64ull << 32) | (1ull << 62);
}
"""


def wide_words() -> str:
    """The definitions, and ``wide_mma<K>(c, T* a, T* b)`` for each width and type."""
    steps = "".join(_step(n, t) for n in sorted({*WIDTHS, *ONE_TILE}) for t in ("f16", "bf16"))
    return _HEAD + steps + _PRODUCT + _turned_words()


def _step(n: int, dtype: str) -> str:
    registers = ", ".join(f"%{i}" for i in range(n // 2))
    bound = ", ".join(f'"+f"(c.v[{i}])' for i in range(n // 2))
    return f"""
INLINE void wide_step(WideC<{n}>& c, uint64_t a, uint64_t b, const {dtype}*) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
               "{{{registers}}}, %{n // 2}, %{n // 2 + 1}, 1, 1, 1, 0, 0;"
               : {bound} : "l"(a), "l"(b));
}}
"""


def _turned_words() -> str:
    """``wide_turned(c, FragA<T> a, uint64_t b)``: 64 rows from the registers of four simds, by 16 rows of [K, N]."""
    return _TURNED + "".join(_turned_step(n, t) for n in (64, 128) for t in ("f16", "bf16"))


def _turned_step(n: int, dtype: str) -> str:
    registers, r = ", ".join(f"%{i}" for i in range(n // 2)), n // 2
    bound = ", ".join(f'"+f"(c.v[{i}])' for i in range(n // 2))
    return f"""
INLINE void wide_turned(WideC<{n}>& c, const FragA<{dtype}>& a, uint64_t b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
               "{{{registers}}}, {{%{r}, %{r + 1}, %{r + 2}, %{r + 3}}}, %{r + 4}, 1, 1, 1, 1;"
               : {bound} : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(b));
}}
"""
