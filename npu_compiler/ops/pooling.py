"""Max and average pooling of one to three spatial dims, fixed and adaptive.

A pool is one reduction over windows read in place: its domain is [N, out ..., C, window ...], channels last. Positions
outside the input are guarded, so no padded copy is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..graph.expr import Expr, const, index, load, maximum, minimum, where
from ..graph.graph import Value
from ..support import dtypes as dt
from .common import MAX_POSITIONS, bounded, inner_taps, ints
from .convolution import Ints, channels_first, channels_last
from .registry import ALL, FLOATS, lowers
from .samples import S, Sample, t


@dataclass(frozen=True)
class Window:
    """The windows along one spatial dim: ``out`` windows of at most ``kernel`` taps over ``size`` elements.

    ``position(o, r)`` is where tap r of window o reads; ``inside(o, at)`` says whether that counts, None if all do.
    ``counts`` are the divisors of an average.
    """

    size: int
    out: int
    kernel: int
    position: Callable[[Expr, Expr], Expr]
    inside: Callable[[Expr, Expr], Expr] | None
    counts: tuple[int, ...]
    dilation: int = 1


def fixed_window(size: int, k: int, stride: int, pad: int, dilation: int, ceil_mode: bool, include_pad: bool) -> Window:
    """Return the windows of one dim by ATen's rules for strides, padding, dilation and ceil_mode, without taps that
    are never inside."""
    if pad > k // 2 or min(k, stride, dilation) < 1:
        raise ValueError(f"pooling with kernel {k}, stride {stride}, dilation {dilation}, padding {pad}")
    reach = dilation * (k - 1)
    out = (size + 2 * pad - reach - 1 + (stride - 1 if ceil_mode else 0)) // stride + 1
    if (
        ceil_mode and (out - 1) * stride >= size + pad
    ):  # the last window must start inside the input or its left padding
        out -= 1
    bounded(out, MAX_POSITIONS, "windows along a dim")
    starts = [o * stride - pad for o in range(out)]
    ends = [min(s + k, size + pad) for s in starts]
    counts = tuple(e - s if include_pad else min(e, size) - max(s, 0) for s, e in zip(starts, ends, strict=True))
    inner, (before, _) = inner_taps(size, out, k, stride, (pad, reach), dilation)
    leaves = before > 0 or (out - 1) * stride - before + dilation * (len(inner) - 1) >= size
    return Window(
        size, out, len(inner),
        lambda o, r: o * stride + r * dilation - before,
        (lambda o, at: (at >= 0) & (at < size)) if leaves else None,
        counts, dilation,
    )  # fmt: skip


def adaptive_window(size: int, out: int) -> Window:
    """Return windows of which number o covers floor(o * size / out) up to ceil((o + 1) * size / out)."""
    if out and size % out == 0:
        return fixed_window(size, size // out, size // out, 0, 1, False, True)
    bounded(out, MAX_POSITIONS, "windows along a dim")
    starts = [o * size // out for o in range(out)]
    ends = [-(-(o + 1) * size // out) for o in range(out)]
    counts = tuple(e - s for s, e in zip(starts, ends, strict=True))
    return Window(
        size, out, max(counts, default=1),
        lambda o, r: o * size // out + r,
        lambda o, at: at < ((o + 1) * size + out - 1) // out,
        counts,
    )  # fmt: skip


def pool(kind: str, x: Value, windows: Sequence[Window], fill: float) -> Value:
    """Reduce the windows of x [N, ..., C]; ``fill`` stands for positions outside. Returns [N, out ..., C]."""
    n = len(windows)
    domain = (x.shape[0], *(w.out for w in windows), x.shape[-1], *(w.kernel for w in windows))
    guards: list[Expr] = []
    idx = [index(0)]
    for d, w in enumerate(windows, 1):
        o = index(d) if w.out > 1 else const(0, "int64")
        r = index(n + 1 + d) if w.kernel > 1 else const(0, "int64")
        idx.append(w.position(o, r))
        guards += [w.inside(o, idx[-1])] if w.inside else []
    e = load(0, x.dtype, [*idx, index(n + 1)])
    if guards:
        e = where(reduce(lambda a, b: a & b, guards), e, const(fill, x.dtype))
    y = x.graph.reduce_expr(kind, [x], e, domain, range(n + 2, 2 * n + 2))
    return y.reshape(*domain[: n + 2])


def fixed_windows(
    x: Value,
    n: int,
    kernel_size: Ints,
    stride: Ints | tuple[()],
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    include_pad: bool,
) -> list[Window]:
    """Return the windows of all spatial dims; a list of one size applies to every dim."""
    kernel = ints(kernel_size, n)
    steps = ints(stride or kernel, n)
    parameters = zip(x.shape[-n:], kernel, steps, ints(padding, n), ints(dilation, n), strict=True)
    return [fixed_window(*p, ceil_mode, include_pad) for p in parameters]


# -- maximum ----------------------------------------------------------------------------------------------------------
def max_windows(x: Value, windows: Sequence[Window]) -> Value:
    """Reduce windows by their maximum."""
    last = channels_last(x, len(windows))
    y = pool("max", last, windows, dt.extremes(x.dtype)[0])
    return channels_first(y, x.rank == len(windows) + 2)


def max_positions(x: Value, windows: Sequence[Window]) -> Value:
    """Flat position, in the spatial dims, of each window's first maximum."""
    n = len(windows)
    taps = pool("argmax", channels_last(x, n), windows, dt.extremes(x.dtype)[0])
    count = math.prod(w.kernel for w in windows)
    tap = minimum(
        maximum(load(0, "int64", [index(d) for d in range(n + 2)]), 0), count - 1
    )  # says that 32 bits suffice
    flat: Expr = const(0, "int64")
    for d, w in enumerate(windows):
        r = tap // math.prod(v.kernel for v in windows[d + 1 :]) % w.kernel
        at = w.position(index(d + 1), r)
        # In a window of -inf alone the padding wins; ATen then returns the first tap inside.
        flat = flat * w.size + (maximum(at, at % w.dilation) if w.inside else at)
    positions = x.graph.elementwise(taps.shape, [taps], flat)
    return channels_first(positions, x.rank == n + 2)


