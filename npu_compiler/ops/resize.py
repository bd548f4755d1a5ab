"""Image resizing. Shapes are static, so positions and weights are constant tables; loads and products remain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ..graph.expr import Expr, const, index, load
from ..graph.graph import Value
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .access import fresh, pick
from .common import MAX_POSITIONS, bounded, ints
from .registry import lowers
from .samples import S, Sample, t

Sizes = Sequence[int] | None
Scales = Sequence[float | None] | None


# -- nearest ----------------------------------------------------------------------------------------------------------
def nearest_positions(n: int, out: int, scale: float | None, exact: bool) -> np.ndarray:
    """Return source positions, in float32 arithmetic as PyTorch does it; ``exact`` measures from pixel centres."""
    ratio = np.float32(1.0 / scale) if scale and scale > 0 else np.float32(n) / np.float32(out)
    i = np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)
    return np.minimum(np.floor(i * ratio).astype(np.int64), n - 1)


def nearest(x: Value, sizes: Sequence[int], scales: Sequence[float | None], exact: bool) -> Value:
    """Resize the spatial dims of [N, C, ...] to ``sizes`` by the nearest element."""
    spatial = x.shape[2:]
    if len(sizes) == 2 and not exact:  # PyTorch's 2-d kernel ignores the scale of a kept or doubled size
        scales = [None if m in (n, 2 * n) else s for n, m, s in zip(spatial, sizes, scales, strict=True)]
    tables = [nearest_positions(n, m, s, exact) for n, m, s in zip(spatial, sizes, scales, strict=True)]
    repeats = [m // n if m % n == 0 else 0 for n, m in zip(spatial, sizes, strict=True)]
    if all(r and (p == np.arange(len(p)) // r).all() for r, p in zip(repeats, tables, strict=True)):
        y = x.reshape(*x.shape[:2], *itertools.chain(*((n, 1) for n in spatial)))
        y = y.expand(*x.shape[:2], *itertools.chain(*zip(spatial, repeats, strict=True)))
        return fresh(y.reshape(*x.shape[:2], *sizes))
    at = [load(1 + d, "int32", [index(2 + d)]).cast("int64") for d in range(len(sizes))]
    return pick(x, (*x.shape[:2], *sizes), [index(0), index(1), *at], *(_table(x, p) for p in tables))


def _table(x: Value, positions: np.ndarray) -> Value:
    """Return a constant with positions along a dim: 32 bits, which vectors of floats have for an element, suffice."""
    return x.graph.const(np.ascontiguousarray(positions, np.int32))


# -- interpolation ----------------------------------------------------------------------------------------------------
def source_points(n: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Return the real-valued source position of every output position along one dim."""
    if align_corners:
        return np.arange(out) * ((n - 1) / (out - 1) if out > 1 else 0.0)
    return (np.arange(out) + 0.5) * (1.0 / scale if scale and scale > 0 else n / out) - 0.5


