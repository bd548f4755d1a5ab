"""Constants, ranges and triangles. They are expressions of the index, so they take no memory; lists of indices do."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..graph.expr import Expr, const, fn, index, where
from ..graph.graph import Graph, Value
from ..support import dtypes as dt
from .registry import FLOATS, INTS, Scalar, lowers
from .samples import UNARY, S, t

Size = list[int]

EVERY = (*FLOATS, *INTS)
ONCE = ("float32",)


def number_dtype(*numbers: Scalar) -> str:
    """PyTorch's default dtype for Python numbers."""
    if any(isinstance(n, float) for n in numbers):
        return "float32"
    return "bool" if all(isinstance(n, bool) for n in numbers) else "int64"


def filled(
    graph: Graph, size: Size | tuple[int, ...], value: Scalar, dtype: str | None, default: str = "float32"
) -> Value:
    """Return a tensor of one value; ``dtype`` None: ``default``."""
    return graph.elementwise(tuple(size), [], const(value, dt.parse(dtype or default)))


@lowers(
    "aten.full.default",
    samples=(
        S([2, 3], 1.5),
        S([4], 2),
        S([], True),
        S([0, 3], 1),
        S([2], 3, dtype="float16"),
        S([2], -math.inf),
        S([3], 0, dtype="bool"),
    ),
    dtypes=ONCE,
)
def full(graph: Graph, size: Size, fill_value: Scalar, *, dtype: str | None = None) -> Value:
    """A tensor of one value."""
    return filled(graph, size, fill_value, dtype, number_dtype(fill_value))


LIKE = (*UNARY, S(t(2, 3), dtype="int64"), S(t(2, 3), dtype="bfloat16"))
NEW = (S(t(2, 3), [4, 5]), S(t(3), []), S(t(), [0, 2]), S(t(2, 3, layout="transposed"), [2], dtype="int64"))
SIZES = (S([2, 3]), S([]), S([0, 3]), S([4], dtype="int64"), S([4], dtype="float16"), S([2], dtype="bool"))


def declare_constant(name: str, value: int, empty: bool = False) -> None:
    """Declare ``name``, ``name``_like and new_``name``. The contents of an empty tensor are undefined: tests check its
    shape only."""
    nothing = (S([0, 3]), S([0], dtype="int64"), S([2, 0], dtype="float16"))

    def make(graph: Graph, size: Size, *, dtype: str | None = None) -> Value:
        return filled(graph, size, value, dtype)

    def like(self: Value, *, dtype: str | None = None) -> Value:
        return filled(self.graph, self.shape, value, dtype, self.dtype)

    def new(self: Value, size: Size, *, dtype: str | None = None) -> Value:
        return filled(self.graph, size, value, dtype, self.dtype)

    lowers(f"aten.{name}.{'memory_format' if empty else 'default'}", samples=nothing if empty else SIZES, dtypes=ONCE)(
        make
    )
    lowers(
        f"aten.{name}_like.default",
        samples=(S(t(0, 2)), S(t(0)), S(t(2, 0), dtype="int64")) if empty else LIKE,
        dtypes=EVERY,
    )(like)
    lowers(f"aten.new_{name}.default", samples=[S(t(2, 3), *s.args) for s in nothing] if empty else NEW, dtypes=EVERY)(
        new
    )


declare_constant("zeros", 0)
declare_constant("ones", 1)
declare_constant("empty", 0, empty=True)


@lowers(
    "aten.empty_strided.default",
    samples=(S([0, 3], [3, 1]), S([0], [1], dtype="int64"), S([2, 0], [1, 1])),
    dtypes=ONCE,
)
def empty_strided(graph: Graph, size: Size, stride: Size, *, dtype: str | None = None) -> Value:
    """Zeros: the contents are undefined, and strides are not part of a value."""
    return filled(graph, size, 0, dtype)


