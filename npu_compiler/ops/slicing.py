"""Slices, windows and splits, and dims reversed or rolled. An op that is a view in PyTorch is a view here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..graph.expr import index, load
from ..graph.graph import Value
from .access import fresh, pick, resized, wrap_dim
from .common import MAX_PARTS, bounded
from .registry import Result, lowers, runs_on_host
from .samples import S, t
from .views import ANY, DTYPES, calls, exchanged


# -- windows ----------------------------------------------------------------------------------------------------------
def window(x: Value, dim: int, start: int, length: int) -> Value:
    """Return ``length`` positions of a dim from ``start`` on; raises ``IndexError`` outside."""
    return x.slice(dim, start, start + length)


@lowers(
    "aten.select.int",
    samples=(*calls((0, 1), (1, -1), (-1, 3), (2, -4), of=ANY[:2]), S(t(3), 0, 2), S(t(2, 0), 0, 1)),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def select(self: Value, dim: int, index: int) -> Value:
    """One position of a dim, which disappears."""
    dim, n = wrap_dim(dim, self.rank), self.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} of a dim of size {n}")
    return window(self, dim, index % n, 1).reshape(*resized(self.shape, dim))


HUGE = (1 << 63) - 1

_SLICES = (
    (), (0, 1), (1, 1, HUGE), (-1, -2), (2, -3, -1), (1, 0, 2, 1), (-1, 0, HUGE, 2), (2, 1, HUGE, 3), (0, 5), (2, 3, 1),
    (2, -100, 100), (0, None, 1),
)  # fmt: skip


@lowers(
    "aten.slice.Tensor",
    samples=(*calls(*_SLICES), *calls((1, 0, HUGE, 2), (-2, 1), of=ANY[1:])),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def slice_(self: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    """``start:end:step`` of a dim, by Python's rules; step > 0."""
    dim = wrap_dim(dim, self.rank)
    start, end, step = slice(start, end, step).indices(self.shape[dim])
    return self.slice(dim, start, max(start, end), step)


