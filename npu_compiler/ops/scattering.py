"""Writes at data-dependent indices. Of several writes to one element, the last in row-major order wins, or all are
combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..graph.expr import Expr, const, index, where
from ..graph.graph import Value, broadcast_shapes
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .access import fresh, identity, integer_load, position, resized, wrap_dim
from .common import scaled
from .indexing import ADVANCED, DTYPES, Selection, places, selection
from .registry import ALL, Result, Scalar, lowers, runs_on_host
from .samples import S, T, t


def written(base: Value, src: Value, idx: Sequence[Expr], tensors: Sequence[Value] = (), mode: str = "set") -> Value:
    """Copy ``base`` and store ``src`` at ``base[idx]``, or combine both there (``mode``: see ``Graph.scatter``); half
    types are combined in float32."""
    if not src.numel:
        return fresh(base)
    if mode == "set":
        return base.graph.scatter(base, src.cast(base.dtype), tensors, idx)
    if base.dtype == "bool":
        raise Unsupported(Reason("dtype", "combining bool elements at computed positions", "use an integer tensor"))
    wide = dt.opmath(base.dtype)
    return base.graph.scatter(base.cast(wide), src.cast(base.dtype).cast(wide), tensors, idx, mode).cast(base.dtype)


def filled(x: Value, shape: Sequence[int], value: Scalar) -> Value:
    """Return a tensor of one value in the dtype of ``x``."""
    return x.graph.elementwise(shape, [], const(value, x.dtype))


# -- whole slices -----------------------------------------------------------------------------------------------------
def slices_at(base: Value, dim: int, at: Value, src: Value, mode: str = "set") -> Value:
    """``src[..., i, ...]`` written at position ``at[i]`` of a dim."""
    x, src, at = (v if v.rank else v.reshape(1) for v in (base, src, at))
    dim = wrap_dim(dim, x.rank)
    if at.rank != 1:
        raise ValueError(f"an index of shape {list(at.shape)}, which is not one-dimensional")
    src = src.expand(*resized(x.shape, dim, at.numel))
    idx = identity(x.rank)
    idx[dim] = integer_load(0, at, [index(dim)])
    return written(x, src, idx, [at], mode).reshape(*base.shape)


def unique(n: int, *chosen: int) -> T:
    """Return distinct positions: PyTorch does not define which of two writes to one place wins."""
    return t(len(chosen), dtype="int64", values=[c % n for c in chosen])


_SLICES = (
    (t(4, 5), 0, unique(4, 2, 0), t(2, 5)),
    (t(4, 5), -1, unique(5, 4, 1, 3), t(4, 3, layout="transposed")),
    (t(2, 1, 6, 3), 2, unique(6, 5), t(2, 1, 1, 3)),
    (t(3, 4), 1, t(0, dtype="int64"), t(3, 0)),
    (t(), 0, unique(1, 0), t()),
)


@lowers("aten.index_copy.default", samples=tuple(S(*a) for a in _SLICES), dtypes=DTYPES, result=Result.UPDATE)
def index_copy(self: Value, dim: int, index: Value, source: Value) -> Value:
    """Slices of a dim replaced by those of ``source``."""
    return slices_at(self, dim, index, source)


@lowers(
    "aten.index_add.default",
    samples=(
        S(t(3, 5), 0, places(7), t(7, 5)), *(S(*a) for a in _SLICES),
        S(t(3, 5), 0, places(4, dtype="int32"), t(4, 5), alpha=2),
        S(t(2, 3), 1, places(5), t(2, 5), alpha=-1),
    ),
    dtypes=ALL,
)  # fmt: skip
def index_add(self: Value, dim: int, index: Value, source: Value, *, alpha: Scalar = 1) -> Value:
    """``alpha`` times slices of ``source`` added to slices of a dim; every run gives the same sums."""
    return slices_at(self, dim, index, scaled(source, alpha), mode="add")


_FILLS = (
    (t(4, 5), 0, places(2, high=4)),
    (t(4, 5), 1, t(3, dtype="int64", values=[-1, 2, -5])),
    (t(4, 5), -1, places(7, high=5)),
    (t(2, 3, 4, layout="transposed"), 1, places()),
)


@lowers("aten.index_fill.int_Scalar", samples=tuple(S(*a, 2) for a in _FILLS), dtypes=DTYPES, result=Result.UPDATE)
def index_fill(self: Value, dim: int, index: Value, value: Scalar) -> Value:
    """Slices of a dim filled with a number."""
    return filled_at(self, dim, index, filled(self, (1,) * self.rank, value))


@lowers("aten.index_fill.int_Tensor", samples=tuple(S(*a, t()) for a in _FILLS), dtypes=DTYPES, result=Result.UPDATE)
def index_fill_tensor(self: Value, dim: int, index: Value, value: Value) -> Value:
    """Slices of a dim filled with the number a 0-d tensor holds."""
    return filled_at(self, dim, index, value.reshape(*(1,) * self.rank))


def filled_at(base: Value, dim: int, at: Value, value: Value) -> Value:
    """Like slices_at, with positions that may count from the end."""
    n = base.shape[wrap_dim(dim, base.rank)] if base.rank else 1
    return slices_at(base, dim, at.graph.pointwise(lambda i: position(i, n), at), value)


# -- single elements ---------------------------------------------------------------------------------------------------
def elements_at(base: Value, dim: int, at: Value, src: Value, mode: str = "set") -> Value:
    """``src[i][j]`` written at ``[at[i][j]][j]`` for dim 0, and so on; ``src`` may be larger than ``at``."""
    x, at, src = (v if v.rank else v.reshape(1) for v in (base, at, src))
    dim = wrap_dim(dim, x.rank)
    if not x.rank == at.rank == src.rank:
        raise ValueError(f"an index of shape {list(at.shape)} for {list(base.shape)}")
    for d, n in enumerate(at.shape):
        src = src.slice(d, 0, n)
    if src.shape != at.shape:
        raise ValueError(f"a source smaller than the index of shape {list(at.shape)}")
    idx = identity(x.rank)
    idx[dim] = integer_load(0, at, identity(x.rank))
    return written(x, src, idx, [at], mode).reshape(*base.shape)


_ELEMENTS = (
    (t(4, 5), 0, t(2, 5, dtype="int64", values=[0, 1, 2, 3, 0, 1, 2, 3, 0, 2]), t(2, 5)),
    (t(3, 4), -1, t(3, 2, dtype="int64", values=[0, 3, 2, 1, 1, 0]), t(3, 5, layout="transposed")),
    (t(2, 2, 4), 2, t(1, 2, 1, dtype="int64", values=[3, 0]), t(1, 2, 3)),
    (t(3, 4), 1, t(3, 0, dtype="int64"), t(3, 4)),
    (t(), 0, t(dtype="int64", values=[0]), t()),
)
_MEETING = ((t(3, 5), 0, places(7, 5), t(7, 5)), (t(2, 3), 1, places(2, 9), t(2, 9)))


@lowers("aten.scatter.src", samples=tuple(S(*a) for a in _ELEMENTS), dtypes=DTYPES, result=Result.UPDATE)
def scatter_src(self: Value, dim: int, index: Value, src: Value) -> Value:
    """self[index[i][j]][j] = src[i][j] for dim 0, and so on."""
    return elements_at(self, dim, index, src)


@lowers(
    "aten.scatter.value",
    samples=tuple(S(*a[:3], 1) for a in (*_ELEMENTS, *_MEETING)),
    dtypes=DTYPES,
    result=Result.UPDATE,
)
def scatter_value(self: Value, dim: int, index: Value, value: Scalar) -> Value:
    """self[index[i][j]][j] = value for dim 0, and so on."""
    return elements_at(self, dim, index, filled(self, index.shape, value))


@lowers("aten.scatter_add.default", samples=tuple(S(*a) for a in (*_ELEMENTS, *_MEETING)), dtypes=ALL)
def scatter_add(self: Value, dim: int, index: Value, src: Value) -> Value:
    """self[index[i][j]][j] += src[i][j] for dim 0, and so on; every run gives the same sums."""
    return elements_at(self, dim, index, src, mode="add")


_OLD_REDUCTIONS = {"add": "add", "multiply": "mul"}
_OLD_CASES = tuple((a, how) for a in (*_ELEMENTS, *_MEETING) for how in _OLD_REDUCTIONS)


def _old_mode(reduce: str) -> str:
    if reduce not in _OLD_REDUCTIONS:
        raise ValueError(f"reduce argument must be either add or multiply, not {reduce!r}")
    return _OLD_REDUCTIONS[reduce]


@lowers("aten.scatter.reduce", samples=tuple(S(*a, reduce=how) for a, how in _OLD_CASES), dtypes=ALL)
def scatter_with(self: Value, dim: int, index: Value, src: Value, *, reduce: str) -> Value:
    """self[index[i][j]][j] += src[i][j], or *=."""
    return elements_at(self, dim, index, src, _old_mode(reduce))


@lowers("aten.scatter.value_reduce", samples=tuple(S(*a[:3], 2, reduce=how) for a, how in _OLD_CASES), dtypes=ALL)
def scatter_value_with(self: Value, dim: int, index: Value, value: Scalar, *, reduce: str) -> Value:
    """``scatter_with`` of one number."""
    return elements_at(self, dim, index, filled(self, index.shape, value), _old_mode(reduce))


def _combined(
    self: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool, writes: Callable[..., Value]
) -> Value:
    """Combine elements of ``src`` for one place with each other, and with its old value or without it. ``writes``:
    :func:`slices_at` or :func:`elements_at`."""
    wide = dt.opmath(self.dtype)
    lowest, highest = dt.extremes(wide)
    modes: dict[str, tuple[str, Scalar]] = {
        "sum": ("add", 0), "mean": ("add", 0), "prod": ("mul", 1), "amax": ("maximum", lowest),
        "amin": ("minimum", highest),
    }  # fmt: skip
    if reduce not in modes:
        raise ValueError(f"reduce argument must be one of {', '.join(modes)}, not {reduce!r}")
    mode, start = modes[reduce]

    def put(base: Value, what: Value | Scalar, mode: str) -> Value:
        what = what if isinstance(what, Value) else filled(base, src.shape, what)
        return writes(base, dim, index, what, mode)

    base = self.cast(wide)
    if not include_self:
        base = put(base, start, "set")
    total = put(base, src.cast(wide), mode)
    if reduce != "mean":
        return total
    ones = filled(base, self.shape, 1)
    count = put(ones if include_self else put(ones, 0, "set"), 1, "add")
    return self.graph.pointwise(lambda s, n: where(n > 0, s / n, s), total, count)


_REDUCTIONS = tuple((how, own) for how in ("sum", "mean", "prod", "amax", "amin") for own in (True, False))


@lowers(
    "aten.scatter_reduce.two",
    samples=tuple(S(*a, how, include_self=own) for a in (*_MEETING, *_ELEMENTS[:3]) for how, own in _REDUCTIONS),
)
def scatter_reduce(self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True) -> Value:
    """Elements for one place are combined, with or without its old value."""
    return _combined(self, dim, index, src, reduce, include_self, elements_at)


@lowers(
    "aten.index_reduce.default",
    samples=tuple(
        S(t(4, 5), 0, t(6, dtype="int64", values=[0, 3, 3, 1, 0, 3]), t(6, 5), how, include_self=own)
        for how, own in _REDUCTIONS
        if how != "sum"
    ),
)
def index_reduce(
    self: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """Slices for one position of a dim are combined, with or without its old slice."""
    return _combined(self, dim, index, source, reduce, include_self, slices_at)


# -- advanced indexing -------------------------------------------------------------------------------------------------
def masked(self: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """``self[mask] = values`` if every masked element gets the same value: a ``where``."""
    if mask.shape != self.shape[: mask.rank]:
        raise IndexError(f"a mask of shape {list(mask.shape)} for {list(self.shape)}")
    rest = self.rank - mask.rank
    if values.rank > rest and values.shape[: values.rank - rest] != (1,):
        raise Unsupported(Reason("data_dependent", "how many values a mask needs depends on data", "assign one value"))
    values = values.reshape(*values.shape[max(values.rank - rest, 0) :]).cast(self.dtype)
    mask = mask.cast("bool").reshape(*mask.shape, *(1,) * rest)
    new = (self + values).cast(self.dtype) if accumulate else values
    broadcast_shapes(self.shape[mask.rank - rest :] if rest else (), values.shape)
    return self.graph.pointwise(where, mask, new, self, opmath=False, promote=False)


_PUTS = tuple(
    S(x, i, t(*shape))
    for (x, i), shape in zip(
        ADVANCED,
        ((3, 5), (1, 2, 1), (), (2, 3, 5), (2, 4), (3, 1), (3, 5), (2, 3, 2, 5), (2, 3, 4), (0, 4)),
        strict=True,
    )
)
_MASKS = (
    S(t(3, 4), [t(3, 4, dtype="bool")], t()),
    S(t(3, 4), [t(3, dtype="bool")], t(4)),
    S(t(3, 4), [t(3, dtype="bool")], t(1, 1)),
)


@lowers(
    "aten.index_put.default", "aten._unsafe_index_put.default",
    samples=(
        *(S(*s.args, True) for s in _PUTS), *_MASKS, S(*_MASKS[0].args, True),
        S(t(4, 3), [unique(4, 3, 0)], t(2, 3)),
    ),
    dtypes=ALL, result=Result.UPDATE,
)  # fmt: skip
def index_put(self: Value, indices: list[Value | None], values: Value, accumulate: bool = False) -> Value:
    """x[i, :, j] = values, or += with the same sums in every run; a mask only if all its elements get one value."""
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype in ("bool", "uint8"):
        return masked(self, indices[0], values, accumulate)
    chosen: Selection = selection(self, indices, 0)
    return written(self, values.expand(*chosen.shape), chosen.idx, chosen.tensors, "add" if accumulate else "set")


runs_on_host("aten.masked_scatter.default", result=Result.UPDATE)


# -- fixed positions ---------------------------------------------------------------------------------------------------
@lowers(
    "aten.select_scatter.default",
    samples=(S(t(3, 4), t(4), 0, 1), S(t(3, 4), t(3), -1, -1), S(t(2, 3, 4, layout="transposed"), t(2, 4), 1, 0)),
    dtypes=DTYPES,
    result=Result.UPDATE,
)
def select_scatter(self: Value, src: Value, dim: int, index: int) -> Value:
    """One position of a dim replaced."""
    dim, n = wrap_dim(dim, self.rank), self.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} of a dim of size {n}")
    return window_set(self, src.reshape(*resized(self.shape, dim, 1)), dim, index % n, 1)


def window_set(base: Value, src: Value, dim: int, start: int, step: int) -> Value:
    """Copy ``base`` with ``src`` stored at start, start + step, ... of a dim."""
    idx = identity(base.rank)
    idx[dim] = index(dim) * step + start
    return written(base, src, idx)


@lowers(
    "aten.slice_scatter.default",
    samples=(
        S(t(5, 4), t(2, 4), 0, 1, 3), S(t(5, 4), t(5, 2), -1, 0, (1 << 63) - 1, 2),
        S(t(2, 6, layout="transposed"), t(2, 2), 1, -2),
        S(t(3), t(3)), S(t(3), t(0), 0, 2, 1),
    ),
    dtypes=DTYPES, result=Result.UPDATE,
)  # fmt: skip
def slice_scatter(
    self: Value, src: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """``start:end:step`` of a dim replaced."""
    dim = wrap_dim(dim, self.rank)
    start, end, step = slice(start, end, step).indices(self.shape[dim])
    return window_set(self, src.expand(*resized(self.shape, dim, len(range(start, end, step)))), dim, start, step)


@lowers(
    "aten.diagonal_scatter.default",
    samples=(
        S(t(3, 3), t(3)),
        S(t(3, 4), t(3), 1),
        S(t(4, 3), t(2), -2),
        S(t(2, 3, 4), t(2, 3), 0, 1, 2),
        S(t(2, 3, 4), t(3, 2), -1, 2, 0),
    ),
    dtypes=DTYPES,
    result=Result.UPDATE,
)
def diagonal_scatter(self: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The elements [i, i + offset] of two dims replaced."""
    a, b = wrap_dim(dim1, self.rank), wrap_dim(dim2, self.rank)
    rest = iter(range(self.rank))
    last = index(self.rank - 2)
    at = {a: last + max(-offset, 0), b: last + max(offset, 0)}
    length = min(self.shape[a] - max(-offset, 0), self.shape[b] - max(offset, 0))
    src = src.expand(*(n for d, n in enumerate(self.shape) if d not in at), length)
    return written(self, src, [at[d] if d in at else index(next(rest)) for d in range(self.rank)])


@lowers(
    "aten.one_hot.default",
    samples=(S(places(4, high=5), 5), S(places(2, 3, high=4, layout="transposed"), 6), S(places(), 3), S(places(0), 3)),
    dtypes=("int64",),
)
def one_hot(self: Value, num_classes: int = -1) -> Value:
    """int64 rows with a 1 at the given position; ``num_classes`` must be given."""
    if num_classes < 0:
        raise Unsupported(Reason("data_dependent", "one_hot without num_classes depends on data", "pass num_classes"))
    zeros = filled(self, (*self.shape, num_classes), 0)
    at = integer_load(0, self, identity(self.rank))
    return written(zeros, filled(self, self.shape, 1), [*identity(self.rank), at], [self])
