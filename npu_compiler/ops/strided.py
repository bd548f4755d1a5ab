"""Windows of memory by strides. The memory is that of a dense tensor in row-major order, which capture ensures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..graph.expr import Expr, const, index
from ..graph.graph import Value
from ..schedule.buffers import contiguous_strides
from ..support.errors import Reason, Unsupported
from .access import pick
from .registry import Result, lowers
from .samples import S, t
from .scattering import written
from .views import DTYPES


def _place(numel: int, size: Sequence[int], stride: Sequence[int], offset: int) -> Expr:
    """Return the position in memory of an element of the window; raises ``IndexError`` if one is outside."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if min(offset, *stride, 0) < 0 or last >= numel > 0:
        raise IndexError(f"positions {offset} to {last} of {numel} elements")
    place = const(offset, "int64")
    for d, s in enumerate(stride):
        place = place + index(d) * s
    return place


def _whole(x: Value, size: Sequence[int], stride: Sequence[int], offset: int) -> bool:
    """Whether the window is all of ``x`` under another shape."""
    return offset == 0 and x.numel == math.prod(size) and tuple(stride) == contiguous_strides(tuple(size))


@lowers(
    "aten.as_strided.default",
    samples=(
        S(t(4, 6), (2, 3), (6, 1)),
        S(t(4, 6), (4, 3, 2), (6, 2, 1)),
        S(t(24), (8, 8), (2, 1), 1),
        S(t(2, 3, 4), (3,), (9,), 5),
        S(t(5), (2, 2), (0, 1)),
        S(t(3), (), (), 2),
        S(t(4), (0, 3), (3, 1)),
    ),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def as_strided(self: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Value:
    """The elements at ``storage_offset`` + sum(index * stride) of the memory of a dense tensor."""
    offset = storage_offset or 0
    if _whole(self, size, stride, offset):
        return self.reshape(*size)
    if 0 in size:
        return self.reshape(self.numel).slice(0, 0, 0).reshape(*size)
    return pick(self.reshape(self.numel), size, [_place(self.numel, size, stride, offset)])


@lowers(
    "aten.as_strided_scatter.default",
    samples=(
        S(t(4, 6), t(2, 3), (2, 3), (6, 1)),
        S(t(4, 6), t(24), (24,), (1,)),
        S(t(24), t(3, 4), (3, 4), (8, 2), 1),
        S(t(2, 3), t(), (), (), 2),
    ),
    dtypes=DTYPES,
    result=Result.UPDATE,
)
def as_strided_scatter(
    self: Value, src: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Value:
    """The elements of such a window replaced, if none of them is in the window twice."""
    offset, reach = storage_offset or 0, 0
    if _whole(self, size, stride, offset):
        return src.expand(*size).reshape(*self.shape)
    for s, n in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if s <= reach and n > 0:
            raise Unsupported(Reason("arguments", "as_strided_scatter writes an element twice", "write to slices"))
        reach += s * (n - 1)
    memory = self.reshape(self.numel)
    if 0 not in size:
        memory = written(memory, src.expand(*size), [_place(self.numel, size, stride, offset)])
    return memory.reshape(*self.shape)
