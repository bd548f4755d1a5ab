// Hopper's asynchronous copies: mbarriers, TMA loads and stores of tiles, thread block clusters.
// Source: PTX ISA, "Data Movement and Conversion Instructions" and "mbarrier".
#pragma once

struct alignas(64) TensorMap { unsigned char bytes[128]; };

// -- mbarriers: 64-bit words in shared memory
INLINE void mbarrier_init(int64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(count) : "memory");
}
INLINE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void mbarrier_expect_bytes(int64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(b)), "r"(bytes) : "memory");
}
INLINE void mbarrier_arrive(int64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(b)) : "memory");
}
INLINE void mbarrier_wait(int64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
               "bra AGAIN;\nDONE:\n}" :: "r"(shared_address(b)), "r"(parity) : "memory");
}
// Arrives when this thread's asynchronous copies so far have ended.
INLINE void copy_async_arrive(int64_t* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared_address(b)) : "memory");
}
INLINE void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// The same; returns whether x holds in any of the threads.
INLINE bool named_barrier_any(int number, int threads, bool x) {
  int any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;\n}"
               : "=r"(any) : "r"((int)x), "r"(number), "r"(threads) : "memory");
  return any != 0;
}

// -- clusters
INLINE int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Makes the mbarriers of all blocks usable. It orders no other accesses to memory, for which it would have to wait.
INLINE void cluster_start() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory"); }
// The corresponding address in the shared memory of block `rank`.
INLINE uint cluster_address(const void* p, int rank) {
  uint at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  return at;
}
INLINE uint register_bits(float x) { return bits_of_f32(x); }
INLINE uint register_bits(int x) { return (uint)x; }
// Stores to the shared memory of a block of the cluster, whose mbarrier `full` counts the bytes; if `own`, to that of this
// block, at a shared_address(), where threads see it behind a barrier.
template <class T> INLINE void cluster_store(bool own, uint at, uint full, T x, T y) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n@p st.shared::cta.v2.b32 [%0], {%2, %3};\n"
               "@!p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];\n}"
               :: "r"(at), "r"(full), "r"(register_bits(x)), "r"(register_bits(y)), "r"((int)own) : "memory");
}
template <class T> INLINE void cluster_store(bool own, uint at, uint full, T x, T y, T z, T w) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n@p st.shared::cta.v4.b32 [%0], {%2, %3, %4, %5};\n"
               "@!p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];\n}"
               :: "r"(at), "r"(full), "r"(register_bits(x)), "r"(register_bits(y)), "r"(register_bits(z)),
                  "r"(register_bits(w)), "r"((int)own) : "memory");
}
// Waits for what blocks of the cluster store.
INLINE void cluster_wait(int64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
               "@p bra DONE;\nbra AGAIN;\nDONE:\n}" :: "r"(shared_address(b)), "r"(parity) : "memory");
}

// -- TMA: one thread starts the copy of a tile between global and shared memory; loads signal bytes to an mbarrier
INLINE void tma_prefetch(const TensorMap& m) { asm volatile("prefetch.tensormap [%0];" :: "l"(&m) : "memory"); }
// Between the results of other kernels and TMA loads of them. A fence of all memory, not just global, would also wait for
// this thread's accesses.
INLINE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
INLINE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void tma_load_bytes(void* to, const void* from, int64_t* full, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}
INLINE void tma_load(void* to, const TensorMap& m, int64_t* full, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               :: "r"(shared_address(to)), "l"(&m), "r"(shared_address(full)), "r"(x), "r"(y), "r"(z) : "memory");
}
INLINE void tma_load(void* to, const TensorMap& m, int64_t* full, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(to)), "l"(&m), "r"(shared_address(full)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
INLINE void tma_load(void* to, const TensorMap& m, int64_t* full, int x, int y, int z, int w, int v) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               :: "r"(shared_address(to)), "l"(&m), "r"(shared_address(full)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");
}
// Loads pixels of image n in row-major order from (x, y) on, shifted by the tap (right, down).
INLINE void tma_load_im2col(void* to, const TensorMap& m, int64_t* full, int c, int x, int y, int n, int right, int down) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
               :: "r"(shared_address(to)), "l"(&m), "r"(shared_address(full)), "r"(c), "r"(x), "r"(y), "r"(n),
                  "h"((short)right), "h"((short)down) : "memory");
}
INLINE void tma_store(const TensorMap& m, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               :: "l"(&m), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z) : "memory");
}
INLINE void tma_store(const TensorMap& m, const void* from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&m), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
INLINE void tma_store(const TensorMap& m, const void* from, int x, int y, int z, int w, int v) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               :: "l"(&m), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");
}
INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the stores of this thread, but for the last LATER groups, have read shared memory, so that it may be
// overwritten.
template <int LATER = 0> INLINE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LATER) : "memory");
}

// -- 16x16 fragments of 16-bit elements in shared memory: each lane has the address of 16 bytes, half a row
template <class T> INLINE Vec<T, 2> unpack_pair(uint v) {
  Vec<T, 2> x;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(x.v[0].bits), "=h"(x.v[1].bits) : "r"(v));
  return x;
}
INLINE void ldmatrix_x4(uint* v, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(shared_address(row)) : "memory");
}
INLINE void stmatrix_x4(void* row, const uint* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// -- pairs of bytes in shared memory
INLINE uint shared_load2(uint at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}
INLINE void shared_store2(uint at, uint pair) {
  asm volatile("st.shared.u16 [%0], %1;" :: "r"(at), "h"((uint16_t)pair) : "memory");
}
// Two uint8 as floats: bytes become the low bits of 2^23.
INLINE Vec<float, 2> unpack_bytes(uint pair) {
  return {{f32_of_bits(byte_permute(pair, 0x4b000000u, 0x7440)) - 8388608.0f,
           f32_of_bits(byte_permute(pair, 0x4b000000u, 0x7441)) - 8388608.0f}};
}

// A position in a ring buffer of STAGES stages. `phase`: the parity of the mbarriers' phase to wait for.
template <int STAGES> struct RingPosition {
  int slot, phase;
  INLINE void next() {
    if (++slot == STAGES) { slot = 0; phase ^= 1; }
  }
};
