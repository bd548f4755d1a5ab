"""The small random llama of the tests of the runtime, and a cache of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_runtime.llm.model import LLM

from . import small_model
from .small_model import MAX_LEN


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from small_model.own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def llm(model: Path, cache: Path) -> LLM:
    return LLM.load(model, max_len=MAX_LEN)
