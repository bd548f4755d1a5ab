"""Which dispatches of a concurrent encoder must wait for earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # of memory: addresses of the first byte and of the byte after the last one
Accesses = tuple[Sequence[Range], Sequence[Range]]  # read, written


def barriers(dispatches: Iterable[Accesses]) -> list[bool]:
    """Return for each dispatch whether a barrier must come before it. A barrier orders everything before it and after
    it, so only dispatches since the last one matter: a dispatch waits if it reads what one of them writes, or writes
    what one of them reads or writes."""
    result = []
    read: list[Range] = []
    written: list[Range] = []
    for reads, writes in dispatches:
        waits = _overlap(reads, written) or _overlap(writes, written) or _overlap(writes, read)
        if waits:
            read, written = [], []
        read.extend(reads)
        written.extend(writes)
        result.append(waits)
    return result


def _overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(max(a, c) < min(b, d) for a, b in some for c, d in others)
