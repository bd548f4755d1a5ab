"""The table of docs/names.md: documented names, what they are called here, and whether that exists."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "names.md"
_NAME = re.compile(r"`(npu_[\w.]+)(?:\(([^)`]*)\))?`")
_PATH = re.compile(r"`([\w.-]+/[\w./*-]*)`")
_WORD = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """One line of the table: the documented name, what to write here, and what differs."""

    documented: str
    here: str
    differs: str

    @property
    def spellings(self) -> list[str]:
        """The documented names of this row."""
        return _WORD.findall(self.documented) or [self.documented]

    def check(self) -> None:
        """Assert that every name and file in the column ``here`` exists and takes the listed arguments."""
        names, paths = _NAME.findall(self.here), _PATH.findall(self.here)
        rest = _PATH.sub("", _NAME.sub("", self.here)).strip(" ,")
        assert (names or paths) and not rest, f"{self.here}: something that is not a name"
        for path in paths:
            assert list(ROOT.glob(path.rstrip("/"))), f"there is no {path}"
        for path, arguments in names:
            found = resolve(path)
            wanted = [a.strip().rstrip("=") for a in arguments.split(",") if a.strip()]
            taken = inspect.signature(found).parameters if wanted else {}
            assert [a for a in wanted if a not in taken] == [], f"{path} does not take all of {wanted}"


@cache
def rows() -> tuple[Row, ...]:
    """Every line of the page's tables."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [line.strip("|").split("|") for line in lines if not line.startswith("| documented |")]
    return tuple(Row(*(cell.strip() for cell in line)) for line in cells)


def row_of(spelling: str) -> Row:
    """Return the line for a documented name, such as ``NPUBuffer`` or ``Executor(program, device)``."""
    found = [row for row in rows() if spelling in row.spellings]
    assert len(found) == 1, f"{PAGE.name} has {len(found)} lines for {spelling!r}"
    return found[0]


def resolve(path: str) -> Any:
    """Return a module, something in it, or an annotated field of a class in it."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            assert (error.name or "").startswith("npu_"), f"{path} needs {error.name}"
            continue
        for part in parts[cut:]:
            fields = get_type_hints(found) if inspect.isclass(found) else {}
            found = fields[part] if part in fields and not hasattr(found, part) else getattr(found, part)
        return found
    raise AssertionError(f"there is no {path}")
