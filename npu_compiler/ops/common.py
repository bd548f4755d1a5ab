"""Helpers of all op families: table-driven declarations and dim arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..graph.expr import Expr, call
from ..graph.graph import Value
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .registry import FLOATS, Scalar, pointwise
from .samples import BINARY, UNARY, Sample

Factor = TypeVar("Factor", Value, Expr)


def names(base: str, *overloads: str, aliases: Sequence[str] = ()) -> list[str]:
    """Return op types: ``names('mul', 'Tensor', 'Scalar', aliases=['multiply'])`` gives four."""
    return [f"aten.{n}.{o}" for n in (base, *aliases) for o in overloads or ("default",)]


def unary(
    op_types: Sequence[str],
    f: str | Callable[[Expr], Expr],
    samples: Sequence[Sample] = UNARY,
    dtypes: Sequence[str] = FLOATS,
    floating: bool = False,
    arithmetic: str = "",
    short: Callable[[Expr], Expr] | None = None,
) -> None:
    """Declare ``f(self)`` elementwise: a function or the name of a scalar op; the rest as in ``@pointwise``."""

    def op(self: Expr) -> Expr:
        return call(f, self) if isinstance(f, str) else f(self)

    op.__doc__ = f"Elementwise {op_types[0].split('.')[1]}."
    op.__module__ = sys._getframe(1).f_globals["__name__"]  # the family that declares it
    pointwise(*op_types, samples=samples, dtypes=dtypes, floating=floating, arithmetic=arithmetic, short=short)(op)


def binary(
    op_types: Sequence[str],
    f: str | Callable[[Expr, Expr], Expr],
    samples: Sequence[Sample] = BINARY,
    dtypes: Sequence[str] = FLOATS,
    floating: bool = False,
) -> None:
    """Declare ``f(self, other)`` elementwise, with broadcasting and promotion; either argument may be a number."""

    def op(self: Expr, other: Expr) -> Expr:
        return call(f, self, other) if isinstance(f, str) else f(self, other)

    op.__doc__ = f"Elementwise {op_types[0].split('.')[1]} of two tensors, or of a tensor and a number."
    op.__module__ = sys._getframe(1).f_globals["__name__"]
    pointwise(*op_types, samples=samples, dtypes=dtypes, floating=floating)(op)


def scaled(x: Factor, factor: Scalar) -> Factor:
    """Return ``x * factor``; as in PyTorch, integers cannot be scaled by a fraction (``ValueError``)."""
    if isinstance(factor, float) and not dt.is_float(x.dtype):
        raise Unsupported(Reason("dtype", f"a factor of {factor} for {x.dtype} numbers"))
    return x if factor == 1 else x * factor


def axes_of(dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the axes of a ``dim`` argument, ascending; None and [] mean all. A 0-d tensor accepts 0 and -1."""
    given = [dim] if isinstance(dim, int) else list(dim or range(rank))
    for d in given:
        if not -max(rank, 1) <= d < max(rank, 1):
            raise IndexError(f"dim {d} of a {rank}-d tensor")
    axes = [d % max(rank, 1) for d in given]
    if len(set(axes)) != len(axes):
        raise ValueError(f"dims {given} name one dim of a {rank}-d tensor twice")
    return tuple(sorted(axes)) if rank else ()


def drop_axes(x: Value, axes: Sequence[int], keepdim: bool = False) -> Value:
    """Remove reduced axes (of size 1) unless ``keepdim``."""
    return x if keepdim else x.reshape(*(n for i, n in enumerate(x.shape) if i not in axes))


MAX_PARTS = 1 << 14  # views that one call is lowered to
MAX_STEPS = 512  # kernels that one call is lowered to; each takes the compiler some 3 ms
MAX_POSITIONS = 1 << 22  # of a table that is computed while a call is lowered


def bounded(count: int, limit: int, what: str) -> int:
    """Return ``count`` if it is at most ``limit``; raises ``Unsupported``: lowering more would take too long."""
    if count > limit:
        raise Unsupported(Reason("size", f"{count} {what}; at most {limit} are compiled"))
    return count


def ints(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """Return an ATen int[n] argument as ``n`` numbers; a single number is repeated."""
    given = (value,) if isinstance(value, int) else tuple(value)
    if len(given) not in (1, n):
        raise ValueError(f"{list(given)} given for {n} spatial dims")
    return given * n if len(given) == 1 else given


def inner_taps(
    size: int, out: int, taps: int, stride: int, padding: tuple[int, int], dilation: int
) -> tuple[range, tuple[int, int]]:  # fmt: skip
    """Return the taps that read an element of a dim in any of the ``out`` windows, and the padding that these taps
    need. Tap r of window o reads position o * stride + r * dilation - padding[0]. If no tap reads an element, all are
    returned."""
    before, after = padding
    first = min(-(-(before - (out - 1) * stride) // dilation), before // dilation)
    last = max((size - 1 + before) // dilation, taps - 1 - after // dilation)
    inner = range(max(first, 0), min(last, taps - 1) + 1)
    if not inner or min(size, out) < 1 or min(padding) < 0:
        return range(taps), padding
    return inner, (before - inner.start * dilation, after - (taps - inner.stop) * dilation)


def real(x: Value) -> Value:
    """Cast integers and bools to float32. Half types stay: arithmetic widens them."""
    return x if dt.is_float(x.dtype) else x.cast("float32")
