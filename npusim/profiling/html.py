"""The report as one HTML page: the files in ``page/`` with the data inside of it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("core", "timeline", "roofline", "modules", "accuracy", "table", "memory", "main")  # in order


def page(title: str, report: Mapping[str, Any]) -> str:
    """Return a self-contained page, without other files or network access. ``report``: the JSON form of a report."""
    data = json.dumps(report, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "styles": _text("page.css"),
        "script": "\n".join(_text(f"{name}.js") for name in _SCRIPTS),
        "data": data.replace("<", "\\u003c"),  # a name from a file must not end the script
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("page.html"))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
