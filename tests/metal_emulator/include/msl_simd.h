// Where threads meet: barriers, simdgroup functions, 8x8 matrices.
#pragma once

namespace metal {

struct site {  // where a meeting stands, with the calls that lead there: all that are there meet
  unsigned id, line;  // line: of the call in the kernel
  const char* name;
  static site root(unsigned number, unsigned line, const char* name) { return {number, line, name}; }
  site then(unsigned number, unsigned, const char* inner) const { return {id * 16777619u ^ number * 2654435761u, line, inner}; }
};

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3 };
EMU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((unsigned)a | (unsigned)b); }

EMU_INLINE void threadgroup_barrier(site at, mem_flags flags) { emu_barrier(at.id, at.line, at.name, (unsigned)flags); }
enum fence_order { memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
EMU_INLINE void atomic_thread_fence(mem_flags flags, fence_order, thread_scope scope = thread_scope_device) {
  if (scope == thread_scope_device && ((unsigned)flags & 1)) emu_fence();
}
EMU_INLINE void simdgroup_barrier(site at, mem_flags flags) {
  unsigned active;
  emu_exchange(at.id, at.line, at.name, nullptr, 0, (unsigned)flags, &active);
}

// Everybody's value. Metal's simdgroup functions take neither bfloat nor 64-bit integers nor bool.
template <class T> struct Lanes {
  T value[EMU_WIDTH];
  unsigned active, lane;
  __attribute__((no_sanitize("thread"))) Lanes(site at, T mine) {
    typedef element_of<T> E;
    static_assert(!is_same_v<E, bfloat> && !is_same_v<E, bool> && sizeof(E) <= 4, "no simdgroup function takes this type in Metal");
    const char* all = emu_exchange(at.id, at.line, at.name, &mine, sizeof mine, 0, &active);
    for (unsigned i = 0; i < EMU_WIDTH; i++) __builtin_memcpy((void*)&value[i], all + i * 16, sizeof(T));
    lane = emu_lane();
  }
  bool has(unsigned i) const { return i < EMU_WIDTH && active >> i & 1; }
  T of(unsigned i) const {
    if (!has(i)) emu_fail("a simdgroup function reads lane %u, which takes no part", i);
    return value[i];
  }
};

// Sums and the like go down a tree of exchanges with lanes 16, 8, 4, 2, 1 away: every lane gets the same bits.
template <class T, class F> EMU_INLINE T simd_fold(site at, T mine, F f) {
  Lanes<T> a(at, mine);
  if (a.active == 0xffffffffu) {
    for (unsigned step = EMU_WIDTH / 2; step; step /= 2)
      for (unsigned i = 0; i < step; i++) a.value[i] = f(a.value[i], a.value[i + step]);
    return a.value[0];
  }
  unsigned i = (unsigned)__builtin_ctz(a.active);
  T r = a.value[i];
  while (++i < EMU_WIDTH)
    if (a.has(i)) r = f(r, a.value[i]);
  return r;
}
template <class T> EMU_INLINE T simd_sum(site at, T v) { return simd_fold(at, v, [](T a, T b) { return T(a + b); }); }
template <class T> EMU_INLINE T simd_product(site at, T v) { return simd_fold(at, v, [](T a, T b) { return T(a * b); }); }
template <class T> EMU_INLINE T simd_max(site at, T v) { return simd_fold(at, v, [](T a, T b) { return metal::max(a, b); }); }
template <class T> EMU_INLINE T simd_min(site at, T v) { return simd_fold(at, v, [](T a, T b) { return metal::min(a, b); }); }
template <class T> EMU_INLINE T simd_and(site at, T v) { return simd_fold(at, v, [](T a, T b) { return T(a & b); }); }
template <class T> EMU_INLINE T simd_or(site at, T v) { return simd_fold(at, v, [](T a, T b) { return T(a | b); }); }
template <class T> EMU_INLINE T simd_xor(site at, T v) { return simd_fold(at, v, [](T a, T b) { return T(a ^ b); }); }

template <class T> EMU_INLINE T simd_shuffle(site at, T v, ushort lane) { return Lanes<T>(at, v).of(lane); }
template <class T> EMU_INLINE T simd_broadcast(site at, T v, ushort lane) { return Lanes<T>(at, v).of(lane); }
template <class T> EMU_INLINE T simd_broadcast_first(site at, T v) {
  Lanes<T> a(at, v);
  return a.of((unsigned)__builtin_ctz(a.active));
}
template <class T> EMU_INLINE T simd_shuffle_xor(site at, T v, ushort mask) {
  Lanes<T> a(at, v);
  return a.of(a.lane ^ mask);
}
// Beyond the end of the simdgroup Metal leaves the result undefined; here a lane keeps its own value, as CUDA's do.
template <class T> EMU_INLINE T simd_shuffle_down(site at, T v, ushort delta) {
  Lanes<T> a(at, v);
  return a.lane + delta < EMU_WIDTH ? a.of(a.lane + delta) : v;
}
template <class T> EMU_INLINE T simd_shuffle_up(site at, T v, ushort delta) {
  Lanes<T> a(at, v);
  return a.lane >= delta ? a.of(a.lane - delta) : v;
}
template <class T> EMU_INLINE T simd_prefix_inclusive_sum(site at, T v) {
  Lanes<T> a(at, v);
  T s = T(0);
  for (unsigned i = 0; i <= a.lane; i++)
    if (a.has(i)) s = s + a.value[i];
  return s;
}
template <class T> EMU_INLINE T simd_prefix_exclusive_sum(site at, T v) {
  Lanes<T> a(at, v);
  T s = T(0);
  for (unsigned i = 0; i < a.lane; i++)
    if (a.has(i)) s = s + a.value[i];
  return s;
}
struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit operator vote_t() const { return votes; }
};
EMU_INLINE simd_vote simd_ballot(site at, bool p) {
  Lanes<uint> a(at, (uint)p);
  ulong r = 0;
  for (unsigned i = 0; i < EMU_WIDTH; i++) r |= (ulong)(a.has(i) && a.value[i]) << i;
  return simd_vote{r};
}
EMU_INLINE bool simd_any(site at, bool p) { return simd_ballot(at, p).votes != 0; }
EMU_INLINE bool simd_all(site at, bool p) {
  Lanes<uint> a(at, (uint)p);
  bool r = true;
  for (unsigned i = 0; i < EMU_WIDTH; i++) r &= !a.has(i) || a.value[i];
  return r;
}
EMU_INLINE bool simd_is_first(site at) {
  Lanes<uint> a(at, 0u);
  return a.lane == (unsigned)__builtin_ctz(a.active);
}

