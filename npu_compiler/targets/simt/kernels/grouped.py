"""Convolutions of few channels per group: the supported kernels, and sizes for ``kernels/grouped.h``.

A tile of a matrix product would be mostly empty, because each group is a product with few columns.
"""

from __future__ import annotations

import math

from ....schedule.anchors import Conv2d
from ....support import dtypes
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, Members, blocks
from .epilogue import Epilogue, Functor

THREADS = 128
MAX_RESULTS = 32  # channels of a group's result; a tile of more is well used
MAX_CHANNELS = 8  # of a group, if a matrix unit could multiply them
MAX_PIXELS, MAX_SPAN = 8, 16  # pixels of a thread's result, and pixels of a line that it reads
MAX_FILTERS = 6 << 10  # floats in shared memory
MAX_BLOCKS = 32
RESIDENT = 8  # workgroups that run on a compute unit at once


def supports_grouped(kernel: Conv2d, dialect: Dialect) -> bool:
    """Whether :func:`emit_grouped` supports ``kernel``, and tiles of a matrix product would be slower."""
    channels, results = kernel.channels[0] // kernel.groups, kernel.channels[1] // kernel.groups
    if kernel.inputs[0].dtype == "uint8":
        return False  # sums of integers
    if kernel.groups == 1 or kernel.splits > 1 or kernel.inputs[0].strides[3] != 1 or results > MAX_RESULTS:
        return False
    if (kernel.inputs[0].dtype in dialect.matrix_types or kernel.tf32) and channels > MAX_CHANNELS:
        return False
    terms = math.prod(kernel.kernel_size) * channels
    return terms * power_of_two(results, 4) <= MAX_FILTERS and _pixels(kernel) > 0


def emit_grouped(kernel: Conv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_grouped`."""
    f, a, (x, w) = Function(kernel, dialect), kernel, kernel.inputs[:2]
    n, oh, ow, _ = kernel.outputs[0].shape
    channels, results = a.channels[0] // a.groups, a.channels[1] // a.groups
    columns, terms, pixels = power_of_two(results, 4), math.prod(a.kernel_size) * channels, _pixels(kernel)
    sets = a.channels[1] // columns
    most = min(MAX_BLOCKS, MAX_FILTERS // (terms * columns))
    together = next(b for b in (32, 16, 8, 4, 2, 1) if b <= most)
    parts, places = blocks(sets, together), n * oh * blocks(ow, pixels)
    sharing = min(blocks(places, THREADS // together), max(1, dialect.device.compute_units * RESIDENT // parts))
    vector = 4 // max(1, dtypes.DTYPES[x.dtype].size // 4)
    while any(v % vector for v in (channels, x.offset, *x.strides[:3])):
        vector //= 2
    members = Members(f, "@NAME@_epilogue")
    epilogue = Epilogue(kernel, members)
    made = Functor(epilogue, members, power_of_two(columns, epilogue.width))
    made.store()
    sizes = dict(
        N=n, H=x.shape[1], W_IN=x.shape[2], IMAGE=x.strides[0], LINE=x.strides[1], PIXEL=x.strides[2], OH=oh, OW=ow,
        R=a.kernel_size[0], S=a.kernel_size[1], STRIDE_H=a.stride[0], STRIDE_W=a.stride[1], PAD_TOP=a.padding[0],
        PAD_LEFT=a.padding[1], DILATION_H=a.dilation[0], DILATION_W=a.dilation[1], CHANNELS=channels, RESULTS=results,
        GROUPS=a.groups, VECTOR=vector, COLUMNS=columns, PIXELS=pixels, BLOCKS=together, THREADS=THREADS,
        WORKGROUPS=sharing,
    )  # fmt: skip
    types = {"X": dtypes.DTYPES[x.dtype].ctype, "W": dtypes.DTYPES[w.dtype].ctype}
    filters = f.array("float", "filters", terms * (together * columns + 4))
    f.template("grouped_conv", "grouped.h", types, sizes, f.pointer(0), f.pointer(1), filters, made.finish())
    return f.finish(parts * sharing, THREADS)


def power_of_two(count: int, widest: int) -> int:
    """Return the largest power of two up to ``widest`` that divides ``count``."""
    return min(count & -count, 1 << (widest.bit_length() - 1))


def _pixels(kernel: Conv2d) -> int:
    """Return the number of neighbouring results that a thread computes: a line has few threads without any; 0: even for
    one it would read too many pixels."""
    ow, taps = kernel.outputs[0].shape[2], (kernel.kernel_size[1] - 1) * kernel.dilation[1] + 1
    most = (MAX_SPAN - taps) // kernel.stride[1] + 1 if taps <= MAX_SPAN else 0
    most = min(MAX_PIXELS, most, ow)
    return min(range(1, most + 1), key=lambda p: (blocks(ow, p) * (p + 1), -p), default=0)
