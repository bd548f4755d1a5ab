"""Output of the commands: texts and tables (through rich on a terminal), streamed text, and a status line."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

_PATIENCE = 2.0  # seconds before a status line appears


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


class Status:
    """A line on standard error that says what is in progress. It appears on terminals only, after two seconds."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False):
        self._stream = stream or sys.stderr
        self._on = not quiet and self._stream.isatty()
        self._text = ""

    @contextmanager
    def __call__(self, text: str) -> Iterator[Status]:
        """Show ``text`` and the elapsed seconds while the block runs."""
        self._text = text
        if not self._on:
            yield self
            return
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done, time.monotonic()), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()

    def update(self, text: str) -> None:
        """Replace the text of the line."""
        self._text = text

    def downloading(self, what: str, done: int, total: int) -> None:
        """A progress callback of ``npusim.models.download``."""
        self._text = f"downloading {what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB"

    def _watch(self, done: threading.Event, start: float) -> None:
        if done.wait(_PATIENCE):
            return
        while not done.wait(0.1):
            self._stream.write(f"\r\x1b[K{self._text} … {time.monotonic() - start:.0f} s")
            self._stream.flush()
        self._stream.write("\r\x1b[K")
        self._stream.flush()


def stream(texts: Iterable[str], quiet: bool = False) -> None:
    """Write texts to standard output as they arrive, then a line end. ``quiet``: consume them only."""
    live = sys.stdout.isatty()
    for text in texts:
        if not quiet:
            print(text, end="", flush=live)
    if not quiet:
        print(flush=True)
