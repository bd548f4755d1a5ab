"""Splits a prompt into chunks, one for each run of an entry point that takes 1, 32, 128 … tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Chunk:
    """A run of the entry point for ``size`` tokens. It computes positions ``start`` to ``stop``; others are padding."""

    start: int
    stop: int
    size: int


def plan_chunks(begin: int, end: int, sizes: Sequence[int], max_len: int, floor: int = 16) -> list[Chunk]:
    """Return the cheapest chunks that compute positions ``begin`` to ``end`` of a context of ``max_len``, in order.

    The last chunk may be padded at its end: the padding's writes to the cache are overwritten before they are read. If
    padding would exceed ``max_len``, the chunk starts earlier and computes some positions again.

    Args:
        sizes: the numbers of tokens that the entry points take.
        floor: see ``TargetConfig.chunk_floor``.
    """
    largest = max(sizes)
    whole, rest = divmod(end - begin, largest)
    chunks = []
    for size in [largest] * whole + list(_cheapest(rest, tuple(sorted(sizes, reverse=True)), floor)):
        stop = min(begin + size, end)
        chunks.append(Chunk(min(begin, max_len - size), stop, size))
        begin = stop
    return chunks


@lru_cache(maxsize=1024)
def _cheapest(count: int, sizes: tuple[int, ...], floor: int) -> tuple[int, ...]:
    """Return the sizes that cover ``count`` tokens at the least cost, largest first; of equal costs, the fewest."""
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for n in range(1, count + 1):
        options = ((best[max(n - s, 0)], s) for s in sizes)
        best.append(min((cost + max(s, floor), runs + 1, (*picked, s)) for (cost, runs, picked), s in options))
    return tuple(sorted(best[count][2], reverse=True))
