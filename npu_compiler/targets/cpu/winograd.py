"""Winograd convolution F(m x m, 3 x 3): the weight transform that goes with ``kernels/winograd.h``.

Source: Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). The transform of a 3x3 filter g is
``U = G g G^T``; the kernel computes ``Y = A^T [U * (B^T d B)] A`` on tiles d of (m + 2) x (m + 2) inputs.

With stride 2, pixels in even and odd places are two convolutions, of two taps and of one. F(2, 2) computes the first
with 3 multiplications for two outputs, the second needs 2: 25 / 4 multiplications per output.

F(2x2) interpolates at 0, +-1 and infinity. It needs 4 multiplications per output instead of 9, and its float32 error is
about that of direct convolution. F(4x4) interpolates at 0, +-3/4, +-3/2 and infinity, and needs 2.25 multiplications.
These points are exact in binary and halve the error of the usual +-1, +-2: it is about three times that of direct
float32 convolution, and far below the rounding of float16 or bfloat16 outputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...weights.format import PANEL
from .devices import CPUDevice
from .limbs import DIRECT, TILE, limbs_flops, round_up, time_with_weights

CHANNELS = 256  # whose float32 products are added to one sum; of more, every 256 have their own
_NEAR, _FAR = 0.75, 1.5  # the interpolation points of F(4x4)


def filter_transform(tile: int, stride: int = 1) -> NDArray[np.float64]:
    """Return G of F(tile x tile, 3 x 3) as float64 [tile + 2, 3], or [5, 3] for tile 2 and stride 2.

    Raises ``ValueError`` for other tiles and strides.
    """
    if (tile, stride) == (2, 2):
        return np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 1], [0, 1, 0]], np.float64)
    if stride != 1:
        raise ValueError(f"winograd tile with stride {stride} must be 2 with stride 2, not {tile}")
    if tile == 2:
        return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float64)
    if tile != 4:
        raise ValueError(f"winograd tile must be 2 or 4, not {tile}")
    a, b = _NEAR, _FAR
    near, far = 1 / (2 * a * a * (a * a - b * b)), 1 / (2 * b * b * (b * b - a * a))
    return np.array(
        [
            [1 / (a * a * b * b), 0, 0],
            [near, near * a, near * a * a],
            [near, -near * a, near * a * a],
            [far, far * b, far * b * b],
            [far, -far * b, far * b * b],
            [0, 0, 1],
        ],
        np.float64,
    )


# Cost model, in flops of the float32 tile, measured on two AVX-512 cores: the transforms of a tile, for each (input,
# output) channel.
_TRANSFORM = {(2, 1): (240, 150), (4, 1): (536, 344), (2, 2): (330, 100)}  # (tile, stride)
_GAIN = 0.95  # required speed-up: Winograd weights are larger


def winograd_tile(n: int, oh: int, ow: int, c: int, k: int, dtype: str, device: CPUDevice, stride: int = 1) -> int:
    """Return the tile (4 or 2) with which a 3x3 convolution of ``c`` to ``k`` channels runs fastest on ``device``, or 0
    if direct convolution is faster.

    ``n, oh, ow``: batch, height and width of the output. ``dtype``: 'float32', 'float16' or 'bfloat16', of the
    activations. Winograd's algorithm computes in float32.
    """
    if min(c, k) < 16:
        return 0
    k = round_up(k, PANEL)
    size, rate = {"float32": (4, 1.0), "float16": (2, 1.0), "bfloat16": (2, device.costs.bfloat16_rate)}[dtype]

    products = 9 * c * k * n * oh * ow
    direct = DIRECT * 2 * products / rate
    if dtype != "bfloat16":
        row, pixels = ow + 2 if stride == 1 else round_up(ow, TILE), n * oh * ow * stride * stride
        limbs = limbs_flops(n * oh * row, pixels, 9, c, k, dtype, device)
        if limbs < direct and dtype == "float32" and c > CHANNELS:
            return 0  # Winograd's weights, which are larger, were not measured beside so many limbs
        direct = min(direct, limbs)
    best, best_cost = 0, _GAIN * time_with_weights(direct, 9 * c * k * size, device)
    for tile in (2,) if dtype == "float32" or stride == 2 else (2, 4):
        tiles, points = n * -(-oh // tile) * -(-ow // tile), ((tile - 1) * stride + 3) ** 2
        for_input, for_output = _TRANSFORM[tile, stride]
        flops = tiles * (2 * points * c * k + for_input * c + for_output * k)
        tile_cost = time_with_weights(flops, points * c * k * 4, device)
        if tile_cost < best_cost:
            best, best_cost = tile, tile_cost
    return best
