"""Views as strides: the window of memory that a chain of views reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..graph.graph import Value
from .buffers import contiguous_strides
from .kernel import Operand


def strided_view(source: Operand, v: Value) -> Operand | None:
    """Return the window of ``source`` that a view reads, or None if strides cannot express it (some reshapes)."""
    a, strides, offset = v.node.attrs, source.strides, source.offset
    if v.op == "permute":
        strides = tuple(strides[p] for p in a["perm"])
    elif v.op == "expand":
        strides = tuple(0 if o != n else s for s, o, n in zip(strides, source.shape, v.shape, strict=True))
    elif v.op == "slice":
        offset += sum(s * st for s, st in zip(a["starts"], strides, strict=True))
        strides = tuple(s * st for s, st in zip(strides, a["steps"], strict=True))
    else:
        reshaped = reshape_strides(source.shape, strides, v.shape)
        if reshaped is None:
            return None
        strides = reshaped
    strides = tuple(0 if n == 1 else s for n, s in zip(v.shape, strides, strict=True))
    return Operand(source.buffer, v.shape, strides, offset)


def reshape_strides(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a reshape without a copy, or None if there are none.

    The old dims are grouped into contiguous runs, and each run is divided into new dims.
    """
    if math.prod(old) == 0:
        return contiguous_strides(new)
    dims = [(n, s) for n, s in zip(old, strides, strict=True) if n != 1]
    runs: list[tuple[int, int]] = []  # (elements, stride of the innermost)
    for n, s in dims:
        if runs and runs[-1][1] == n * s:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    out: list[int] = []
    left, stride = 1, 0
    for n in reversed(new):
        if n == 1:
            out.append(0)
            continue
        if left == 1:
            if not runs:
                return None
            left, stride = runs.pop()
        if left % n:
            return None
        out.append(stride)
        left //= n
        stride *= n
    return tuple(reversed(out))
