"""Depthwise convolutions."""

from __future__ import annotations

from ....schedule.kernel import DepthwiseConv2d
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import read
from .epilogue import Epilogue

THREADS = 128


def emit_depthwise(kernel: DepthwiseConv2d, dialect: Dialect) -> Emission:
    """A thread makes one result: neighbouring threads take neighbouring channels."""
    f = Function(kernel, dialect)
    out, a = f.lines, kernel
    x, w = kernel.inputs[:2]
    n, oh, ow, c = kernel.outputs[0].shape
    (r, s), (sh, sw), (dh, dw), (top, left) = a.kernel_size, a.stride, a.dilation, a.padding[:2]
    h, wide = x.shape[1:3]
    count = n * oh * ow * c
    out.add(f"const uint at = (uint)gid * {THREADS}u + (uint)tid;", f"if (at >= {count}u) return;")
    out.add(f"const int c = (int)(at % {c}u), pixel = (int)(at / {c}u);")
    out.add(f"const int y0 = pixel / {ow} % {oh} * {sh} - {top}, x0 = pixel % {ow} * {sw} - {left};")
    out.add(f"const int64_t image = (int64_t)(pixel / {oh * ow}) * {h * wide * c};", "float acc = 0.0f;")
    out.add("#pragma unroll")
    with out.block(f"for (int r = 0; r < {r}; r++) {{"):
        out.add(f"const int y = y0 + r * {dh};", f"if (y < 0 || y >= {h}) continue;", "#pragma unroll")
        with out.block(f"for (int s = 0; s < {s}; s++) {{"):
            out.add(f"const int x = x0 + s * {dw};", f"if (x < 0 || x >= {wide}) continue;")
            value = read(f.pointer(0), f"image + (y * {wide} + x) * {c} + c", x.dtype).text
            weight = read(f.pointer(1), f"r * {w.strides[0]} + s * {w.strides[1]} + c * {w.strides[2]}", w.dtype).text
            out.add(f"acc += {value} * {weight};")
    Epilogue(kernel, f).store("pixel", "c", 1, lambda _, at: "acc")
    return f.finish(blocks(count, THREADS), THREADS)
