"""Lets ``-k`` select the cases of one file of ops: ``pytest tests/conformance -k views``. On the CPU all threads take
part, however short a program is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_compiler.ops import REGISTRY
from npu_compiler.targets.cpu import target


@pytest.fixture(scope="package", autouse=True)
def all_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "_is_short", lambda schedule, costs: False)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        op_type = getattr(item, "callspec", None) and item.callspec.params.get("op_type")  # type: ignore[attr-defined]
        if op_type in REGISTRY:
            item.extra_keyword_matches.add(REGISTRY[op_type].family)
