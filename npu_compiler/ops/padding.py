"""Padding: one load per element, at an index that the mode maps back into the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..graph.expr import Expr, call, const, index, load, maximum, minimum, where
from ..graph.graph import Value
from ..support.errors import Reason, Unsupported
from .access import pick
from .registry import ALL, Scalar, lowers
from .samples import S, t

DTYPES = (*ALL, "bool")

# Position -> position in the tensor, for a dim of n elements.
MODES: dict[str, Callable[[Expr, int], Expr]] = {
    "reflect": lambda i, n: (n - 1) - call("abs", (n - 1) - call("abs", i)),
    "replicate": lambda i, n: minimum(maximum(i, 0), n - 1),
    "circular": lambda i, n: i % n,
}


def per_dim(x: Value, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Return (before, after) per dim from a list that starts at the last dim."""
    if len(pad) % 2 or len(pad) > 2 * x.rank:
        raise ValueError(f"{len(pad)} pad sizes for a {x.rank}-d tensor")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (x.rank - len(pairs)) + pairs[::-1]


def padded_shape(x: Value, pads: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the shape after padding; raises ``ValueError`` if a dim would be negative."""
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, pads, strict=True))
    if min(shape, default=0) < 0:
        raise ValueError(f"padding {list(pads)} leaves shape {list(shape)}")
    return shape


def pad_constant(x: Value, pad: Sequence[int], value: Scalar) -> Value:
    """Pad with ``value``; ``pad`` lists (before, after) from the last dim on, negative sizes crop."""
    pads = per_dim(x, pad)
    idx = [index(d) - before for d, (before, _) in enumerate(pads)]
    inside = const(True, "bool")
    for i, n, (before, after) in zip(idx, x.shape, pads, strict=True):
        inside = inside & (i >= 0) if before > 0 else inside
        inside = inside & (i < n) if after > 0 else inside
    e = where(inside, load(0, x.dtype, idx), const(value, x.dtype))
    return x.graph.elementwise(padded_shape(x, pads), [x], e)


def pad_mapped(x: Value, pad: Sequence[int], mode: str) -> Value:
    """Pad with the tensor's own elements by ``mode``."""
    pads = per_dim(x, pad)
    if mode == "circular":  # cropped elements do not wrap around
        for d, (before, after) in enumerate(pads):
            x = x.slice(d, max(-before, 0), x.shape[d] - max(-after, 0))
        pads = [(max(before, 0), max(after, 0)) for before, after in pads]
    for n, most in zip(x.shape, map(max, pads), strict=True):
        if (mode == "reflect" and most >= max(n, 1)) or (mode == "circular" and most > n) or (n == 0 < most):
            raise ValueError(f"padding {list(pad)} is too large for {list(x.shape)}")
    back = MODES[mode]
    idx = [
        back(index(d) - before, n) if before or after else index(d)
        for d, (n, (before, after)) in enumerate(zip(x.shape, pads, strict=True))
    ]
    return pick(x, padded_shape(x, pads), idx)


_PADS = (
    S(t(2, 3), [1, 2]), S(t(2, 3, layout="transposed"), [0, 1, 2, 0]), S(t(2, 3, 4), [-1, 2, 1, -1]),
    S(t(2, 3, 4), [-1, -2]),
    S(t(2, 3), [0, 0, 0, 0]), S(t(0, 3), [0, 0, 1, 1]), S(t(3), []), S(t(2, 2), [-1, 0, 3, -1]),
)  # fmt: skip


@lowers(
    "aten.constant_pad_nd.default",
    samples=(*_PADS, S(t(2, 3), [1, 2], 1.5), S(t(2, 3), [1, 0, 0, 1], -2), S(t(2, 3), [1, 1], True)),
    dtypes=DTYPES,
)
def constant_pad_nd(self: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    """Each dim, from the last, extended by (before, after) copies of ``value``; negative sizes crop."""
    return pad_constant(self, pad, value)


@lowers(
    "aten.pad.default",
    samples=(
        *_PADS,
        S(t(2, 3), [1, 2], "constant", 1.5),
        S(t(2, 3, 4), [2, 1], "reflect"),
        S(t(1, 2, 3, 4), [3, 0, 1, 2], "reflect"),
        S(t(1, 2, 3, 4, layout="transposed"), [3, 5, 1, 2], "replicate"),
        S(t(1, 1, 2, 3, 4), [1, 0, 0, 2, 2, 1], "replicate"),
        S(t(1, 2, 3, 4), [3, 0, 1, 2], "circular"),
        S(t(2, 3, 4), [-1, 2], "circular"),
    ),
)
def pad(self: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """Padding by mode: 'constant', 'reflect', 'replicate' or 'circular'."""
    if mode == "constant":
        return pad_constant(self, pad, value or 0.0)
    if mode not in MODES:
        raise Unsupported(
            Reason("attribute", f"aten.pad.default: unknown mode {mode!r}", f"use constant, {', '.join(MODES)}")
        )
    return pad_mapped(self, pad, mode)


def _declare_mapped(op: str, mode: str, dims: int) -> None:
    shape = (1, 2, 3, 4, 3)[: dims + 2]
    pads = ([1, 2, 0, 1, 2, 0][: 2 * dims], [0, 1] * dims, [1, -1, 2, 1, -1, 0][: 2 * dims])
    layouts = (t(*shape), t(*shape, layout="transposed"), t(*shape[1:], layout="strided"))

    @lowers(op, samples=tuple(S(x, p) for x, p in zip(layouts, pads, strict=True)))
    def lower(self: Value, padding: Sequence[int]) -> Value:
        """Padding with the tensor's own elements: mirrored at the edge, or the edge repeated."""
        return pad_mapped(self, padding, mode)


for _n in (1, 2, 3):
    _declare_mapped(f"aten.reflection_pad{_n}d.default", "reflect", _n)
    _declare_mapped(f"aten.replication_pad{_n}d.default", "replicate", _n)


@lowers(
    "aten._pad_circular.default",
    samples=(S(t(1, 2, 3, 4), [3, 0, 1, 2]), S(t(2, 3, 4, layout="transposed"), [-1, 2]), S(t(1, 2, 5), [5, 5])),
)
def pad_circular(self: Value, pad: Sequence[int]) -> Value:
    """Padding with elements from the other end."""
    return pad_mapped(self, pad, "circular")