// ---------------------------------------------------------------------------------------------------------- matrices
// Each lane holds two neighbours of one row. A product is one exchange; it accumulates in float, in order.
EMU_INLINE unsigned matrix_row(unsigned lane) { return (lane / 4 & 4) | (lane / 2 & 3); }
EMU_INLINE unsigned matrix_column(unsigned lane) { return (lane / 8 & 1) * 4 + (lane & 1) * 2; }
EMU_INLINE unsigned matrix_lane(unsigned row, unsigned column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column >> 1 & 1);
}

template <class T, int Rows, int Columns> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  static_assert(is_same_v<T, float> || is_half<T>, "simdgroup matrices hold float, half or bfloat");
  vec<T, 2> pair;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T x) : pair(x, x) {}
  vec<T, 2>& thread_elements() { return pair; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Rows, int Columns> EMU_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, Rows, Columns>(x);
}

template <class T, class P, class S>
EMU_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, ptr<P, S> p, ulong stride = 8, ulong2 origin = ulong2(0ul, 0ul), bool transposed = false) {
  static_assert(is_same_v<remove_const_t<P>, T>, "simdgroup_load: memory and matrix have different element types");
  ulong r = matrix_row(emu_lane()), c = matrix_column(emu_lane());
  for (ulong i = 0; i < 2; i++)
    m.pair[(int)i] = transposed ? p[(origin.y + c + i) * stride + origin.x + r] : p[(origin.y + r) * stride + origin.x + c + i];
}
template <class T, class S>
EMU_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, ptr<T, S> p, ulong stride = 8, ulong2 origin = ulong2(0ul, 0ul), bool transposed = false) {
  ulong r = matrix_row(emu_lane()), c = matrix_column(emu_lane());
  for (ulong i = 0; i < 2; i++) {
    if (transposed) p[(origin.y + c + i) * stride + origin.x + r] = m.pair[(int)i];
    else p[(origin.y + r) * stride + origin.x + c + i] = m.pair[(int)i];
  }
}
template <class D, class A, class B, class C>
EMU_INLINE __attribute__((no_sanitize("thread"))) void simdgroup_multiply_accumulate(
    site at, simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  float mine[4] = {(float)a.pair.x, (float)a.pair.y, (float)b.pair.x, (float)b.pair.y};
  unsigned active, lane = emu_lane(), row = matrix_row(lane), column = matrix_column(lane);
  const float* all = (const float*)emu_exchange(at.id, at.line, at.name, mine, sizeof mine, 0, &active);
  if (active != 0xffffffffu) emu_fail("%s needs all 32 lanes", at.name);
  float x = (float)c.pair.x, y = (float)c.pair.y;
  for (unsigned k = 0; k < 8; k++) {
    float left = all[matrix_lane(row, k) * 4 + (k & 1)];
    const float* right = all + matrix_lane(k, column) * 4 + 2;
    x += left * right[0], y += left * right[1];
  }
  d.pair = vec<D, 2>(D(x), D(y));
}
template <class D, class A, class B>
EMU_INLINE void simdgroup_multiply(site at, simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(at, d, a, b, simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal
