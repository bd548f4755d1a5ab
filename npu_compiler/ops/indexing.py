"""Reads at data-dependent indices. Kernels check the range of every such load at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.expr import Expr, const, index
from ..graph.graph import Value, broadcast_shapes
from ..support.errors import Reason, Unsupported
from .access import identity, integer_load, pick, position, resized, wrap_dim
from .registry import ALL, lowers
from .samples import S, T, t

DTYPES = (*ALL, "bool")


def places(*shape: int, low: int = 0, high: int = 3, dtype: str = "int64", layout: str = "contiguous") -> T:
    """Return a random tensor of positions in [low, high), for samples."""
    return t(*shape, dtype=dtype, low=low, high=high, layout=layout)


@lowers(
    "aten.embedding.default",
    samples=(
        S(t(5, 4), places(2, 3, high=5)), S(t(5, 4), places(3, high=5, dtype="int32"), 0),
        S(t(5, 4, layout="transposed"), places(high=5)),
        S(t(5, 4), places(2, 2, high=5), -1, True, True), S(t(5, 4), places(0, 2)),
    ),
)  # fmt: skip
def embedding(
    weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Value:
    """Rows of ``weight``; the other arguments affect gradients only."""
    at = integer_load(1, indices, identity(indices.rank))
    return pick(weight, (*indices.shape, weight.shape[1]), [at, index(indices.rank)], indices)


_INDEX_SELECT = (
    S(t(3, 5), 0, places(4)), S(t(3, 5), -1, places(2, high=5, dtype="int32")),
    S(t(2, 3, 4, layout="transposed"), 1, places(5)),
    S(t(3, 5), 1, places()), S(t(3, 5), 0, places(0)), S(t(), 0, places(1, high=1)),
)  # fmt: skip


@lowers("aten.index_select.default", samples=_INDEX_SELECT, dtypes=DTYPES)
def index_select(self: Value, dim: int, index: Value) -> Value:
    """The given positions of a dim."""
    x, where = self if self.rank else self.reshape(1), index if index.rank else index.reshape(1)
    dim = wrap_dim(dim, x.rank)
    out = pick(x, resized(x.shape, dim, where.numel), along(x.rank, dim, where, one_d=True), where)
    return out if self.rank else out.reshape()


def along(rank: int, dim: int, where: Value, one_d: bool = False) -> list[Expr]:
    """Return the indices of the domain, with the position of one dim looked up in ``where`` (by that dim only)."""
    at = identity(rank)
    return [*at[:dim], integer_load(1, where, [at[dim]] if one_d else at), *at[dim + 1 :]]


_GATHERS = (
    S(t(3, 5), 0, places(2, 5)), S(t(3, 5), -1, places(3, 7, high=5)),
    S(t(2, 3, 4, layout="transposed"), 1, places(1, 2, 3)),
    S(t(4), 0, places(6, high=4)), S(t(3, 5), 1, places(3, 0)), S(t(), 0, places(high=1)),
)  # fmt: skip


def gathered(base: Value, dim: int, at: Value) -> Value:
    """Return ``gather`` of ``base`` along ``dim`` at the positions ``at``."""
    x, where = (v if v.rank else v.reshape(1) for v in (base, at))
    if x.rank != where.rank:
        raise ValueError(f"an index of shape {list(at.shape)} for {list(base.shape)}")
    return pick(x, where.shape, along(x.rank, wrap_dim(dim, x.rank), where), where).reshape(*at.shape)


@lowers("aten.gather.default", samples=_GATHERS, dtypes=DTYPES)
def gather(self: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    """out[i][j] = self[index[i][j]][j] for dim 0, and so on."""
    return gathered(self, dim, index)


@lowers(
    "aten.take_along_dim.default",
    samples=(
        S(t(3, 5), places(3, 2, high=5), 1), S(t(3, 5), places(1, 5), 0), S(t(2, 3, 4), places(1, 2, 4), -2),
        S(t(2, 3), places(4, high=6)), S(t(3, 5), places(3, 2, low=-12, high=12), 1),
    ),
    dtypes=DTYPES,
)  # fmt: skip
def take_along_dim(self: Value, indices: Value, dim: int | None = None) -> Value:
    """``gather`` with broadcasting, at positions modulo the dim's size; without a dim, of the flattened tensors."""
    if dim is None:
        return gathered(self.reshape(self.numel), 0, indices.reshape(indices.numel))
    dim = wrap_dim(dim, self.rank)
    common = broadcast_shapes(resized(self.shape, dim, 1), resized(indices.shape, dim, 1))
    size = self.shape[dim]
    x, where = (v.expand(*resized(common, dim, v.shape[dim])) for v in (self, indices))
    return gathered(x, dim, x.graph.pointwise(lambda i: i.cast("int64") % size if size else i, where, opmath=False))