@lowers(
    "aten.empty_permuted.default",
    samples=(S([0, 3], [0, 1]), S([0], [0], dtype="int64"), S([2, 0], [1, 0])),
    dtypes=ONCE,
)
def empty_permuted(graph: Graph, size: Size, physical_layout: Size, *, dtype: str | None = None) -> Value:
    """Zeros: contents are undefined, and the physical layout is not part of a value."""
    return filled(graph, size, 0, dtype)


@lowers(
    "aten.full_like.default",
    samples=(S(t(2, 3), 1), S(t(), 2), S(t(2, 3), 1, dtype="int64"), S(t(0, 2), 3)),
    dtypes=EVERY,
)
def full_like(self: Value, fill_value: Scalar, *, dtype: str | None = None) -> Value:
    """A tensor of one value in the shape of self."""
    return filled(self.graph, self.shape, fill_value, dtype, self.dtype)


@lowers(
    "aten.new_full.default",
    samples=(S(t(2, 3), [4], 1), S(t(2, 3), [], 2), S(t(2), [2, 2], 1.5, dtype="float32")),
    dtypes=EVERY,
)
def new_full(self: Value, size: Size, fill_value: Scalar, *, dtype: str | None = None) -> Value:
    """A tensor of one value in the dtype of self."""
    return filled(self.graph, size, fill_value, dtype, self.dtype)


@lowers("aten.fill.Scalar", samples=(S(t(2, 3), 1), S(t(), 2), S(t(0, 2), 3)), dtypes=EVERY)
def fill(self: Value, value: Scalar) -> Value:
    """Every element replaced by a number."""
    return filled(self.graph, self.shape, value, self.dtype)


@lowers("aten.fill.Tensor", samples=(S(t(2, 3), t()), S(t(), t()), S(t(0, 2), t(dtype="float32"))), dtypes=EVERY)
def fill_tensor(self: Value, value: Value) -> Value:
    """Every element replaced by the number a 0-d tensor holds."""
    return value.cast(self.dtype).expand(*self.shape)


@lowers("aten.zero.default", samples=UNARY, dtypes=EVERY)
def zero(self: Value) -> Value:
    """Every element replaced by 0."""
    return filled(self.graph, self.shape, 0, self.dtype)


@lowers(
    "aten.scalar_tensor.default",
    samples=(S(1.5), S(2, dtype="int64"), S(True, dtype="bool"), S(-math.inf), S(3)),
    dtypes=ONCE,
)
def scalar_tensor(graph: Graph, s: Scalar, *, dtype: str | None = None) -> Value:
    """A 0-d tensor."""
    return filled(graph, (), s, dtype)


# -- ranges -----------------------------------------------------------------------------------------------------------
def ramp(graph: Graph, start: Scalar, step: Scalar, n: int, dtype: str) -> Value:
    """Return start + i * step: exact for integers, rounded once for floats."""
    wide = "float64" if dt.is_float(dtype) else "int64"
    return graph.elementwise((n,), [], (index(0).cast(wide) * const(step, wide) + const(start, wide)).cast(dtype))


def _arange(graph: Graph, start: Scalar, end: Scalar, step: Scalar, dtype: str | None) -> Value:
    n = math.ceil((end - start) / step)
    return ramp(graph, start, step, n, dt.parse(dtype or number_dtype(start + 0, end + 0, step + 0)))


@lowers(
    "aten.arange.default",
    samples=(S(5), S(0), S(4.5), S(7, dtype="float32"), S(3, dtype="int32"), S(3.0, dtype="int64")),
    dtypes=ONCE,
)
def arange(graph: Graph, end: Scalar, *, dtype: str | None = None) -> Value:
    """0, 1, ... below end."""
    return _arange(graph, 0, end, 1, dtype)


@lowers("aten.arange.start", samples=(S(2, 7), S(-3, 3), S(0.5, 4), S(3, 3), S(1, 6, dtype="float16")), dtypes=ONCE)
@lowers(
    "aten.arange.start_step",
    samples=(
        S(2, 9, 2),
        S(9, 2, -3),
        S(0, 1, 0.1),
        S(1.5, 3, 0.25),
        S(0, 12, 2, dtype="float32"),
        S(0, 4),
        S(0, 100, 7, dtype="bfloat16"),
    ),
    dtypes=ONCE,
)
def arange_from(graph: Graph, start: Scalar, end: Scalar, step: Scalar = 1, *, dtype: str | None = None) -> Value:
    """start, start + step, ... before end."""
    return _arange(graph, start, end, step, dtype)


