"""Barriers of a concurrent encoder, on random schedules."""

from __future__ import annotations

import random

from npu_runtime.backends.metal.hazards import Accesses, Range, barriers


def overlap(some: list[Range], others: list[Range]) -> bool:
    return any(max(a, c) < min(b, d) for a, b in some for c, d in others)


def conflict(first: Accesses, second: Accesses) -> bool:
    reads, writes = list(second[0]), list(second[1])
    return overlap(list(first[1]), reads + writes) or overlap(list(first[0]), writes)


def test_conflicting_dispatches_have_a_barrier_between_them_and_others_none() -> None:
    draw = random.Random(5)

    def ranges(n: int) -> list[Range]:
        return [(at, at + draw.randint(0, 6)) for at in (draw.randrange(40) for _ in range(n))]

    for _ in range(200):
        work = [(ranges(draw.randint(0, 2)), ranges(1)) for _ in range(12)]
        waits = barriers(work)
        since = 0  # the first dispatch after the last barrier
        for n, accesses in enumerate(work):
            needed = any(conflict(earlier, accesses) for earlier in work[since:n])
            assert waits[n] == needed
            since = n if needed else since


def test_readers_of_one_buffer_do_not_wait() -> None:
    assert barriers([([(0, 8)], [(8, 16)]), ([(0, 8)], [(16, 24)]), ([(8, 16), (16, 24)], [(0, 8)])]) == [
        False, False, True
    ]  # fmt: skip
