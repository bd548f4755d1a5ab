// Functions that all kernels share, written in the vocabulary of a dialect.

template <class T, int N> struct alignas(sizeof(T) * N) Vec { T v[N]; };

// The position of a thread: workgroup, thread in the workgroup, lane in the subgroup, subgroup in the workgroup.
struct Thread { int workgroup, tid, lane, subgroup; };

INLINE float to_f32(float x) { return x; }

// 8-bit floats without infinities (float8_e4m3fn). Numbers that would round to more than 448 become NaN.
struct e4m3 { uint8_t bits; };
#ifndef HAS_E4M3
INLINE float f32_of_e4m3(uint code) {
  const uint magnitude = code & 0x7fu;  // below 2^-6: a multiple of 2^-9
  const uint bits = magnitude < 8 ? bits_of_f32((float)magnitude * 0.001953125f) : (magnitude << 20) + (120u << 23);
  return magnitude == 0x7fu ? m_nan_float() : f32_of_bits(bits | (code & 0x80u) << 24);
}
INLINE uint e4m3_of_f32(float x) {
  const uint u = bits_of_f32(x), magnitude = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
  if (magnitude > 0x43e80000u) return sign | 0x7fu;
  if (magnitude < 0x3c800000u)  // adding 2^14 aligns the last bit of a subnormal with that of the float
    return sign | (bits_of_f32(f32_of_bits(magnitude) + 16384.0f) - 0x46800000u);
  return sign | ((magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20);
}
INLINE uint e4m3_pair(float low, float high) { return e4m3_of_f32(low) | e4m3_of_f32(high) << 8; }
#endif
INLINE float to_f32(e4m3 x) { return f32_of_e4m3(x.bits); }
INLINE e4m3 to_e4m3(float x) {
  e4m3 y;
  y.bits = (uint8_t)e4m3_of_f32(x);
  return y;
}

// Convert a value from its storage type to registers and back: half types become floats, other types are cast.
template <class T> INLINE T widen(T x) { return x; }
INLINE float widen(f16 x) { return to_f32(x); }
INLINE float widen(bf16 x) { return to_f32(x); }
INLINE float widen(e4m3 x) { return to_f32(x); }
template <class T> struct Storage {
  template <class R> static INLINE T of(R x) { return (T)x; }
};
template <> struct Storage<f16> {
  static INLINE f16 of(float x) { return to_f16(x); }
};
template <> struct Storage<bf16> {
  static INLINE bf16 of(float x) { return to_bf16(x); }
};
template <> struct Storage<e4m3> {
  static INLINE e4m3 of(float x) { return to_e4m3(x); }
};
template <class T, class R> INLINE T narrow(R x) { return Storage<T>::of(x); }

// Converts in pairs, whose conversion may saturate; one comparison finds out whether a number should be NaN.
template <int N> INLINE Vec<e4m3, N> e4m3_vector(THREAD const float* x) {
  Vec<e4m3, N> y;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint pair = e4m3_pair(x[i], x[i + 1]);
    y.v[i].bits = (uint8_t)pair;
    y.v[i + 1].bits = (uint8_t)(pair >> 8);
    largest = m_max(largest, m_max(m_abs(x[i]), m_abs(x[i + 1])));
  }
  if (largest > 464.0f) {
#pragma unroll
    for (int i = 0; i < N; i++) y.v[i] = to_e4m3(x[i]);
  }
  return y;
}

INLINE float round_f16(float x) { return to_f32(to_f16(x)); }
#ifndef HAS_ROUND_BF16
INLINE float round_bf16(float x) { return to_f32(to_bf16(x)); }
#endif
INLINE float round_e4m3(float x) { return to_f32(to_e4m3(x)); }

INLINE uint4 zero16() {
  uint4 v;
  v.x = v.y = v.z = v.w = 0;
  return v;
}

INLINE int64_t subgroup_xor(int64_t x, int mask) {
  const int low = subgroup_xor((int)x, mask), high = subgroup_xor((int)(x >> 32), mask);
  return (int64_t)((uint64_t)(uint)low | ((uint64_t)(uint)high << 32));
}
INLINE bool subgroup_xor(bool x, int mask) { return subgroup_xor((int)x, mask) != 0; }
INLINE float subgroup_max(float x) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x = m_max(x, subgroup_xor(x, m));
  return x;
}

// Returns a data-dependent index, or 0 if it is not below n; then sets `bad`.
INLINE int64_t checked(int64_t i, int64_t n, DEVICE int* bad) {
  if (i >= 0 && i < n) return i;
  set_flag(bad);
  return 0;
}
// The same for an index that is the whole part of a float; n <= 2^24.
INLINE int checked_float(float x, int n, DEVICE int* bad) {
  if (x > -1.0f && x < (float)n) return (int)x;
  set_flag(bad);
  return 0;
}

