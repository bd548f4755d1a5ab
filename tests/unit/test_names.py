"""docs/names.md: what its table tells people to write exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "names.md"
NAME = re.compile(r"`(npu_[\w.]+)(?:\(([^)`]*)\))?`")


def cells() -> list[tuple[str, str]]:
    """(documented, here) of every row."""
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(documented.strip(), here.strip()) for documented, here in rows]


def resolve(path: str) -> Any:
    """A module, something in it, or an annotated field of a class in it."""
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


@pytest.mark.parametrize(("documented", "here"), cells())
def test_every_name_is_there(documented: str, here: str) -> None:
    names = NAME.findall(here)
    assert names and not NAME.sub("", here).strip(" ,"), f"{here}: something that is not a name"
    for path, arguments in names:
        found = resolve(path)
        wanted = [a.strip().rstrip("=") for a in arguments.split(",") if a.strip()]
        taken = inspect.signature(found).parameters if wanted else {}
        assert [a for a in wanted if a not in taken] == []


@pytest.mark.parametrize("name", ["compile_graph", "NPUBuffer", "Device", "DispatchStrategy"])
def test_unknown_names_lead_to_the_page(name: str) -> None:
    for package in ("npu_compiler", "npu_runtime"):
        with pytest.raises(AttributeError, match=r"docs/names\.md"):
            getattr(importlib.import_module(package), name)


def test_the_page_is_a_table_of_many_names() -> None:
    rows = cells()
    assert len(rows) > 40 and len({documented for documented, _ in rows}) == len(rows)
    assert "docs/names.md" in (PAGE.parents[1] / "README.md").read_text()
