"""The table of operators, derived from the registry: for the documentation and the command line."""

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
    """Every native overload, by family and name."""
    for op_type, op in sorted(REGISTRY.items(), key=lambda item: (item[1].family, item[0])):
        yield Row(op_type, op.family, op.dtypes, len(op.samples), op.doc)


def operators_markdown() -> str:
    """The page of native operators: a section a family, a row an overload."""
    rows = list(operators())
    lines = [
        "# Operators",
        "",
        f"{len(rows)} ATen overloads are native. Each is tested with the number of samples and the dtypes shown, "
        "against PyTorch and float64; in-place variants of all of them are lowered as well.",
    ]
    for family, members in groupby(rows, key=lambda row: row.family):
        lines += ["", f"## {family.replace('_', ' ').capitalize()}", ""]
        lines += ["| overload | what it computes | tested dtypes | samples |", "|---|---|---|---:|"]
        lines += [f"| `{r.op_type}` | {_cell(r.doc)} | {' '.join(r.dtypes)} | {r.samples} |" for r in members]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that cannot break a table: bars and brackets of index notation escaped."""
    return text.replace("|", "\\|").replace("[", "\\[").replace("*", "\\*")
