"""Checks the Objective-C names in the Metal backend's source against ``tests/data/metal_api.json``.

pyobjc spells the selector ``setBuffer:offset:atIndex:`` as ``setBuffer_offset_atIndex_``: it takes as many arguments
as it has underscores. A selector without arguments looks like any method of Python, so an attribute must be in the
table or be an attribute that Python objects of the backend have. The check knows names, not the class of each object;
a selector of the wrong class fails when it is called, because ``test_stand_in.py`` checks the methods of each class.
"""

from __future__ import annotations

import ast
import builtins
import concurrent.futures
import hashlib
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
_VARLIST = frozenset({"as_buffer", "as_tuple"})  # of pyobjc's arrays of unknown length
_PYTHON_TYPES: tuple[type, ...] = (
    str, bytes, bytearray, memoryview, list, dict, tuple, set, int, float, slice, property, type,
    BaseException, OSError, Path, re.Pattern, re.Match, deque, np.ndarray, np.dtype, threading.Thread, threading.Event,
    type(threading.Lock()), type(hashlib.sha256()),
    concurrent.futures.Future, concurrent.futures.ThreadPoolExecutor,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """``selectors`` of all classes, ``constants`` with their values (None for strings), argument counts of
    ``functions``, fields of ``structs``, names of ``classes``, and by selector the ``returned`` arguments."""

    selectors: frozenset[str]
    constants: dict[str, int | None]
    functions: dict[str, int]
    structs: dict[str, list[str]]
    classes: frozenset[str]
    returned: dict[str, list[int]]


@cache
def table() -> Table:
    """Return the vendored table."""
    data = json.loads(TABLE.read_text())
    selectors = frozenset(s for c in data["classes"].values() for s in c["selectors"]) | _ROOT_SELECTORS
    classes = frozenset(data["classes"])
    names = (data[key] for key in ("constants", "functions", "structs"))
    return Table(selectors, *names, classes, data["returned_arguments"])


def python_names(sources: list[str]) -> frozenset[str]:
    """Return the attributes of Python objects: those of built-in types, and all that ``sources`` define."""
    names = {name for t in _PYTHON_TYPES for name in dir(t)} | set(dir(builtins)) | _VARLIST
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


@dataclass(frozen=True)
class _File:
    """``parents``: of each node. ``modules``: names of Python's modules, whose attributes Python checks. ``python``:
    attributes that are not Objective-C's. ``methods``: bound methods by the local name that they have in the file.
    ``indexed``: local names that are subscripted."""

    parents: dict[ast.AST, ast.AST]
    modules: frozenset[str]
    python: frozenset[str]
    methods: dict[str, str]
    indexed: frozenset[str]

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """The call of which ``node`` is the function."""
        call = self.parents.get(node)
        return call if isinstance(call, ast.Call) and call.func is node else None


def problems(source: str, python: frozenset[str]) -> list[str]:
    """Return what is wrong with the Objective-C names in ``source``, each with its line; ``python`` are the names of
    attributes that are not Objective-C's."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    indexed = {n.value.id for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}
    file = _File(parents, _modules(nodes), python, dict(_bound_methods(nodes)), frozenset(indexed))
    return [f"line {node.lineno}: {text}" for node in nodes for text in _problems_at(node, file)]  # type: ignore[attr-defined]


def _modules(nodes: list[ast.AST]) -> frozenset[str]:
    imports = (n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
    return frozenset((a.asname or a.name).split(".")[0] for n in imports for a in n.names) - set(_OBJC_MODULES)


def _bound_methods(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """(local name, attribute) of assignments such as ``end, commit = encoder.endEncoding, buffer.commit``."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if tuples else [(target, value)]
            for name, method in pairs:
                if isinstance(name, ast.Name) and isinstance(method, ast.Attribute) and method.attr.endswith("_"):
                    yield name.id, method.attr


def _problems_at(node: ast.AST, file: _File) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if _SELECTOR_TEXT.fullmatch(text):
            yield from _unknown_selector(text)
        case ast.Constant(value=str(text)) if _asked_for(file.parents.get(node)):
            if text not in file.python and text != text.lower():
                yield from _unknown_selector(text.replace("_", ":"))
        case ast.Name(id=name) | ast.Attribute(attr=name) if _PREFIXED.fullmatch(name):
            yield from _framework_name(name, file.call_of(node), file)
        case ast.Name(id=name) if name in file.methods and file.call_of(node) is not None:
            yield from _selector(file.methods[name], file.call_of(node), file)
        case ast.Attribute(value=ast.Name(id=base)) if base in file.modules or base in _OBJC_MODULES:
            pass
        case ast.Attribute(attr=name) if name not in file.python:
            yield from _selector(name, file.call_of(node), file)


def _asked_for(call: ast.AST | None) -> bool:
    """Whether a string is the name in ``getattr(x, "name")`` or ``hasattr(x, "name")``."""
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")


def _unknown_selector(selector: str) -> list[str]:
    return [] if selector in table().selectors else [f"no class of Metal has the selector {selector}"]


def _framework_name(name: str, call: ast.Call | None, file: _File) -> Iterator[str]:
    t = table()
    takes = t.functions.get(name, len(t.structs.get(name, ())))
    known = name in t.functions or name in t.structs
    if known and call is not None and len(call.args) != takes:
        yield f"{name} takes {takes} arguments, not {len(call.args)}"
    elif not known and name not in t.constants and name not in t.classes and name not in file.python:
        yield f"{name} is not a constant, function, struct or class of Metal"


def _selector(name: str, call: ast.Call | None, file: _File) -> Iterator[str]:
    selector = name.replace("_", ":")
    count = selector.count(":")
    if unknown := _unknown_selector(selector):
        yield from unknown
    elif call is None:
        if not count:  # one with arguments may be called later, by another name
            yield f"{selector} is a method: call it"
    elif len(call.args) != count or call.keywords:
        yield f"{selector} takes {count} arguments, not {len(call.args) + len(call.keywords)}"
    elif returned := table().returned.get(selector):
        if any(not isinstance(call.args[at], ast.Constant) for at in returned):
            yield f"{selector} returns its argument {returned[0]}: pass None there"
        match file.parents[call]:
            case ast.Assign(targets=[ast.Name(id=target)]) if target in file.indexed:
                pass
            case ast.Attribute() | ast.Expr() | ast.Assign(targets=[ast.Name()]):
                yield f"{selector} returns a tuple, whose last item is the error: unpack it"