@lowers(
    "aten.narrow.default",
    samples=calls((0, 1, 1), (-1, 1, 2), (1, -2, 2), (2, 4, 0), of=ANY[:2]),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def narrow(self: Value, dim: int, start: int, length: int) -> Value:
    """``length`` positions of a dim from ``start`` on."""
    dim, n = wrap_dim(dim, self.rank), self.shape[dim]
    start = start + n if start < 0 else start
    if not 0 <= start <= start + length <= n:
        raise IndexError(f"positions {start} to {start + length} of a dim of size {n}")
    return window(self, dim, start, length)


_DIAGONALS = (
    *calls((), (1,), (-1,), (2,), (-3,), of=(t(3, 3), t(2, 4), t(4, 2, layout="transposed"))),
    *calls((0, 1, 2), (1, -1, 0), (-1, 0, 2)),
)


@lowers("aten.diagonal.default", samples=_DIAGONALS, dtypes=DTYPES, result=Result.VIEW)
def diagonal(self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The elements [i, i + offset] of two dims, as a new last dim."""
    a, b = wrap_dim(dim1, self.rank), wrap_dim(dim2, self.rank)
    m, n = self.shape[a], self.shape[b]
    x = self.permute(*(d for d in range(self.rank) if d not in (a, b)), a, b)
    length = max(0, min(m, n - offset) if offset >= 0 else min(m + offset, n))
    start = offset if offset >= 0 else -offset * n
    flat = x.reshape(*x.shape[:-2], m * n)  # elements of a diagonal are n + 1 apart in memory
    return flat.slice(-1, start, start + length * (n + 1), n + 1) if length else window(flat, -1, 0, 0)


@lowers(
    "aten.unfold.default",
    samples=(
        *calls((1, 2, 1), (-1, 2, 2), (2, 3, 1), (0, 1, 5), of=ANY[:2]),
        S(t(7), 0, 3, 2),
        S(t(7), 0, 2, 3),
        S(t(4), 0, 4, 1),
    ),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def unfold(self: Value, dimension: int, size: int, step: int) -> Value:
    """Windows of ``size`` every ``step`` positions of a dim; the elements of a window are a new last dim."""
    d = wrap_dim(dimension, self.rank)
    n = self.shape[d]
    count = (n - size) // step + 1
    if size <= step and count * step <= n:  # no overlap: a view, which may be written to
        x = window(self, d, 0, count * step).reshape(*resized(self.shape, d, count, step))
        x = window(x, d + 1, 0, size)
        return x.permute(*(i for i in range(x.rank) if i != d + 1), d + 1)
    idx = [index(i) if i != d else index(d) * step + index(self.rank) for i in range(self.rank)]
    return pick(self, (*resized(self.shape, d, count), size), idx)


# -- partitions of a dim -----------------------------------------------------------------------------------------------
def parts(x: Value, sizes: Sequence[int], dim: int) -> list[Value]:
    """Split a dim into parts of the given sizes; raises ``ValueError`` if they do not add up."""
    dim = wrap_dim(dim, x.rank)
    if sum(sizes) != x.shape[dim] or any(n < 0 for n in sizes):
        raise ValueError(f"sizes {list(sizes)} do not partition a dim of size {x.shape[dim]}")
    bounded(len(sizes), MAX_PARTS, "parts of a tensor")
    starts = accumulate(sizes, initial=0)
    return [window(x, dim, s, n) for s, n in zip(starts, sizes, strict=False)]


def equal_parts(x: Value, size: int, dim: int) -> list[Value]:
    """Parts of ``size``; the last one may be smaller."""
    n = x.shape[wrap_dim(dim, x.rank)]
    starts = range(0, n, size) if n else ()
    bounded(len(starts), MAX_PARTS, "parts of a tensor")
    return parts(x, [min(size, n - s) for s in starts] or [0], dim)


_SPLITS = (*calls((1,), (2, 1), (3, -1), (9, 2), of=ANY[:2]), S(t(0, 3), 2), S(t(0, 3), 0))


@lowers("aten.split.Tensor", samples=_SPLITS, dtypes=DTYPES, result=Result.VIEW)
@lowers("aten.unsafe_split.Tensor", samples=_SPLITS, dtypes=DTYPES)
def split(self: Value, split_size: int, dim: int = 0) -> list[Value]:
    """Parts of ``split_size`` along a dim; the last one may be smaller."""
    return equal_parts(self, split_size, dim)


_SIZES = (*calls(([1, 1],), ([2, 1], 1), ([1, 0, 3], -1), of=ANY[:2]), S(t(0, 3), [0]))


@lowers("aten.split.sizes", samples=_SIZES, dtypes=DTYPES, result=Result.VIEW)
def split_sizes(self: Value, split_size: Sequence[int], dim: int = 0) -> list[Value]:
    """Parts of the given sizes along a dim."""
    return parts(self, split_size, dim)


@lowers("aten.split_with_sizes.default", samples=_SIZES, dtypes=DTYPES, result=Result.VIEW)
@lowers("aten.unsafe_split_with_sizes.default", samples=_SIZES, dtypes=DTYPES)
def split_with_sizes(self: Value, split_sizes: Sequence[int], dim: int = 0) -> list[Value]:
    """Parts of the given sizes along a dim."""
    return parts(self, split_sizes, dim)


_CHUNKS = (*calls((2,), (2, 1), (3, -1), (5, 2), (1,), of=ANY[:2]), S(t(0, 3), 2), S(t(7), 4))


@lowers("aten.chunk.default", samples=_CHUNKS, dtypes=DTYPES, result=Result.VIEW)
@lowers("aten.unsafe_chunk.default", samples=_CHUNKS, dtypes=DTYPES)
def chunk(self: Value, chunks: int, dim: int = 0) -> list[Value]:
    """At most ``chunks`` parts of equal size along a dim; the last one may be smaller."""
    n = self.shape[wrap_dim(dim, self.rank)]
    bounded(chunks, MAX_PARTS, "parts of a tensor")
    return equal_parts(self, -(-n // chunks), dim) if n else parts(self, [0] * chunks, dim)


@lowers(
    "aten.tensor_split.sections",
    samples=(*calls((2,), (2, 1), (3, -1), (5, 2), of=ANY[:2]), S(t(0, 3), 2)),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def tensor_split(self: Value, sections: int, dim: int = 0) -> list[Value]:
    """``sections`` parts along a dim whose sizes differ by one at most."""
    n = self.shape[wrap_dim(dim, self.rank)]
    bounded(sections, MAX_PARTS, "parts of a tensor")
    return parts(self, [n // sections + (i < n % sections) for i in range(sections)], dim)


@lowers(
    "aten.tensor_split.indices",
    samples=calls(([1],), ([1, 2], 1), ([-1, 9], -1), ([3, 1], 2), ([], 0), of=ANY[:2]),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def tensor_split_indices(self: Value, indices: Sequence[int], dim: int = 0) -> list[Value]:
    """Parts of a dim between the given positions, by Python's slicing rules."""
    dim = wrap_dim(dim, self.rank)
    edges = [0, *indices, self.shape[dim]]
    return [slice_(self, dim, a, b) for a, b in pairwise(edges)]


@lowers(
    "aten.unbind.int",
    samples=(*calls((), (1,), (-1,), of=ANY[:3]), S(t(3)), S(t(0, 3))),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def unbind(self: Value, dim: int = 0) -> list[Value]:
    """Every position of a dim, which disappears."""
    count = bounded(self.shape[wrap_dim(dim, self.rank)], MAX_PARTS, "parts of a tensor")
    return [select(self, dim, i) for i in range(count)]


runs_on_host(
    *(f"aten.{n}.{o}" for n in ("dsplit", "hsplit", "vsplit") for o in ("int", "array")),
    "aten.narrow.Tensor", "aten.tensor_split.tensor_indices_or_sections",
    result=Result.VIEW,
)  # fmt: skip


# -- reordering --------------------------------------------------------------------------------------------------------
def flipped(x: Value, dims: Sequence[int]) -> Value:
    """Reverse dims."""
    turned = {wrap_dim(d, x.rank) for d in dims}
    return pick(x, x.shape, [n - 1 - index(d) if d in turned else index(d) for d, n in enumerate(x.shape)])


@lowers(
    "aten.flip.default",
    samples=(*calls(([0],), ([-1, 1],), ([],), of=ANY[:3]), S(t(0, 3), [1]), S(t(), [])),
    dtypes=DTYPES,
)
def flip(self: Value, dims: Sequence[int]) -> Value:
    """Dims read backwards."""
    return flipped(self, dims)


@lowers("aten.fliplr.default", samples=calls((), of=ANY[:3]), dtypes=DTYPES)
def fliplr(self: Value) -> Value:
    """The second dim read backwards."""
    return flipped(self, [1])


@lowers("aten.flipud.default", samples=calls((), of=ANY[:3]), dtypes=DTYPES)
def flipud(self: Value) -> Value:
    """The first dim read backwards."""
    return flipped(self, [0])


@lowers("aten.rot90.default", samples=calls((), (2,), (-1,), (3, [1, 2]), (1, [2, 0]), (4,), of=ANY[:2]), dtypes=DTYPES)
def rot90(self: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    """Turned by 90 degrees ``k`` times, from the first dim towards the second."""
    a, b = dims
    k %= 4
    x = flipped(self, [[], [b], [a, b], [a]][k])
    return exchanged(x, a, b) if k % 2 else x


@lowers(
    "aten.roll.default",
    samples=(
        *calls(([1],), ([5],), ([1], [0]), ([-1, 2], [1, -1]), ([7], [2]), ([1, 1], [1, 1]), ([0], [0]), of=ANY[:2]),
        S(t(0, 3), [1], [0]),
        S(t(), [1]),
    ),
    dtypes=DTYPES,
)
def roll(self: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    """Positions moved up by ``shifts``, around the end; without dims, of the flattened tensor."""
    x = self if dims else self.reshape(self.numel)
    cuts = [0] * x.rank  # the position that comes first, of each dim
    for shift, dim in zip(shifts, dims or [0], strict=True):
        d = wrap_dim(dim, x.rank)
        cuts[d] = (cuts[d] - shift) % x.shape[d] if x.shape[d] else 0
    if cuts[-1]:  # rows are copied as a whole
        x = x.graph.concat([x.slice(-1, cuts[-1], x.shape[-1]), x.slice(-1, 0, cuts[-1])], x.rank - 1)
    if any(cuts[:-1]):
        at = [(index(d) + cut) % x.shape[d] if cut else index(d) for d, cut in enumerate(cuts[:-1])]
        x = x.graph.elementwise(x.shape, [x], load(0, x.dtype, [*at, index(x.rank - 1)]))
    return fresh(x.reshape(*self.shape))