INLINE int add_wrapping(int a, int b) { return (int)((uint)a + (uint)b); }
INLINE int sub_wrapping(int a, int b) { return (int)((uint)a - (uint)b); }
INLINE int mul_wrapping(int a, int b) { return (int)((uint)a * (uint)b); }
INLINE int64_t add_wrapping(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
INLINE int64_t sub_wrapping(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }
INLINE int64_t mul_wrapping(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

// Return NaN if either operand is NaN, as in PyTorch; of two zeros, either one.
template <class T> INLINE T m_maximum(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> INLINE T m_minimum(T a, T b) { return (a < b || a != a) ? a : b; }
template <class T> INLINE bool m_isnan(T x) { return x != x; }
template <class T> INLINE T m_sign(T x) { return (T)((x > 0) - (x < 0)); }

#ifndef HAS_ROUGH_LOG2
INLINE float m_log2_rough(float x) { return m_log2(x); }
#endif

// Whole numbers below 2^22 in magnitude are the low bits of their sum with 1.5 * 2^23, and adding that rounds.
// min(max(round(x), low), high) for whole numbers low and high of up to 2^21 in magnitude; NaN gives low.
INLINE int round_clamped(float x, float low, float high) {
#ifdef HAS_ROUND_TO_INT
  return round_to_int(m_minimum(m_max(x, low), high));
#else
  return (int)(bits_of_f32(m_minimum(m_max(x, low), high) + 12582912.0f) - 0x4b400000u);
#endif
}
// The same plus `zero`, as a float: conversions from integers are slower than sums of floats.
INLINE float round_clamped_float(float x, float low, float high, float zero) {
  return (m_minimum(m_max(x, low), high) + 12582912.0f) - (12582912.0f - zero);
}
// The same for results of 8 bits that pack_pair() saturates, or of which only the low byte is valid.
INLINE int round_clamped_bits(float x, float low, float high) {
#ifdef HAS_ROUND_TO_INT
  if (low == 0.0f && high <= 255.0f) return round_to_int(high < 255.0f ? m_minimum(x, high) : x);
  return round_clamped(x, low, high);
#else
  return (int)bits_of_f32(m_minimum(m_max(x, low), high) + 12582912.0f);
#endif
}

// One step of an argmax: NaN is the largest value; of equal values, the first wins.
template <class T> INLINE void argmax_step(THREAD T& value, THREAD int& at, T x, int i) {
  const bool nan = x != x, held = value != value, first = i < at;  // no branch: loops around it load ahead
  const bool take = (nan & (!held | first)) | (!nan & !held & ((x > value) | ((x == value) & first)));
  value = take ? x : value;
  at = take ? i : at;
}
template <class T> INLINE void argmin_step(THREAD T& value, THREAD int& at, T x, int i) {
  const bool nan = x != x, held = value != value, first = i < at;
  const bool take = (nan & (!held | first)) | (!nan & !held & ((x < value) | ((x == value) & first)));
  value = take ? x : value;
  at = take ? i : at;
}

// Integers: division by zero returns 0, and overflow wraps around.
template <class T> INLINE T integer_idiv(T a, T b) {
  return b == 0 ? (T)0 : b == -1 ? sub_wrapping((T)0, a) : (T)(a / b);
}
template <class T> INLINE T integer_fmod(T a, T b) { return b == 0 || b == -1 ? (T)0 : (T)(a % b); }
template <class T> INLINE bool inexact_below_zero(T a, T b) { return integer_fmod(a, b) != 0 && (a < 0) != (b < 0); }
template <class T> INLINE T integer_pow(T base, T exponent) {
  if (exponent < 0) return base == 1 ? (T)1 : base == -1 ? (T)((exponent & 1) ? -1 : 1) : (T)0;
  T result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = mul_wrapping(result, base);
    base = mul_wrapping(base, base);
  }
  return result;
}
#define INTEGER_FUNCTIONS(T, U, bits)                                                                         \
  INLINE T m_idiv(T a, T b) { return integer_idiv(a, b); }                                                    \
  INLINE T m_fmod(T a, T b) { return integer_fmod(a, b); }                                                    \
  INLINE T m_floordiv(T a, T b) { return integer_idiv(a, b) - (T)inexact_below_zero(a, b); }                  \
  INLINE T m_remainder(T a, T b) { return integer_fmod(a, b) + (inexact_below_zero(a, b) ? b : (T)0); }       \
  INLINE T m_pow(T a, T b) { return integer_pow(a, b); }                                                      \
  INLINE T m_abs(T a) { return a < 0 ? sub_wrapping((T)0, a) : a; }                                           \
  INLINE T m_shl(T a, T by) { return by < 0 || by > bits - 1 ? (T)0 : (T)((U)a << by); }                      \
  INLINE T m_shr(T a, T by) { return a >> (by < 0 || by > bits - 1 ? (T)(bits - 1) : by); }
INTEGER_FUNCTIONS(int, uint, 32)
INTEGER_FUNCTIONS(int64_t, uint64_t, 64)
#undef INTEGER_FUNCTIONS

// Floats: the quotient rounded down, and the remainder with the sign of the divisor.
template <class T> INLINE T float_remainder(T a, T b) {
  const T rest = m_fmod(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
template <class T> INLINE T float_floordiv(T a, T b) {
  if (b == 0) return a / b;
  const T rest = m_fmod(a, b);
  T whole = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) whole -= 1;
  const T down = m_floor(whole);
  return whole - down > (T)0.5 ? down + 1 : down;
}
INLINE float m_remainder(float a, float b) { return float_remainder(a, b); }
INLINE float m_floordiv(float a, float b) { return float_floordiv(a, b); }
// log(exp(a) + exp(b)). Equal infinities have no difference.
template <class T> INLINE T float_logaddexp(T a, T b) {
  return a == b && a - b != 0 ? a : m_maximum(a, b) + m_log1p(m_exp(-m_abs(a - b)));
}
INLINE float m_logaddexp(float a, float b) { return float_logaddexp(a, b); }
INLINE float m_sigmoid(float x) { return 1.0f / (1.0f + m_exp(-x)); }
#ifdef HAS_DOUBLE
INLINE double m_remainder(double a, double b) { return float_remainder(a, b); }
INLINE double m_floordiv(double a, double b) { return float_floordiv(a, b); }
INLINE double m_logaddexp(double a, double b) { return float_logaddexp(a, b); }
INLINE double m_sigmoid(double x) { return 1.0 / (1.0 + m_exp(-x)); }
#endif

// Four sums over a quad of lanes at once: lane l returns sum number l % 4.
INLINE float quad_sum4(float a, float b, float c, float d, int lane) {
  const bool odd = (lane & 1) != 0, second = (lane & 2) != 0;
  const float ab = (odd ? b : a) + subgroup_xor(odd ? a : b, 1), cd = (odd ? d : c) + subgroup_xor(odd ? c : d, 1);
  return (second ? cd : ab) + subgroup_xor(second ? ab : cd, 2);
}
// The same over a subgroup.
INLINE float subgroup_sum4(float a, float b, float c, float d, int lane) {
  float x = quad_sum4(a, b, c, d, lane);
#pragma unroll
  for (int m = 4; m < 32; m <<= 1) x += subgroup_xor(x, m);
  return x;
}

// Decodes eight columns of a row in bf16c12 (formats/bf16c12/rows4.py) to bfloat16, from their low bytes and their
// codes. The row's scale is not applied.
INLINE uint4 rows4_decode(uint low0, uint low1, uint codes) {
  const uint selector = codes & 0x77777777u, table0 = 0x3b3a3900u, table1 = 0x3f3e3d3cu;
  const uint high0 = byte_permute(table0, table1, selector) | (codes & 0x80808080u);
  const uint high1 = byte_permute(table0, table1, selector >> 16) | (codes << 4 & 0x80808080u);
  uint4 v;
  v.x = byte_permute(low0, high0, 0x5140u);
  v.y = byte_permute(low0, high0, 0x7362u);
  v.z = byte_permute(low1, high1, 0x5140u);
  v.w = byte_permute(low1, high1, 0x7362u);
  return v;
}

// Combine the low (high) halves of two words.
INLINE uint pair_low(uint a, uint b) { return (a & 0xffffu) | (b << 16); }
INLINE uint pair_high(uint a, uint b) { return (a >> 16) | (b & 0xffff0000u); }

// Converts 16 bytes of weights to floats. The last argument only selects the type.
INLINE void unpack(uint4 v, THREAD float* y, THREAD bf16*) {
  const uint w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    y[2 * i] = f32_of_bits(w[i] << 16);
    y[2 * i + 1] = f32_of_bits(w[i] & 0xffff0000u);
  }
}
INLINE void unpack(uint4 v, THREAD float* y, THREAD f16*) {
  const uint w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    y[2 * i] = to_f32(f16_of_bits((uint16_t)(w[i] & 0xffffu)));
    y[2 * i + 1] = to_f32(f16_of_bits((uint16_t)(w[i] >> 16)));
  }
}
INLINE void unpack(uint4 v, THREAD float* y, THREAD float*) {
  y[0] = f32_of_bits(v.x);
  y[1] = f32_of_bits(v.y);
  y[2] = f32_of_bits(v.z);
  y[3] = f32_of_bits(v.w);
}
