"""Reshapes, permutations, broadcasting and repetition. An op that is a view in PyTorch is a view here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..graph.graph import Value, broadcast_shapes
from .access import fresh, resized, wrap_dim
from .common import names
from .registry import ALL, Result, lowers, runs_on_host
from .samples import S, Sample, T, t

DTYPES = (*ALL, "bool")
ANY = (t(2, 3, 4), t(2, 3, 4, layout="transposed"), t(1, 5, 1), t(0, 3))

Ints = int | Sequence[int]


def calls(*args: tuple[Any, ...], of: Sequence[T] = (t(2, 3, 4),)) -> tuple[Sample, ...]:
    """One sample per tensor and argument list."""
    return tuple(S(x, *a) for x in of for a in args)


# -- reshapes ---------------------------------------------------------------------------------------------------------
@lowers(
    "aten.view.default",
    samples=(*calls(([6, 4],), ([2, -1],), ([1, 24, 1],)), S(t(0, 3), [0, 5]), S(t(), [1])),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def view(self: Value, size: Sequence[int]) -> Value:
    """The same elements under another shape; one size may be -1."""
    return self.reshape(*size)


_RESHAPES = (*calls(([6, 4],), ([-1],), of=ANY[:2]), S(t(0, 3), [3, 0]), S(t(1), []), S(t(6, layout="strided"), [2, 3]))


@lowers("aten._unsafe_view.default", samples=calls(([6, 4],), ([-1, 2],), ([24],)), dtypes=DTYPES)
def unsafe_view(self: Value, size: Sequence[int]) -> Value:
    """The same elements under another shape, in a tensor of its own."""
    return fresh(self.reshape(*size))


@lowers("aten.reshape.default", samples=_RESHAPES, dtypes=DTYPES, result=Result.VIEW_IF_POSSIBLE)
def reshape(self: Value, shape: Sequence[int]) -> Value:
    """The same elements, in row-major order, under another shape."""
    return self.reshape(*shape)


_SHAPES = (S(t(2, 6), t(3, 4)), S(t(2, 3, 4), t(24)), S(t(0, 3), t(7, 0)), S(t(1, 1), t()))


@lowers("aten.view_as.default", samples=_SHAPES, dtypes=DTYPES, result=Result.VIEW)
@lowers("aten.reshape_as.default", samples=_SHAPES, dtypes=DTYPES, result=Result.VIEW_IF_POSSIBLE)
def view_as(self: Value, other: Value) -> Value:
    """The same elements under the shape of ``other``."""
    return self.reshape(*other.shape)


@lowers(
    "aten.flatten.using_ints",
    samples=(*calls((), (1,), (0, 1), (-2, -1), (1, 1), of=ANY[:2]), S(t()), S(t(2, 0, 3), 1)),
    dtypes=DTYPES,
    result=Result.VIEW_IF_POSSIBLE,
)
def flatten(self: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """Dims ``start_dim`` to ``end_dim`` joined into one."""
    if self.rank == 0:
        return self.reshape(1)
    a, b = wrap_dim(start_dim, self.rank), wrap_dim(end_dim, self.rank)
    return self.reshape(*self.shape[:a], math.prod(self.shape[a : b + 1]), *self.shape[b + 1 :])


@lowers("aten.ravel.default", samples=calls((), of=(*ANY, t())), dtypes=DTYPES, result=Result.VIEW_IF_POSSIBLE)
def ravel(self: Value) -> Value:
    """All elements in one dim."""
    return self.reshape(self.numel)


@lowers(
    "aten.unflatten.int",
    samples=calls((-1, [2, 2]), (0, [1, -1]), (2, [-1, 2, 1])) + calls((1, [3, -1]), of=ANY[:2]),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def unflatten(self: Value, dim: int, sizes: Sequence[int]) -> Value:
    """One dim split into ``sizes``; one of them may be -1."""
    dim = wrap_dim(dim, self.rank)
    known = math.prod(n for n in sizes if n != -1)
    return self.reshape(*resized(self.shape, dim, *(self.shape[dim] // known if n == -1 else n for n in sizes)))


def squeezed(x: Value, dims: Sequence[int]) -> Value:
    """Drop those of ``dims`` that have size 1."""
    gone = {wrap_dim(d, x.rank) for d in dims}
    return x.reshape(*(n for i, n in enumerate(x.shape) if n != 1 or i not in gone))


_ONES = (t(1, 3, 1, 4), t(3, 1, 4, 1, layout="transposed"), t(1, 1), t(0, 1))


@lowers("aten.squeeze.default", samples=calls((), of=(*_ONES, t(2, 3), t())), dtypes=DTYPES, result=Result.VIEW)
def squeeze(self: Value) -> Value:
    """Every dim of size 1 removed."""
    return squeezed(self, range(self.rank))


@lowers(
    "aten.squeeze.dim",
    samples=(*calls((0,), (-1,), of=_ONES), S(t(2, 3), 1), S(t(), -1)),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def squeeze_dim(self: Value, dim: int) -> Value:
    """One dim removed if its size is 1."""
    return squeezed(self, [dim])


@lowers(
    "aten.squeeze.dims",
    samples=(*calls(([0, -1],), ([1],), of=_ONES), S(t(2, 1, 3, 1), [])),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def squeeze_dims(self: Value, dim: Sequence[int]) -> Value:
    """Those of the dims removed whose size is 1."""
    return squeezed(self, dim)


@lowers(
    "aten.unsqueeze.default",
    samples=(*calls((0,), (1,), (-1,), of=ANY), S(t(), 0), S(t(), -1)),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def unsqueeze(self: Value, dim: int) -> Value:
    """A dim of size 1 inserted."""
    dim = wrap_dim(dim, self.rank + 1)
    return self.reshape(*self.shape[:dim], 1, *self.shape[dim:])


def at_least(x: Value, rank: int) -> Value:
    """numpy's rule: [] -> [1], [1, 1], [1, 1, 1]; [n] -> [1, n], [1, n, 1]; [m, n] -> [m, n, 1]."""
    shape = x.shape or (1,)
    if len(shape) == 1 < rank:
        shape = (1, *shape)
    if len(shape) == 2 < rank:
        shape = (*shape, 1)
    return x.reshape(*shape)


