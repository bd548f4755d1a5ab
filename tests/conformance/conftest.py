"""Lets ``-k`` select the cases of one file of ops: ``pytest tests/conformance -k views``."""

from __future__ import annotations

import pytest

from .cases import Case


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
        if isinstance(case, Case):
            item.extra_keyword_matches.add(case.family)
