"""Sums, extremes, statistics, norms, running reductions and softmax. Half types are reduced in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..graph.expr import const, fn, where
from ..graph.graph import Value
from ..support import dtypes as dt
from .access import fresh, wrap_dim
from .arithmetic import truth
from .common import MAX_STEPS, axes_of, bounded, drop_axes, real
from .joining import joined
from .registry import ALL, FLOATS, INTS, Scalar, lowers
from .samples import S, Sample, t

Dim = int | Sequence[int] | None

exp, log, sqrt, absolute, isnan, isinf = fn("exp"), fn("log"), fn("sqrt"), fn("abs"), fn("isnan"), fn("isinf")

EVERY = (*FLOATS, *INTS)
WHOLE = (S(t(3, 5)), S(t(2, 3, 4, layout="transposed")), S(t(7, layout="strided")), S(t()), S(t(40, 41)))
WITH_NAN = (S(t(2, 3, values=(math.nan, 1, 2, 3, 2, -math.inf)), 1),)
ONE_DIM = (
    S(t(3, 5), 1),
    S(t(2, 3, 4), -2),
    S(t(2, 3, 4, layout="transposed"), 2, True),
    S(t(9, layout="strided"), 0),
    S(t(), -1),
    S(t(0, 3), 1),
    S(t(4, 67), -1, True),
)
DIMS = (
    S(t(3, 5), [1]),
    S(t(2, 3, 4), [-1, 0]),
    S(t(2, 3, 4, layout="transposed"), [1, 2], True),
    S(t(2, 3), []),
    S(t(0, 3), [1]),
    S(t(2, 3, 4, 5), [2, 3], True),
)
NO_DIM = (S(t(2, 3), None), S(t(2, 3), None, True))


def typed(samples: Sequence[Sample], dtype: str) -> tuple[Sample, ...]:
    """Return the samples and the first one again with ``dtype=``."""
    return (*samples, S(*samples[0].args, dtype=dtype))


# -- sums -------------------------------------------------------------------------------------------------------------
@lowers("aten.sum.default", samples=typed(WHOLE, "float32"), dtypes=EVERY)
@lowers("aten.sum.dim_IntList", samples=typed(DIMS + NO_DIM, "float32"), dtypes=EVERY)
def total(self: Value, dim: Dim = None, keepdim: bool = False, *, dtype: str | None = None) -> Value:
    """Sum; integers and bools give int64."""
    axes = axes_of(dim, self.rank)
    return drop_axes((self.cast(dtype) if dtype else self).sum(axes), axes, keepdim)


@lowers("aten.mean.default", samples=typed(WHOLE, "float32"))
@lowers("aten.mean.dim", samples=typed(DIMS + NO_DIM, "float32"))
def mean(self: Value, dim: Dim = None, keepdim: bool = False, *, dtype: str | None = None) -> Value:
    """Mean over the dims; floats only."""
    axes = axes_of(dim, self.rank)
    return drop_axes((self.cast(dtype) if dtype else self).mean(axes), axes, keepdim)


@lowers("aten.prod.default", samples=typed(WHOLE[:4], "float32"), dtypes=ALL)
@lowers("aten.prod.dim_int", samples=typed(ONE_DIM, "float32"), dtypes=ALL)
def prod(self: Value, dim: int | None = None, keepdim: bool = False, *, dtype: str | None = None) -> Value:
    """Product; integers and bools give int64."""
    axes = axes_of(dim, self.rank)
    return drop_axes(self.graph.reduce("prod", self.cast(dtype) if dtype else self, axes), axes, keepdim)


@lowers("aten.nansum.default", samples=typed((*WHOLE[:3], *DIMS, *NO_DIM, *WITH_NAN), "float32"))
def nansum(self: Value, dim: Dim = None, keepdim: bool = False, *, dtype: str | None = None) -> Value:
    """Sum that takes NaN for 0."""
    clean = self.graph.pointwise(lambda x: where(isnan(x), 0, x), self)
    return total(clean, dim, keepdim, dtype=dtype)


@lowers("aten.count_nonzero.default", samples=(S(t(3, 5)), S(t(2, 3, 4), 1), S(t(2, 3), -1), S(t(0, 2))), dtypes=EVERY)
@lowers(
    "aten.count_nonzero.dim_IntList", samples=(S(t(3, 5), [1]), S(t(2, 3, 4), [0, -1]), S(t(2, 3), [])), dtypes=EVERY
)
def count_nonzero(self: Value, dim: Dim = None) -> Value:
    """Number of elements that are not 0, int64."""
    return total(self.graph.pointwise(truth, self), dim)


# -- extremes ---------------------------------------------------------------------------------------------------------
def extreme(kind: str, x: Value, axes: Sequence[int], keepdim: bool = False) -> Value:
    """Reduce by 'max', 'min', 'argmax' or 'argmin' (the flat position) over ``axes``; NaN wins."""
    if any(x.shape[a] == 0 for a in axes):
        raise ValueError(f"{kind} over an empty dim of {list(x.shape)}")
    return drop_axes(x.graph.reduce(kind, x, axes), axes, keepdim)


def declare_extremes(kind: str) -> None:
    """amax, max.default, max.dim and argmax, or the same of min."""

    def whole(self: Value) -> Value:
        return extreme(kind, self, axes_of(None, self.rank))

    def over(self: Value, dim: Dim = (), keepdim: bool = False) -> Value:
        return extreme(kind, self, axes_of(dim, self.rank), keepdim)

    def along(self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        """Values and their first positions along one dim."""
        axes = axes_of(dim, self.rank)
        return extreme(kind, self, axes, keepdim), extreme(f"arg{kind}", self, axes, keepdim)

    def position(self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        """First position of the extreme, along a dim or in the flattened tensor."""
        return extreme(f"arg{kind}", self, axes_of(dim, self.rank), keepdim)

    lowers(f"aten.{kind}.default", samples=WHOLE, dtypes=EVERY)(whole)
    lowers(f"aten.a{kind}.default", samples=(*DIMS, S(t(2, 3)), *WITH_NAN), dtypes=EVERY)(over)
    lowers(f"aten.{kind}.dim", samples=ONE_DIM + WITH_NAN, dtypes=EVERY)(along)
    lowers(f"aten.arg{kind}.default", samples=(*ONE_DIM, *WITH_NAN, *NO_DIM, S(t(3, 5))), dtypes=ALL)(position)


declare_extremes("max")
declare_extremes("min")


@lowers(
    "aten.aminmax.default",
    samples=(S(t(3, 5)), S(t(3, 5), dim=1), S(t(2, 3, 4), dim=-2, keepdim=True), S(t(), dim=0)),
    dtypes=EVERY,
)
def aminmax(self: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    """Minimum and maximum, over a dim or over all elements."""
    axes = axes_of(dim, self.rank)
    return extreme("min", self, axes, keepdim), extreme("max", self, axes, keepdim)


LOGICAL = (*ONE_DIM, S(t(3, 0), 1), S(t(3, 0), 0, True))


def declare_quantifier(name: str, kind: str) -> None:
    """Declare any or all: an extreme of truth values; over no elements, the neutral one."""

    def quantify(self: Value, axes: Sequence[int], keepdim: bool) -> Value:
        holds = self.graph.pointwise(truth, self)
        if holds.numel == 0:
            shape = tuple(1 if d in axes else n for d, n in enumerate(holds.shape))
            return drop_axes(self.graph.elementwise(shape, [], const(name == "all", "bool")), axes, keepdim)
        return extreme(kind, holds, axes, keepdim)

    def over(self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        return quantify(self, axes_of(dim, self.rank), keepdim)

    def over_dims(self: Value, dim: list[int] | None = None, keepdim: bool = False) -> Value:
        """An empty list, unlike None, names no dim here."""
        return quantify(self, () if dim == [] else axes_of(dim, self.rank), keepdim)

    lowers(f"aten.{name}.default", samples=(*WHOLE, S(t(0, 3))), dtypes=EVERY)(over)
    lowers(f"aten.{name}.dim", samples=LOGICAL, dtypes=EVERY)(over)
    lowers(f"aten.{name}.dims", samples=(*DIMS, *NO_DIM, S(t(3, 0), [0, 1])), dtypes=EVERY)(over_dims)


declare_quantifier("any", "max")
declare_quantifier("all", "min")


# -- statistics and norms ---------------------------------------------------------------------------------------------
def moments(x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """Return variance and mean over ``axes`` (they stay as size 1) in two passes, which avoids cancellation."""
    x = real(x)
    m = x.mean(axes)
    d = x - m
    n = math.prod(x.shape[a] for a in axes)
    return (d * d).sum(axes) / float(n), m


def _spread(x: Value, axes: Sequence[int], correction: Scalar) -> tuple[Value, Value]:
    """Return variance and mean like :func:`moments`, without the error that the rounding of the mean makes: it shows
    if the mean is much larger than the spread."""
    n = math.prod(x.shape[a] for a in axes)
    m = x.mean(axes)
    d = x - m
    rest = d.sum(axes)
    squares = (d * d).sum(axes) - rest * rest / float(max(n, 1))
    return squares / float(max(n - correction, 0)), m


SPREAD = (S(t(3, 5)), S(t(2, 3, 4, layout="transposed")), S(t(3, 5), False), S(t(1)))
SPREAD_DIM = (*DIMS, *NO_DIM, S(t(3, 5), [1], False), S(t(2, 3, 4), [0, -1], True, True), S(t(3, 1), [1]))
SPREAD_CORRECTION = (
    S(t(3, 5)),
    S(t(3, 5), [1], correction=0),
    S(t(2, 3, 4), [-1, 0], correction=2, keepdim=True),
    S(t(3, 5), None, correction=None),
    S(t(3, 5), [0], correction=0.5),
    S(t(3, 2), [1], correction=3),
)


def declare_spread(name: str, results: Callable[[Value, Value], tuple[Value, ...]]) -> None:
    """Declare ``name`` and its overloads; ``results`` makes them of variance and mean."""

    def spread(
        self: Value, dim: Dim = None, unbiased: bool = True, *, correction: Scalar | None = None, keepdim: bool = False
    ) -> Value | tuple[Value, ...]:
        """Variance or standard deviation (and mean), divided by n - correction; 1 is the default."""
        axes = axes_of(dim, self.rank)
        out = results(*_spread(real(self), axes, int(unbiased) if correction is None else correction))
        return tuple(drop_axes(v, axes, keepdim) for v in out)

    lowers(f"aten.{name}.default", samples=SPREAD)(spread)
    lowers(f"aten.{name}.dim", samples=SPREAD_DIM)(spread)
    lowers(f"aten.{name}.correction", samples=SPREAD_CORRECTION)(spread)


def root(x: Value) -> Value:
    """Square root; exact zeros stay."""
    return x.graph.pointwise(sqrt, x)


declare_spread("var", lambda v, m: (v,))
declare_spread("std", lambda v, m: (root(v),))
declare_spread("var_mean", lambda v, m: (v, m))
declare_spread("std_mean", lambda v, m: (root(v), m))


def norm(x: Value, p: Scalar, dim: Dim, keepdim: bool, dtype: str | None) -> Value:
    """The vector norm of order ``p`` (0 counts, infinities are extremes of magnitude)."""
    g, axes = x.graph, axes_of(dim, x.rank)
    x = real(x.cast(dtype) if dtype else x)
    if math.isinf(p) and x.numel:
        return extreme("max" if p > 0 else "min", g.pointwise(absolute, x), axes, keepdim)
    if p == 0:
        y = g.pointwise(truth, x).sum(axes).cast(x.dtype)
    elif p == 1:
        y = g.pointwise(absolute, x).sum(axes)
    elif p == 2:
        y = root((x * x).sum(axes))
    else:
        power = fn("pow")
        y = g.pointwise(lambda s: power(s, 1.0 / p), g.pointwise(lambda v: power(absolute(v), float(p)), x).sum(axes))
    return drop_axes(y, axes, keepdim)


ORDERS = (2, 1, 0, math.inf, -math.inf, 3, 0.5, -1.0)


@lowers(
    "aten.linalg_vector_norm.default",
    samples=(
        S(t(3, 5)),
        *(S(t(3, 5), p, [1]) for p in ORDERS),
        S(t(2, 3, 4), 2, [-1, 0], True),
        S(t(2, 3), 2, None, dtype="float32"),
        S(t(0)),
    ),
)
def vector_norm(
    self: Value, ord: Scalar = 2, dim: Dim = None, keepdim: bool = False, *, dtype: str | None = None
) -> Value:
    """The norm of order ``ord`` over the dims."""
    return norm(self, ord, dim, keepdim, dtype)


@lowers("aten.norm.Scalar", samples=(S(t(3, 5)), S(t(3, 5), 1), S(t(2, 3, layout="transposed"), math.inf)))
@lowers("aten.norm.ScalarOpt_dim", samples=(*(S(t(3, 5), p, [1]) for p in ORDERS), S(t(2, 3, 4), None, [0, -1], True)))
@lowers("aten.norm.ScalarOpt_dtype", samples=[S(t(3, 5), p, dtype="float32") for p in (2, 1, None)])
@lowers("aten.norm.ScalarOpt_dim_dtype", samples=[S(t(3, 5), p, [1], True, dtype="float32") for p in (2, 1, None)])
def norm_of(
    self: Value, p: Scalar | None = 2, dim: Dim = None, keepdim: bool = False, *, dtype: str | None = None
) -> Value:
    """The norm of order ``p``; None means 2."""
    return norm(self, 2 if p is None else p, dim, keepdim, dtype)


@lowers(
    "aten.frobenius_norm.dim",
    samples=(S(t(3, 5), [1]), S(t(2, 3, 4), [0, -1], True), S(t(2, 3, 4, layout="transposed"), [1, 2])),
)
def frobenius_norm(self: Value, dim: Dim, keepdim: bool = False) -> Value:
    """The square root of the sum of squares over the dims."""
    return norm(self, 2, dim, keepdim, None)


# -- softmax ----------------------------------------------------------------------------------------------------------
NEGATIVE = t(2, 4, values=(-math.inf,) * 4 + (-math.inf, 1, 2, 0.5))
SOFTMAX = (
    S(t(3, 5, low=-9, high=9), 1),
    S(t(2, 3, 4), -2),
    S(t(2, 3, 4, layout="transposed"), 0),
    S(t(7, layout="strided"), -1),
    S(t(), 0),
    S(t(0, 3), 0),
    S(t(4, 130), 1),
    S(NEGATIVE, 1),
)
SOFTMAX_DTYPE = (*SOFTMAX, S(t(3, 5), -1, "float32"), S(t(3, 5, dtype="int64"), -1, "float32"))


def softmax_parts(x: Value, dim: int, dtype: str | None) -> tuple[Value, Value, tuple[int, ...]]:
    """Return x as floats, its maximum along dim, and the axes."""
    x, axes = real(x.cast(dtype) if dtype else x), axes_of(dim, x.rank)
    return x, x.amax(axes) if x.numel else x.sum(axes), axes


@lowers("aten.softmax.int", "aten.special_softmax.default", samples=SOFTMAX_DTYPE)
def softmax(self: Value, dim: int, dtype: str | None = None) -> Value:
    """exp(x - max) divided by its sum; a row of -inf gives NaN."""
    x, top, axes = softmax_parts(self, dim, dtype)
    e = x.graph.pointwise(lambda a, b: exp(a - b), x, top)
    return e / e.sum(axes)


@lowers("aten.log_softmax.int", samples=SOFTMAX_DTYPE)
def log_softmax(self: Value, dim: int, dtype: str | None = None) -> Value:
    """x - max - log(sum(exp(x - max))) along a dim."""
    x, top, axes = softmax_parts(self, dim, dtype)
    d = x - top
    return x.graph.pointwise(lambda a, s: a - log(s), d, x.graph.pointwise(exp, d).sum(axes))


@lowers("aten._softmax.default", samples=[S(*s.args, False) for s in SOFTMAX])
def softmax_core(self: Value, dim: int, half_to_float: bool) -> Value:
    """Softmax along a dim; ``half_to_float`` returns float32."""
    return softmax(self, dim)


@lowers("aten._log_softmax.default", samples=[S(*s.args, False) for s in SOFTMAX])
def log_softmax_core(self: Value, dim: int, half_to_float: bool) -> Value:
    """Log-softmax along a dim; ``half_to_float`` returns float32."""
    return log_softmax(self, dim)


@lowers("aten._safe_softmax.default", samples=SOFTMAX_DTYPE)
def safe_softmax(self: Value, dim: int, dtype: str | None = None) -> Value:
    """Softmax in which a row of -inf gives zeros."""
    x, top, axes = softmax_parts(self, dim, dtype)
    return softmax_of_visible(x, top, axes)[0]


def softmax_of_visible(x: Value, top: Value, axes: tuple[int, ...]) -> tuple[Value, Value]:
    """Return the softmax over ``axes``, zeros where the maximum ``top`` is -inf, and the sums that it divides by."""
    e = x.graph.pointwise(lambda a, b: exp(a - b), x, top)
    total = e.sum(axes)
    return x.graph.pointwise(lambda m, y: where(fn("eq")(m, -math.inf), 0, y), top, e / total), total


INFINITE_ROWS = t(3, 2, values=(-math.inf, -math.inf, math.inf, 1, 2, 3))


@lowers(
    "aten.logsumexp.default",
    samples=(S(t(3, 5), [1]), S(t(2, 3, 4), [-1, 0], True), S(t(0, 3), [1]), S(t(3, 0), [1]), S(INFINITE_ROWS, [1])),
)
def logsumexp(self: Value, dim: Dim, keepdim: bool = False) -> Value:
    """log(sum(exp(x - m))) + m, where m is the maximum, or 0 if that is infinite."""
    x, axes, g = real(self), axes_of(dim, self.rank), self.graph
    if not x.numel:
        return drop_axes(g.pointwise(log, x.sum(axes)), axes, keepdim)
    top = g.pointwise(lambda a: where(isinf(a), 0, a), x.amax(axes))
    s = g.pointwise(lambda a, b: exp(a - b), x, top).sum(axes)
    return drop_axes(g.pointwise(lambda a, b: log(a) + b, s, top), axes, keepdim)


# -- running reductions -----------------------------------------------------------------------------------------------
RUNNING = (
    S(t(3, 5), 1),
    S(t(2, 3, 4), -2),
    S(t(2, 3, layout="transposed"), 0),
    S(t(9, layout="strided"), 0),
    S(t(), 0),
    S(t(0, 3), 0),
)


INFINITE = (
    S(t(2, 4, values=(-math.inf, -math.inf, 1, 80, 2, math.inf, math.inf, 3)), 1),
    S(t(2, 3, values=(1, math.nan, 2, -math.inf, 3, 1e30)), -1),
    S(t(40, 67, low=-90, high=90), 1),
)


def scan(kind: str, x: Value, dim: int) -> Value:
    """Running reduction along a dim; a 0-d tensor is its own."""
    axes = axes_of(dim, x.rank)
    return x.graph.scan(kind, x, axes[0]) if axes else x


def declare_running(name: str, kind: str, extreme_name: str, extreme_kind: str) -> None:
    """cumsum or cumprod; cummax or cummin."""

    def running(self: Value, dim: int, *, dtype: str | None = None) -> Value:
        """Running sum or product; integers and bools give int64."""
        x = self.cast(dtype) if dtype else self
        return scan(kind, x if dt.is_float(x.dtype) else x.cast("int64"), dim)

    def running_extreme(self: Value, dim: int) -> tuple[Value, Value]:
        """Running extreme and its last position."""
        axes = axes_of(dim, self.rank)
        if not axes:
            return self, self.graph.elementwise((), [], const(0, "int64"))
        return self.graph.scan_extreme(extreme_kind, self, axes[0])

    lowers(f"aten.{name}.default", samples=(*RUNNING, S(t(2, 3), 1, dtype="float32")), dtypes=ALL)(running)
    lowers(f"aten.{extreme_name}.default", samples=(*RUNNING, *WITH_NAN), dtypes=ALL)(running_extreme)


declare_running("cumsum", "sum", "cummax", "argmax")
declare_running("cumprod", "prod", "cummin", "argmin")


@lowers("aten.logcumsumexp.default", "aten._logcumsumexp.default", samples=(*RUNNING, *INFINITE))
def logcumsumexp(self: Value, dim: int) -> Value:
    """Logarithm of the running sum of exponentials."""
    return scan("logaddexp", self, dim)


@lowers(
    "aten.diff.default",
    samples=(
        *(S(x) for x in (t(7), t(2, 3, 4), t(9, layout="strided"), t(2, 3, 4, layout="transposed"), t(0, 3), t(3, 1))),
        S(t(3, 5), 1, 0), S(t(3, 5), 2), S(t(2, 6), 3, -1), S(t(3, 5), 9), S(t(3, 5), 0),
        S(t(2, 5), 1, -1, t(2, 1)), S(t(2, 5), 2, 1, t(2, 1), t(2, 3)),
        S(t(3, 5), 1, 0, t(1, 5, dtype="float32")), S(t(6, dtype="bool", values=(1, 0, 0, 1, 1, 0)), 2),
    ),
    dtypes=ALL,
)  # fmt: skip
def diff(self: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None) -> Value:
    """Differences of neighbours along a dim, ``n`` times; of bools, whether they differ."""
    if not self.rank or n < 0:
        raise ValueError(f"{n} times the differences of a {self.rank}-d tensor")
    x = joined([v for v in (prepend, self, append) if v is not None], dim)
    dim = wrap_dim(dim, x.rank)
    if not n:
        return fresh(x)
    for _ in range(bounded(min(n, x.shape[dim]), MAX_STEPS, "differences of differences")):
        later, earlier = x.slice(dim, 1, x.shape[dim]), x.slice(dim, 0, x.shape[dim] - 1)
        x = x.graph.pointwise(fn("ne") if x.dtype == "bool" else fn("sub"), later, earlier)
    return x
