"""Greedy decoding that the device does by itself gives the tokens that the host would have chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_compiler.support.errors import BackendError
from npu_runtime import CPUBackend
from npu_runtime.llm.model import LLM

from . import small_model

MAX_LEN = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.write_model(tmp_path_factory.mktemp("ahead") / "small")


@pytest.fixture(scope="module")
def plain(path: Path) -> LLM:
    return LLM.load(path, max_len=MAX_LEN, cache=False)


@pytest.fixture(scope="module")
def ahead(path: Path) -> LLM:
    return small_model.asynchronous(path, MAX_LEN)


def answer(llm: LLM, prompt: list[int] | str, **options: object) -> tuple[list[int], str | None]:
    generation = llm.generate(prompt, stream=False, **options)  # type: ignore[arg-type]
    return generation.tokens, generation.finish_reason


def test_answers_are_the_same(plain: LLM, ahead: LLM) -> None:
    """Up to a limit, to the end of the context, to a stop token, continued, and after a prompt of another kind."""
    assert set(ahead.program.entries) == {*plain.program.entries, "greedy", "sample"}
    first = answer(plain, "hello", max_tokens=12, ignore_eos=True)
    assert answer(ahead, "hello", max_tokens=12, ignore_eos=True) == first and len(first[0]) == 12
    grown = [*plain.encode("hello"), *first[0], 7, 9]
    for prompt, options in (
        (grown, {"ignore_eos": True}),
        ("abc", {"max_tokens": 1}),
        ("abc", {"max_tokens": 2, "ignore_eos": True}),
        ("hello", {"max_tokens": 12, "stop": [first[0][5]], "ignore_eos": True}),
        ("hello", {"max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True}),
        ("hello", {"max_tokens": 9, "repetition_penalty": 1.3, "ignore_eos": True}),
    ):
        assert answer(ahead, prompt, **options) == answer(plain, prompt, **options)  # type: ignore[arg-type]
        assert ahead.tokens == plain.tokens


def test_an_interrupted_answer_leaves_nothing_behind(plain: LLM, ahead: LLM) -> None:
    generation = ahead.generate("hello", max_tokens=12, ignore_eos=True)
    for _ in range(3):
        next(generation)
    answers = [answer(llm, "other", max_tokens=8, ignore_eos=True) for llm in (ahead, plain)]
    assert answers[0] == answers[1]
    assert ahead.tokens == plain.tokens


def test_the_caches_hold_what_they_would(plain: LLM, ahead: LLM, tmp_path: Path) -> None:
    """After an answer, saved and loaded: a continuation starts from there."""
    for llm in (plain, ahead):
        llm.forget()
        answer(llm, "hello", max_tokens=10, ignore_eos=True)
    ahead.save_state(tmp_path / "state")
    tokens = ahead.tokens
    ahead.forget()
    ahead.load_state(tmp_path / "state")
    assert ahead.tokens == tokens == plain.tokens
    more = [*tokens, 5]
    assert answer(ahead, more, max_tokens=5, ignore_eos=True) == answer(plain, more, max_tokens=5, ignore_eos=True)


def test_damaged_weights_are_noticed(path: Path, ahead: LLM) -> None:
    broken = small_model.weights(small_model.config())
    broken["model.norm.weight"][:] = np.nan
    with pytest.warns(RuntimeWarning, match="contains NaN"):
        llm = LLM(ahead.program, broken, ahead.manifest, CPUBackend())
    assert llm._async_greedy is not None
    llm._async_greedy.begin(3, 0)
    with pytest.raises(BackendError, match="logits hold nan"):
        llm._async_greedy.next(0)
