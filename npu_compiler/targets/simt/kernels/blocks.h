// Weights in block formats, in the layout of rows (npu_compiler/weights/block_rows.py describes the bytes), decoded in
// registers. An element is value(code) * scale + base.
//
// A format is a BlockFormat: BLOCK and SUB_BLOCK, the codes of a block and those that share a scale (0: those of a row),
// and two structs.
// Codes defines
//   BITS                        of a code
//   pairs(codes, r)             the values of the four pairs of row r of a piece, in bf16, where they are exact
//   Value, raised(codes, r)     cheaper: the values as elements of fragments of type Value, exact, divided by factor(i) in
//                               pair i, plus the pair of constants raise(i) if RAISED (RAISE: that of all pairs, or 0)
//   Halves                      a struct with the same in f16, if that takes fewer instructions, or else Codes itself
//   bytes(codes, r)             of codes of four bits only: the values of a row plus ZERO, as bytes; byte i is element(i)
//   HALVES_PAY                  whether it takes so many fewer that they pay for the conversion of the left operand even
//                               if that is multiplied by one tile only
// Scale defines
//   SCALE_BYTES, HEAD_BYTES     bytes of the scales of a sub-block and of the head of a block, of one row
//   scale(scales, head, r)      the scale of row r
//   HAS_BASE                    whether there is a base(scales, head, r), too
#pragma once

// Loads N words of weights.
template <int N> INLINE void stream_words(THREAD uint* words, DEVICE const uint8_t* from) {
  if (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const uint4 v = stream16(from + 16 * i);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  } else if (N == 2) {
    const uint2 v = stream8(from);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) words[i] = stream4(from + 4 * i);
  }
}

// How the parts of a piece get from device memory to registers: move<N>(words, from) is called for each part, in order.
struct StreamWords {
  template <int N> INLINE void move(THREAD uint* words, DEVICE const uint8_t* from) { stream_words<N>(words, from); }
};

// -- codes
// The codes of a piece in registers.
template <int BITS> struct PieceCodes {
  CONSTANTS int LOW = BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;
  uint low[LOW], high[HIGH == 0 ? 1 : HIGH];

  INLINE void zero() {
    for (int i = 0; i < LOW; i++) low[i] = 0;
    for (int i = 0; i < HIGH; i++) high[i] = 0;
  }
  // `four`: the weights of four rows of `pieces` pieces.
  template <class Move>
  INLINE void load(DEVICE const uint8_t* four, int pieces, int piece, THREAD Move& how) {
    how.template move<LOW>(low, four + piece * (4 * LOW));
    if (HIGH != 0) how.template move<HIGH == 0 ? 1 : HIGH>(high, four + pieces * (4 * LOW) + piece * (4 * HIGH));
  }
  // Pair i of row r: two codes, 16 bits apart, among the other bits of `rest`.
  INLINE uint pair(int r, int i, uint rest) const {
    const uint x = field<LOW>(low, r, i, 0, rest);
    return HIGH == 0 ? x : field<HIGH == 0 ? 1 : HIGH>(high, r, i, LOW, x);
  }
  // The bits of a plane of B bits, moved to bit `to` of `rest`.
  template <int B> static INLINE uint field(THREAD const uint* words, int r, int i, int to, uint rest) {
    const int from = 4 * B * (r % (4 / B)) + B * i;
    const uint word = words[r / (4 / B)];
    return masked_or(from >= to ? word >> (from - to) : word << (to - from), ((1u << B) - 1u) * 0x10001u << to, rest);
  }
};
// Bytes, row by row.
template <> struct PieceCodes<8> {
  uint low[8];
  INLINE void zero() {
    for (int i = 0; i < 8; i++) low[i] = 0;
  }
  template <class Move>
  INLINE void load(DEVICE const uint8_t* four, int pieces, int piece, THREAD Move& how) {
#pragma unroll
    for (int r = 0; r < 4; r++) how.template move<2>(low + 2 * r, four + (r * pieces + piece) * 8);
  }
  // Pair i of row r: the second byte is 16 bits higher.
  INLINE uint pair(int r, int i) const { return byte_permute(low[2 * r + i / 2], 0u, i % 2 ? 0x4342u : 0x4140u); }
};

