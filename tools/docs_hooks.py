"""What mkdocs does to pages before it renders them.

Headings of a Korean page have the anchors of the English page, so links with anchors are the same in both languages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify, unique

_HEADING = re.compile(r"(#+) +(.+?) *")


def headings(lines: list[str]) -> list[int]:
    """The numbers of the lines that are headings: those in code blocks are not."""
    found, inside = [], False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and _HEADING.fullmatch(line):
            found.append(number)
    return found


def anchors(lines: list[str]) -> list[str]:
    """The anchor of every heading, as the extension ``toc`` makes it."""
    used: set[str] = set()
    found = []
    for number in headings(lines):
        text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", lines[number].lstrip("# "))
        found.append(unique(slugify(text, "-"), used))
    return found


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Give the headings of a Korean page the anchors of the English one."""
    if not page.file.src_uri.endswith(".ko.md"):
        return markdown
    english = Path(config.docs_dir, page.file.src_uri.removesuffix(".ko.md") + ".md").read_text(encoding="utf-8")
    lines = markdown.split("\n")
    for number, anchor in zip(headings(lines), anchors(english.split("\n")), strict=True):
        lines[number] += f" {{ #{anchor} }}"
    return "\n".join(lines)
