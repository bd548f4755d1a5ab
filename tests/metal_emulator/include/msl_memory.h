// Pointers that know their address space, threadgroup variables, atomics, positions.
#pragma once

namespace metal {

struct device_space {};
struct coherent_space {};  // coherent(device): what other groups of the launch write can be seen
struct constant_space {};
struct threadgroup_space {};
struct thread_space {};

// A pointer into one address space. Nothing converts between spaces; thread pointers come from plain C++ addresses.
template <class T, class Space> struct ptr {
  T* address;
  ptr() = default;
  ptr(decltype(nullptr)) : address(nullptr) {}
  template <class S = Space, class = enable_if_t<is_same_v<S, thread_space>>> ptr(T* p) : address(p) {}
  template <class U, class = enable_if_t<is_same_v<const U, T> && !is_same_v<U, T>>> ptr(ptr<U, Space> p) : address(p.address) {}
  template <class U, class = enable_if_t<!is_same_v<const U, T> && !is_same_v<U, T>>, class = void>
  explicit ptr(ptr<U, Space> p) : address((T*)p.address) {}
  static ptr from(const void* p) {
    ptr r;
    r.address = (T*)p;
    return r;
  }
  T& at(T* p) const {
    if (alignof(T) > 1 && (uintptr_t)p % alignof(T)) emu_fail("an address is not a multiple of %zu bytes, the alignment of what is read or written there", alignof(T));
    return *p;
  }
  template <class I> T& operator[](I i) const { return at(address + i); }
  T& operator*() const { return at(address); }
  T* operator->() const { return &at(address); }
  explicit operator bool() const { return address != nullptr; }
  template <class I> ptr& operator+=(I i) { address += i; return *this; }
  template <class I> ptr& operator-=(I i) { address -= i; return *this; }
  ptr& operator++() { ++address; return *this; }
  ptr operator++(int) { ptr r = *this; ++address; return r; }
};
// Of unknown type: any pointer of the space becomes one, and it is cast back.
template <class Space> struct ptr<const void, Space> {
  const void* address;
  ptr() = default;
  template <class T> ptr(ptr<T, Space> p) : address(p.address) {}
};
template <class Space> struct ptr<void, Space> {
  void* address;
  ptr() = default;
  template <class T, class = enable_if_t<is_same_v<T, remove_const_t<T>>>> ptr(ptr<T, Space> p) : address(p.address) {}
};
template <class T, class S, class I, class = enable_if_t<is_integer<I>>> EMU_INLINE ptr<T, S> operator+(ptr<T, S> p, I i) { p.address += i; return p; }
template <class T, class S, class I, class = enable_if_t<is_integer<I>>> EMU_INLINE ptr<T, S> operator+(I i, ptr<T, S> p) { p.address += i; return p; }
template <class T, class S, class I, class = enable_if_t<is_integer<I>>> EMU_INLINE ptr<T, S> operator-(ptr<T, S> p, I i) { p.address -= i; return p; }
template <class T, class U, class S> EMU_INLINE long operator-(ptr<T, S> a, ptr<U, S> b) { return a.address - b.address; }
template <class T, class S> EMU_INLINE bool operator==(ptr<T, S> a, ptr<T, S> b) { return a.address == b.address; }
template <class T, class S> EMU_INLINE bool operator!=(ptr<T, S> a, ptr<T, S> b) { return a.address != b.address; }
template <class T, class S> EMU_INLINE bool operator<(ptr<T, S> a, ptr<T, S> b) { return a.address < b.address; }

template <class T> EMU_INLINE ptr<T, threadgroup_space> shared(unsigned id, size_t count, const char* name) {
  return ptr<T, threadgroup_space>::from(emu_shared(id, sizeof(T) * count, alignof(T), sizeof(T), name));
}

// ---------------------------------------------------------------------------------------------------------- positions
template <class T> struct positioned {  // uint, ushort
  static T make(const unsigned* p) { return T(p[0]); }
};
template <class T> struct positioned<vec<T, 2>> {
  static vec<T, 2> make(const unsigned* p) { return vec<T, 2>(T(p[0]), T(p[1])); }
};
template <class T> struct positioned<vec<T, 3>> {
  static vec<T, 3> make(const unsigned* p) { return vec<T, 3>(T(p[0]), T(p[1]), T(p[2])); }
};
template <class T> EMU_INLINE T position(const unsigned* p) { return positioned<T>::make(p); }

// ------------------------------------------------------------------------------------------------------------ atomics
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
template <class T, class S> EMU_INLINE T atomic_load_explicit(ptr<atomic<T>, S> p, memory_order) {
  static_assert(is_same_v<S, device_space> || is_same_v<S, threadgroup_space>, "atomics live in device or threadgroup memory");
  return as_type<T>(emu_atomic_load(p.address));
}
template <class T, class S, class U> EMU_INLINE void atomic_store_explicit(ptr<atomic<T>, S> p, U x, memory_order order) {
  uint old = as_type<uint>(atomic_load_explicit(p, order));
  while (!emu_atomic_swap(p.address, &old, as_type<uint>(T(x)))) {}
}
#define EMU_ATOMIC(name, result)                                                                                    \
  template <class T, class S, class U> EMU_INLINE T atomic_##name##_explicit(ptr<atomic<T>, S> p, U u, memory_order order) { \
    T x = T(u), old = atomic_load_explicit(p, order);                                                               \
    uint bits = as_type<uint>(old);                                                                                 \
    while (!emu_atomic_swap(p.address, &bits, as_type<uint>(T(result)))) old = as_type<T>(bits);                    \
    return old;                                                                                                     \
  }
EMU_ATOMIC(exchange, x) EMU_ATOMIC(fetch_add, old + x) EMU_ATOMIC(fetch_sub, old - x) EMU_ATOMIC(fetch_max, old > x ? old : x)
EMU_ATOMIC(fetch_min, old < x ? old : x) EMU_ATOMIC(fetch_or, old | x) EMU_ATOMIC(fetch_and, old & x)

}  // namespace metal
