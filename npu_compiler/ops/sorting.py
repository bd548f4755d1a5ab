"""Sorting and order statistics. NaN counts as the largest number; sorting is always stable."""

from __future__ import annotations

import math

from ..graph.graph import Value
from .access import fresh, wrap_dim
from .registry import ALL, lowers
from .samples import S, T, t


def ordered(x: Value, dim: int, descending: bool, k: int | None = None) -> tuple[Value, Value]:
    """Return the first ``k`` values in order along a dim, and their positions."""
    dim = wrap_dim(dim, x.rank)
    if k is not None and not 0 <= k <= (x.shape[dim] if x.rank else 1):
        raise ValueError(f"{k} of {list(x.shape)} elements along dim {dim}")
    values, indices = x.graph.sort(x if x.rank else x.reshape(1), dim, descending, k)
    return (values, indices) if x.rank else (values.reshape(), indices.reshape())


def distinct(*shape: int) -> T:
    """Return up to 101 distinct numbers: an op that is not stable in PyTorch then has one right result."""
    return t(*shape, values=[(i * 37 + 11) % 101 - 50 for i in range(math.prod(shape))])


_TENSORS = (distinct(3, 5), t(2, 3, 4, layout="transposed"), t(7, layout="strided"), t(), t(0, 3))
_SORTS = (
    *(S(x) for x in _TENSORS),
    S(distinct(3, 5), 0),
    S(distinct(2, 3, 4), 1, True),
    S(distinct(2, 50), -1, True),
    S(t(), 0, True),
)


@lowers("aten.sort.default", samples=_SORTS, dtypes=ALL)
def sort(self: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    """Values in order along a dim, and where they come from."""
    return ordered(self, dim, descending)


_NAN = tuple(
    S(t(5, dtype=dtype, values=[1.0, math.nan, -2.0, math.inf, 0.5]), -1, down)
    for dtype, down in (("float32", False), ("bfloat16", True), ("float16", True))
)
_STABLE = tuple(
    S(s.args[0], stable=True, **dict(zip(("dim", "descending"), s.args[1:], strict=False))) for s in (*_SORTS, *_NAN)
)


@lowers("aten.sort.stable", samples=(*_STABLE, S(t(3, 40, low=0, high=4), stable=True, descending=True)), dtypes=ALL)
def sort_stable(self: Value, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    """Values in order along a dim, equal ones in the order they come in."""
    return ordered(self, dim, descending)


@lowers("aten.argsort.default", samples=_SORTS, dtypes=ALL)
def argsort(self: Value, dim: int = -1, descending: bool = False) -> Value:
    """Positions of the values in order along a dim."""
    return ordered(self, dim, descending)[1]


@lowers("aten.argsort.stable", samples=_STABLE, dtypes=ALL)
def argsort_stable(self: Value, *, stable: bool, dim: int = -1, descending: bool = False) -> Value:
    """Positions of the values in order along a dim, equal ones in the order they come in."""
    return ordered(self, dim, descending)[1]


@lowers("aten.msort.default", samples=(S(t(5, 3)), S(t(2, 3, 4, layout="transposed")), S(t(6))), dtypes=ALL)
def msort(self: Value) -> Value:
    """Values in order along the first dim."""
    return ordered(self, 0, False)[0]


@lowers(
    "aten.topk.default",
    samples=(
        S(distinct(3, 7), 3), S(distinct(3, 7), 2, 0), S(distinct(2, 3, 4), 2, 1, False),
        S(distinct(4, 6), 6, -1, True, True),
        S(distinct(9), 0), S(distinct(2, 40), 5, -1, False, True), S(t(values=[2]), 1),
    ),
    dtypes=ALL,
)  # fmt: skip
def topk(self: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, Value]:
    """The ``k`` largest or smallest values along a dim, in order, and their positions."""
    return ordered(self, dim, largest, k)


def kth(x: Value, k: int, dim: int, keepdim: bool) -> tuple[Value, Value]:
    """The k-th smallest (from 1) along a dim and its position."""
    dim = wrap_dim(dim, x.rank)
    results = ordered(x, dim, False, k)
    if not x.rank:
        return results
    values, indices = (v.slice(dim, k - 1, k) for v in results)
    shape = values.shape if keepdim else (*values.shape[:dim], *values.shape[dim + 1 :])
    return fresh(values.reshape(*shape)), fresh(indices.reshape(*shape))


@lowers(
    "aten.kthvalue.default",
    samples=(S(distinct(3, 7), 3), S(distinct(5, 2), 5, 0, True), S(distinct(2, 3, 4), 1, 1), S(t(values=[2]), 1)),
    dtypes=ALL,
)
def kthvalue(self: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The k-th smallest value along a dim, and its position."""
    return kth(self, k, dim, keepdim)
