"""Concatenation and stacking."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Value, result_type
from .access import fresh, wrap_dim
from .common import names
from .registry import lowers
from .samples import S, t
from .views import DTYPES, at_least


def joined(tensors: Sequence[Value], dim: int) -> Value:
    """Concatenate tensors along one dim in their common dtype. A tensor of shape [0] fits any other, as in PyTorch."""
    dtype = result_type(tensors)
    parts = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    if not parts[0].rank:
        raise ValueError("0-d tensors cannot be concatenated")
    dim = wrap_dim(dim, parts[0].rank)
    for x in parts:
        if [*x.shape[:dim], *x.shape[dim + 1 :]] != [*parts[0].shape[:dim], *parts[0].shape[dim + 1 :]]:
            raise ValueError(f"shapes {[list(x.shape) for x in tensors]} differ outside dim {dim}")
    out = parts[0].graph.concat([x.cast(dtype) for x in parts], dim)
    return fresh(out) if len(parts) == 1 else out


@lowers(
    *names("cat", aliases=["concat", "concatenate"]),
    samples=(
        S([t(2, 3), t(4, 3), t(1, 3)]),
        S([t(2, 3, 4), t(2, 3, 1), t(2, 3, 2, layout="transposed")], -1),
        S([t(2, 3), t(2, 2), t(2, 1), t(2, 4), t(2, 0)], 1),
        S([t(0), t(2, 3, 4)], -2),
        S([t(0), t(0)]),
        S([t(3), t(0), t(2)]),
        S([t(2, 3), t(2, 3, dtype="int32")]),
        S([t(2, 3, dtype="bool"), t(2, 3)], 1),
        S([t(2, 3, dtype="float32"), t(2, 3)]),
        S([t(0, dtype="float32"), t(2, 3)]),
        S([t(3, layout="strided")]),
    ),
    dtypes=DTYPES,
)
def cat(tensors: list[Value], dim: int = 0) -> Value:
    """Tensors one after the other along a dim, promoted to a common dtype."""
    return joined(tensors, dim)


@lowers(
    "aten.stack.default",
    samples=(
        S([t(2, 3), t(2, 3)]),
        S([t(2, 3), t(2, 3, layout="transposed"), t(2, 3, dtype="int32")], -1),
        S([t(2, 3, 4)], 1),
        S([t(), t()], -1),
        S([t(0, 3), t(0, 3)], 1),
    ),
    dtypes=DTYPES,
)
def stack(tensors: list[Value], dim: int = 0) -> Value:
    """Tensors of one shape side by side along a new dim."""
    dim = wrap_dim(dim, tensors[0].rank + 1)
    if len({x.shape for x in tensors}) > 1:
        raise ValueError(f"shapes {[list(x.shape) for x in tensors]} differ")
    dtype = result_type(tensors)
    return joined([x.cast(dtype).reshape(*x.shape[:dim], 1, *x.shape[dim:]) for x in tensors], dim)


_LISTS = (
    S([t(3), t(3)]),
    S([t(2, 3), t(2, 3, layout="transposed"), t(2, 3)]),
    S([t(), t(), t()]),
    S([t(2, 3, 4), t(2, 3, 4)]),
)


@lowers("aten.hstack.default", samples=(*_LISTS, S([t(2, 3), t(2, 1)])), dtypes=DTYPES)
def hstack(tensors: list[Value]) -> Value:
    """Side by side: along dim 1, or dim 0 of vectors."""
    parts = [at_least(x, 1) for x in tensors]
    return joined(parts, 0 if parts[0].rank == 1 else 1)


@lowers("aten.vstack.default", samples=(*_LISTS, S([t(2, 3), t(3)])), dtypes=DTYPES)
def vstack(tensors: list[Value]) -> Value:
    """One below the other: vectors are rows."""
    return joined([at_least(x, 2) for x in tensors], 0)


@lowers("aten.dstack.default", samples=_LISTS, dtypes=DTYPES)
def dstack(tensors: list[Value]) -> Value:
    """One behind the other, along dim 2."""
    return joined([at_least(x, 3) for x in tensors], 2)


@lowers("aten.column_stack.default", samples=(*_LISTS, S([t(2, 3), t(2)])), dtypes=DTYPES)
def column_stack(tensors: list[Value]) -> Value:
    """Side by side along dim 1: vectors are columns."""
    return joined([x if x.rank > 1 else x.reshape(x.numel, 1) for x in tensors], 1)