@lowers(
    "aten.take.default",
    samples=(
        S(t(3, 5), places(2, 3, low=-15, high=15)),
        S(t(4, layout="strided"), places(6, high=4)),
        S(t(2, 3), places(high=6)),
    ),
    dtypes=DTYPES,
)
def take(self: Value, index: Value) -> Value:
    """Elements of the flattened tensor; negative positions count from the end."""
    at = integer_load(1, index, identity(index.rank))
    return pick(self.reshape(self.numel), index.shape, [position(at, self.numel)], index)


@dataclass(frozen=True)
class Selection:
    """The meaning of ``x[i, :, j]``: the ``shape`` of the result and, over it, the position ``idx`` of each element in
    x. Loads in ``idx`` read ``tensors``, numbered from the ``operand`` passed to :func:`selection`."""

    shape: tuple[int, ...]
    idx: list[Expr]
    tensors: list[Value]


def selection(x: Value, indices: Sequence[Value | None], operand: int) -> Selection:
    """Resolve advanced indexing by numpy's rules: index tensors are broadcast together, and their dims replace the
    indexed dims if those are neighbours, else come first. Negative positions count from the end."""
    if any(i is not None and i.dtype in ("bool", "uint8") for i in indices):
        raise Unsupported(
            Reason("data_dependent", "indexing with a mask has a shape that depends on data", "use torch.where")
        )
    entries = [*indices, *[None] * (x.rank - len(indices))]
    if len(entries) > x.rank:
        raise IndexError(f"{len(entries)} indices for a {x.rank}-d tensor")
    used = [d for d, i in enumerate(entries) if i is not None]
    tensors = [i for i in entries if i is not None]
    common = broadcast_shapes(*(i.shape for i in tensors))
    adjacent = used == list(range(used[0], used[-1] + 1))
    first = used[0] if adjacent else 0
    kept = [d for d in range(x.rank) if d not in used]
    before, after = (kept[:first], kept[first:])
    shape = (*(x.shape[d] for d in before), *common, *(x.shape[d] for d in after))
    idx: list[Expr] = [index(0)] * x.rank
    for at, d in enumerate(before):
        idx[d] = index(at)
    for at, d in enumerate(after):
        idx[d] = index(len(before) + len(common) + at)
    for number, (d, i) in enumerate(zip(used, tensors, strict=True)):
        off = len(before) + len(common) - i.rank
        where = [index(off + k) if n != 1 else const(0, "int64") for k, n in enumerate(i.shape)]
        idx[d] = position(integer_load(operand + number, i, where), x.shape[d])
    return Selection(shape, idx, tensors)


ADVANCED = (
    (t(4, 5), [places(3, low=-4, high=4)]),
    (t(4, 5), [None, places(2, 3, low=-5, high=5)]),
    (t(4, 5), [places(3, high=4), places(3, high=5)]),
    (t(3, 4, 5), [places(2, 1), places(3, high=4)]),
    (t(3, 4, 5, layout="transposed"), [places(2), None, places(2, high=5)]),
    (t(3, 4, 5), [None, places(2, high=4), places(1, high=5, dtype="int32")]),
    (t(3, 4, 5), [None, places(high=4)]),
    (t(2, 3, 4, 5), [None, places(3, 2), places(2, high=4), None]),
    (t(2, 3, 4, 5), [places(2, high=2), None, None, places(2, high=5)]),
    (t(3, 4), [places(0, dtype="int64")]),
)


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor", samples=tuple(S(x, i) for x, i in ADVANCED), dtypes=DTYPES)
def index_tensor(self: Value, indices: list[Value | None]) -> Value:
    """x[i, :, j] with integer index tensors; None keeps a dim. A mask is refused: its result has no static shape."""
    chosen = selection(self, indices, 1)
    return pick(self, chosen.shape, chosen.idx, *chosen.tensors)
