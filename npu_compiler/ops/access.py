"""Helpers of data movement ops: dims, element loads and copies."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.expr import Expr, index, load, where
from ..graph.graph import Value


def wrap_dim(dim: int, rank: int) -> int:
    """Return a dim counted from the front; a 0-d tensor accepts 0 and -1. ``IndexError`` if there is no such dim."""
    n = max(rank, 1)
    if not -n <= dim < n:
        raise IndexError(f"dim {dim} of a {rank}-d tensor")
    return dim % n


def resized(shape: Sequence[int], dim: int, *sizes: int) -> tuple[int, ...]:
    """Return ``shape`` with one dim replaced by ``sizes``."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def pick(x: Value, shape: Sequence[int], idx: Sequence[Expr], *others: Value) -> Value:
    """Return a tensor of ``shape`` whose elements are ``x[idx]``; loads in ``idx`` number ``others`` from 1."""
    return x.graph.elementwise(shape, [x, *others], load(0, x.dtype, idx))


def fresh(x: Value) -> Value:
    """Return a copy of ``x``, for ops that copy in PyTorch: a write to their result must not change ``x``."""
    return x.graph.pointwise(lambda e: e, x, opmath=False)


def position(i: Expr, n: int) -> Expr:
    """Return the position in ``n`` elements of an index that may count from the end."""
    return where(i < 0, i + n, i)


def integer_load(number: int, x: Value, idx: Sequence[Expr]) -> Expr:
    """Load an element of an index tensor of any integer dtype as an int64 index."""
    return load(number, x.dtype, idx).cast("int64")


def identity(rank: int) -> list[Expr]:
    """Return the position in the domain: one index expression per dim."""
    return [index(d) for d in range(rank)]
