// A model of Intel AMX, for machines without it: the members of npu::Amx (kernels/amx.h), computed bit by bit as the
// instructions do. Compile with `-include amx_model.h`. Source: Intel 64 and IA-32 Architectures Software Developer's
// Manual, volume 2, TDPBF16PS, TDPBSSD, LDTILECFG, TILELOADD; volume 1, chapter 18.
//
// What faults in hardware ends the process with a message. With AMX_MODEL_REFUSES in the environment, the system refuses
// the tile state. The sign and payload of a NaN are not modelled.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define NPU_AMX_MODEL ::AmxModel
#define AMX_MODEL_CALL __attribute__((noinline))  // inlined into every kernel, these would double its compile time

struct AmxModel {
  static constexpr int TILES = 8, ROWS = 16, BYTES = 64;
  struct State {
    bool configured;
    int rows[TILES], bytes[TILES];
    alignas(64) uint8_t tile[TILES][ROWS][BYTES];
  };
  static State& state() {
    static thread_local State s;
    return s;
  }
  static void require(bool met, const char* fault) {
    if (met) return;
    fprintf(stderr, "AMX model: %s\n", fault);
    abort();
  }

  static bool request() { return !getenv("AMX_MODEL_REFUSES"); }
  template <class Shapes> AMX_MODEL_CALL static void configure(const Shapes& c) {
    State& s = state();
    require(c.palette == 0 || c.palette == 1, "#GP: there is no such palette");
    if (c.palette == 0) return release();
    require(c.start_row < ROWS, "#GP: start_row is out of range");
    for (uint8_t byte : c.reserved) require(byte == 0, "#GP: a reserved byte of the configuration is not zero");
    s = State{};
    s.configured = true;
    for (int t = 0; t < 16; t++) {
      require(t < TILES || (c.rows[t] == 0 && c.row_bytes[t] == 0), "#GP: there are eight tiles");
      require(c.rows[t] <= ROWS && c.row_bytes[t] <= BYTES, "#GP: a tile exceeds 16 rows x 64 bytes");
      require((c.rows[t] == 0) == (c.row_bytes[t] == 0), "#GP: a tile has rows without bytes, or bytes without rows");
      if (t < TILES) s.rows[t] = c.rows[t], s.bytes[t] = c.row_bytes[t];
    }
  }
  static void release() { state() = State{}; }

  template <int T> static State& use() {
    static_assert(T >= 0 && T < TILES, "there are eight tiles");
    State& s = state();
    require(s.configured, "#UD: tiles are used without a configuration");
    require(s.rows[T] > 0, "#UD: a tile is used that is not configured");
    return s;
  }
  template <int T> static void zero() {
    State& s = use<T>();
    memset(s.tile[T], 0, sizeof s.tile[T]);
  }
  template <int T> AMX_MODEL_CALL static void load(const void* p, long stride) {
    zero<T>();
    State& s = state();
    for (int r = 0; r < s.rows[T]; r++) memcpy(s.tile[T][r], (const char*)p + r * stride, (size_t)s.bytes[T]);
  }
  template <int T> static void stream(const void* p, long stride) { load<T>(p, stride); }
  template <int T> AMX_MODEL_CALL static void store(void* p, long stride) {
    State& s = use<T>();
    for (int r = 0; r < s.rows[T]; r++) memcpy((char*)p + r * stride, s.tile[T][r], (size_t)s.bytes[T]);
  }

  template <int C, int A, int B> static State& operands() {
    static_assert(C != A && C != B && A != B, "#UD: the tiles of a product must differ");
    State& s = use<C>();
    use<A>(), use<B>();
    require(s.bytes[C] % 4 == 0 && s.bytes[A] % 4 == 0, "#UD: the rows of a product are not a multiple of 4 bytes");
    require(s.rows[C] == s.rows[A] && s.bytes[C] == s.bytes[B] && s.bytes[A] / 4 == s.rows[B],
            "#UD: the shapes of a product do not agree");
    return s;
  }

  // Rounds to float, to nearest even; results that are below the normal range after rounding become zero. The sum of
  // two floats, or of a float and a product of two bfloat16, has one rounding: double has more than twice the bits
  // (Figueroa, "When is double rounding innocuous?", 1995), and no denormal result remains.
  static float rounded(double sum) {
    return sum < 0x1.ffffffp-127 && sum > -0x1.ffffffp-127 ? __builtin_copysignf(0.0f, (float)sum) : (float)sum;
  }
  static float flushed(float x) { return rounded((double)x); }
  static float widened(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, 4);
    return flushed(x);
  }

  template <int C, int A, int B> AMX_MODEL_CALL static void dpbf16ps() {
    State& s = operands<C, A, B>();
    const int columns = s.bytes[C] / 4, pairs = s.rows[B];
    float b[ROWS][2][ROWS];  // [pair][even or odd][column]
    for (int k = 0; k < pairs; k++)
      for (int n = 0; n < columns; n++)
        for (int i = 0; i < 2; i++) b[k][i][n] = widened(((const uint16_t*)s.tile[B][k])[2 * n + i]);
    for (int m = 0; m < s.rows[C]; m++) {
      float sums[2][ROWS] = {};
      for (int k = 0; k < pairs; k++)
        for (int i = 0; i < 2; i++) {
          const double a = widened(((const uint16_t*)s.tile[A][m])[2 * k + i]);
          for (int n = 0; n < columns; n++) sums[i][n] = rounded((double)sums[i][n] + a * (double)b[k][i][n]);
        }
      float* c = (float*)s.tile[C][m];
      for (int n = 0; n < columns; n++)
        c[n] = rounded((double)flushed(c[n]) + (double)rounded((double)sums[0][n] + (double)sums[1][n]));
    }
  }

  template <int C, int A, int B, class TA, class TB> AMX_MODEL_CALL static void dp8() {
    State& s = operands<C, A, B>();
    for (int m = 0; m < s.rows[C]; m++)
      for (int k = 0; k < s.rows[B]; k++)
        for (int n = 0; n < s.bytes[C] / 4; n++)
          for (int i = 0; i < 4; i++)  // sums wrap around
            ((uint32_t*)s.tile[C][m])[n] +=
                (uint32_t)((int32_t)(TA)s.tile[A][m][4 * k + i] * (int32_t)(TB)s.tile[B][k][4 * n + i]);
  }
  template <int C, int A, int B> static void dpbssd() { dp8<C, A, B, int8_t, int8_t>(); }
  template <int C, int A, int B> static void dpbsud() { dp8<C, A, B, int8_t, uint8_t>(); }
  template <int C, int A, int B> static void dpbusd() { dp8<C, A, B, uint8_t, int8_t>(); }
  template <int C, int A, int B> static void dpbuud() { dp8<C, A, B, uint8_t, uint8_t>(); }
};