def _declare_atleast(rank: int) -> None:
    tensors = (t(), t(3), t(2, 3, layout="transposed"), t(2, 1, 3))

    @lowers(f"aten.atleast_{rank}d.default", samples=calls((), of=tensors), dtypes=DTYPES, result=Result.VIEW)
    def one(self: Value) -> Value:
        """Size-1 dims added up to a rank."""
        return at_least(self, rank)

    @lowers(
        f"aten.atleast_{rank}d.Sequence",
        samples=(S(list(tensors)), S([t(4)]), S([t(), t(2, 3)])),
        dtypes=DTYPES,
        result=Result.VIEW,
    )
    def many(tensors: list[Value]) -> list[Value]:
        """Size-1 dims added to every tensor up to a rank."""
        return [at_least(x, rank) for x in tensors]


for _rank in (1, 2, 3):
    _declare_atleast(_rank)


# -- permutations -----------------------------------------------------------------------------------------------------
def exchanged(x: Value, a: int, b: int) -> Value:
    """Exchange two dims."""
    return x.transpose(wrap_dim(a, x.rank), wrap_dim(b, x.rank)) if x.rank else x


_EXCHANGES = (*calls((0, 1), (-1, 0), (2, 2), (1, -1), of=ANY[:3]), S(t(0, 3), 0, 1), S(t(), 0, -1))


@lowers(*names("transpose", "int"), *names("swapdims"), samples=_EXCHANGES, dtypes=DTYPES, result=Result.VIEW)
def transpose(self: Value, dim0: int, dim1: int) -> Value:
    """Two dims exchanged."""
    return exchanged(self, dim0, dim1)


@lowers("aten.swapaxes.default", samples=_EXCHANGES, dtypes=DTYPES, result=Result.VIEW)
def swapaxes(self: Value, axis0: int, axis1: int) -> Value:
    """Two dims exchanged."""
    return exchanged(self, axis0, axis1)


