"""Depthwise convolutions: sizes for ``kernels/depthwise.h``."""

from __future__ import annotations

from ....schedule.anchors import DepthwiseConv2d
from ....support import dtypes
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, Members, blocks
from .epilogue import Epilogue, Functor

THREADS = 128


def emit_depthwise(kernel: DepthwiseConv2d, dialect: Dialect) -> Emission:
    """Return the function of a depthwise convolution."""
    f, a = Function(kernel, dialect), kernel
    x, w = kernel.inputs[:2]
    n, oh, ow, c = kernel.outputs[0].shape
    sizes = dict(
        N=n, H=x.shape[1], W_IN=x.shape[2], C=c, OH=oh, OW=ow, R=a.kernel_size[0], S=a.kernel_size[1], W_R=w.strides[0],
        W_S=w.strides[1], W_C=w.strides[2], STRIDE_H=a.stride[0], STRIDE_W=a.stride[1], PAD_TOP=a.padding[0],
        PAD_LEFT=a.padding[1], DILATION_H=a.dilation[0], DILATION_W=a.dilation[1], THREADS=THREADS,
    )  # fmt: skip
    members = Members(f, "@NAME@_epilogue")
    made = Functor(Epilogue(kernel, members), members, 1)
    made.store()
    types = {"X": dtypes.DTYPES[x.dtype].ctype, "W": dtypes.DTYPES[w.dtype].ctype}
    f.template("depthwise", "depthwise.h", types, sizes, f.pointer(0), f.pointer(1), made.finish())
    return f.finish(blocks(n * oh * ow * c, THREADS), THREADS)
