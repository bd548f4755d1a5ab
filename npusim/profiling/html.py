"""The report as one HTML page: ``page.html`` with its styles, its script and the data inside of it."""

from __future__ import annotations

import html
import json
from pathlib import Path

from .report import ProfileReport

_FOLDER = Path(__file__).parent


def page(report: ProfileReport) -> str:
    """A page that needs nothing else: no other file, no network."""
    data = json.dumps(report.to_json(), allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(f"{report.model} — npusim profile"),
        "styles": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": (_FOLDER / "page.js").read_text(encoding="utf-8"),
        "data": data.replace("</", "<\\/"),  # a name from a file must not end the script
    }
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text
