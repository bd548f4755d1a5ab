"""Numbers, tensors and tables as text: for terminals, logs, notebooks and JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any


def si(value: float, unit: str = "") -> str:
    """Return a number with three digits and a decimal prefix: '1.23 M' for 1234567."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    text = f"{value:.0f}" if not prefix and value == int(value) else f"{value:.3g}"
    return f"{text} {prefix}{unit}".rstrip()


def table(header: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "  ") -> list[str]:
    """Return the lines of a table; columns whose cells all start with a digit are aligned to the right."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *text, strict=True)]
    right = [bool(text) and all(row[i][:1].isdigit() for row in text) for i in range(len(header))]
    lines = []
    for row in [list(header), *text]:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def printable(text: str) -> str:
    """Return ``text`` as one line with control characters escaped: these could move the cursor or hide text."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def json_safe(value: Any) -> Any:
    """Return ``value`` with NaN and infinities, which JSON lacks, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: json_safe(v) for k, v in value.items()}
    return [json_safe(v) for v in value] if isinstance(value, list | tuple) else value


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], most: int = 100) -> str:
    """Return a table for a notebook, with at most ``most`` rows."""
    shown = list(rows)
    lines = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in shown[:most]]
    if len(shown) > most:
        lines.append(f'<td colspan="{len(header)}">… and {len(shown) - most} more</td>')
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def html_text(text: str) -> str:
    """Return a paragraph for a notebook."""
    return f"<p>{html.escape(text)}</p>"


def tensor_text(shape: Sequence[int], dtype: str) -> str:
    """'float32[2, 3]'."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
