"""How data movement ops read their operands: dims, element loads and copies."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.expr import Expr, index, load, where
from ..graph.graph import Value


def wrap_dim(dim: int, rank: int) -> int:
    """A dim counted from either end; a 0-d tensor accepts 0 and -1. ``IndexError`` if there is no such dim."""
    n = max(rank, 1)
    if not -n <= dim < n:
        raise IndexError(f"dim {dim} of a {rank}-d tensor")
    return dim % n


def resized(shape: Sequence[int], dim: int, *sizes: int) -> tuple[int, ...]:
    """``shape`` with one dim replaced by ``sizes``."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def pick(x: Value, shape: Sequence[int], idx: Sequence[Expr], *others: Value) -> Value:
    """A tensor of ``shape`` whose elements are ``x[idx]``; loads in ``idx`` number ``others`` from 1."""
    return x.graph.elementwise(shape, [x, *others], load(0, x.dtype, idx))


def fresh(x: Value) -> Value:
    """``x`` as a value of its own, for ops that copy in PyTorch: writing to their result must not change ``x``."""
    return x.graph.pointwise(lambda e: e, x, opmath=False)


def position(i: Expr, n: int) -> Expr:
    """An index that may count from the end, as a position in ``n`` elements."""
    return where(i < 0, i + n, i)


def integer_load(number: int, x: Value, idx: Sequence[Expr]) -> Expr:
    """An element of an index tensor of any integer dtype, as an index."""
    return load(number, x.dtype, idx).cast("int64")


def identity(rank: int) -> list[Expr]:
    """The index of the domain itself: one expression per dim."""
    return [index(d) for d in range(rank)]
