"""The table of operators for the documentation and the command line, derived from the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from . import REGISTRY


@dataclass(frozen=True)
class Row:
    """One overload: the file that declares it, the dtypes and number of samples it is tested with, its doc line."""

    op_type: str
    family: str
    dtypes: tuple[str, ...]
    samples: int
    doc: str


def operators() -> Iterator[Row]:
    """Return every native overload, by family and name."""
    for op_type, op in sorted(REGISTRY.items(), key=lambda item: (item[1].family, item[0])):
        doc = f"{op.doc} Not on Metal, which has no float64." if op.arithmetic == "float64" else op.doc
        yield Row(op_type, op.family, op.dtypes, len(op.samples), doc)


def operators_markdown() -> str:
    """Return the page of native operators: one section per family, one row per overload."""
    rows = list(operators())
    lines = [
        "# Operators",
        "",
        f"{len(rows)} overloads of ATen ops and of quantised models' ops are native. Each is tested with the number of "
        "samples and the dtypes shown, "
        "against PyTorch and float64; in-place variants of all of them are lowered as well.",
    ]
    for family, members in groupby(rows, key=lambda row: row.family):
        lines += ["", f"## {family.replace('_', ' ').capitalize()}", ""]
        lines += ["| overload | what it computes | tested dtypes | samples |", "|---|---|---|---:|"]
        lines += [f"| `{r.op_type}` | {_cell(r.doc)} | {' '.join(r.dtypes)} | {r.samples} |" for r in members]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escape bars and brackets, which would break a table."""
    return text.replace("|", "\\|").replace("[", "\\[").replace("*", "\\*")