def spatial(samples: Sequence[Sample], n: int) -> list[Sample]:
    """Two-dimensional samples for ``n`` spatial dims: sizes are cut, or the first one repeated."""

    def shape(s: tuple[int, ...]) -> tuple[int, ...]:
        lead, size = s[:-2], s[-2:]
        return (*lead, *((size[0],) * (n - 2) + size if n > 1 else size[1:]))

    def listed(a: object) -> object:
        return ([a[0]] * (n - 2) + a if n > 1 else a[1:]) if isinstance(a, list) and a else a

    return [
        S(t(*shape(s.args[0].shape), layout=s.args[0].layout), *(listed(a) for a in s.args[1:]), **dict(s.kwargs))
        for s in samples
    ]


MAX_POOLS = (
    S(t(2, 3, 8, 8), [2, 2]),
    S(t(1, 4, 9, 9), [3, 3], [2, 2], [1, 1]),
    S(t(3, 7, 8), [3, 2], [2, 1], [1, 0]),
    S(t(2, 3, 9, 10), [2, 3], [1, 2], [1, 1], [2, 2]),
    S(t(2, 3, 8, 10), [3, 3], [2, 2], [1, 1], [1, 1], True),
    S(t(2, 3, 7, 7, layout="transposed"), [3, 3], [2, 2], [0, 0], [1, 1], True),
    S(t(0, 3, 6, 6), [2, 2]),
)
INFINITE = S(t(1, 1, 3, 3, values=(-math.inf,) * 4 + (1, math.nan) + (-math.inf,) * 3), [2, 2], [2, 2], [1, 1])


