"""Convolutions of few terms as one pointwise node, whose expression is the sum of all terms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from operator import add

from . import expr
from .expr import Expr
from .graph import Value

ATTRIBUTES = "stride", "padding", "dilation", "groups"  # of a conv2d node


def input_position(
    out: Sequence[Expr],
    tap: Sequence[Expr | int],
    stride: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
) -> list[Expr]:
    """Return where in its input a convolution reads for a result: for each spatial dim, from the position of the
    result and that of the tap. The position may be outside of the input."""
    dims = zip(out, tap, stride, before, dilation, strict=True)
    return [at * step + (i * spacing - lo) for at, i, step, lo, spacing in dims]


def direct_convolution(
    x: Value,
    w: Value,
    stride: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out: Sequence[int],
    dtype: str,
) -> Value:
    """Convolve x [N, C, ...] with w [K, ..., C/groups] to results [N, K, ...] in ``dtype``, in which terms are added.
    ``before``: the padding in front of each spatial dim; ``out``: the spatial sizes of the results."""
    k, *kernel, channels = w.shape
    image, o = expr.index(0), expr.index(1)
    terms = []
    for *tap, c in product(*map(range, (*kernel, channels))):
        at = input_position([expr.index(d) for d in range(2, x.rank)], tap, stride, before, dilation)
        value = expr.load(0, x.dtype, [image, o // (k // groups) * channels + c, *at]).cast(dtype)
        for position, size in reversed(list(zip(at, x.shape[2:], strict=True))):
            value = expr.where((position >= 0) & (position < size), value, expr.const(0, dtype))
        filter_at = [o, *(expr.const(i, "int64") for i in (*tap, c))]
        terms.append(value * expr.load(1, w.dtype, filter_at).cast(dtype))
    total: Expr = reduce(add, terms)
    return x.graph.elementwise((x.shape[0], k, *out), [x, w], total)
