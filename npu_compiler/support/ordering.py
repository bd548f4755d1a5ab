"""Orders: topological ones of directed acyclic graphs, and barriers in a sequence of accesses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
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


def barrier_groups(accesses: Iterable[tuple[Collection[int], Collection[int]]]) -> list[int]:
    """Return the number of the group of each access (what it reads, what it writes), in order and from 0 on.

    An access joins the previous one's group unless it reads or writes what the group writes, or writes what the group
    reads. The accesses of a group may therefore happen in any order; a barrier must separate groups.
    """
    group = 0
    read: set[int] = set()
    written: set[int] = set()
    numbers: list[int] = []
    for reads, writes in accesses:
        if not written.isdisjoint(reads) or not written.isdisjoint(writes) or not read.isdisjoint(writes):
            group += 1
            read, written = set(), set()
        read.update(reads)
        written.update(writes)
        numbers.append(group)
    return numbers
