"""The result of a profile, with its views: text, HTML in notebooks, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npu_compiler.support.errors import ConfigError, InputError
from npu_compiler.support.files import write_atomic
from npu_compiler.support.records import Field, parse_json
from npu_compiler.support.text import html_table, html_text, json_safe, si, table

from . import html, model_explorer, trace
from .reading import read_profile
from .records import Profile, Section

SCHEMA = 1
HEADER = ("#", "lost µs", "µs", "share", "of roof", "GFLOP/s", "GB/s", "kernel", "kind", "module")


@dataclass(frozen=True)
class ProfileReport(Profile):
    """The result of a profile. Views: :meth:`table`, :meth:`save`, and an HTML table in notebooks."""

    def __str__(self) -> str:
        return self.table()

    def summary(self, section: Section) -> str:
        """Return a section in one line."""
        many = f" ({section.count} such runs)" if section.count > 1 else ""
        roof = f", {section.of_roof:.0%} of the roofline" if section.roof else ""
        seconds = section.seconds or 1.0
        rates = f"{si(section.flops / seconds, 'FLOP/s')}, {si(section.nbytes / seconds, 'B/s')}"
        return (
            f"{section.title}: {section.seconds * 1e3:.3f} ms{many}, {section.whole * 1e3:.3f} ms without timing "
            f"(medians of {section.runs} runs); {len(section.rows)} steps, {rates}{roof}"
        )

    def cells(self, section: Section) -> list[tuple[object, ...]]:
        """Return the rows of the table whose header is :data:`HEADER`, those that lose the most time first."""
        total = section.kernel_seconds or 1.0
        return [
            (
                r.index, f"{r.lost * 1e6:.1f}", f"{r.seconds * 1e6:.1f}", f"{r.seconds / total:.1%}",
                f"{r.of_roof:.0%}" if r.roof else "-", f"{r.gflops:.1f}", f"{r.gbytes:.1f}", _clip(r.name, 32),
                r.kind if r.device == "npu" else r.device, _clip(r.module, 44),
            )
            for r in sorted(section.rows, key=lambda r: (-r.lost, -r.seconds))
        ]  # fmt: skip

    def table(self, limit: int | None = 20) -> str:
        """Return the sections as text, the rows that lose the most time first, at most ``limit`` of each."""
        lines = [f"{self.model} on {self.machine} ({self.device}), {self.dtype}"]
        for section in self.sections:
            cells = self.cells(section)
            lines += ["", self.summary(section), *table(HEADER, cells[:limit])]
            lines += [f"  … {len(cells) - limit} more"] if limit is not None and len(cells) > limit else []
        if self.not_on_npu:
            rows = [(n.node, n.op, n.reason) for n in self.not_on_npu]
            lines += ["", "not on the NPU", *table(("node", "op", "reason"), rows)]
        return "\n".join([*lines, *(f"\nnote: {note}" for note in self.notes)]) + "\n"

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = html_text(f"{self.model} on {self.machine} ({self.device}), {self.dtype}")
        return head + "".join(html_text(self.summary(s)) + html_table(HEADER, self.cells(s), 30) for s in self.sections)

    # -- files ------------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Return all records as JSON-safe data; :meth:`from_json` reads it."""
        return {"schema": SCHEMA, **json_safe(asdict(self))}

    @classmethod
    def from_json(cls, data: Any, origin: str = "the profile") -> ProfileReport:
        """Return the report of data that :meth:`to_json` made. Raises ``InputError`` for other data; the message begins
        with ``origin``."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{origin} is not a profile that this version reads; write one with npusim profile --json")
        try:
            return read_profile(cls, Field(data, "", InputError))
        except InputError as error:
            raise InputError(f"{origin} is damaged: {error}; write it again") from None

    def save(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write one view, atomically. ``format``: 'html', 'json', 'trace' (Perfetto) or 'model-explorer'; None: by the
        file's name, '.html' or '.json'. Raises ``InputError`` if the file cannot be written, ``ConfigError`` for any
        other format."""
        target = Path(path)
        views: dict[str, Callable[[], str]] = {
            "html": lambda: html.page(f"{self.model}: npusim profile", self.to_json()),
            "json": lambda: json.dumps(self.to_json(), allow_nan=False),
            "trace": lambda: json.dumps(trace.trace(self), allow_nan=False),
            "model-explorer": lambda: json.dumps(model_explorer.graphs(self), allow_nan=False),
        }
        format = target.suffix.removeprefix(".") if format is None else format
        if format not in views:
            raise ConfigError(f"{target}: a profile is saved as {', '.join(views)}, not as {format!r}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, views[format]().encode())
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None
        return target


def read_report(path: str | os.PathLike[str]) -> ProfileReport:
    """Read a report from a file that ``save(..., 'json')`` wrote. Raises ``InputError``."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return ProfileReport.from_json(parse_json(text, str(path), InputError), str(path))


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