@lowers(
    "aten.t.default",
    samples=calls((), of=(t(3, 5), t(4, 2, layout="transposed"), t(6), t())),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def t_(self: Value) -> Value:
    """A matrix transposed; tensors of fewer dims stay as they are."""
    return self.permute(*range(self.rank)[::-1])


@lowers(
    "aten.numpy_T.default",
    samples=calls((), of=(t(3, 5), t(4, 2, layout="transposed"), t(6))),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def numpy_t(self: Value) -> Value:
    """All dims in reverse order."""
    return self.permute(*range(self.rank)[::-1])


@lowers(
    "aten.mT.default",
    samples=calls((), of=(t(3, 5), t(2, 3, 4), t(2, 3, 4, layout="transposed"))),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def matrix_transpose(self: Value) -> Value:
    """The last two dims exchanged."""
    return exchanged(self, -1, -2)


@lowers(
    "aten.permute.default",
    samples=(*calls(([2, 0, 1],), ([0, -1, 1],), ([0, 1, 2],), of=ANY[:3]), S(t(0, 3), [1, 0]), S(t(), [])),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def permute(self: Value, dims: Sequence[int]) -> Value:
    """Dims in another order."""
    return self.permute(*(wrap_dim(d, self.rank) for d in dims))


_MOVES = (
    (0, 2), (-1, 0), (1, 1), ([0, 1], [2, 0]), ([2, 0], [0, -1]), ([0, 1, 2], [1, 2, 0]),
)  # fmt: skip


def _moved(self: Value, source: Ints, destination: Ints) -> Value:
    """Dims moved to other places; the rest keep their order."""
    given = [[d] if isinstance(d, int) else d for d in (source, destination)]
    src, dst = ([wrap_dim(d, self.rank) for d in ds] for ds in given)
    perm = [d for d in range(self.rank) if d not in src]
    for d, s in sorted(zip(dst, src, strict=True)):
        perm.insert(d, s)
    return self.permute(*perm)


lowers(*names("movedim", "int", aliases=["moveaxis"]), samples=calls(*_MOVES[:3]), dtypes=DTYPES, result=Result.VIEW)(
    _moved
)
lowers(
    *names("movedim", "intlist", aliases=["moveaxis"]), samples=calls(*_MOVES[3:]), dtypes=DTYPES, result=Result.VIEW
)(_moved)


@lowers(
    "aten.pixel_shuffle.default",
    samples=calls((2,), of=(t(1, 8, 3, 2), t(4, 2, 2), t(2, 3, 8, 2, 3))) + calls((3,), of=(t(2, 9, 2, 1),)),
)
def pixel_shuffle(self: Value, upscale_factor: int) -> Value:
    """[..., C*r*r, H, W] -> [..., C, H*r, W*r]."""
    *batch, c, h, w = self.shape
    r, n = upscale_factor, len(batch)
    x = self.reshape(*batch, c // (r * r), r, r, h, w)
    x = x.permute(*range(n), *(n + d for d in (0, 3, 1, 4, 2)))
    return fresh(x.reshape(*batch, c // (r * r), h * r, w * r))


@lowers(
    "aten.pixel_unshuffle.default",
    samples=calls((2,), of=(t(1, 2, 6, 4), t(1, 4, 4), t(2, 3, 1, 2, 2))) + calls((3,), of=(t(2, 1, 6, 3),)),
)
def pixel_unshuffle(self: Value, downscale_factor: int) -> Value:
    """[..., C, H*r, W*r] -> [..., C*r*r, H, W]."""
    *batch, c, h, w = self.shape
    r, n = downscale_factor, len(batch)
    x = self.reshape(*batch, c, h // r, r, w // r, r)
    x = x.permute(*range(n), *(n + d for d in (0, 2, 4, 1, 3)))
    return fresh(x.reshape(*batch, c * r * r, h // r, w // r))


@lowers(
    "aten.channel_shuffle.default",
    samples=calls((2,), (3,), of=(t(2, 6, 2, 3), t(1, 12, 2))) + calls((1,), of=(t(1, 4, 2, 2),)),
)
def channel_shuffle(self: Value, groups: int) -> Value:
    """Channels [g, C/g] read as [C/g, g]."""
    n, c, *rest = self.shape
    x = self.reshape(n, groups, c // groups, *rest).transpose(1, 2)
    return fresh(x.reshape(*self.shape))


# -- broadcasting and repetition --------------------------------------------------------------------------------------
_EXPANSIONS = (
    S(t(3, 1), [3, 4]), S(t(1, 3, 1), [2, -1, 4]), S(t(3), [2, 3]), S(t(), [2, 2]), S(t(1, 3), [0, 3]),
    S(t(4, 1, layout="transposed"), [-1, 2]),
)  # fmt: skip


@lowers("aten.expand.default", samples=_EXPANSIONS, dtypes=DTYPES, result=Result.VIEW)
def expand(self: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    """Size-1 dims repeated without a copy, leading dims added; -1 keeps a size."""
    return self.expand(*size)


@lowers("aten.broadcast_to.default", samples=_EXPANSIONS, dtypes=DTYPES, result=Result.VIEW)
def broadcast_to(self: Value, size: Sequence[int]) -> Value:
    """Size-1 dims repeated without a copy, leading dims added."""
    return self.expand(*size)


@lowers(
    "aten.expand_as.default",
    samples=(S(t(3, 1), t(3, 4)), S(t(3), t(2, 3)), S(t(), t(2, 0)), S(t(2, 3), t(2, 3))),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def expand_as(self: Value, other: Value) -> Value:
    """Size-1 dims repeated to the shape of ``other``."""
    return self.expand(*other.shape)


@lowers(
    "aten.broadcast_tensors.default",
    samples=(S([t(3, 1), t(4)]), S([t(2, 3)]), S([t(), t(1, 2), t(3, 1, layout="transposed")])),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def broadcast_tensors(tensors: list[Value]) -> list[Value]:
    """All tensors expanded to their common shape."""
    shape = broadcast_shapes(*(x.shape for x in tensors))
    return [x.expand(*shape) for x in tensors]


def repeated(x: Value, repeats: Sequence[int]) -> Value:
    """Repeat ``x`` ``repeats`` times along every dim: each dim n becomes [r, n], then r * n."""

    shape = (1,) * (len(repeats) - x.rank) + x.shape
    if len(repeats) != len(shape):
        raise ValueError(f"{len(repeats)} repeats for a {x.rank}-d tensor")
    y = x.reshape(*(m for n in shape for m in (1, n)))
    y = y.expand(*(m for n, r in zip(shape, repeats, strict=True) for m in (r, n)))
    return fresh(y.reshape(*(n * r for n, r in zip(shape, repeats, strict=True))))


_REPEATS = (
    S(t(2, 3), [2, 1]), S(t(3), [2, 3]), S(t(2, 3, layout="transposed"), [1, 2, 2]), S(t(2), [0]), S(t(), [3]),
    S(t(), []), S(t(2, 1), [1, 1]),
)  # fmt: skip


@lowers("aten.repeat.default", samples=_REPEATS, dtypes=DTYPES)
def repeat(self: Value, repeats: Sequence[int]) -> Value:
    """The tensor laid out several times along every dim."""
    return repeated(self, repeats)


@lowers("aten.tile.default", samples=(*_REPEATS, S(t(2, 3, 2), [2]), S(t(2, 3), [])), dtypes=DTYPES)
def tile(self: Value, dims: Sequence[int]) -> Value:
    """``repeat`` where missing leading counts are 1."""
    return repeated(self, [1] * (self.rank - len(dims)) + list(dims))


@lowers(
    "aten.repeat_interleave.self_int",
    samples=(
        *calls((2, 1), (3, -1), (2,), (1, 0), of=ANY[:2]),
        S(t(3), 0, 0),
        S(t(2, 2), 2, 0, output_size=4),
        S(t(), 3),
    ),
    dtypes=DTYPES,
)
def repeat_interleave(self: Value, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> Value:
    """Each element along ``dim`` (of the flattened tensor if None) repeated in place."""
    x = self.reshape(self.numel) if dim is None or self.rank == 0 else self
    dim = wrap_dim(dim or 0, x.rank)
    y = x.reshape(*resized(x.shape, dim, x.shape[dim], 1)).expand(*resized(x.shape, dim, x.shape[dim], repeats))
    return fresh(y.reshape(*resized(x.shape, dim, x.shape[dim] * repeats)))


@lowers(
    "aten.meshgrid.default",
    samples=(S([t(2), t(3)]), S([t(2), t(), t(4)]), S([t(3, layout="strided")])),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def meshgrid(tensors: list[Value]) -> list[Value]:
    """Each vector expanded along its own dim of a common grid, rows first."""
    return grid(tensors)


def grid(vectors: Sequence[Value]) -> list[Value]:
    """Expand each vector along its own dim of a common grid."""
    shape = [x.numel for x in vectors]
    return [x.reshape(*(n if i == d else 1 for i, n in enumerate(shape))).expand(*shape) for d, x in enumerate(vectors)]


@lowers(
    "aten.meshgrid.indexing",
    samples=(
        S([t(2), t(3)], indexing="ij"),
        S([t(2), t(3)], indexing="xy"),
        S([t(2), t(3), t(4)], indexing="xy"),
        S([t(2)], indexing="xy"),
    ),
    dtypes=DTYPES,
    result=Result.VIEW,
)
def meshgrid_indexing(tensors: list[Value], *, indexing: str) -> list[Value]:
    """Each vector expanded along its own dim of a common grid; 'xy' exchanges the first two dims."""
    if indexing == "ij" or len(tensors) < 2:
        return grid(tensors)
    first, second, *rest = tensors
    b, a, *others = (x.transpose(0, 1) for x in grid([first, second, *rest]))
    return [b, a, *others]


# -- views that only the host makes -----------------------------------------------------------------------------------
runs_on_host(
    *(f"aten.{n}.default" for n in ("_neg_view", "_reshape_alias", "linalg_diagonal")), "aten.view.dtype",
    *(f"aten.{n}.default" for n in ("_conj", "adjoint", "imag", "mH", "matrix_H", "view_as_complex", "view_as_real")),
    result=Result.VIEW,
)  # fmt: skip
