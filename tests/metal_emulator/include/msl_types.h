// half, bfloat, vectors. Arithmetic of the half types is float's, rounded once: exact for + - * / and sqrt.
#pragma once

namespace metal {

// ------------------------------------------------------------------------------------------------------------- traits
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> constexpr bool is_integer =
    is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, signed char> || is_same_v<T, uchar> ||
    is_same_v<T, short> || is_same_v<T, ushort> || is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, long> ||
    is_same_v<T, ulong>;
template <class T> constexpr bool is_builtin = is_integer<T> || is_same_v<T, float>;

template <class T, class A> EMU_INLINE T as_type(A a) {
  static_assert(sizeof(T) == sizeof(A), "as_type: the sizes differ");
  T t;
  __builtin_memcpy((void*)&t, &a, sizeof t);
  return t;
}

// -------------------------------------------------------------------------------------------------------- half, bfloat
EMU_INLINE ushort float_to_bfloat(float x) {
  uint u = as_type<uint>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return ushort(u >> 16 | 0x40u);
  return ushort((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

struct half {
  ushort bits;
  half() = default;
  template <class T, class = enable_if_t<is_builtin<T>>> half(T x) : bits(emu_float_to_half((float)x)) {}
  operator float() const { return emu_half_to_float(bits); }
};

struct bfloat {
  ushort bits;
  bfloat() = default;
  template <class T, class = enable_if_t<is_builtin<T>>> explicit bfloat(T x) : bits(float_to_bfloat((float)x)) {}
  explicit bfloat(half x) : bits(float_to_bfloat((float)x)) {}
  operator float() const { return as_type<float>((uint)bits << 16); }
  explicit operator half() const { return half((float)*this); }
};

template <class T> constexpr bool is_half = is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> constexpr bool is_scalar = is_builtin<T> || is_half<T>;
// The type of an operation on two scalars, at least one of a half type: float wins over half, half over integers.
template <class A, class B> struct common {};
template <> struct common<half, half> { typedef half type; };
template <> struct common<bfloat, bfloat> { typedef bfloat type; };
template <class A> struct common<A, float> { typedef enable_if_t<is_half<A>, float> type; };
template <class B> struct common<float, B> { typedef enable_if_t<is_half<B>, float> type; };
template <class A, class B> struct mixed_half { static constexpr bool value = is_half<A> && is_integer<B>; };
template <class A, class B, class = void> struct operation {};
template <class A, class B> struct operation<A, B, enable_if_t<mixed_half<A, B>::value>> { typedef A type; };
template <class A, class B> struct operation<A, B, enable_if_t<mixed_half<B, A>::value>> { typedef B type; };
template <class A, class B> struct operation<A, B, enable_if_t<(is_half<A> || is_half<B>) && !is_integer<A> && !is_integer<B>>>
    : common<A, B> {};

#define EMU_HALF_OPERATOR(op)                                                                \
  template <class A, class B, class R = typename operation<A, B>::type> EMU_INLINE R operator op(A a, B b) { \
    return R((float)a op(float) b);                                                          \
  }
EMU_HALF_OPERATOR(+) EMU_HALF_OPERATOR(-) EMU_HALF_OPERATOR(*) EMU_HALF_OPERATOR(/)
#define EMU_HALF_COMPARE(op)                                                                 \
  template <class A, class B, class = typename operation<A, B>::type> EMU_INLINE bool operator op(A a, B b) { \
    return (float)a op(float) b;                                                             \
  }
EMU_HALF_COMPARE(==) EMU_HALF_COMPARE(!=) EMU_HALF_COMPARE(<) EMU_HALF_COMPARE(<=) EMU_HALF_COMPARE(>) EMU_HALF_COMPARE(>=)
#define EMU_HALF_ASSIGN(op, do)                                                              \
  template <class A, class B, class = enable_if_t<is_half<A> && is_scalar<B>>> EMU_INLINE A& operator op(A& a, B b) { \
    return a = A((float)a do (float)b);                                                      \
  }
EMU_HALF_ASSIGN(+=, +) EMU_HALF_ASSIGN(-=, -) EMU_HALF_ASSIGN(*=, *) EMU_HALF_ASSIGN(/=, /)
template <class A, class = enable_if_t<is_half<A>>> EMU_INLINE A operator-(A a) { return as_type<A>(ushort(a.bits ^ 0x8000)); }
template <class A, class = enable_if_t<is_half<A>>> EMU_INLINE A operator+(A a) { return a; }

// ------------------------------------------------------------------------------------------------------------ vectors
template <class T, int N> struct vec;
template <class T> struct vector_of { typedef T element; static constexpr int size = 0; };
template <class T, int N> struct vector_of<vec<T, N>> { typedef T element; static constexpr int size = N; };
template <class T> constexpr bool is_vector = vector_of<T>::size != 0;
template <class T> using element_of = typename vector_of<T>::element;

#define EMU_SWIZZLE2(name, a, b) vec<T, 2> swizzle_##name() const { return vec<T, 2>(a, b); }
#define EMU_VECTOR_COMMON(N)                                                                          \
  vec() = default;                                                                                    \
  template <class U, class = enable_if_t<is_scalar<U>>> explicit vec(U v) { for (int i = 0; i < N; i++) (*this)[i] = T(v); } \
  template <class U, class = enable_if_t<!is_same_v<U, T>>> explicit vec(const vec<U, N>& v) {        \
    for (int i = 0; i < N; i++) (*this)[i] = T(v[i]);                                                 \
  }                                                                                                   \
  T& operator[](int i) { return (&x)[i]; }                                                            \
  const T& operator[](int i) const { return (&x)[i]; }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  EMU_VECTOR_COMMON(2)
  vec(T a, T b) : x(a), y(b) {}
  EMU_SWIZZLE2(xy, x, y) EMU_SWIZZLE2(yx, y, x) EMU_SWIZZLE2(xx, x, x) EMU_SWIZZLE2(yy, y, y)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  EMU_VECTOR_COMMON(3)
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
  vec(vec<T, 2> a, T b) : x(a.x), y(a.y), z(b) {}
  EMU_SWIZZLE2(xy, x, y) EMU_SWIZZLE2(yz, y, z) EMU_SWIZZLE2(xz, x, z)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  EMU_VECTOR_COMMON(4)
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  vec(vec<T, 2> a, T b, T c) : x(a.x), y(a.y), z(b), w(c) {}
  vec(vec<T, 3> a, T b) : x(a.x), y(a.y), z(a.z), w(b) {}
  EMU_SWIZZLE2(xy, x, y) EMU_SWIZZLE2(zw, z, w) EMU_SWIZZLE2(xz, x, z) EMU_SWIZZLE2(yw, y, w)
  vec<T, 3> swizzle_xyz() const { return vec<T, 3>(x, y, z); }
};

#define EMU_VECTOR_OPERATOR(op)                                                                       \
  template <class T, int N> EMU_INLINE auto operator op(vec<T, N> a, vec<T, N> b) {                   \
    vec<remove_const_t<decltype(T(a[0] op b[0]))>, N> r;                                              \
    for (int i = 0; i < N; i++) r[i] = T(a[i] op b[i]);                                               \
    return r;                                                                                         \
  }                                                                                                   \
  template <class T, int N, class U, class = enable_if_t<is_scalar<U>>> EMU_INLINE auto operator op(vec<T, N> a, U b) { \
    return a op vec<T, N>(b);                                                                         \
  }                                                                                                   \
  template <class T, int N, class U, class = enable_if_t<is_scalar<U>>> EMU_INLINE auto operator op(U a, vec<T, N> b) { \
    return vec<T, N>(a) op b;                                                                         \
  }
EMU_VECTOR_OPERATOR(+) EMU_VECTOR_OPERATOR(-) EMU_VECTOR_OPERATOR(*) EMU_VECTOR_OPERATOR(/) EMU_VECTOR_OPERATOR(%)
EMU_VECTOR_OPERATOR(&) EMU_VECTOR_OPERATOR(|) EMU_VECTOR_OPERATOR(^) EMU_VECTOR_OPERATOR(<<) EMU_VECTOR_OPERATOR(>>)
#define EMU_VECTOR_COMPARE(op)                                                                        \
  template <class T, int N> EMU_INLINE vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) {           \
    vec<bool, N> r;                                                                                   \
    for (int i = 0; i < N; i++) r[i] = a[i] op b[i];                                                  \
    return r;                                                                                         \
  }                                                                                                   \
  template <class T, int N, class U, class = enable_if_t<is_scalar<U>>> EMU_INLINE vec<bool, N> operator op(vec<T, N> a, U b) { \
    return a op vec<T, N>(b);                                                                         \
  }
EMU_VECTOR_COMPARE(==) EMU_VECTOR_COMPARE(!=) EMU_VECTOR_COMPARE(<) EMU_VECTOR_COMPARE(<=) EMU_VECTOR_COMPARE(>) EMU_VECTOR_COMPARE(>=)
#define EMU_VECTOR_ASSIGN(op, do)                                                                     \
  template <class T, int N, class U> EMU_INLINE auto operator op(vec<T, N>& a, U b)->decltype(a = a do b) { return a = a do b; }
EMU_VECTOR_ASSIGN(+=, +) EMU_VECTOR_ASSIGN(-=, -) EMU_VECTOR_ASSIGN(*=, *) EMU_VECTOR_ASSIGN(/=, /)
template <class T, int N> EMU_INLINE vec<T, N> operator-(vec<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = -a[i];
  return a;
}

template <class T, int N> struct packed_vec {  // no alignment beyond its element's
  T v[N];
  packed_vec() = default;
  packed_vec(vec<T, N> a) { for (int i = 0; i < N; i++) v[i] = a[i]; }
  operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = v[i];
    return r;
  }
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
};

namespace types {
using metal::half;
using metal::bfloat;
using metal::vec;
#define EMU_VECTORS(T) typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;
EMU_VECTORS(bool) EMU_VECTORS(char) EMU_VECTORS(uchar) EMU_VECTORS(short) EMU_VECTORS(ushort) EMU_VECTORS(int)
EMU_VECTORS(uint) EMU_VECTORS(long) EMU_VECTORS(ulong) EMU_VECTORS(half) EMU_VECTORS(bfloat) EMU_VECTORS(float)
typedef packed_vec<float, 2> packed_float2;
typedef packed_vec<float, 3> packed_float3;
typedef packed_vec<float, 4> packed_float4;
typedef packed_vec<half, 2> packed_half2;
typedef packed_vec<half, 3> packed_half3;
typedef packed_vec<half, 4> packed_half4;
}  // namespace types
using namespace types;

}  // namespace metal