// -- scales
// The fields of four rows: words of one byte, or two words of halves, or four of floats. A row may be known at run time
// only, so that arrays are not indexed by it.
INLINE float half_at(THREAD const uint* words, int r) {
  const uint word = r < 2 ? words[0] : words[1];
  return to_f32(f16_of_bits((uint16_t)(r % 2 ? word >> 16 : word & 0xffffu)));
}
INLINE float float_at(THREAD const uint* words, int r) {
  return f32_of_bits(r < 2 ? (r == 0 ? words[0] : words[1]) : (r == 2 ? words[2] : words[3]));
}
// Byte r plus 2^23: the low bits of a float, without a conversion, which is slow.
INLINE float raised_byte_at(THREAD const uint* word, int r) {
  return f32_of_bits(byte_permute(word[0], 0x4b000000u, 0x7440u | (uint)r));
}
INLINE float byte_at(THREAD const uint* word, int r) { return raised_byte_at(word, r) - 8388608.0f; }
INLINE float signed_byte_at(THREAD const uint* word, int r) {
  const uint raised = word[0] ^ 0x80808080u;
  return raised_byte_at(&raised, r) - (8388608.0f + 128.0f);
}

// -- formats
// What codes have in common that become values of type T in fragments, without a constant added to them.
template <class T> struct ValueCodes {
  typedef T Value;
  CONSTANTS bool RAISED = false, HALVES_PAY = false;
  CONSTANTS int RAISE = 0;
  static INLINE float factor(int) { return 1.0f; }
  static INLINE uint raise(int) { return 0; }
};
// Codes of four bits in fragments of f16, where 1024 + code and 1024 + 16 code take one instruction each.
template <int FIRST> struct NibbleHalves {
  typedef f16 Value;
  CONSTANTS bool RAISED = true;
  CONSTANTS int RAISE = 0;
  static INLINE float factor(int i) { return i % 2 ? 0.0625f : 1.0f; }
  static INLINE uint raise(int i) { return (0x6400u - (i % 2 ? 16 * FIRST : FIRST)) * 0x10001u; }
  static INLINE uint4 raised(THREAD const PieceCodes<4>& codes, int r) {
    const uint low = codes.low[r], high = low >> 8;
    uint4 v;
    v.x = masked_or(low, 0x000f000fu, 0x64006400u);
    v.y = masked_or(low, 0x00f000f0u, 0x64006400u);
    v.z = masked_or(high, 0x000f000fu, 0x64006400u);
    v.w = masked_or(high, 0x00f000f0u, 0x64006400u);
    return v;
  }
};
// Codes of four bits as bytes.
struct NibbleBytes {
  static INLINE int element(int i) { return i % 2 * 4 + i / 2 % 2 + i / 4 * 2; }
  static INLINE uint2 bytes(THREAD const PieceCodes<4>& codes, int r) {
    uint2 v;
    v.x = codes.low[r] & 0x0f0f0f0fu;
    v.y = codes.low[r] >> 4 & 0x0f0f0f0fu;
    return v;
  }
};
template <int BITS, int FIRST> struct LinearCodes;
template <int BITS, int FIRST> struct LinearHalves {
  typedef LinearCodes<BITS, FIRST> Codes;
};
template <int FIRST> struct LinearHalves<4, FIRST> {
  typedef NibbleHalves<FIRST> Codes;
};
// Values code + FIRST: those of bf16 from 128 on are one apart, so a code is the low bits of 128 + code.
template <int BITS_, int FIRST> struct LinearCodes : ValueCodes<bf16>, NibbleBytes {
  typedef typename LinearHalves<BITS_, FIRST>::Codes Halves;
  CONSTANTS int BITS = BITS_;
  CONSTANTS bool RAISED = true;
  CONSTANTS int RAISE = 128 - FIRST, ZERO = -FIRST;
  static INLINE uint raise(int) { return (0x4300u - FIRST) * 0x10001u; }
  static INLINE uint4 raised(THREAD const PieceCodes<BITS>& codes, int r) {
    uint4 v;
    v.x = codes.pair(r, 0, 0x43004300u);
    v.y = codes.pair(r, 1, 0x43004300u);
    v.z = codes.pair(r, 2, 0x43004300u);
    v.w = codes.pair(r, 3, 0x43004300u);
    return v;
  }
  static INLINE uint4 pairs(THREAD const PieceCodes<BITS>& codes, int r) {
    uint4 v = raised(codes, r);
    v.x = pair_subtract(v.x, raise(0));
    v.y = pair_subtract(v.y, raise(1));
    v.z = pair_subtract(v.z, raise(2));
    v.w = pair_subtract(v.w, raise(3));
    return v;
  }
};
// Signed bytes: the low seven bits, less 128 if the sign is set.
INLINE uint signed_pair(uint bytes) {
  return pair_subtract(masked_or(bytes, 0x007f007fu, 0x43004300u), masked_or(bytes, 0x00800080u, 0x43004300u));
}
struct SignedBytes : ValueCodes<bf16> {
  typedef SignedBytes Halves;
  CONSTANTS int BITS = 8;
  static INLINE uint4 raised(THREAD const PieceCodes<8>& codes, int r) { return pairs(codes, r); }
  static INLINE uint4 pairs(THREAD const PieceCodes<8>& codes, int r) {
    uint4 v;
    v.x = signed_pair(codes.pair(r, 0));
    v.y = signed_pair(codes.pair(r, 1));
    v.z = signed_pair(codes.pair(r, 2));
    v.w = signed_pair(codes.pair(r, 3));
    return v;
  }
};
struct Fp8Halves : ValueCodes<f16> {
  static INLINE uint4 raised(THREAD const PieceCodes<8>& codes, int r) {
    const uint2 left = halves_of_e4m3(codes.low[2 * r]), right = halves_of_e4m3(codes.low[2 * r + 1]);
    uint4 v;
    v.x = left.x, v.y = left.y, v.z = right.x, v.w = right.y;
    return v;
  }
};
struct Fp8Codes : ValueCodes<bf16> {
  typedef Fp8Halves Halves;
  CONSTANTS bool HALVES_PAY = true;
  CONSTANTS int BITS = 8;
  static INLINE uint4 raised(THREAD const PieceCodes<8>& codes, int r) { return pairs(codes, r); }
  static INLINE uint4 pairs(THREAD const PieceCodes<8>& codes, int r) {
    uint4 v;
    v.x = pair_of_e4m3(codes.pair(r, 0));
    v.y = pair_of_e4m3(codes.pair(r, 1));
    v.z = pair_of_e4m3(codes.pair(r, 2));
    v.w = pair_of_e4m3(codes.pair(r, 3));
    return v;
  }
};
// Entries of a table of 16 signed bytes: TABLE0 has the first four of them.
template <uint TABLE0, uint TABLE1, uint TABLE2, uint TABLE3> struct ListedCodes : ValueCodes<bf16> {
  typedef ListedCodes Halves;
  CONSTANTS int BITS = 4;
  static INLINE uint4 raised(THREAD const PieceCodes<4>& codes, int r) { return pairs(codes, r); }
  // The bytes of the codes in the low four nibbles.
  static INLINE uint look_up(uint nibbles) {
    const uint which = nibbles & 0x7777u;
    const uint low = byte_permute(TABLE0, TABLE1, which), high = byte_permute(TABLE2, TABLE3, which);
    const uint mask = byte_permute(0xff00u, 0u, nibbles >> 3 & 0x1111u);
    return (low & ~mask) | (high & mask);
  }
  CONSTANTS int ZERO = 128;
  static INLINE int element(int i) { return i % 4 * 2 + i / 4; }
  static INLINE uint2 bytes(THREAD const PieceCodes<4>& codes, int r) {
    uint2 v;
    v.x = look_up(codes.low[r]) ^ 0x80808080u;
    v.y = look_up(codes.low[r] >> 16) ^ 0x80808080u;
    return v;
  }
  static INLINE uint4 pairs(THREAD const PieceCodes<4>& codes, int r) {
    const uint even = look_up(codes.low[r]), odd = look_up(codes.low[r] >> 16);
    uint4 v;
    v.x = signed_pair(byte_permute(even, odd, 0x0400u));
    v.y = signed_pair(byte_permute(even, odd, 0x0501u));
    v.z = signed_pair(byte_permute(even, odd, 0x0602u));
    v.w = signed_pair(byte_permute(even, odd, 0x0703u));
    return v;
  }
};

