"""Tokens drawn from few candidates are those that all logits would have given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig
from npu_compiler.pipeline import compile_entries
from npu_compiler.support.errors import BackendError
from npu_runtime import CPUBackend, Executor
from npu_runtime.llm.device_top_k import DeviceScores
from npu_runtime.llm.model import LLM
from npu_runtime.llm.sampling import Candidates, HostScores, Sampler, SamplingOptions, Scores, log_probability

from ..support.metal_backend import EmulatedMetal
from . import small_model

VOCAB, MAX_LEN = 20_000, 64

# options, and whether candidates are enough for logits of a usual spread
SETTINGS: list[tuple[dict[str, Any], bool]] = [
    ({"temperature": 0.8, "top_k": 50, "top_p": 0.95}, True),
    ({"temperature": 1.0, "top_k": 20, "min_p": 0.1}, True),
    ({"temperature": 0.7, "top_p": 0.8}, True),
    ({"temperature": 0.7, "top_p": 0.5, "min_p": 0.2}, True),
    ({"temperature": 1.0, "min_p": 0.05}, True),
    ({"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.2}, True),
    ({"temperature": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}, True),
    ({"repetition_penalty": 1.3}, True),
    ({"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}, False),
    ({"temperature": 1.0, "top_k": 40, "repetition_penalty": 0.8}, False),
    ({"temperature": 1.0, "top_k": 5000}, False),
    ({"temperature": 3.0, "top_p": 0.99}, False),
    ({"temperature": 1.0}, False),
]


def logits(seed: int, vocab: int = VOCAB, coarse: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(vocab) * 2
    x[rng.integers(0, vocab, 40)] += np.linspace(4, 9, 40)
    return (np.round(x * 2) / 2 if coarse else x).astype(np.float32)


class Whole(HostScores):
    """All tokens are candidates."""

    def candidates(self) -> Candidates:
        return Candidates(None, self.logits())


class Steps:
    """The logits of one step, and how often they were asked for."""

    def __init__(self, x: np.ndarray):
        self.x, self.asked = x, 0

    def logits(self) -> np.ndarray:
        self.asked += 1
        return self.x


def digest(x: np.ndarray, temperature: float, steps: Steps, rows: int = 32) -> DeviceScores:
    """What ``SamplingDecoder`` says of logits, in numpy."""
    table = np.pad(x, (0, -x.size % rows), constant_values=-np.inf).reshape(rows, -1)
    places = np.argsort(-table, axis=0, kind="stable")[:4]  # NaN is last here: put it first
    nan = np.isnan(table).any(axis=0)
    places[0, nan] = np.argmax(np.isnan(table), axis=0)[nan]
    values = np.take_along_axis(table, places, 0)
    below = table - values[0]
    with np.errstate(over="ignore"):
        sums = np.stack((np.exp(below / np.float32(temperature)).sum(0), np.exp(below).sum(0)))
    return DeviceScores(steps, values, places, sums, temperature)  # type: ignore[arg-type]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("options", "enough"), SETTINGS)
def test_the_draw_is_the_same(options: dict[str, Any], enough: bool, coarse: bool) -> None:
    """With logits of which many are equal, too, where fewer candidates are surely ahead of the others."""
    samplers = [Sampler(SamplingOptions(**options, seed=5), VOCAB) for _ in range(3)]
    asked = 0
    for n in range(60):
        x = logits(n, coarse=coarse)
        steps = Steps(x)
        kinds: list[Scores] = [Whole(x), HostScores(x), digest(x, samplers[0].temperature, steps)]
        if not samplers[0].narrow:
            kinds[2] = HostScores(steps.logits())
        tokens = [s(scores) for s, scores in zip(samplers, kinds, strict=True)]
        assert tokens[0] == tokens[1] == tokens[2]
        asked += steps.asked
        for s in samplers:
            s.see([tokens[0], n])
    if not coarse:
        assert asked <= 3 if enough else asked >= 57


def test_candidates_are_what_they_say() -> None:
    for x in (logits(1), logits(2, coarse=True), logits(3, 3000), np.zeros(VOCAB, np.float32)):
        for scores in (HostScores(x), digest(x, 1.0, Steps(x))):
            c = scores.candidates()
            ids = np.arange(x.size) if c.ids is None else c.ids
            np.testing.assert_array_equal(c.logits, x[ids])
            assert (np.diff(ids) > 0).all()
            assert c.ids is None or np.delete(x, ids).max() <= c.bound < c.logits.min(initial=math.inf)


def test_totals_and_log_probabilities() -> None:
    x = logits(4, 4999)
    for temperature in (0.3, 1.0, 2.0):
        exact = np.exp((x.astype(np.float64) - x.max()) / temperature).sum()
        for scores in (HostScores(x), digest(x, temperature, Steps(x))):
            assert scores.total(temperature) == pytest.approx(exact, rel=2e-6)
            for token in (int(x.argmax()), 17, 4998):
                assert scores.log_probability(token) == pytest.approx(log_probability(x, token), abs=2e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_an_error(bad: float) -> None:
    for place in (3, VOCAB - 1):
        x = logits(5)
        x[place] = bad
        for options, _ in SETTINGS:
            sampler = Sampler(SamplingOptions(**options), VOCAB)
            with pytest.raises(BackendError, match="try float32"), np.errstate(invalid="ignore"):
                sampler(digest(x, sampler.temperature, Steps(x)) if sampler.narrow else HostScores(x))


def test_no_other_token_is_likely_at_all() -> None:
    """All but a few are masked; whole columns, too."""
    x = np.full(VOCAB, -np.inf, np.float32)
    x[[30, 40, 700]] = 1, 2, 0
    for options, _ in SETTINGS:
        samplers = [Sampler(SamplingOptions(**options, seed=1), VOCAB) for _ in range(2)]
        with np.errstate(invalid="ignore"):
            for _ in range(8):
                device = digest(x, samplers[1].temperature, Steps(x)) if samplers[1].narrow else HostScores(x)
                assert samplers[0](Whole(x)) == samplers[1](device)


# -- the entry point -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.write_model(tmp_path_factory.mktemp("candidates") / "small", vocab_size=5003)


@pytest.fixture(scope="module")
def plain(path: Path) -> LLM:
    return LLM.load(path, max_len=MAX_LEN, cache=False)


@pytest.fixture(scope="module")
def digesting(path: Path) -> LLM:
    return small_model.asynchronous(path, MAX_LEN)


@pytest.mark.parametrize("options", [o for o, _ in SETTINGS])
def test_answers_are_the_same(plain: LLM, digesting: LLM, options: dict[str, Any]) -> None:
    for seed in range(3):
        answers = [
            llm.generate([3, 1, 4, 1, 5], max_tokens=20, ignore_eos=True, stream=False, seed=seed, **options).tokens
            for llm in (plain, digesting)
        ]
        assert answers[0] == answers[1] and len(answers[0]) == 20
        assert plain.tokens == digesting.tokens


def test_the_digest_of_simt_kernels() -> None:
    """The entry point as Metal runs it, against the CPU."""
    config = LLMConfig.from_hf(small_model.config(vocab_size=5003, num_hidden_layers=1))
    graph = llm_graphs(config, max_len=8, chunks=(), device_sampling=True)["sample"]
    weights = small_model.weights(small_model.config(vocab_size=5003, num_hidden_layers=1))
    feeds = {"token_ids": np.array([[7]]), "positions": np.array([0]), "temperature": np.float32([0.7])}
    results = []
    for target, backend in (("cpu", CPUBackend()), ("metal", EmulatedMetal("shuffled", seed=4))):
        program = compile_entries({"sample": graph}, target)
        results.append(list(Executor(program, weights, backend).run(feeds).values()))
    for x, values, rows, sums in results:
        wanted = digest(x[0], 0.7, Steps(x[0]), 9)
        np.testing.assert_array_equal(values, wanted._values)
        np.testing.assert_array_equal(rows, wanted._rows)
        np.testing.assert_allclose(sums, wanted._sums, rtol=3e-6)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 1.0, "seed": 2}])
def test_log_probabilities_are_the_same(plain: LLM, digesting: LLM, options: dict[str, Any]) -> None:
    here, there = (
        list(llm.generate([9, 2], max_tokens=12, ignore_eos=True, logprobs=True, **{"seed": 1, **options}))
        for llm in (plain, digesting)
    )
    assert [t.id for t in here] == [t.id for t in there]
    np.testing.assert_allclose([t.logprob for t in there], [t.logprob for t in here], atol=1e-5)


def test_damaged_weights_are_noticed(path: Path, digesting: LLM) -> None:
    broken = small_model.weights(small_model.config(vocab_size=5003))
    broken["model.norm.weight"][:] = np.nan
    with pytest.warns(RuntimeWarning, match="contains NaN"):
        llm = LLM(digesting.program, broken, digesting.manifest, CPUBackend())
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=5), llm.vocab)
    with pytest.raises(BackendError, match="logits hold nan"):
        sampler(llm._step([3], sampler))
