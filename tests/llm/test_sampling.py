"""Choosing tokens: against plain definitions of every filter, statistics of draws, bad options and bad logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from npu_compiler.support.errors import BackendError, InputError
from npu_runtime.llm.sampling import Sampler, SamplingOptions, log_probability

VOCAB = 50


def logits(seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * scale).astype(np.float32)


def filtered(x: np.ndarray, o: SamplingOptions) -> np.ndarray:
    """The distribution after temperature and filters, float64[vocab], by full sorts."""
    x = x.astype(np.float64) / o.temperature
    if o.top_k:
        x = np.where(x >= np.sort(x)[-min(o.top_k, x.size)], x, -np.inf)
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= o.top_p]] = 0
    p[p < o.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.3, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 1000},
    ],
)
def test_draws_follow_the_filtered_distribution(options: dict[str, Any]) -> None:
    o = SamplingOptions(**options, seed=3)
    x, sampler, n = logits(1), Sampler(o, VOCAB), 4000
    counts = np.bincount([sampler(x) for _ in range(n)], minlength=VOCAB)
    expected = filtered(x, o)
    assert not counts[expected == 0].any()
    some = expected > 0
    deviations = (counts[some] - n * expected[some]) / np.sqrt(n * expected[some] * (1 - expected[some]) + 1)
    assert np.abs(deviations).max() < 4.5


def test_greedy_is_the_default_and_takes_the_first_of_equals() -> None:
    x = np.zeros(VOCAB, np.float32)
    x[[7, 9]] = 1
    assert Sampler(SamplingOptions(), VOCAB)(x) == 7


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_extreme_filters_leave_the_best(options: dict[str, Any]) -> None:
    sampler = Sampler(SamplingOptions(temperature=3.0, seed=0, **options), VOCAB)
    x = logits(2)
    assert {sampler(x) for _ in range(50)} == {int(x.argmax())}


def test_tiny_temperature_is_greedy() -> None:
    x = logits(3)
    assert Sampler(SamplingOptions(temperature=1e-30, seed=0), VOCAB)(x) == x.argmax()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_temperatures_beyond_float32(options: dict[str, Any]) -> None:
    """A temperature that float32 rounds to 0 takes the most likely token, one that it rounds to infinity any token."""
    coldest, hottest = (Sampler(SamplingOptions(temperature=t, seed=1, **options), VOCAB) for t in (1e-300, 1e300))
    assert {coldest(logits()) for _ in range(9)} == {int(logits().argmax())}
    assert len({hottest(logits()) for _ in range(99)}) > 2


def test_seeds_repeat_and_differ() -> None:
    x = logits(4, 0.1)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed), VOCAB)
        return [sampler(x) for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(None) != draws(None)


def test_repetition_penalty_weakens_what_was_seen() -> None:
    x = np.array([2.0, 1.5, -1.0, -1.2], np.float32)
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0), 4)
    assert sampler(x) == 0
    sampler.see([0])
    assert sampler(x) == 1  # 2.0 / 2 < 1.5
    sampler.see([1])
    assert sampler(x) == 0
    negative = np.array([-1.0, -1.5, -9, -9], np.float32)
    assert sampler(negative) == 0  # both doubled: -2 against -3
    assert list(x) == [2.0, 1.5, -1.0, np.float32(-1.2)]  # the caller's logits stay


def test_minus_infinity_is_never_drawn() -> None:
    x = np.full(VOCAB, -np.inf, np.float32)
    x[[3, 4]] = 0
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=1), VOCAB)
    assert {sampler(x) for _ in range(40)} == {3, 4}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_are_an_error(options: dict[str, Any], bad: float) -> None:
    x = logits()
    x[9] = bad
    with pytest.raises(BackendError, match="try float32"):
        Sampler(SamplingOptions(**options), VOCAB)(x)


def test_log_probability() -> None:
    x = logits(6, 20.0)
    exact = x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64))
    for token in range(VOCAB):
        assert log_probability(x, token) == pytest.approx(exact[token], abs=1e-5)
    assert log_probability(np.zeros(4, np.float32), 2) == pytest.approx(math.log(0.25), abs=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_k": 1.5},
        {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2}, {"repetition_penalty": 0}, {"seed": -1},
    ],
)  # fmt: skip
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        SamplingOptions(**options)
