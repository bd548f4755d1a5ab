"""The site builds without a warning, has every page in both languages, and requests nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .snippets import ROOT

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

_LOADS = re.compile(r'<(?:script|link|img|iframe|source|video|audio)\b[^>]*?\b(?:src|href)="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def english(site: Path) -> set[Path]:
    """The English pages of a site, without their suffixes."""
    pages = {p.relative_to(site).with_suffix("") for p in site.rglob("*.html")}
    return {p for p in pages if p.parts[0] not in ("ko", "404")}


def test_every_page_is_there_in_both_languages(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {p.relative_to(docs).with_suffix("") for p in docs.rglob("*.md") if not p.name.endswith(".ko.md")}
    assert english(site) == {p.relative_to(site / "ko").with_suffix("") for p in (site / "ko").rglob("*.html")} == pages


def test_every_page_is_in_the_navigation(site: Path) -> None:
    page = (site / "faq.html").read_text(encoding="utf-8")
    listed = {Path(name) for name in re.findall(r'<a href="([\w/]+)\.html" class="md-nav__link', page)}
    assert english(site) - {Path("faq")} <= listed


def test_readers_switch_and_search_in_both_languages(site: Path) -> None:
    for page, links in (("faq.html", ["faq.html", "ko/faq.html"]), ("ko/faq.html", ["../faq.html", "faq.html"])):
        assert re.findall(r'<a href="([^"]+)" hreflang="\w+"', (site / page).read_text(encoding="utf-8")) == links
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert index["config"]["lang"] == ["en", "ko"]
    assert {"faq.html", "ko/faq.html"} <= {entry["location"] for entry in index["docs"]}


def test_pages_request_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = _LOADS.findall(page.read_text(encoding="utf-8"))
        assert len(loads) > 3 and [x for x in loads if re.match(r"\w+://|//", x)] == [], page.name
    sheets = "".join(p.read_text(encoding="utf-8") for p in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheets)


def test_figures_and_search_are_there(site: Path) -> None:
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    shown = set(re.findall(r'<img [^>]*src="(figures/\w+\.svg)"', "".join(p.read_text() for p in site.glob("*.html"))))
    assert shown == {f"figures/{name}.svg" for name in ("pipeline", "memory_plan", "roofline")}
    assert all((site / name).is_file() for name in shown)
