// Reductions among the threads of a workgroup, in a fixed order, so that every thread has the same result.
//
// Op: Sum, Prod, Max or Min, with of(a, b). Integers wrap around. For booleans, Sum and Max are "or", Prod and Min are
// "and". ArgOp: ArgMax or ArgMin, with step(value, at, x, i), which also updates the position of the value.
#pragma once

struct Sum {
  static INLINE bool of(bool a, bool b) { return a | b; }
  static INLINE float of(float a, float b) { return a + b; }
#ifdef HAS_DOUBLE
  static INLINE double of(double a, double b) { return a + b; }
#endif
  template <class T> static INLINE T of(T a, T b) { return add_wrapping(a, b); }
};
struct Prod {
  static INLINE bool of(bool a, bool b) { return a & b; }
  static INLINE float of(float a, float b) { return a * b; }
#ifdef HAS_DOUBLE
  static INLINE double of(double a, double b) { return a * b; }
#endif
  template <class T> static INLINE T of(T a, T b) { return mul_wrapping(a, b); }
};
struct Max {
  static INLINE bool of(bool a, bool b) { return a | b; }
  template <class T> static INLINE T of(T a, T b) { return m_maximum(a, b); }
};
struct Min {
  static INLINE bool of(bool a, bool b) { return a & b; }
  template <class T> static INLINE T of(T a, T b) { return m_minimum(a, b); }
};
struct ArgMax {
  template <class T> static INLINE void step(THREAD T& value, THREAD int& at, T x, int i) {
    argmax_step(value, at, x, i);
  }
};
struct ArgMin {
  template <class T> static INLINE void step(THREAD T& value, THREAD int& at, T x, int i) {
    argmin_step(value, at, x, i);
  }
};

// Reduces among the lanes of a subgroup.
template <class Op, class T> INLINE T subgroup_reduce(T x) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x = Op::of(x, subgroup_xor(x, m));
  return x;
}
template <class ArgOp, class T> INLINE void subgroup_reduce_arg(THREAD T& x, THREAD int& at) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    const T other = subgroup_xor(x, m);
    const int place = subgroup_xor(at, m);
    ArgOp::step(x, at, other, place);
  }
}

// Reduces N values in shared memory that are STEP elements apart.
template <class Op, int N, int STEP, class T> INLINE T reduce_shared(SMEM const T* s) {
  T x = s[0];
  for (int k = 1; k < N; k++) x = Op::of(x, s[k * STEP]);
  return x;
}
template <class ArgOp, int N, int STEP, class T>
INLINE void reduce_shared_arg(SMEM const T* s, SMEM const int* places, THREAD T& x, THREAD int& at) {
  x = s[0];
  at = places[0];
  for (int k = 1; k < N; k++) ArgOp::step(x, at, s[k * STEP], places[k * STEP]);
}
