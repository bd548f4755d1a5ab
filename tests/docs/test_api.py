"""The API reference: its names are public, and the lists of lazy names are those that type checkers and griffe see."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

import npu_compiler
import npu_runtime

from .snippets import ROOT

NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_public(name: str) -> None:
    package, _, last = name.rpartition(".")
    if package in ("npusim", "npu_compiler", "npu_runtime"):
        assert last in importlib.import_module(package).__all__
    found = getattr(importlib.import_module(package), last)
    assert found.__doc__


@pytest.mark.parametrize(
    ("package", "homes"), [("npu_compiler", npu_compiler._LAZY), ("npu_runtime", npu_runtime._MODULE_OF)]
)
def test_type_checkers_see_the_lazy_names(package: str, homes: dict[str, str]) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.name: i.module for i in block.body if isinstance(i, ast.ImportFrom) for a in i.names}
    assert homes.items() <= seen.items()
    public = set(importlib.import_module(package).__all__)
    assert set(homes) - public <= {"CUDABackend", "MetalBackend"} and public - set(homes) <= {"compile"}
