// Convolutions of few channels per group, NHWC, in float arithmetic. A thread computes PIXELS neighbours of a line for
// COLUMNS neighbouring channels of a group, and neighbouring threads compute neighbouring channels. A workgroup has
// BLOCKS such sets of channels, whose filters are in shared memory.
//
// Types of D: X, W. Constants: N, H, W_IN of the image and its strides IMAGE, LINE, PIXEL; OH, OW of the result; R, S
// of the filters; STRIDE_*, PAD_TOP, PAD_LEFT, DILATION_*; CHANNELS and RESULTS of a group, GROUPS; VECTOR channels are
// loaded at once; THREADS of a workgroup; WORKGROUPS that share the lines. The epilogue is a rendered functor: WIDTH,
// and store(row, column, const float* acc).
#pragma once

// Computes the results of line `row` (of all images) from pixel `left` on, of the group that begins at `channel`.
template <class D>
INLINE void grouped_sums(DEVICE const typename D::X* x, SMEM const float* filters, int row, int left, int channel,
                         THREAD float (&acc)[D::PIXELS][D::COLUMNS]) {
  typedef Vec<typename D::X, D::VECTOR> Channels;
  const int SPAN = (D::PIXELS - 1) * D::STRIDE_W + (D::S - 1) * D::DILATION_W + 1;  // pixels of a line that are read
  const int y0 = row % D::OH * D::STRIDE_H - D::PAD_TOP, x0 = left * D::STRIDE_W - D::PAD_LEFT;
#pragma unroll
  for (int r = 0; r < D::R; r++) {
    const int y = y0 + r * D::DILATION_H;
    if (y < 0 || y >= D::H) continue;
    DEVICE const typename D::X* const from = x + (int64_t)(row / D::OH) * D::IMAGE + (int64_t)y * D::LINE + channel;
#pragma unroll 1
    for (int c = 0; c < D::CHANNELS; c += D::VECTOR) {
      Channels pixels[SPAN];
#pragma unroll
      for (int i = 0; i < SPAN; i++) {
#pragma unroll
        for (int v = 0; v < D::VECTOR; v++) pixels[i].v[v] = narrow<typename D::X>(0.0f);
        DEVICE const typename D::X* const pixel = from + (int64_t)(x0 + i) * D::PIXEL + c;
        if (x0 + i >= 0 && x0 + i < D::W_IN) pixels[i] = *(DEVICE const Channels*)pixel;
      }
#pragma unroll
      for (int s = 0; s < D::S; s++)
#pragma unroll
        for (int v = 0; v < D::VECTOR; v++) {
          const int term = (r * D::S + s) * D::CHANNELS + c + v;
          const Vec<float, D::COLUMNS> f =
              *(SMEM const Vec<float, D::COLUMNS>*)(filters + term * (D::BLOCKS * D::COLUMNS + 4));
#pragma unroll
          for (int p = 0; p < D::PIXELS; p++) {
            const float pixel = (float)widen(pixels[p * D::STRIDE_W + s * D::DILATION_W].v[v]);
#pragma unroll
            for (int k = 0; k < D::COLUMNS; k++) acc[p][k] += pixel * f.v[k];
          }
        }
    }
  }
}

// filters: [R * S * CHANNELS, BLOCKS * COLUMNS + 4]; the pitch spreads the terms of a filter over the banks.
template <class D, class E>
INLINE void grouped_conv(DEVICE const typename D::X* x, DEVICE const typename D::W* w, SMEM float* filters,
                         THREAD const E& epilogue, Thread th) {
  const int TERMS = D::R * D::S * D::CHANNELS, ALL = D::GROUPS * D::RESULTS / D::COLUMNS, WIDE = D::BLOCKS * D::COLUMNS;
  const int parts = (ALL + D::BLOCKS - 1) / D::BLOCKS, lines = (D::OW + D::PIXELS - 1) / D::PIXELS;
  const int first = th.workgroup % parts * D::BLOCKS, mine = th.tid % D::BLOCKS;
  for (int i = th.tid; i < TERMS * WIDE; i += D::THREADS) {
    const int column = first * D::COLUMNS + i / TERMS, term = i % TERMS;
    const bool exists = column < ALL * D::COLUMNS;
    filters[term * (WIDE + 4) + i / TERMS] = exists ? (float)widen(w[(int64_t)column * TERMS + term]) : 0.0f;
  }
  barrier();
  if (first + mine >= ALL) return;
  const int together = D::THREADS / D::BLOCKS, count = D::N * D::OH * lines;
  for (int place = th.workgroup / parts * together + th.tid / D::BLOCKS; place < count;
       place += D::WORKGROUPS * together) {
    float acc[D::PIXELS][D::COLUMNS] = {};
    const int row = place / lines, left = place % lines * D::PIXELS, channel = (first + mine) * D::COLUMNS;
    grouped_sums<D>(x, filters + mine * D::COLUMNS, row, left, channel / D::RESULTS * D::CHANNELS, acc);
#pragma unroll
    for (int p = 0; p < D::PIXELS; p++)
      if (left + p < D::OW) {
#pragma unroll
        for (int k = 0; k < D::COLUMNS; k += E::WIDTH) epilogue.store(row * D::OW + left + p, channel + k, acc[p] + k);
      }
  }
}
