"""The factors of a row norm that is split between two products: see ``simt/rewrites/split_rms_norm.py``."""

from __future__ import annotations

from ...graph import expr
from ...schedule.anchors import Conv2d, Gemm
from ..codegen.nest import Nest
from ..simt.lang.function import Function
from ..simt.lang.lines import Lines
from ..simt.lang.scalar import Scalars, Value


def row_scale(kernel: Gemm | Conv2d, f: Function) -> str:
    """Define the functor that computes ``kernel``'s row factors from the per-row sums of the previous product, and
    return the C++ expression that instantiates it."""
    assert kernel.row_scale is not None
    number, lines = len(kernel.inputs) - 1, Lines()
    tiles, rows = kernel.inputs[number].shape
    lines.add("const float* sums;", f"CONSTANTS bool ENABLED = true;  CONSTANTS int TILES = {tiles}, ROWS = {rows};")
    with lines.block("INLINE float factor(float total) const {"):
        s = Scalars(Nest((), (), [], {}, set(), [], False), {}, lines)
        s.bound[expr.stage(0, "float32")] = Value("total", "float")
        lines.add(f"return {s.text(kernel.row_scale, 'float')};")
    f.before.append("\n".join(["struct @NAME@_scale {", *lines.text, "};\n"]))
    return f"@NAME@_scale{{{f.pointer(number)}}}"
