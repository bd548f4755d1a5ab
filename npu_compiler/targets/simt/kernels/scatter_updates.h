// Updates at data-dependent indices. Results do not depend on their order: maxima, and sums of integers, to which any number
// of threads adds atomically. Floats are converted to fixed point with a unit that fits the largest update of
// their place. Of the bits below this update's leading one, BITS are for carries and 61 - BITS for fractions, so that
// a sum is at least as exact as one in float.
//
// (J. Demmel and H. D. Nguyen, "Parallel Reproducible Summation", 2015, describe such sums for one place.)
#pragma once

INLINE void raise_number(DEVICE int* number, int x) {
  if (atomic_load(number) < x) atomic_max(number, x);
}

// Raises the magnitude of a place, the bits of its largest update without the sign, so that NaN > infinity > numbers.
// CROWDED: places have many updates, of which few raise it.
template <bool CROWDED> INLINE void raise_magnitude(DEVICE int* magnitude, float x) {
  const int mine = (int)(bits_of_f32(x) & 0x7fffffffu);
  if (mine != 0 && (!CROWDED || atomic_load(magnitude) < mine)) atomic_max(magnitude, mine);
}

// The binary logarithm of the number of units in 1.
template <int BITS> INLINE int fixed_point_shift(int magnitude) {
  const int exponent = magnitude >> 23;
  return 61 - BITS - (exponent > 1 ? exponent : 1) + 127;
}

// Returns x * 2^shift, for shift from -254 to 254.
INLINE float times_power_of_two(float x, int shift) {
  const int half_shift = shift / 2;
  return x * f32_of_bits((uint)(127 + half_shift) << 23) * f32_of_bits((uint)(127 + shift - half_shift) << 23);
}

// Adds x. If an update of the place is not finite, the low and the high word count positive and negative infinities.
template <int BITS> INLINE void add_fixed_point(DEVICE int64_t* sum, int magnitude, float x) {
  if (magnitude >= 0x7f800000) {
    if (m_isinf(x)) atomic_add((DEVICE int*)sum + (x < 0 ? 1 : 0), 1);
  } else if (x != 0) {
    atomic_add(sum, (int64_t)m_round(times_power_of_two(x, fixed_point_shift<BITS>(magnitude))));
  }
}

// Returns base plus the sum of its place.
template <int BITS> INLINE float add_to_base(float base, int magnitude, int64_t sum) {
  if (magnitude == 0) return base;
  if (magnitude > 0x7f800000) return m_nan_float();
  if (magnitude == 0x7f800000) {
    const bool positive = (uint)sum != 0, negative = (uint)(sum >> 32) != 0;
    return positive && negative ? m_nan_float() : base + (negative ? -m_inf_float() : m_inf_float());
  }
  return base + times_power_of_two((float)sum, -fixed_point_shift<BITS>(magnitude));
}

// Stores the base plus the sums. C::X and C::Y are the places of the base and the result, COUNT elements in rows of N.
template <class C>
INLINE void add_fixed_point_sums(
    DEVICE const int* magnitudes, DEVICE const int64_t* sums, DEVICE const float* x, DEVICE float* y, Thread at) {
  const uint n = (uint)at.workgroup * (uint)C::THREADS + (uint)at.tid;
  if (n >= (uint)C::COUNT) return;
  const int row = (int)(n / (uint)C::N), column = (int)(n % (uint)C::N);
  const float base = x[C::X::row(row) + (int64_t)column * C::X::STEP];
  y[C::Y::row(row) + (int64_t)column * C::Y::STEP] = add_to_base<C::BITS>(base, magnitudes[n], sums[n]);
}