def linear_taps(n: int, out: int, align_corners: bool, scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and weights [out, 2] of linear interpolation; as in PyTorch, an unchanged size ignores the
    scale and copies each element."""
    if n == out:
        at = np.arange(n)
        return np.stack([at, at], 1), np.stack([np.ones(n), np.zeros(n)], 1)
    point = np.maximum(source_points(n, out, align_corners, scale), 0.0)
    low = np.minimum(np.floor(point).astype(np.int64), n - 1)
    share = np.minimum(point - low, 1.0)
    return np.stack([low, np.minimum(low + 1, n - 1)], 1), np.stack([1 - share, share], 1)


def cubic_taps(n: int, out: int, align_corners: bool, scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and weights [out, 4] of cubic convolution with a = -0.75 (R. Keys, 1981)."""
    point = source_points(n, out, align_corners, scale)
    low = np.floor(point)
    x = np.abs((point - low)[:, None] - np.arange(-1, 3))
    a = -0.75
    inner, outer = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    return np.clip(low[:, None].astype(np.int64) + np.arange(-1, 3), 0, n - 1), np.where(x <= 1, inner, outer)


Taps = Callable[[int, int, bool, float | None], tuple[np.ndarray, np.ndarray]]


def interpolated(x: Value, sizes: Sequence[int], align: bool, scales: Sequence[float | None], taps: Taps) -> Value:
    """Sum over the taps of every spatial dim, one dim at a time, innermost last."""
    wide = dt.opmath(x.dtype)
    inputs = [x]
    tables: list[tuple[int, Value, Value]] = []
    for n, m, s in zip(x.shape[2:], sizes, scales, strict=True):
        at, weight = taps(n, m, align, s)
        pair = _table(x, at.T), x.graph.const(np.ascontiguousarray(weight.T), wide)  # neighbours along the dim
        tables.append((len(inputs), *pair))
        inputs += pair

    def total(d: int, idx: list[Expr]) -> Expr:
        if d == len(tables):
            return load(0, x.dtype, idx).cast(wide)
        first, at, _ = tables[d]
        e: Expr | None = None
        for k in range(at.shape[0]):
            where = [const(k, "int64"), index(2 + d)]
            term = load(first + 1, wide, where) * total(d + 1, [*idx, load(first, "int32", where).cast("int64")])
            e = term if e is None else e + term
        assert e is not None
        return e

    return x.graph.elementwise((*x.shape[:2], *sizes), inputs, total(0, [index(0), index(1)]))


# -- declarations -----------------------------------------------------------------------------------------------------
def target(x: Value, sizes: Sizes, scales: Scales) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Return output sizes and scales from either argument. ``ValueError`` if the sizes do not fit the tensor."""
    spatial = x.shape[2:]
    if sizes is None:
        assert scales is not None, "neither output_size nor scale_factors is given"
        sizes = [int(n * s) for n, s in zip(spatial, scales, strict=True) if s is not None]
    given = ints(sizes, len(spatial))
    bounded(max(given, default=0), MAX_POSITIONS, "positions along a dim")
    if min((*given, *spatial), default=0) < 1:
        raise ValueError(f"cannot resize {list(x.shape)} to {list(given)}")
    return given, tuple(scales) if scales else (None,) * len(spatial)


_IMAGES = {1: t(2, 3, 5), 2: t(2, 3, 4, 5), 3: t(1, 2, 3, 4, 2)}
_SIZES = ((8, 10, 6), (7, 3, 5), (4, 5, 3), (1, 11, 2))
_FACTORS = ((2.0, 2.0, 3.0), (1.5, 0.6, 2.0), (2.5, 1.1, 1.3))


def tries(flags: Sequence[bool]) -> list[tuple[bool, ...]]:
    """Return all combinations of flags for samples."""
    return [(flag,) for flag in flags] or [()]


def by_size(n: int, *flags: bool, options: Sequence[tuple[float | None, ...]] = ((),)) -> list[Sample]:
    """Return samples with an output size for ``n`` spatial dims; ``flags`` are values of align_corners to try."""
    calls = [S(_IMAGES[n], list(size[:n]), *f) for size in _SIZES for f in tries(flags)]
    layouts = [S(t(1, 2, *(4, 3, 2)[:n], layout="transposed"), [6] * n, *flags[:1], *o) for o in options]
    return calls + layouts


def by_factor(n: int, *flags: bool) -> list[Sample]:
    """Return samples with scale factors, or sizes, as ``interpolate`` exports them."""
    cases = [*((None, list(f[:n])) for f in _FACTORS), (list(_SIZES[1][:n]), None)]
    return [S(_IMAGES[n], size, *f, scale) for size, scale in cases for f in tries(flags)]


def _declare_nearest(name: str, exact: bool) -> None:
    def resize(x: Value, size: Sizes, scales: Scales) -> Value:
        return nearest(x, *target(x, size, scales), exact)

    def one(self: Value, output_size: Sequence[int], scales: float | None = None) -> Value:
        """Vectors resized: each element is the nearest source element."""
        return resize(self, output_size, (scales,))

    def two(
        self: Value, output_size: Sequence[int], scales_h: float | None = None, scales_w: float | None = None
    ) -> Value:
        """Images resized: each pixel is the nearest source pixel."""
        return resize(self, output_size, (scales_h, scales_w))

    def three(
        self: Value,
        output_size: Sequence[int],
        scales_d: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        """Volumes resized: each voxel is the nearest source voxel."""
        return resize(self, output_size, (scales_d, scales_h, scales_w))

    def vec(input: Value, output_size: Sizes, scale_factors: Scales) -> Value:
        """The nearest source element; by size or by scale factors."""
        return resize(input, output_size, scale_factors)

    sizes: list[Callable[..., Value]] = [one, two, three]
    for n, f in enumerate(sizes, 1):
        lowers(f"aten.{name}{n}d.default", samples=by_size(n, options=((), (1.6,) * n)))(f)
        lowers(f"aten.{name}{n}d.vec", samples=by_factor(n))(vec)


def _declare_interpolation(names: dict[int, str], taps: Taps) -> None:
    def resize(x: Value, size: Sizes, align: bool, scales: Scales) -> Value:
        if not dt.is_float(x.dtype):
            raise Unsupported(Reason("dtype", f"interpolation of {x.dtype} elements", "cast to a floating dtype first"))
        sizes, factors = target(x, size, scales)
        return interpolated(x, sizes, align, factors, taps)

    def one(self: Value, output_size: Sequence[int], align_corners: bool, scales: float | None = None) -> Value:
        """Vectors resized with interpolation."""
        return resize(self, output_size, align_corners, (scales,))

    def two(
        self: Value,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        """Images resized with interpolation."""
        return resize(self, output_size, align_corners, (scales_h, scales_w))

    def three(
        self: Value,
        output_size: Sequence[int],
        align_corners: bool,
        scales_d: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        """Volumes resized with interpolation."""
        return resize(self, output_size, align_corners, (scales_d, scales_h, scales_w))

    def vec(input: Value, output_size: Sizes, align_corners: bool, scale_factors: Scales) -> Value:
        """Resizing with interpolation; by size or by scale factors."""
        return resize(input, output_size, align_corners, scale_factors)

    sizes: list[Callable[..., Value]] = [one, two, three]
    for n, name in names.items():
        f = sizes[n - 1]
        lowers(f"aten.{name}.default", samples=by_size(n, False, True, options=((), (1.6,) * n)))(f)
        lowers(f"aten.{name}.vec", samples=by_factor(n, False, True))(vec)


_declare_nearest("upsample_nearest", exact=False)
_declare_nearest("_upsample_nearest_exact", exact=True)
_declare_interpolation({1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}, linear_taps)
_declare_interpolation({2: "upsample_bicubic2d"}, cubic_taps)
