"""docs/names.md: what its table tells people to write exists."""

from __future__ import annotations

import importlib

import pytest

from ..support.names_page import ROOT, Row, rows


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.spellings[0])
def test_every_name_is_there(row: Row) -> None:
    row.check()


@pytest.mark.parametrize("name", ["compile_graph", "NPUBuffer", "Device", "DispatchStrategy"])
def test_unknown_names_lead_to_the_page(name: str) -> None:
    for package in ("npu_compiler", "npu_runtime"):
        with pytest.raises(AttributeError, match=r"docs/names\.md"):
            getattr(importlib.import_module(package), name)


def test_the_page_is_a_table_of_many_names() -> None:
    spellings = [name for row in rows() for name in row.spellings]
    assert len(rows()) > 40 and len(set(spellings)) == len(spellings)
    assert "docs/names.md" in (ROOT / "README.md").read_text(encoding="utf-8")