def declare_max(n: int) -> None:
    """Declare max pooling of ``n`` spatial dims, fixed and adaptive."""

    def max_pool(
        self: Value,
        kernel_size: Ints,
        stride: Ints | tuple[()] = (),
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> Value:
        """Largest element of each window; padding never wins, NaN does."""
        return max_windows(self, fixed_windows(self, n, kernel_size, stride, padding, dilation, ceil_mode, True))

    def with_indices(
        self: Value,
        kernel_size: Ints,
        stride: Ints | tuple[()] = (),
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        """Largest elements and their flat positions."""
        windows = fixed_windows(self, n, kernel_size, stride, padding, dilation, ceil_mode, True)
        return max_windows(self, windows), max_positions(self, windows)

    def adaptive(self: Value, output_size: Ints) -> tuple[Value, Value]:
        """Largest elements of windows that divide the input evenly, and their flat positions."""
        windows = [adaptive_window(s, o) for s, o in zip(self.shape[-n:], ints(output_size, n), strict=True)]
        return max_windows(self, windows), max_positions(self, windows)

    samples = spatial(MAX_POOLS, n)
    special = [INFINITE] if n == 2 else []
    lowers(f"aten.max_pool{n}d.default", samples=samples + special, dtypes=ALL if n > 1 else FLOATS)(max_pool)
    lowers(f"aten.max_pool{n}d_with_indices.default", samples=samples + special, dtypes=ALL)(with_indices)
    lowers(f"aten.adaptive_max_pool{n}d.default", samples=spatial(ADAPTIVE, n))(adaptive)


# -- average ----------------------------------------------------------------------------------------------------------
def average(x: Value, windows: Sequence[Window], divisor: int | None = None) -> Value:
    """Average windows over their number of elements, or over ``divisor``."""
    n = len(windows)
    last = channels_last(x, n)
    if all(w.out == 1 and w.kernel == w.size and not w.inside for w in windows):  # a global pool is a plain reduction
        total = last.sum(range(1, n + 1))
    else:
        total = pool("sum", last, windows, 0.0)
    if divisor is None and any(len(set(w.counts)) > 1 for w in windows):
        bounded(math.prod(w.out for w in windows), MAX_POSITIONS, "windows of different sizes")
        counts = reduce(np.multiply.outer, [np.array(w.counts, np.float32) for w in windows])
        y = total / x.graph.const(counts[..., None])
    else:
        y = total / float(math.prod(max(w.counts, default=1) for w in windows) if divisor is None else divisor)
    return channels_first(y, x.rank == n + 2)


AVERAGE_POOLS = (
    S(t(2, 3, 8, 8), [2, 2]),
    S(t(1, 4, 9, 9), [3, 3], [2, 2], [1, 1]),
    S(t(3, 7, 8), [3, 2], [2, 1], [1, 0], False, False),
    S(t(2, 3, 8, 10), [3, 3], [2, 2], [1, 1], True),
    S(t(2, 3, 8, 10), [3, 3], [2, 2], [1, 1], True, False),
    S(t(2, 3, 7, 7, layout="transposed"), [3, 3], [2, 2], [0, 0], True, False),
    S(t(0, 3, 6, 6), [2, 2]),
)
DIVIDED = (
    S(t(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], False, True, 3),
    S(t(2, 3, 7, 7), [3, 3], [2, 2], [1, 1], True, False, 5),
)
ADAPTIVE = (
    S(t(2, 3, 8, 8), [1, 1]),
    S(t(2, 3, 8, 12), [4, 3]),
    S(t(1, 4, 7, 9), [3, 5]),
    S(t(4, 5, 6, layout="transposed"), [2, 4]),
    S(t(2, 3, 4, 5), [6, 7]),
)


def declare_average(n: int) -> None:
    """Declare average pooling of ``n`` spatial dims, fixed and adaptive."""

    def avg_pool(
        self: Value,
        kernel_size: Ints,
        stride: Ints | tuple[()] = (),
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        """Mean of each window, with or without the zeros of the padding, or its sum over ``divisor_override``."""
        windows = fixed_windows(self, n, kernel_size, stride, padding, 1, ceil_mode, count_include_pad)
        return average(self, windows, divisor_override)

    def adaptive(self: Value, output_size: Ints) -> Value:
        """Mean of windows that divide the input evenly."""
        sizes = ints(output_size, n)
        return average(self, [adaptive_window(s, o) for s, o in zip(self.shape[-n:], sizes, strict=True)])

    lowers(f"aten.avg_pool{n}d.default", samples=spatial(AVERAGE_POOLS + (DIVIDED if n > 1 else ()), n))(avg_pool)
    op_types = [f"aten.adaptive_avg_pool{n}d.default", *([f"aten._adaptive_avg_pool{n}d.default"] if n > 1 else [])]
    lowers(*op_types, samples=spatial(ADAPTIVE, n))(adaptive)


for _n in (1, 2, 3):
    declare_max(_n)
    declare_average(_n)
