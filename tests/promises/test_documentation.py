"""The documentation: a site in English and Korean. ``tests/docs`` runs its code blocks and compares the languages."""

from __future__ import annotations

import re

import pytest

from ..support.names_page import ROOT
from .test_quick_start import extra

DOCS = ROOT / "docs"
PAGES = """index concepts setup usage partitioning operators architecture extending porting performance
troubleshooting faq api names""".split()
PLUGINS = {"i18n": "mkdocs-static-i18n", "mkdocstrings": "mkdocstrings", "autorefs": "mkdocstrings"}
HANGUL = re.compile(r"[\uac00-\ud7a3]")


def settings() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_row_004_the_site_has_settings_pages_and_an_extra() -> None:
    """uv sync --extra docs, then uv run mkdocs serve."""
    pages = set(re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", settings(), re.MULTILINE))
    assert pages and not [page for page in pages if not (DOCS / page).is_file()]
    assert set(PAGES) <= {page.removesuffix(".md") for page in pages}
    named = re.findall(r"^  - (\w+)(?::|$)", settings().partition("\nplugins:")[2], re.MULTILINE)
    wanted = {PLUGINS[name] for name in named if name != "search"} | {"mkdocs-material"}
    assert wanted <= extra("docs")


@pytest.mark.parametrize("page", PAGES)
def test_row_005_pages_in_english(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert text.startswith("# ") and len(text.splitlines()) > 10 and not HANGUL.search(text)


@pytest.mark.parametrize("page", PAGES)
def test_row_006_pages_in_korean(page: str) -> None:
    text = (DOCS / f"{page}.ko.md").read_text(encoding="utf-8")
    assert re.match(r"# .*", text) and HANGUL.search(text)


def test_row_008_a_page_on_partitioning() -> None:
    text = (DOCS / "partitioning.md").read_text(encoding="utf-8")
    for name in ("npu_compiler.partition(", "force_cpu", "is_supported", "transfer", "DAGExecutor"):
        assert name in text, f"docs/partitioning.md explains {name}"


def test_the_readme_leads_to_operators_and_partitioning() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/operators.md" in text and "docs/partitioning.md" in text
