"""A Korean page has what its English page has: headings, code blocks, links, figures, tables and names."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from .snippets import ROOT, prose, snippets

DOCS = ROOT / "docs"
ENGLISH = sorted(p for p in DOCS.rglob("*.md") if not p.name.endswith(".ko.md"))
PAIRS = [(p, p.with_suffix(".ko.md")) for p in ENGLISH]
_HANGUL = re.compile(r"[\uac00-\ud7a3]")


def own_prose(page: Path) -> list[str]:
    """The lines that a translator writes: no tables, which may be generated, and no references to docstrings."""
    text = re.sub(r"<!-- bench:\w+ -->.*?<!-- /bench -->", "", "\n".join(prose(page)), flags=re.DOTALL)
    return [line for line in text.splitlines() if line[:1] not in ("|", "<", ":", "!")]


def links(page: Path) -> Counter[str]:
    """The targets of links and figures; their order depends on the language."""
    return Counter(re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page))))


def tables(page: Path) -> list[tuple[int, list[str]]]:
    """The number of columns of every row, and the code in its first cell."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in prose(page) if line.startswith("|")]
    return [(len(row), re.findall(r"`[^`]+`", row[0])) for row in rows]


def names(page: Path) -> list[set[str]]:
    """What every section has in code font: names, options, values."""
    sections = re.split(r"^(?=#+ )", "\n".join(prose(page)), flags=re.MULTILINE)
    return [{" ".join(code.split()) for code in re.findall(r"(?<!`)`[^`|]+`", section)} for section in sections]


def test_every_page_has_a_korean_one() -> None:
    assert sorted(DOCS.rglob("*.ko.md")) == sorted(korean for _, korean in PAIRS)


@pytest.mark.parametrize(("english", "korean"), PAIRS, ids=lambda p: p.name)
def test_pages_say_the_same(english: Path, korean: Path) -> None:
    levels = [[line.split(" ")[0] for line in prose(p) if re.match(r"#+ ", line)] for p in (english, korean)]
    assert levels[0] == levels[1]
    blocks = [[(s.language, s.text, s.mark) for s in snippets(p)] for p in (english, korean)]
    assert blocks[0] == blocks[1]
    references = [[line for line in prose(p) if line.startswith(":::")] for p in (english, korean)]
    assert references[0] == references[1]
    assert links(english) == links(korean)
    assert tables(english) == tables(korean)
    assert names(english) == names(korean)
    assert _HANGUL.search(next(line for line in prose(korean) if line.startswith("# ")))
    assert [line for line in own_prose(korean) if len(line) > 80 and not _HANGUL.search(line)] == []
