// Convolutions of few channels on Hopper: lines of pixels are loaded once into shared memory for all taps of a filter.
//
// The rows of wgmma are 8 blocks of 8: 8 neighbouring results in each of 8 lines of results. Another tap only changes
// the address of the left operand. A thread block loads all lines that 8 lines of results (a band) read at once, and
// keeps the filters. Pixels either have 128 or 64 bytes and are rows of a swizzled tile, with zeros outside the image;
// or they are contiguous elements of an image, where a row of a filter is 32 neighbouring elements, and neighbouring
// results begin 8 elements apart (OVERLAPPING).
//
// Constants of D, in addition to those of tma_epilogue.h: IMAGES, OH, OW of the result; BANDS of an image, each shared
// by SHARES thread blocks; LINES of the image that a band visits, PITCH elements apart; LINES_SIZE: elements of a
// stage; TAPS, KERNEL_W, CHANNELS, STRIDE_H, PAD_TOP, PAD_LEFT, DILATION_H, DILATION_W; FILTER_SIZE: elements of all
// filters; of images OVERLAPPING: IMAGE_SIZE, IMAGE_H. KEEPS_SHARED: what columns share stays in registers.
#pragma once
#include "tma_result_stages.h"
#include "tma_thread_stores.h"

constexpr int LINE_BLOCK = 8;  // results of a line, and lines, that wgmma multiplies together

// What becomes of the results besides storing them: see max_pool.h.
struct NoPool {
  static constexpr bool ENABLED = false;
};

// Row `h` of a lane's two rows: a pixel of the result, or the row after the last one.
template <class D> struct PixelRows {
  int image, band, tile, subgroup, lane;
  INLINE int operator()(int h) const {
    const int down = band * LINE_BLOCK + subgroup % 4 * 2 + h, over = tile * LINE_BLOCK + (lane >> 2);
    return down < D::OH && over < D::OW ? (image * D::OH + down) * D::OW + over : D::M;
  }
};

template <class D> INLINE void load_lines(typename D::T* to, const TensorMap* lines, const typename D::T* pixels,
                                          int64_t* full, int image, int band) {
  const int y0 = band * (LINE_BLOCK * D::STRIDE_H);
  if constexpr (D::OVERLAPPING) {
    const int bytes = (D::IMAGE_H - y0 < D::LINES ? D::IMAGE_H - y0 : D::LINES) * (D::PITCH * 2);
    mbarrier_expect_bytes(full, bytes);
    tma_load_bytes(to, pixels + (int64_t)image * D::IMAGE_SIZE + y0 * D::PITCH, full, bytes);
  } else {
    mbarrier_expect_bytes(full, D::LINES * D::PITCH * 2);
    tma_load(to, *lines, full, 0, -D::PAD_LEFT, y0 - D::PAD_TOP, image);
  }
}

// Computes the sums of 8 lines by 8 pixels. `lines`: the first pixel that they read.
template <class D> INLINE void multiply_taps(TileC<D>& acc, const typename D::T* lines,
                                             const typename D::T* filters) {
  constexpr int APART = D::OVERLAPPING ? LINE_BLOCK : D::CHANNELS;  // elements between neighbouring results
  wgmma_fence();
  const uint64_t left = wgmma_pitched_descriptor<D::STRIDE_H * D::PITCH * 2, D::OVERLAPPING ? 0 : D::CHANNELS * 2>(lines);
  const uint64_t right = wgmma_descriptor<D::CHANNELS>(filters);
#pragma unroll
  for (int tap = 0; tap < D::TAPS; tap++)
#pragma unroll
    for (int k = 0; k < D::CHANNELS / 16; k++) {
      const int at = tap / D::KERNEL_W * (D::DILATION_H * D::PITCH / 8) + tap % D::KERNEL_W * (D::DILATION_W * APART / 8);
      wgmma_k16(acc, left + at + 2 * k, right + tap * (D::TILE_N * D::CHANNELS / 8) + 2 * k, filters, tap + k > 0);
    }
  wgmma_commit();
  wgmma_finish(acc);
}

// The number of the n-th share that a thread block computes, over all bands of all images. If results are pooled, a
// block computes all bands of an image in order.
template <class D, class Pool> INLINE int share_of(int workgroup, int n) {
  return Pool::ENABLED ? (workgroup + n / D::BANDS * D::STEP) * D::BANDS + n % D::BANDS : workgroup + n * D::STEP;
}

