// Depthwise convolutions, NHWC. A thread computes PIXELS neighbours of a line for VECTOR neighbouring channels, and
// neighbouring threads compute neighbouring channels.
//
// Types of D: X, W. Constants: N, H, W_IN, C of the image; OH, OW of the result; R, S of the filter, whose strides are
// W_R, W_S, W_C; STRIDE_*, PAD_TOP, PAD_LEFT, DILATION_*; FILTERS: VECTOR filters are loaded at once; THREADS of a
// workgroup. The epilogue is a rendered functor: WIDTH, and store(row, column, const float* acc).
#pragma once

// The weights of a tap for VECTOR channels.
template <class D>
INLINE Vec<float, D::VECTOR> depthwise_filter(DEVICE const typename D::W* w) {
  typedef Vec<typename D::W, D::VECTOR> Weights;
  Vec<float, D::VECTOR> f;
  if (D::FILTERS) {
    const Weights loaded = *(DEVICE const Weights*)w;
#pragma unroll
    for (int v = 0; v < D::VECTOR; v++) f.v[v] = (float)widen(loaded.v[v]);
  } else {
#pragma unroll
    for (int v = 0; v < D::VECTOR; v++) f.v[v] = (float)widen(w[v * D::W_C]);
  }
  return f;
}

template <class D, class E>
INLINE void depthwise(DEVICE const typename D::X* x, DEVICE const typename D::W* w, THREAD const E& epilogue,
                      Thread th) {
  typedef Vec<typename D::X, D::VECTOR> Channels;
  const int SPAN = (D::PIXELS - 1) * D::STRIDE_W + (D::S - 1) * D::DILATION_W + 1;  // pixels of a line that are read
  const int SETS = D::C / D::VECTOR, PARTS = (D::OW + D::PIXELS - 1) / D::PIXELS;
  const uint at = (uint)th.workgroup * (uint)D::THREADS + (uint)th.tid;
  if (at >= (uint)D::N * (uint)D::OH * (uint)PARTS * (uint)SETS) return;
  const int c = (int)(at % (uint)SETS) * D::VECTOR, place = (int)(at / (uint)SETS);
  const int row = place / PARTS, left = place % PARTS * D::PIXELS;
  const int y0 = row % D::OH * D::STRIDE_H - D::PAD_TOP, x0 = left * D::STRIDE_W - D::PAD_LEFT;
  float acc[D::PIXELS][D::VECTOR] = {};
#pragma unroll
  for (int r = 0; r < D::R; r++) {
    const int y = y0 + r * D::DILATION_H;
    if (y < 0 || y >= D::H) continue;
    DEVICE const typename D::X* const line = x + ((int64_t)(row / D::OH) * D::H + y) * (D::W_IN * D::C) + c;
    Channels pixels[SPAN];
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
#pragma unroll
      for (int v = 0; v < D::VECTOR; v++) pixels[i].v[v] = narrow<typename D::X>(0.0f);
      if (x0 + i >= 0 && x0 + i < D::W_IN) pixels[i] = *(DEVICE const Channels*)(line + (x0 + i) * D::C);
    }
#pragma unroll
    for (int s = 0; s < D::S; s++) {
      const Vec<float, D::VECTOR> f = depthwise_filter<D>(w + r * D::W_R + s * D::W_S + c * D::W_C);
#pragma unroll
      for (int p = 0; p < D::PIXELS; p++)
#pragma unroll
        for (int v = 0; v < D::VECTOR; v++)
          acc[p][v] += (float)widen(pixels[p * D::STRIDE_W + s * D::DILATION_W].v[v]) * f.v[v];
    }
  }
#pragma unroll
  for (int p = 0; p < D::PIXELS; p++)
    if (left + p < D::OW) {
#pragma unroll
      for (int v = 0; v < D::VECTOR; v += E::WIDTH) epilogue.store(row * D::OW + left + p, c + v, acc[p] + v);
    }
}
