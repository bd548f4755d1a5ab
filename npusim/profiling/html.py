"""The report as one HTML page: ``page.html`` with its styles, its script and the data inside of it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def page(title: str, report: Mapping[str, Any]) -> str:
    """A page that needs nothing else: no other file, no network. ``report``: the JSON form of a report."""
    data = json.dumps(report, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "styles": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": (_FOLDER / "page.js").read_text(encoding="utf-8"),
        "data": data.replace("</", "<\\/"),  # a name from a file must not end the script
    }
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text
