"""Output of the commands: texts and tables (through rich on a terminal), and streamed text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass(frozen=True)
class Table:
    """A header and rows of cells, shown in aligned columns."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Result:
    """The outcome of a command: ``data`` for --json, ``blocks`` (texts and tables) for people, the exit ``code``."""

    data: dict[str, Any]
    blocks: list[str | Table] = field(default_factory=list)
    code: int = 0


def show(blocks: Sequence[str | Table], stream: TextIO | None = None) -> None:
    """Print blocks to ``stream`` (default: standard output). Control characters, which names from files may have, are
    shown as escapes."""
    from npu_compiler.support.text import printable, table

    stream = stream or sys.stdout
    printer = _rich_printer(stream) if stream.isatty() and "NO_COLOR" not in os.environ else None
    for block in blocks:
        if isinstance(block, str):
            print("\n".join(map(printable, block.split("\n"))), file=stream)
            continue
        rows = [[printable(str(cell)) for cell in row] for row in block.rows]
        if printer is not None:
            printer(Table(block.header, rows))
        else:
            print("\n".join(table(block.header, rows, indent="")), file=stream)


def _rich_printer(stream: TextIO) -> Any:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        return None

    def print_table(block: Table) -> None:
        shown = RichTable(box=None, header_style="bold", pad_edge=False)
        for i, name in enumerate(block.header):
            right = bool(block.rows) and all(str(row[i])[:1].isdigit() for row in block.rows)
            shown.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in block.rows:
            shown.add_row(*(str(cell).replace("[", "\\[") for cell in row))
        Console(file=stream).print(shown)

    return print_table


def stream(texts: Iterable[str], quiet: bool = False) -> None:
    """Write texts to standard output as they arrive, then a line end. ``quiet``: consume them only."""
    live = sys.stdout.isatty()
    for text in texts:
        if not quiet:
            print(text, end="", flush=live)
    if not quiet:
        print(flush=True)