@lowers(
    "aten.linspace.default",
    samples=(
        S(0, 1, 5),
        S(-2.5, 7, 10),
        S(-3, 11, 1),
        S(0, 9, 4, dtype="int64"),
        S(1, 0, 0),
        S(0, 1, 7, dtype="float16"),
    ),
    dtypes=ONCE,
)
def linspace(graph: Graph, start: Scalar, end: Scalar, steps: int, *, dtype: str | None = None) -> Value:
    """Evenly spaced from both ends, so that both are met exactly; a single one is the start."""
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    end = end if steps > 1 else start
    low = index(0).cast("float64") * step + float(start)
    high = float(end) - (steps - 1 - index(0)).cast("float64") * step
    return graph.elementwise((steps,), [], where(index(0) < steps // 2, low, high).cast(dt.parse(dtype or "float32")))


# -- two-dimensional --------------------------------------------------------------------------------------------------
@lowers("aten.eye.default", samples=(S(3), S(1, dtype="int64"), S(0), S(4, dtype="bool")), dtypes=ONCE)
@lowers("aten.eye.m", samples=(S(3, 5), S(4, 2, dtype="float16"), S(2, 0)), dtypes=ONCE)
def eye(graph: Graph, n: int, m: int | None = None, *, dtype: str | None = None) -> Value:
    """The identity matrix, or n x m with ones on the diagonal."""
    diagonal = fn("eq")(index(0), index(1))
    name = dt.parse(dtype or "float32")
    return graph.elementwise((n, n if m is None else m), [], where(diagonal, const(1, name), const(0, name)))


TRIANGLES = (
    S(t(4, 5)),
    S(t(2, 4, 3), 1),
    S(t(4, 4, layout="transposed"), -1),
    S(t(3, 3), 5),
    S(t(0, 3)),
    S(t(2, 5, 4), -9),
)


def declare_triangle(name: str, keep: Callable[[Expr], Expr]) -> None:
    """Declare triu or tril; ``keep`` says which elements stay, by column minus row."""

    def triangle(self: Value, diagonal: int = 0) -> Value:
        """One triangle of the last two dims, zeros in the other."""
        offset = index(self.rank - 1) - index(self.rank - 2) - diagonal
        return self.graph.pointwise(lambda x: where(keep(offset), x, const(0, x.dtype)), self)

    lowers(f"aten.{name}.default", samples=TRIANGLES, dtypes=EVERY)(triangle)


declare_triangle("tril", lambda offset: offset <= 0)
declare_triangle("triu", lambda offset: offset >= 0)


_LONG = 4  # int64, as the schema names it
_LISTS = (S(4, 4), S(3, 5, 1), S(5, 3, -2), S(4, 4, 2, dtype="int32"), S(0, 3), S(2, 2, 5))


def _pair(graph: Graph, found: tuple[np.ndarray, ...], dtype: str | int) -> Value:
    return graph.const(np.stack(found).astype(dt.numpy_dtype("int64" if dtype == _LONG else dt.parse(dtype))))


@lowers("aten.tril_indices.default", samples=_LISTS, dtypes=ONCE)
def tril_indices(graph: Graph, row: int, col: int, offset: int = 0, *, dtype: str | int = _LONG) -> Value:
    """Row and column of every element on or below a diagonal."""
    return _pair(graph, np.tril_indices(row, offset, col), dtype)


@lowers("aten.triu_indices.default", samples=_LISTS, dtypes=ONCE)
def triu_indices(graph: Graph, row: int, col: int, offset: int = 0, *, dtype: str | int = _LONG) -> Value:
    """Row and column of every element on or above a diagonal."""
    return _pair(graph, np.triu_indices(row, offset, col), dtype)
