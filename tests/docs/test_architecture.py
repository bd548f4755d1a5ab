"""The page on the architecture lists every folder, and a folder imports only what earlier rows of its tables list."""

from __future__ import annotations

import re

import pytest

from ..unit.test_package_graph import PACKAGES, room_graph
from .snippets import ROOT


def rows(package: str) -> list[list[str]]:
    """The paths that the rows of a package's table name, as modules."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition(f"| `{package}/` |")[2].partition("\n\n")[0]
    named = [re.findall(r"`([\w/.]+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    return [[f"{package}.{name.removesuffix('.py').strip('/').replace('/', '.')}" for name in row] for row in named]


ROWS = [row for package in PACKAGES for row in rows(package)]


def row_of(room: str) -> int | None:
    """The row that lists a folder or, if none does, the nearest folder above it."""
    for name in (room.rsplit(".", n)[0] for n in range(room.count(".") + 1)):
        if number := [n for n, row in enumerate(ROWS) if name in row]:
            return number[0]
    return None  # a module in the root of a package


def test_every_folder_is_listed() -> None:
    folders = {r for r in room_graph() if ROOT.joinpath(*r.split(".")).is_dir() and r not in PACKAGES}
    assert len(ROWS) > 25 and sorted(f for f in folders if row_of(f) is None) == []


def test_what_is_listed_is_there() -> None:
    paths = [ROOT.joinpath(*name.split(".")) for row in ROWS for name in row]
    assert [p for p in paths if not p.is_dir() and not p.with_suffix(".py").is_file()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_from_earlier_rows(package: str) -> None:
    later = [
        (room, target)
        for room, targets in room_graph().items()
        if room.split(".")[0] == package and (own := row_of(room)) is not None
        for target in targets
        if (other := row_of(target)) is not None and other > own
    ]
    assert later == []
