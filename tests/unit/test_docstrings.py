"""Public functions, classes and methods of targets and backends have docstrings, or implement documented methods."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import npu_compiler.targets
import npu_runtime.backends
from npu_compiler.targets import CodegenTarget
from npu_compiler.targets.simt.lang.function import Scope

CONTRACTS = (CodegenTarget, Scope)  # implemented without being base classes
OPTIONAL = ("compiler",)  # described in the docstring of CodegenTarget


def _modules() -> Iterator[ModuleType]:
    for package in (npu_compiler.targets, npu_runtime.backends):
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def _is_documented(owner: type, name: str, member: object) -> bool:
    if getattr(member, "__doc__", None) or name in OPTIONAL:
        return True
    return any(getattr(getattr(base, name, None), "__doc__", None) for base in (*owner.__mro__[1:], *CONTRACTS))


def _undocumented(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):  # a dataclass's own
            yield name
        if inspect.isclass(value):
            for key, member in vars(value).items():
                is_method = inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
                is_method = is_method and key not in inspect.get_annotations(value)  # a field's default
                if is_method and not key.startswith("_") and not _is_documented(value, key, member):
                    yield f"{name}.{key}"


@pytest.mark.parametrize("module", list(_modules()), ids=lambda m: m.__name__)
def test_public_names_are_documented(module: ModuleType) -> None:
    assert list(_undocumented(module)) == []
