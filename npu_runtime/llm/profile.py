"""Execution times of a language model's entry points: a prompt, and one step of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from npu_compiler.support.errors import InputError

from ..profiler import EntryProfile
from .chunks import Chunk

if TYPE_CHECKING:
    from .model import LLM


@dataclass(frozen=True)
class LLMProfile:
    """The times of an entry point that computes ``tokens`` tokens after ``start`` others; a prompt takes ``count`` such
    runs. The keys and values of the ``start`` tokens are the current contents of the caches."""

    times: EntryProfile
    tokens: int
    start: int
    count: int = 1


def profile_llm(llm: LLM, prompt: int, cache: int, runs: int, warmup: int) -> list[LLMProfile]:
    """Profile the entry points that a prompt of ``prompt`` tokens uses, at the last position of each, and a decode step
    after ``cache`` tokens. The caches are restored afterwards. Raises ``InputError`` if either does not fit the
    context."""
    if not (1 <= prompt <= llm.max_len and 0 <= cache < llm.max_len):
        raise InputError(
            f"a prompt of {prompt} tokens and a step after {cache} do not fit the context, which holds {llm.max_len}; "
            "ask for less, or load the model with a larger max_len"
        )
    chunks = llm.chunks(0, prompt)
    last = {chunk.size: chunk for chunk in chunks}
    counts = [sum(c.size == size for c in chunks) for size in last]
    measured = [_measure(llm, chunk, runs, warmup, n) for chunk, n in zip(last.values(), counts, strict=True)]
    return [*measured, _measure(llm, Chunk(cache, cache + 1, 1), runs, warmup)]


def _measure(llm: LLM, chunk: Chunk, runs: int, warmup: int, count: int = 1) -> LLMProfile:
    executor = llm.executor(chunk.size)
    rng = np.random.default_rng(0)
    tokens = np.zeros((1, chunk.size), np.int64)
    used = chunk.stop - chunk.start
    tokens[0, :used] = rng.integers(0, llm.vocab, used)
    positions = np.arange(chunk.start, chunk.start + chunk.size)
    values = {"token_ids": tokens, "positions": positions, "last": np.array([used - 1])}
    return LLMProfile(executor.profile(values, runs, warmup), used, chunk.start, count)
