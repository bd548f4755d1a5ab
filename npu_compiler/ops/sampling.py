"""Images sampled at data-dependent positions, and windows as columns."""

from __future__ import annotations

from functools import reduce

from ..graph.expr import Expr, const, fn, index, load, where
from ..graph.graph import Value
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .common import ints
from .registry import lowers
from .samples import S, t

BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _reflected(p: Expr, n: int, align: bool) -> Expr:
    """Reflect a position at the centres of the outer pixels (``align``) or at their edges until it is inside."""
    low, span = (0.0, float(n - 1)) if align else (-0.5, float(n))
    if span == 0:
        return p * 0.0
    p = fn("abs")(p - low)
    rest, turns = fn("fmod")(p, const(span, p.dtype)), fn("floor")(p / span)
    even = fn("eq")(turns - 2.0 * fn("floor")(turns / 2.0), const(0.0, p.dtype))
    return where(even, rest + low, span - rest + low)


class _Position:
    """The position of g in [-1, 1] among ``n`` pixels: pixel ``whole`` and the ``share`` of the next one. NaN is the
    first pixel, unless zeros are outside."""

    def __init__(self, g: Expr, n: int, padding: int, align: bool):
        scaled, middle = g * ((n - 1 if align else n) / 2), (n - 1) / 2
        p = straight = scaled + middle  # rounds less than (g + 1) n / 2
        if padding != ZEROS:
            if padding == REFLECTION:
                p = _reflected(p, n, align)
            p = where(fn("isnan")(p), const(0.0, p.dtype), p)  # an infinite one has no reflection either
            p = fn("minimum")(fn("maximum")(p, const(0.0, p.dtype)), const(float(n - 1), p.dtype))
        self.point, self.whole = p, fn("floor")(p)
        self.share = where(fn("eq")(p, straight), scaled + (middle - self.whole), p - self.whole)


def _pixel(x: Value, at: tuple[Expr, Expr], wide: str) -> Expr:
    """Read x [N, C, H, W] at integer positions (y, x) of a float dtype; zero outside."""
    inside = reduce(
        lambda a, b: a & b, [c for p, n in zip(at, x.shape[2:], strict=True) for c in (p >= 0.0, p <= float(n - 1))]
    )
    places = [where(inside, p, const(0.0, wide)).cast("int64") for p in at]
    return where(inside, load(0, x.dtype, [index(0), index(1), *places]).cast(wide), const(0.0, wide))


_IMAGE, _GRID = t(2, 3, 5, 6), t(2, 4, 7, 2, low=-1.4, high=1.4)
_GRIDS = tuple(
    S(_IMAGE, _GRID, mode, padding, align)
    for mode in (BILINEAR, NEAREST)
    for padding in (ZEROS, BORDER, REFLECTION)
    for align in (False, True)
)
_LAYOUTS = (S(t(1, 2, 1, 4, layout="transposed"), t(1, 3, 3, 2), BILINEAR, REFLECTION, True),)


@lowers("aten.grid_sampler_2d.default", samples=_GRIDS)
@lowers("aten.grid_sampler.default", samples=(*_GRIDS, *_LAYOUTS))
def grid_sampler(input: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Value:
    """Pixels of input [N, C, H, W] at grid [N, OH, OW, 2], (x, y) from -1 to 1: bilinear or nearest."""
    if input.rank != 4 or interpolation_mode not in (BILINEAR, NEAREST):
        what = "images of three dims" if input.rank != 4 else f"interpolation mode {interpolation_mode}"
        raise Unsupported(Reason("attribute", f"grid_sampler: no kernel for {what}", "use bilinear or nearest in 2-d"))
    wide = dt.opmath(input.dtype)
    x, y = (load(1, grid.dtype, [index(0), index(2), index(3), const(k, "int64")]).cast(wide) for k in (0, 1))
    py, px = (_Position(g, n, padding_mode, align_corners) for g, n in zip((y, x), input.shape[2:], strict=True))
    if interpolation_mode == NEAREST:
        value = _pixel(input, (fn("round")(py.point), fn("round")(px.point)), wide)
    else:
        rows, columns = ([(p.whole, 1.0 - p.share), (p.whole + 1.0, p.share)] for p in (py, px))
        value = reduce(
            lambda a, b: a + b,
            [_pixel(input, (ay, ax), wide) * (wy * wx) for ay, wy in rows for ax, wx in columns],
        )
    return input.graph.elementwise((*input.shape[:2], *grid.shape[1:3]), [input, grid], value.cast(input.dtype))


@lowers(
    "aten.im2col.default",
    samples=(
        S(t(2, 3, 5, 6), [2, 3], [1, 1], [0, 1], [1, 1]),
        S(t(1, 2, 7, 6, layout="transposed"), [3, 2], [2, 1], [2, 0], [2, 3]),
        S(t(3, 4, 5), [2, 2], [1, 1], [1, 1], [1, 2]),
    ),
    dtypes=("float32", "float16", "bfloat16"),
)
def im2col(self: Value, kernel_size: list[int], dilation: list[int], padding: list[int], stride: list[int]) -> Value:
    """Windows of [N, C, H, W] or [C, H, W] as columns [N, C x taps, windows]; zeros around the image."""
    x = self if self.rank == 4 else self.reshape(1, *self.shape)
    (r, s), d, p, step = ints(kernel_size, 2), ints(dilation, 2), ints(padding, 2), ints(stride, 2)
    n, c, *size = x.shape
    out = [(m + 2 * q - e * (k - 1) - 1) // st + 1
           for m, q, e, k, st in zip(size, p, d, (r, s), step, strict=True)]  # fmt: skip
    at = [index(4 + a) * step[a] + index(2 + a) * d[a] - p[a] for a in range(2)]
    inside = reduce(lambda a, b: a & b, [c for i, m in zip(at, size, strict=True) for c in (i >= 0, i < m)])
    value = where(inside, load(0, x.dtype, [index(0), index(1), *at]), const(0, x.dtype))
    y = x.graph.elementwise((n, c, r, s, *out), [x], value).reshape(n, c * r * s, out[0] * out[1])
    return y if self.rank == 4 else y.reshape(*y.shape[1:])
