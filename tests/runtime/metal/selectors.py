"""Checks the Objective-C names in the Metal backend's source against ``tests/data/metal_api.json``.

pyobjc spells the selector ``setBuffer:offset:atIndex:`` as ``setBuffer_offset_atIndex_``: it takes as many arguments
as it has underscores. A selector without arguments looks like any method of Python, so an attribute must be in the
table or be an attribute that Python objects of the backend have. The check knows names, not the class of each object,
so it accepts a selector of the wrong class.
"""

from __future__ import annotations

import ast
import builtins
import concurrent.futures
import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests" / "data" / "metal_api.json"
_OBJC_MODULES = ("Metal", "Foundation", "objc")
_PREFIXED = re.compile(r"(MTL|MPS|NS)[A-Z0-9]\w+")
_SELECTOR_TEXT = re.compile(r"[a-z]\w*:(\w+:)*")
# Every Objective-C object has these, through NSObject or pyobjc; neither package lists them.
_ROOT_SELECTORS = frozenset({"alloc", "init", "respondsToSelector:", "copy"})
_PYTHON_TYPES: tuple[type, ...] = (
    str, bytes, bytearray, memoryview, list, dict, tuple, set, int, float, slice, property, type,
    BaseException, OSError, Path, re.Pattern, re.Match, deque, np.ndarray, np.dtype, threading.Thread, threading.Event,
    type(threading.Lock()),
    concurrent.futures.Future, concurrent.futures.ThreadPoolExecutor,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """``selectors`` of all classes, ``constants`` with their values (None for strings), argument counts of
    ``functions``, names of ``classes``, and by selector the ``returned`` arguments."""

    selectors: frozenset[str]
    constants: dict[str, int | None]
    functions: dict[str, int]
    classes: frozenset[str]
    returned: dict[str, list[int]]


@cache
def table() -> Table:
    """Return the vendored table."""
    data = json.loads(TABLE.read_text())
    selectors = frozenset(s for c in data["classes"].values() for s in c["selectors"]) | _ROOT_SELECTORS
    classes = frozenset(data["classes"])
    return Table(selectors, data["constants"], data["functions"], classes, data["returned_arguments"])


def python_names(sources: list[str]) -> frozenset[str]:
    """Return the attributes of Python objects: those of built-in types, and all that ``sources`` define."""
    names = {name for t in _PYTHON_TYPES for name in dir(t)} | set(dir(builtins))
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Assign(targets=targets):
                    names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return frozenset(names)


def problems(source: str, python: frozenset[str]) -> list[str]:
    """Return what is wrong with the Objective-C names in ``source``, each with its line; ``python`` are the names of
    attributes that are not Objective-C's."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    modules = _modules(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name | ast.Constant):
            found += [f"line {node.lineno}: {text}" for text in _problems_at(node, parents, modules, python)]
    return found


def _modules(tree: ast.Module) -> set[str]:
    """Names bound to Python modules, whose attributes Python checks."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return names - set(_OBJC_MODULES)


def _problems_at(
    node: ast.Attribute | ast.Name | ast.Constant,
    parents: dict[ast.AST, ast.AST],
    modules: set[str],
    python: frozenset[str],
) -> Iterator[str]:
    call = parents.get(node)
    count = len(call.args) if isinstance(call, ast.Call) and call.func is node else None
    match node:
        case ast.Constant(value=str(text)) if _SELECTOR_TEXT.fullmatch(text):
            yield from _unknown_selector(text)
        case ast.Constant(value=str(text)) if _asked_for(node, call):
            if text not in python and text != text.lower():
                yield from _unknown_selector(text.replace("_", ":"))
        case ast.Name(id=name) | ast.Attribute(attr=name) if _PREFIXED.fullmatch(name):
            yield from _framework_name(name, count, python)
        case ast.Attribute(value=ast.Name(id=base)) if base in modules or base in _OBJC_MODULES:
            pass
        case ast.Attribute(attr=name) if name not in python:
            yield from _selector(name, call if count is not None else None, parents)


def _asked_for(node: ast.Constant, call: ast.AST | None) -> bool:
    """Whether a string is the name in ``getattr(x, "name")`` or ``hasattr(x, "name")``."""
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")


def _unknown_selector(selector: str) -> list[str]:
    return [] if selector in table().selectors else [f"no class of Metal has the selector {selector}"]


def _framework_name(name: str, count: int | None, python: frozenset[str]) -> Iterator[str]:
    t = table()
    if name in t.functions and count is not None and count != t.functions[name]:
        yield f"{name} takes {t.functions[name]} arguments, not {count}"
    elif name not in t.functions and name not in t.constants and name not in t.classes and name not in python:
        yield f"{name} is no constant, function or class of Metal"


def _selector(name: str, call: ast.AST | None, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    selector = name.replace("_", ":")
    if unknown := _unknown_selector(selector):
        yield from unknown
    elif not isinstance(call, ast.Call):
        yield f"{selector} is a method: call it"
    elif len(call.args) != selector.count(":") or call.keywords:
        yield f"{selector} takes {selector.count(':')} arguments, not {len(call.args) + len(call.keywords)}"
    elif returned := table().returned.get(selector):
        if any(not isinstance(call.args[at], ast.Constant) for at in returned):
            yield f"{selector} returns its argument {returned[0]}: pass None there"
        match parents[call]:
            case ast.Attribute() | ast.Expr() | ast.Assign(targets=[ast.Name()]):
                yield f"{selector} returns a tuple, whose last item is the error: unpack it"
