"""Options of the whole test suite."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    cases = int(os.environ.get("NPU_FUZZ_CASES", "2000"))
    parser.addoption("--fuzz-cases", type=int, default=cases, help="cases of each kind in tests/fuzz (default: 2000)")


@pytest.fixture(scope="session")
def fuzz_cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz-cases"))