// `slots`: the filters, then the ring. `staging`: shared memory for the results that TMA stores or `pool` reads.
// `lines`: the tensor map of the left operand; null if OVERLAPPING, and then `pixels` points to the images.
template <class D, class E, class Pool>
INLINE void tma_conv(const TensorMap* lines, const typename D::T* pixels, const TensorMap& weights,
                     typename D::T* slots, typename D::T* staging, int64_t* full, const E& epilogue,
                     const TensorMap* out, const Pool& pool, const Thread& th) {
  typedef ResultSubtile<D> P;
  constexpr int WARPGROUPS = D::TILE_M / 64, ALL_SHARES = D::IMAGES * D::BANDS * D::SHARES;
  constexpr int APART = D::OVERLAPPING ? LINE_BLOCK : D::CHANNELS, LINE_TILES = (D::OW + LINE_BLOCK - 1) / LINE_BLOCK;
  ASSUME(th.tid >= 0 && th.tid < D::TILE_M * 2 + 32);
  typename D::T* const ring = slots + D::FILTER_SIZE;
  int64_t *const empty = full + D::STAGES, *const filters = full + 2 * D::STAGES;
  if (th.tid == 0) {
    for (int i = 0; i < D::STAGES; i++) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, WARPGROUPS);
    }
    mbarrier_init(filters, 1);
    mbarrier_init_fence();
  }
  barrier();
  if (th.subgroup == WARPGROUPS * 4) {
    if (th.lane == 0) {
      tma_prefetch(weights);
      mbarrier_expect_bytes(filters, D::TAPS * D::TILE_N * D::CHANNELS * 2);
      for (int tap = 0; tap < D::TAPS; tap++)
        tma_load(slots + tap * (D::TILE_N * D::CHANNELS), weights, filters, tap * D::CHANNELS, 0, 0);
      pdl_wait();
      fence_async_global();
      RingPosition<D::STAGES> at = {0, 1};
      for (int n = 0, t; (t = share_of<D, Pool>(th.workgroup, n)) < ALL_SHARES; n++) {
        const int image = t / (D::SHARES * D::BANDS), band = t / D::SHARES % D::BANDS;
        mbarrier_wait(empty + at.slot, at.phase);
        load_lines<D>(ring + at.slot * D::LINES_SIZE, lines, pixels, full + at.slot, image, band);
        at.next();
      }
    }
    return;
  }
  pdl_wait();
  mbarrier_wait(filters, 0);
  constexpr int SHARED_VECTORS = !D::KEEPS_SHARED ? 1 : D::RESULT_STAGES ? D::TILE_N / 8 : D::TILE_N / 32;
  typename E::Shared kept[SHARED_VECTORS];
  if constexpr (D::KEEPS_SHARED) {
#pragma unroll
    for (int g = 0; g < SHARED_VECTORS; g++)
      epilogue.read_shared(D::RESULT_STAGES ? g * 8 + (th.lane & 3) * 2 : g * 32 + (th.lane & 3) * 8, kept[g]);
  }
  const typename E::Shared* const shared = D::KEEPS_SHARED ? kept : nullptr;
  RingPosition<D::STAGES> at = {0, 0};
  int offset = th.subgroup / 4;  // the warpgroup that has one tile more alternates
  for (int n = 0, t; (t = share_of<D, Pool>(th.workgroup, n)) < ALL_SHARES; n++) {
    const int image = t / (D::SHARES * D::BANDS), band = t / D::SHARES % D::BANDS;
    mbarrier_wait(full + at.slot, at.phase);
    if constexpr (Pool::ENABLED) {
      constexpr int STEPS = LINE_TILES / WARPGROUPS;
#pragma unroll 1
      for (int step = 0; step < STEPS; step++) {
        const int tile = step * WARPGROUPS + th.subgroup / 4;
        TileC<D> acc;
        multiply_taps<D>(acc, ring + at.slot * D::LINES_SIZE + tile * (LINE_BLOCK * APART), slots);
        if (step == STEPS - 1 && th.tid % 128 == 0) mbarrier_arrive(empty + at.slot);
        pool.barrier();  // the pixels of the step before have been read
        const PixelRows<D> row = {image, band, tile, th.subgroup, th.lane};
        write_subtiles<D, 0, P::COUNT, P::SIZE, false>(epilogue, acc, RowFactors<NoRowScale>(), row, 0, th,
                                                     staging + th.subgroup / 4 * P::SIZE, nullptr, shared, nullptr);
        pool.barrier();
        pool.store(image, band, step, th.tid);
      }
      at.next();
      continue;
    }
    const int last = (t % D::SHARES + 1) * LINE_TILES / D::SHARES;
#pragma unroll 1
    for (int tile = t % D::SHARES * LINE_TILES / D::SHARES + offset; tile < last; tile += WARPGROUPS) {
      const PixelRows<D> row = {image, band, tile, th.subgroup, th.lane};
      typename E::Ahead ahead[D::READ_AHEAD ? D::TILE_N / 16 : 1];
      if constexpr (D::READ_AHEAD) {
#pragma unroll
        for (int g = 0; g < D::TILE_N / 32; g++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int m = row(h), n = g * 32 + (th.lane & 3) * 8;
            if (m < D::M && n < D::N) epilogue.read_ahead(m, n, ahead[2 * g + h]);
          }
      }
      TileC<D> acc;
      multiply_taps<D>(acc, ring + at.slot * D::LINES_SIZE + tile * (LINE_BLOCK * APART), slots);
      RowFactors<NoRowScale> factors;
      if constexpr (D::RESULT_STAGES > 0) {
        if (th.tid % 128 == 0) tma_store_wait_read();
        named_barrier(1 + th.subgroup / 4, 128);
        typename D::T* const own = staging + th.subgroup / 4 * (P::COUNT * P::SIZE);
        fill_subtiles<D, 0, P::COUNT, P::SIZE, false>(epilogue, acc, factors, row, 0, th, own, nullptr, shared, nullptr);
        if (th.tid % 128 == 0) {
#pragma unroll
          for (int n = 0; n < P::COUNT; n++)
            tma_store(*out, own + n * P::SIZE, n * P::ROW_B16, tile * LINE_BLOCK, band * LINE_BLOCK, image);
          tma_store_commit();
        }
      } else {
        float sums[2];
        store_tile<D>(epilogue, acc, factors, row, 0, 0, th.lane, ahead, shared, sums);
      }
    }
    if (th.tid % 128 == 0) mbarrier_arrive(empty + at.slot);
    at.next();
    offset = (offset + WARPGROUPS - LINE_TILES % WARPGROUPS) % WARPGROUPS;
  }
  if (D::RESULT_STAGES && th.tid % 128 == 0) tma_store_wait_read();
}
