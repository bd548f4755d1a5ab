// Weights in block formats (blocks.h) and in bf16c12 (gemv_bf16c12.h) decoded to elements [N, K] in memory.
//
// Constants of C: N, K; PIECES of eight columns in a row; FOURS: groups of four rows; THREADS. Types: T, of the elements;
// F, the format, or for bf16c12 the constants PLANES, EXTRAS and MAX_OUTLIERS of gemv_bf16c12.h. LAST: the last workgroup
// of a kernel that may run beside its predecessors; -1: workgroups wait for these before they store.
#pragma once
#include "blocks.h"

// Of a kernel that runs beside its predecessors, only the last workgroup waits for them, after its work: the kernel ends
// after they do, and its successor starts after they have ended.
template <class C> INLINE void unpack_begin(Thread at) {
  if (C::LAST >= 0 && at.workgroup != C::LAST) pdl_launch_dependents();
}
template <class C> INLINE void unpack_wait() {
  if (C::LAST < 0) pdl_wait();
}
template <class C> INLINE void unpack_end(Thread at) {
  if (C::LAST >= 0 && at.workgroup == C::LAST) {
    pdl_wait();
    pdl_launch_dependents();
  }
}

// A thread decodes a piece: eight columns of four rows.
template <class C> INLINE void unpack_blocks(DEVICE const uint8_t* weights, DEVICE typename C::T* out, Thread at) {
  typedef Piece<typename C::F, C::PIECES, 8> P;
  const int64_t index = (int64_t)at.workgroup * C::THREADS + at.tid;
  const int four = (int)(index / C::PIECES), n = (int)(index % C::PIECES);
  P piece;
  unpack_begin<C>(at);
  if (four < C::FOURS) piece.load(weights + (int64_t)four * P::NBYTES, n);
  unpack_wait<C>();
#pragma unroll
  for (int r = 0; r < 4; r++) {
    if (four >= C::FOURS || (C::N % 4 != 0 && four * 4 + r >= C::N)) break;
    *(DEVICE Vec<typename C::T, 8>*)(out + ((int64_t)four * 4 + r) * C::K + n * 8) = decoded_row<typename C::T>(piece, r);
  }
  unpack_end<C>(at);
}

// A workgroup decodes 8 THREADS columns of four rows in shared memory, where it replaces outliers.
template <class C>
INLINE void unpack_rows4(DEVICE const uint8_t* weights, DEVICE bf16* out, SMEM bf16* tile, Thread at) {
  const int chunks = (C::PIECES + C::THREADS - 1) / C::THREADS, columns = C::THREADS * 8;
  const int four = at.workgroup / chunks, begin = at.workgroup % chunks * columns, piece = begin / 8 + at.tid;
  const bool exists = C::PIECES % C::THREADS == 0 || piece < C::PIECES;
  DEVICE const uint8_t* const group = weights + (int64_t)four * C::PLANES;
  DEVICE const uint8_t* const extras = weights + (int64_t)C::FOURS * C::PLANES + (int64_t)four * C::EXTRAS;
  uint4 codes = zero16(), low[2] = {zero16(), zero16()};
  unpack_begin<C>(at);
  if (exists) {
    codes = stream16(group + piece * 16);
    low[0] = stream16(group + 16 * C::PIECES + piece * 16);
    low[1] = stream16(group + 32 * C::PIECES + piece * 16);
  }
  const uint code[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const uint4 l = low[r / 2];
    float values[8];
    unpack(rows4_decode(r % 2 ? l.z : l.x, r % 2 ? l.w : l.y, code[r]), values, (THREAD bf16*)nullptr);
    const float scale = to_f32(((DEVICE const bf16*)extras)[r]);
    Vec<bf16, 8> row;
#pragma unroll
    for (int e = 0; e < 8; e++) row.v[e] = to_bf16(values[e] * scale);
    *(SMEM Vec<bf16, 8>*)(tile + r * columns + at.tid * 8) = row;
  }
  barrier();
  for (int i = at.tid; i < C::MAX_OUTLIERS; i += C::THREADS) {
    const uint outlier = *(DEVICE const uint*)(extras + 8 + i * 4);
    const int column = (int)(outlier >> 16 & 0x3fffu) - begin;
    if ((outlier << 17) != 0 && column >= 0 && column < columns)
      tile[(int)(outlier >> 30) * columns + column] = to_bf16(f32_of_bits(outlier << 16));
  }
  barrier();
  unpack_wait<C>();
#pragma unroll
  for (int r = 0; r < 4; r++)
    if (exists && (C::N % 4 == 0 || four * 4 + r < C::N))
      *(DEVICE uint4*)(out + ((int64_t)four * 4 + r) * C::K + piece * 8) =
          *(SMEM const uint4*)(tile + r * columns + at.tid * 8);
  unpack_end<C>(at);
}
