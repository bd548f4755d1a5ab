"""A model of the ring buffer in ``tma_mainloop.h`` whose right operands teams of warps split: random interleavings of
the producer, of loads that end in any order, of the teams, and of the warpgroups that multiply.

An mbarrier's wait takes the parity of a phase, and so confuses phases that are two apart. No GPU is needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from npu_compiler.targets.cuda.dialect import HOPPER
from npu_compiler.targets.cuda.tile_selection import Problem, candidates, device_of
from npu_compiler.targets.simt.kernels.gemm import Product

STEPS, MOVES, RUNS = 40, 100_000, 25


@dataclass
class MBarrier:
    """``arrivals`` and all bytes of expected loads complete a phase."""

    arrivals: int
    missing: int = 0
    loads: int = 0
    phase: int = 0

    def arrive(self, loads: int = 0) -> None:
        self.missing = self.missing or self.arrivals
        self.missing, self.loads = self.missing - 1, self.loads + loads
        self._complete()

    def loaded(self) -> None:
        self.loads -= 1
        self._complete()

    def _complete(self) -> None:
        if self.missing == self.loads == 0:
            self.phase += 1

    def wait(self, parity: int) -> Iterator[None]:
        while self.phase % 2 == parity:
            yield


class Ring:
    """The ring and its users; each ``yield`` of a user is a place where others may go on."""

    def __init__(self, stages: int, teams: int, warpgroups: int, waits: bool, seed: int):
        self.stages, self.teams, self.warpgroups, self.waits = stages, teams, warpgroups, waits
        self.random = random.Random(seed)
        self.loaded, self.full = ([MBarrier(1) for _ in range(stages)] for _ in range(2))
        self.empty = [MBarrier(warpgroups) for _ in range(stages)]
        self.slots: list[tuple[int, str]] = [(-1, "")] * stages
        self.loading: list[int] = []
        self.multiplied = 0

    def at(self, step: int) -> tuple[int, int]:
        """Return the slot of a step and the parity of its phase."""
        return step % self.stages, step // self.stages % 2

    def producer(self) -> Iterator[None]:
        for step in range(STEPS):
            slot, parity = self.at(step)
            yield from self.empty[slot].wait(parity ^ 1)
            self.loaded[slot].arrive(loads=1)
            self.loading.append(step)
            yield

    def memory(self) -> Iterator[None]:
        while self.multiplied < STEPS * self.warpgroups:
            if self.loading:
                step = self.loading.pop(self.random.randrange(len(self.loading)))
                self.slots[self.at(step)[0]] = step, "loaded"
                self.loaded[self.at(step)[0]].loaded()
            yield

    def team(self, number: int) -> Iterator[None]:
        for step in range(number, STEPS, self.teams):
            slot, parity = self.at(step)
            if self.waits:
                yield from self.empty[slot].wait(parity ^ 1)
            yield from self.loaded[slot].wait(parity)
            assert self.slots[slot] == (step, "loaded")
            yield
            self.slots[slot] = step, "split"
            self.full[slot].arrive()
            yield

    def warpgroup(self) -> Iterator[None]:
        for step in range(STEPS):
            slot, parity = self.at(step)
            yield from self.loaded[slot].wait(parity)
            yield from self.full[slot].wait(parity)
            assert self.slots[slot] == (step, "split")
            yield
            self.multiplied += 1
            self.empty[slot].arrive()
            yield

    def run(self) -> None:
        """Let all of them run, each at a random speed."""
        users = [self.producer(), self.memory(), *map(self.team, range(self.teams))]
        users += [self.warpgroup() for _ in range(self.warpgroups)]
        speeds = [self.random.random() ** 2 + 0.02 for _ in users]
        for user in self.random.choices(users, speeds, k=MOVES):
            next(user, None)
            if self.multiplied == STEPS * self.warpgroups:
                return
        raise AssertionError("a deadlock")


def plans() -> set[tuple[int, int]]:
    """Return (stages, teams) of all plans for products of floats."""
    found = set()
    for size in (64, 640, 4096):
        problem = Problem(Product(1, size, size, size), 64, columns=16, limbs=True)
        found |= {(p.stages, p.splitters // p.split_team) for p in candidates(problem, device_of(HOPPER))}
    return found


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_teams_split_every_stage_once(warpgroups: int) -> None:
    assert plans()
    for stages, teams in plans():
        assert teams <= stages
        for seed in range(RUNS):
            Ring(stages, teams, warpgroups, True, seed).run()


def test_teams_that_do_not_wait_for_the_stage_before_fail() -> None:
    with pytest.raises(AssertionError):
        for seed in range(RUNS):
            Ring(5, 3, 1, False, seed).run()
