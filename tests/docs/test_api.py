"""The API reference: its names are public, and the lists of lazy names are those that type checkers and griffe see."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import npu_compiler
import npu_runtime

from .snippets import ROOT

NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_names_are_there_once() -> None:
    assert sorted(NAMES) == sorted(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_public(name: str) -> None:
    package, _, last = name.rpartition(".")
    if package in ("npusim", "npu_compiler", "npu_runtime"):
        assert last in importlib.import_module(package).__all__
    found = getattr(importlib.import_module(package), last)
    assert found.__doc__


def documented(found: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A function, or the public methods of a class, with its docstring."""
    methods = [f for n, f in vars(found).items() if n[0] != "_"] if inspect.isclass(found) else []
    for f in (found, *(inspect.unwrap(getattr(m, "__func__", m)) for m in methods)):
        if callable(f) and f.__doc__:
            yield inspect.cleandoc(f.__doc__), f


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_documented_by_their_names(name: str) -> None:
    """A build of the site is strict about it, too."""
    package, _, last = name.rpartition(".")
    for text, f in documented(getattr(importlib.import_module(package), last)):
        section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
        arguments = re.findall(r"^    (\S[^:\n]*):", section[1], re.MULTILINE) if section else []
        assert [a for a in arguments if a.lstrip("*") not in inspect.signature(f).parameters] == [], f


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
