"""Options of the whole test suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from .support.sweeps import FULL


def pytest_addoption(parser: pytest.Parser) -> None:
    cases = int(os.environ.get("NPU_FUZZ_CASES", "2000" if FULL else "300"))
    parser.addoption("--fuzz-cases", type=int, default=cases, help="cases of each kind in tests/fuzz (default: 300)")


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes share a long run, they share precompiled headers, and each compiles a program's kernels
    at once: two compilers would instantiate the same templates."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        from .support.precompiled import use_precompiled_headers

        os.environ.setdefault("NPU_COMPILE_JOBS", "1")
        use_precompiled_headers()


def pytest_collection_finish() -> None:
    """Thousands of tests and the modules that they import stay until the end: the garbage collector need not look at
    them again, and collects the many objects of a graph less often. It was an eighth of the time of a capture."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


@pytest.fixture(scope="module", autouse=True)
def settings_are_left_alone() -> Iterator[None]:
    """A file of tests that lost NPU_CXX would make all later ones compile without precompiled headers."""
    before = _settings()
    yield
    assert _settings() == before


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NPU_")}


@pytest.fixture(scope="session")
def fuzz_cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz-cases"))
