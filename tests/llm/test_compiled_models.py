"""Every supported kind of decoder, compiled, against transformers: prompts, single tokens, whole answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runtime.llm.model import LLM

from ..models.gate import largest
from ..support.sweeps import FULL
from . import tiny
from .gguf_writer import write_gguf
from .teacher import Teacher, teacher

LENGTH = 300
PROMPTS = (1, 7, 33, 200)

# Compiling each takes ten seconds. These differ most: ropes, norms, windows, caps, head layouts; FULL runs all of them.
FEW = [("llama3.gguf", "bfloat16"), ("qwen3", "float32"), ("gemma3_text", "bfloat16"), ("phi3-long", "bfloat16")]
ALL = [(name, dtype) for name in (*tiny.CASES, "qwen2.gguf") for dtype in ("float32", "bfloat16")]
ALL += [("llama3.gguf", "bfloat16")]  # not float32: its frequencies are stored as rounded quotients


def model_of(name: str) -> Any:
    name, _, file = name.partition(".")
    changes = {"hidden_act": "silu"} if file else {}  # what a GGUF llama has
    return tiny.hf_model(name, max_position_embeddings=LENGTH, **changes)


@cache
def reference(name: str, dtype: str) -> Teacher:
    return teacher(model_of(name), dtype, [tiny.text_ids(LENGTH)])


@pytest.mark.parametrize(("name", "dtype"), ALL if FULL else FEW)
def test_logits_and_answers_are_those_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    model = model_of(name)
    if name.endswith(".gguf"):
        path = write_gguf(tmp_path / name, model, {"llama3.gguf": "llama"}.get(name, "qwen2"))
    else:
        path = tiny.save(model, tmp_path)
    llm = LLM.load(path, max_len=LENGTH, dtype=dtype, cache=False)
    ids, forced = tiny.text_ids(LENGTH), reference(name, dtype)
    for prompt in PROMPTS:
        found = forced.check(llm.logits(ids, prompt), slice(prompt - 1, None))
        print(f"{name} {dtype}, prompt of {prompt}: {found}")
    answer = llm.generate(ids[:33], max_tokens=LENGTH - 33, ignore_eos=True, stream=False)
    text = [*ids[:33], *answer.tokens]
    assert len(text) == LENGTH
    own = teacher(model_of(name), dtype, [text])
    chosen, best = own.exact[32:-1][np.arange(LENGTH - 33), answer.tokens], own.exact[32:-1].max(-1)
    assert (best - chosen <= 2 * largest(own.eager - own.exact)).all(), "a token of the answer is not the best one"


def test_what_always_runs_is_part_of_the_whole() -> None:
    """And has every kind of layer, and both types of numbers."""
    assert set(FEW) <= set(ALL)
    types = {tiny.CASES[name.removesuffix(".gguf")][0] for name, _ in FEW}
    assert types == {"Llama", "Qwen3", "Gemma3", "Phi3"}  # a Mistral is a Llama with a window, a Qwen2 one with biases
    assert {dtype for _, dtype in FEW} == {"float32", "bfloat16"}
