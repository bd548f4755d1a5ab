
// Tiles that the copy engine brings: rings of stages with a barrier for "full" and one for "empty".
struct alignas(64) TileMap { unsigned char bytes[128]; };
INLINE void ring_init(int64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(group_address(b)), "r"(count) : "memory");
}
INLINE void ring_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void ring_expect(int64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(group_address(b)), "r"(bytes) : "memory");
}
INLINE void ring_arrive(int64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(group_address(b)) : "memory");
}
INLINE uint peer_address(const void* p, int rank) {  // the same place in the memory of group `rank` of the cluster
  uint at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(group_address(p)), "r"(rank));
  return at;
}
INLINE void ring_wait(int64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
               "bra AGAIN;\nDONE:\n}" :: "r"(group_address(b)), "r"(parity) : "memory");
}
INLINE int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
INLINE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
INLINE void team_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
INLINE void peer_store(uint at, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(x), "f"(y) : "memory");
}
INLINE void peer_store(uint at, float x, float y, float z, float w) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// A simd's 16 rows from `row` on, to the group whose share they are: its `results` hold [part, SHARE, LD]. Of two
// blocks of 8 columns, neighbouring lanes bring their pairs together, one those of the first and one of the second.
template <int SHARE, int LD, int N> INLINE void peer_send(float* results, int rank, const WideC<N>& c, int row, int lane) {
  const bool odd = lane & 1;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = row + (lane >> 2) + 8 * h;
    const uint to = peer_address(results + (rank * SHARE + r % SHARE) * LD, r / SHARE);
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
      const float* left = c.v + 4 * j + 2 * h;
      const float* right = left + 4;
      const float x = simd_xor(odd ? left[0] : right[0], 1), y = simd_xor(odd ? left[1] : right[1], 1);
      const uint at = to + (j + (odd ? 1 : 0)) * 32 + (lane & 2) * 8;
      if (odd) peer_store(at, x, y, right[0], right[1]);
      else peer_store(at, left[0], left[1], x, y);
    }
    if (N / 8 % 2) peer_store(to + (N / 8 - 1) * 32 + (lane & 3) * 8, c.v[N / 2 - 4 + 2 * h], c.v[N / 2 - 3 + 2 * h]);
  }
}
INLINE void tile_map_ready(const TileMap& m) { asm volatile("prefetch.tensormap [%0];" :: "l"(&m) : "memory"); }
INLINE void copies_follow() { asm volatile("fence.proxy.async;" ::: "memory"); }
INLINE void bytes_copy(void* to, const void* from, int64_t* full, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(group_address(to)), "l"(from), "r"(bytes), "r"(group_address(full)) : "memory");
}
INLINE void tile_copy(void* to, const TileMap& m, int64_t* full, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               :: "r"(group_address(to)), "l"(&m), "r"(group_address(full)), "r"(x), "r"(y), "r"(z) : "memory");
}
INLINE void tile_copy_4d(void* to, const TileMap& m, int64_t* full, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(group_address(to)), "l"(&m), "r"(group_address(full)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
INLINE void tile_store(const TileMap& m, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               :: "l"(&m), "r"(group_address(from)), "r"(x), "r"(y), "r"(z) : "memory");
}
INLINE void tile_store_4d(const TileMap& m, const void* from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&m), "r"(group_address(from)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
INLINE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // what they take is free
// Neighbouring pairs as lanes have the sums of 16 rows by 16 columns: a lane says where one half of a row lies.
template <class T> INLINE Vec<T, 2> pair_of(uint v) {
  Vec<T, 2> x;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(x.v[0].bits), "=h"(x.v[1].bits) : "r"(v));
  return x;
}
template <class T> INLINE void pairs_take(Vec<T, 2>* x, const T* row) {
  uint v[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(group_address(row)) : "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = pair_of<T>(v[i]);
}
INLINE void pairs_put(void* row, const uint* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(group_address(row)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
// Pixels of an image from (x, y) on, moved by (right, down).
INLINE void pixel_copy(void* to, const TileMap& m, int64_t* full, int c, int x, int y, int n, int right, int down) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
               :: "r"(group_address(to)), "l"(&m), "r"(group_address(full)), "r"(c), "r"(x), "r"(y), "r"(n),
                  "h"((short)right), "h"((short)down) : "memory");
}

// Four lanes of a row hold two neighbours of each of 4 B blocks of 8; afterwards each holds B whole blocks.
template <int B> INLINE void quad_turn(float* x, int lane) {
#pragma unroll
  for (int m = 1; m < 4; m *= 2) {
    const bool upper = (lane & m) != 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      if (s & m) continue;
#pragma unroll
      for (int j = 0; j < 2 * B; j++) {
        float& low = x[s * 2 * B + j];
        float& high = x[(s + m) * 2 * B + j];
        const float other = simd_xor(upper ? low : high, m);
        low = upper ? other : low;
        high = upper ? high : other;
      }
    }
  }
  if (B > 1) {
    float y[8 * B];
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int j = 0; j < 2 * B; j++) y[j / 2 * 8 + 2 * s + j % 2] = x[s * 2 * B + j];
#pragma unroll
    for (int i = 0; i < 8 * B; i++) x[i] = y[i];
  }
}
