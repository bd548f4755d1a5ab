"""The packages form layers: nothing imports, directly or through others, what imports it. Local imports count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
PACKAGES = ("npu_compiler", "npu_runtime", "npusim")

Graph = dict[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the packages by its dotted name; a package by its ``__init__.py``."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ``known`` that a module imports, at its top or inside functions, type checking aside."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for a in node.names:
                target = f"{base}.{a.name}" if f"{base}.{a.name}" in known else base
                if target in known:
                    yield target


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module at all depths, without those for type checking; expressions hold no imports."""
    if not _for_types_only(node):
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                yield from _statements(child)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@lru_cache(maxsize=1)
def import_graph() -> Graph:
    known = modules()
    return {name: set(imports(name, path, known)) - {name} for name, path in known.items()}


def room(module: str) -> str:
    """The folder of a module; modules that stand in the root of a package are rooms of their own."""
    folder = module if modules_by_name[module].stem == "__init__" else module.rpartition(".")[0]
    return module if folder in PACKAGES else folder


modules_by_name = modules()


def room_graph() -> Graph:
    rooms: Graph = {}
    for module, targets in import_graph().items():
        rooms.setdefault(room(module), set()).update(room(t) for t in targets if room(t) != room(module))
    return rooms


def cycles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph.get(v, ())):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            at = stack.index(v)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for v in sorted(graph):
        if v not in index:
            visit(v)
    return found


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("graph", [import_graph, room_graph])
def test_nothing_imports_what_imports_it(graph: object) -> None:
    assert callable(graph)
    assert cycles(graph()) == []


@pytest.mark.parametrize(
    ("package", "foreign"), [("npu_compiler", ("npu_runtime", "npusim")), ("npu_runtime", ("npusim",))]
)
def test_packages_know_only_those_below(package: str, foreign: tuple[str, ...]) -> None:
    above = {
        (name, target)
        for name, targets in import_graph().items()
        if name.split(".")[0] == package
        for target in targets
        if target.split(".")[0] in foreign
    }
    assert above == set()


@pytest.mark.parametrize("stage", ["graph", "passes", "schedule", "targets", "weights"])
def test_no_stage_after_lowering_knows_the_ops(stage: str) -> None:
    knows = {
        (name, target)
        for name, targets in import_graph().items()
        if name.startswith(f"npu_compiler.{stage}.")
        for target in targets
        if target.startswith(("npu_compiler.ops", "npu_compiler.frontend"))
    }
    assert knows == set()


def test_the_root_of_the_compiler_is_short() -> None:
    files = sorted(p.name for p in (ROOT / "npu_compiler").glob("*.py"))
    assert len(files) <= 8, files


def test_a_room_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for name, path in modules().items()
        if path.stem == "__init__" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
