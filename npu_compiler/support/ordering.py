"""Topological orders of directed acyclic graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def depth_first(roots: Iterable[T], before: Callable[[T], Sequence[T]]) -> list[T]:
    """Return all items that are reachable from ``roots``, each one after the items ``before(item)``.

    The order is depth first: roots and the results of ``before`` are visited in order. There must be no cycle.
    """
    done: dict[T, None] = {}
    for root in roots:
        stack = [(root, False)]
        while stack:
            item, ready = stack.pop()
            if item in done:
                continue
            if ready:
                done[item] = None
            else:
                stack.append((item, True))
                stack.extend((x, False) for x in reversed(before(item)) if x not in done)
    return list(done)