// One float16 scale; perhaps a float16 base.
struct HalfScale {
  CONSTANTS int SCALE_BYTES = 2, HEAD_BYTES = 0;
  CONSTANTS bool HAS_BASE = false;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint*, int r) { return half_at(scales, r); }
  static INLINE float base(THREAD const uint*, THREAD const uint*, int) { return 0.0f; }
};
struct HalfScaleAndBase {
  CONSTANTS int SCALE_BYTES = 4, HEAD_BYTES = 0;
  CONSTANTS bool HAS_BASE = true;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint*, int r) { return half_at(scales, r); }
  static INLINE float base(THREAD const uint* scales, THREAD const uint*, int r) { return half_at(scales + 2, r); }
};
// A float16 scale and a whole number, the code of zero.
struct HalfScaleAndZero {
  CONSTANTS int SCALE_BYTES = 3, HEAD_BYTES = 0;
  CONSTANTS bool HAS_BASE = true;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint*, int r) { return half_at(scales, r); }
  static INLINE float base(THREAD const uint* scales, THREAD const uint*, int r) {
    return -(half_at(scales, r) * byte_at(scales + 2, r));
  }
};
// A float32 scale; perhaps a signed byte, the code of zero.
struct FloatScale {
  CONSTANTS int SCALE_BYTES = 4, HEAD_BYTES = 0;
  CONSTANTS bool HAS_BASE = false;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint*, int r) { return float_at(scales, r); }
  static INLINE float base(THREAD const uint*, THREAD const uint*, int) { return 0.0f; }
};
struct FloatScaleAndZero {
  CONSTANTS int SCALE_BYTES = 5, HEAD_BYTES = 0;
  CONSTANTS bool HAS_BASE = true;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint*, int r) { return float_at(scales, r); }
  static INLINE float base(THREAD const uint* scales, THREAD const uint*, int r) {
    return -(float_at(scales, r) * signed_byte_at(scales + 4, r));
  }
};
// Whole numbers of scale and minimum, times the two float16 numbers of the head.
struct LargeFromScale {
  CONSTANTS int SCALE_BYTES = 2, HEAD_BYTES = 4;
  CONSTANTS bool HAS_BASE = true;
  static INLINE float scale(THREAD const uint* scales, THREAD const uint* head, int r) {
    return half_at(head, r) * byte_at(scales, r);
  }
  static INLINE float base(THREAD const uint* scales, THREAD const uint* head, int r) {
    return -(half_at(head + 2, r) * byte_at(scales + 1, r));
  }
};

