"""The harness finds what it is there to find."""

from __future__ import annotations

import random

import pytest

from . import harness

FAULTY = "tests.fuzz.faulty"


def test_workers_survive_what_cases_do() -> None:
    """Every case is judged once, although some kill their process. (No case of this seed hangs.)"""
    report = harness.run_in_workers(FAULTY, seed=6, cases=60, jobs=2)
    assert report.accepted + report.refused + len(report.failures) == 60
    found = {(f.what, f.where.split(" at ")[0]) for f in report.failures}
    assert found >= {("untyped", "KeyError"), ("untyped", "_Panic"), ("signal", "SIGSEGV"), ("signal", "exit status 3")}
    assert len({f.number for f in report.failures}) == len(report.failures)
    assert "python -m tests.fuzz tests.fuzz.faulty --seed 6 --case" in str(report)


def test_a_case_may_not_hang_or_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SECONDS", 0.2)

    def draw(number: int) -> int:
        rng = random.Random(f"{FAULTY} 6 {number}")
        rng.randbytes(4)
        return rng.randrange(40)

    for drawn, what in ((5, "hang"), (2, "memory"), (0, "untyped")):
        number = next(n for n in range(1000) if draw(n) == drawn)
        (failure,) = harness.run_cases(FAULTY, 6, range(number, number + 1)).failures
        assert (failure.what, failure.number) == (what, number)
        assert "faulty.py" in failure.detail
