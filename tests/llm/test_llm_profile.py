"""A language model is profiled in sections: the runs of a prompt, and a step of decoding."""

from __future__ import annotations

import numpy as np
import pytest

import npusim
from npu_compiler.support.errors import ConfigError, InputError
from npu_runtime.llm.model import LLM
from npusim.profiling import collect

from . import small_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = small_model.write_model(
        tmp_path_factory.mktemp("models") / "small", max_position_embeddings=80, num_hidden_layers=1
    )
    return LLM.load(folder, threads=1, max_len=80)


def test_prompt_and_decode_step_are_measured_apart(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "roofline_of", lambda program, backend: None)
    llm.reset()
    before = {key: value.copy() for key, value in llm.state.snapshot().items()}
    report = npusim.profile(llm, runs=2, warmup=1, prompt=64, cache=40)
    prefill, decode = report.sections
    assert (prefill.title, prefill.name, prefill.count) == ("32 tokens of 64 at position 32", "prefill_32", 2)
    assert (decode.title, decode.name, decode.count) == ("decode after 40 tokens", "decode", 1)
    for section in report.sections:
        entry = llm.program.entries[section.name]
        assert [r.name for r in section.rows] == [c.name for c in entry.calls] and section.whole > 0
        assert any(p.module.startswith("model.layers.0") for r in section.rows for p in r.places)
    assert {h.kind for h in report.held} >= {"weight", "state"} and report.model == llm.manifest.name
    for key, value in llm.state.snapshot().items():
        np.testing.assert_array_equal(value, before[key])


def test_what_does_not_fit_is_refused(llm: LLM) -> None:
    for prompt, cache in ((81, 1), (8, 80)):
        with pytest.raises(InputError, match="do not fit the context, which holds 80"):
            llm.profile(prompt, cache)
    with pytest.raises(InputError, match="random tokens"):
        npusim.profile(llm, [np.zeros(1)])
    with pytest.raises(ConfigError, match="from its IR"):
        npusim.profile(llm, accuracy=True)
