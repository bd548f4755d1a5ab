// Depthwise convolutions, NHWC: each thread computes one result, neighbouring threads neighbouring channels.
//
// Types of D: X, W. Constants: N, H, W_IN, C of the image; OH, OW of the result; R, S of the filter, whose strides are
// W_R, W_S, W_C; STRIDE_*, PAD_TOP, PAD_LEFT, DILATION_*; THREADS of a workgroup. The epilogue is a rendered functor:
// store(row, column, const float* acc).
#pragma once

template <class D, class E>
INLINE void depthwise(DEVICE const typename D::X* x, DEVICE const typename D::W* w, THREAD const E& epilogue,
                      Thread th) {
  const uint at = (uint)th.workgroup * (uint)D::THREADS + (uint)th.tid;
  if (at >= (uint)D::N * (uint)D::OH * (uint)D::OW * (uint)D::C) return;
  const int c = (int)(at % (uint)D::C), pixel = (int)(at / (uint)D::C);
  const int y0 = pixel / D::OW % D::OH * D::STRIDE_H - D::PAD_TOP, x0 = pixel % D::OW * D::STRIDE_W - D::PAD_LEFT;
  const int64_t image = (int64_t)(pixel / (D::OH * D::OW)) * (D::H * D::W_IN * D::C);
  float acc = 0.0f;
#pragma unroll
  for (int r = 0; r < D::R; r++) {
    const int yy = y0 + r * D::DILATION_H;
    if (yy < 0 || yy >= D::H) continue;
#pragma unroll
    for (int s = 0; s < D::S; s++) {
      const int xx = x0 + s * D::DILATION_W;
      if (xx < 0 || xx >= D::W_IN) continue;
      acc += (float)widen(x[image + (yy * D::W_IN + xx) * D::C + c]) *
             (float)widen(w[r * D::W_R + s * D::W_S + c * D::W_C]);
    }
  }
  epilogue.store(pixel, c, &acc);
}
