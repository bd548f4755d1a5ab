"""Conformance samples: example calls of an op, written beside its declaration.

``S(T(2, 3), T(3), alpha=2)`` is a call with two tensors; positional arguments follow the ATen schema, keyword arguments
are keyword-only schema arguments. A sample is run for every dtype of its op; ``T(dtype=...)`` fixes a tensor's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class T:
    """A random tensor argument. ``dtype`` None takes the dtype under test. ``layout``: 'contiguous', 'transposed'
    (last two dims swapped in memory) or 'strided' (every other element of a larger tensor). Values are uniform in
    [low, high) (integers included), or ``values`` if given."""

    shape: tuple[int, ...]
    dtype: str | None = None
    low: float = -2.0
    high: float = 2.0
    layout: str = "contiguous"
    values: Sequence[Any] | None = None

    def __repr__(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self).items() if k != "shape" and v != getattr(T, k)]
        return f"t({', '.join([*map(str, self.shape), *changed])})"


def t(
    *shape: int,
    dtype: str | None = None,
    low: float = -2.0,
    high: float = 2.0,
    layout: str = "contiguous",
    values: Any = None,
) -> T:
    """Return a random tensor argument; see :class:`T`."""
    return T(shape, dtype, low, high, layout, tuple(values) if values is not None else None)


@dataclass(frozen=True)
class Sample:
    """One call of an op: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return f"S({', '.join([*map(repr, self.args), *(f'{k}={v!r}' for k, v in self.kwargs)])})"


def S(*args: Any, **kwargs: Any) -> Sample:
    """Return a sample: a call with these arguments."""
    return Sample(args, tuple(kwargs.items()))


UNARY = (S(t(3, 5)), S(t(2, 3, 4, layout="transposed")), S(t(7, layout="strided")), S(t()), S(t(0, 3)), S(t(2, 67)))
POSITIVE = (
    S(t(3, 5, low=0.1, high=4)),
    S(t(2, 3, 4, low=0.01, high=30, layout="transposed")),
    S(t(41, low=0.5, high=2)),
)
UNIT = (
    S(t(3, 5, low=-0.99, high=0.99)),
    S(t(2, 3, 4, low=-0.9, high=0.9, layout="transposed")),
    S(t(41, low=-0.5, high=0.5)),
)
BINARY = (
    S(t(3, 5), t(3, 5)),
    S(t(2, 3, 4), t(4)),
    S(t(2, 1, 4, layout="transposed"), t(3, 1)),
    S(t(3, 4), t()),
    S(t(3, 5), 2),
    S(t(0, 3), t(3)),
)
