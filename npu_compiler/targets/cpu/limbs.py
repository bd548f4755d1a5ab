"""Convolutions in bfloat16 limbs (``kernels/amx_limbs.h``): which ones run faster than with float32 arithmetic.

A float16 number is the exact sum of two bfloat16 limbs, a float32 number of three. Where a device multiplies bfloat16
so much faster that several products take less time than one of float32, a convolution multiplies the limbs. Its
weights are split when they are loaded, which needs 4 bytes for each float16 weight and 6 for each float32 weight.
"""

from __future__ import annotations

from ...graph.graph import Node
from ...support.dtypes import DTYPES
from ...weights.format import PANEL
from ...weights.packing import LIMBS, LIMBS_OF
from .devices import CPUDevice

DIRECT = 0.9  # flops of a convolution run this much closer to peak than the many small products of a Winograd kernel
TILE = 16  # positions of a tile
_GROUP = 32  # channels of a step
_MIN_ROWS = 2 * TILE

# Measured: products of limbs for each product; what one takes longer than at the device's rate; and what it takes to
# split an element of the input into each limb, in flops.
_PRODUCTS = {"float16": 3, "float32": 6}
_OVERHEAD = 1.5
_SPLIT = 13


def limbs_flops(positions: int, pixels: int, taps: int, c: int, k: int, dtype: str, device: CPUDevice) -> float:
    """Return the time of a convolution of ``c`` to ``k`` channels in limbs, as the float32 flops that take as long.

    ``positions``: those that its tiles compute, ``pixels``: those of its input that are split.
    """
    c, k = round_up(c, _GROUP), round_up(k, PANEL)
    products = 2 * round_up(positions, TILE) * taps * c * k * _PRODUCTS[dtype]
    return _OVERHEAD * products / device.costs.bfloat16_rate + _SPLIT * LIMBS[LIMBS_OF[dtype]] * pixels * c


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def time_with_weights(flops: float, weight_bytes: float, device: CPUDevice) -> float:
    """Return the time of a kernel, in flops, whose arithmetic overlaps in part with reading its weights."""
    memory = weight_bytes * device.costs.winograd_flops_per_byte
    return max(flops, memory) + min(flops, memory) / 2


def limbs_are_faster(conv: Node, device: CPUDevice) -> bool:
    """Return whether a convolution with static weights should multiply limbs."""
    (x, w), a = conv.inputs, conv.attrs
    if x.dtype not in _PRODUCTS or w.dtype != x.dtype or a["groups"] != 1:
        return False
    n, oh, ow, k = conv.out.shape
    (_, h, width, c), (_, r, s, _) = x.shape, w.shape
    rows = positions = pixels = n * oh * ow
    if r * s > 1:  # positions in memory order of the padded input, with those between two rows
        pixels, row = n * h * width, (ow - 1) * a["stride"][1] + (s - 1) * a["dilation"][1] + 1
        positions = n * oh * (row if a["stride"] == (1, 1) else round_up(ow, TILE))
    weights, size = r * s * c * round_up(k, PANEL), DTYPES[x.dtype].size
    limbs = limbs_flops(positions, pixels, r * s, c, k, x.dtype, device)
    direct = time_with_weights(DIRECT * 2 * rows * weights, size * weights, device)
    return rows >= _MIN_ROWS and time_with_weights(limbs, (size + 2) * weights, device) < direct
