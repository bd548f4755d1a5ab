"""Depthwise convolutions: sizes for ``kernels/depthwise.h``."""

from __future__ import annotations

from ....schedule.anchors import DepthwiseConv2d
from ....support import dtypes
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, Members, blocks
from .epilogue import Epilogue, Functor
from .grouped import MAX_SPAN, power_of_two

THREADS = 128
PIXELS = 4, 2, 1  # neighbours of a line that a thread may compute
RESIDENT = 4  # workgroups of a compute unit; larger parts for each thread would leave some without work


def emit_depthwise(kernel: DepthwiseConv2d, dialect: Dialect) -> Emission:
    """Return the function of a depthwise convolution."""
    f, a = Function(kernel, dialect), kernel
    x, w = kernel.inputs[:2]
    n, oh, ow, c = kernel.outputs[0].shape
    pixels, vector = _part(kernel, dialect)
    sizes = dict(
        N=n, H=x.shape[1], W_IN=x.shape[2], C=c, OH=oh, OW=ow, R=a.kernel_size[0], S=a.kernel_size[1], W_R=w.strides[0],
        W_S=w.strides[1], W_C=w.strides[2], STRIDE_H=a.stride[0], STRIDE_W=a.stride[1], PAD_TOP=a.padding[0],
        PAD_LEFT=a.padding[1], DILATION_H=a.dilation[0], DILATION_W=a.dilation[1], PIXELS=pixels, VECTOR=vector,
        FILTERS=w.strides[2] == 1 and not any(s % vector for s in (w.offset, *w.strides[:2])), THREADS=THREADS,
    )  # fmt: skip
    members = Members(f, "@NAME@_epilogue")
    epilogue = Epilogue(kernel, members)
    made = Functor(epilogue, members, power_of_two(vector, epilogue.width))
    made.store()
    types = {"X": dtypes.DTYPES[x.dtype].ctype, "W": dtypes.DTYPES[w.dtype].ctype}
    f.template("depthwise", "depthwise.h", types, sizes, f.pointer(0), f.pointer(1), made.finish())
    return f.finish(blocks(n * oh * blocks(ow, pixels) * (c // vector), THREADS), THREADS)


def _part(kernel: DepthwiseConv2d, dialect: Dialect) -> tuple[int, int]:
    """Return (pixels, channels) of a thread: the most for which all compute units have work."""
    x, (n, oh, ow, c) = kernel.inputs[0], kernel.outputs[0].shape
    size, taps = dtypes.DTYPES[x.dtype].size, (kernel.kernel_size[1] - 1) * kernel.dilation[1] + 1
    widest = min(power_of_two(c, 16 // size), power_of_two(x.offset or 16, 16))
    vectors = [1 << i for i in range(widest.bit_length())]
    spans = {p: (p - 1) * kernel.stride[1] + taps for p in PIXELS}
    parts = [(p, v) for p in PIXELS for v in vectors if p == 1 or (p <= ow and spans[p] <= MAX_SPAN)]

    def threads(part: tuple[int, int]) -> int:
        return n * oh * blocks(ow, part[0]) * (c // part[1])

    busy = [part for part in parts if threads(part) >= dialect.device.compute_units * RESIDENT * THREADS]
    return max(busy or [(1, 1)], key=lambda part: (part[0] * part[1], part[1]))