// A format: how codes become values, and what scales them.
template <class Codes_, class Scale_, int BLOCK_, int SUB_BLOCK_> struct BlockFormat {
  typedef Codes_ Codes;
  typedef Scale_ Scale;
  CONSTANTS int BLOCK = BLOCK_, SUB_BLOCK = SUB_BLOCK_;
};

// -- pieces
// A piece and the scales of COLUMNS columns, of which its own are a part, in registers.
template <class F, int PIECES, int COLUMNS> struct Piece {
  typedef typename F::Scale S;
  CONSTANTS int BITS = F::Codes::BITS, SCALE = S::SCALE_BYTES, HEAD = S::HEAD_BYTES;
  CONSTANTS int K = PIECES * 8, SUB_BLOCK = F::SUB_BLOCK == 0 ? K : F::SUB_BLOCK, BLOCK = F::BLOCK == 0 ? K : F::BLOCK;
  CONSTANTS int SUBS = COLUMNS > SUB_BLOCK ? COLUMNS / SUB_BLOCK : 1;
  CONSTANTS int PLANES = PIECES * 4 * BITS, HEADS = PLANES + K / SUB_BLOCK * (4 * SCALE);
  CONSTANTS int NBYTES = (HEADS + K / BLOCK * (4 * HEAD) + 31) / 32 * 32;  // of four rows
  PieceCodes<BITS> codes;
  uint scales[SUBS][SCALE], head[HEAD == 0 ? 1 : HEAD];

  INLINE void zero() {
    codes.zero();
    for (int i = 0; i < SUBS * SCALE; i++) scales[i / SCALE][i % SCALE] = 0;
    for (int i = 0; i < HEAD; i++) head[i] = 0;
  }
  INLINE void load(DEVICE const uint8_t* four, int piece) {
    load_codes(four, piece);
    load_scales(four, piece);
  }
  INLINE void load_codes(DEVICE const uint8_t* four, int piece) {
    StreamWords how;
    codes.load(four, PIECES, piece, how);
  }
  INLINE void load_scales(DEVICE const uint8_t* four, int piece) {
    StreamWords how;
    move_scales(four, piece, how);
  }
  template <class Move> INLINE void move_all(DEVICE const uint8_t* four, int piece, THREAD Move& how) {
    codes.load(four, PIECES, piece, how);
    move_scales(four, piece, how);
  }
  template <class Move> INLINE void move_scales(DEVICE const uint8_t* four, int piece, THREAD Move& how) {
    const int column = piece * 8 / COLUMNS * COLUMNS;
#pragma unroll
    for (int i = 0; i < SUBS; i++)
      how.template move<SCALE>(scales[i], four + PLANES + (column / SUB_BLOCK + i) * (4 * SCALE));
    if (HEAD != 0) how.template move<HEAD == 0 ? 1 : HEAD>(head, four + HEADS + column / BLOCK * (4 * HEAD));
  }
  INLINE uint4 pairs(int r) const { return F::Codes::pairs(codes, r); }
  INLINE float scale(int i, int r) const { return S::scale(scales[i], head, r); }
  INLINE float base(int i, int r) const { return S::base(scales[i], head, r); }
};

// The elements of row r of a piece.
template <class T, class F, int PIECES> INLINE Vec<T, 8> decoded_row(THREAD const Piece<F, PIECES, 8>& piece, int r) {
  float values[8];
  unpack(piece.pairs(r), values, (THREAD bf16*)nullptr);
  const float scale = piece.scale(0, r), base = piece.base(0, r);
  Vec<T, 8> row;
#pragma unroll
  for (int e = 0; e < 8; e++) row.v[e] = narrow<T>(F::Scale::HAS_BASE ? values[e] * scale + base : values[e] * scale);
  return row;
}
