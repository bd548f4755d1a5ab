"""Backends by the name of their target: modules of ``npu_runtime/backends``, and registered ones."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.support.errors import BackendError
from npu_compiler.target_config import split_target

if TYPE_CHECKING:
    from .backends.base import Backend

_PACKAGE = f"{__package__}.backends"


def available_backends() -> list[str]:
    """Return the names of the backends of this installation."""
    found = (Path(__file__).parent / "backends").iterdir()
    modules = {p.stem for p in found if p.suffix == ".py" or (p / "__init__.py").exists()}
    return sorted(modules - {"__init__", "base"})


_registered: dict[str, Callable[..., Backend]] = {}


def register_backend(name: str, backend: Callable[..., Backend]) -> None:
    """Register a backend that is not part of this package; it runs the programs of the target ``name``."""
    _registered[name] = backend


def backend_class(name: str) -> Callable[..., Backend]:
    """Return the class, or the registered function, that creates backends of a target. Raises ``BackendError`` if
    there is none."""
    if name in _registered:
        return _registered[name]
    known = available_backends()
    if name not in known:
        raise BackendError(
            f"this build has no {name!r} target; it has: {', '.join(known)}. Compile the model for one of these"
        )
    made: Callable[..., Backend] = importlib.import_module(f"{_PACKAGE}.{name}").BACKEND
    return made


def get_backend(name: str, **options: Any) -> Backend:
    """Return a new backend by target name, e.g. ``get_backend('cpu', threads=2)``. Raises ``BackendError`` if there is
    none, ``ConfigError`` if the name is not text.

    A device after a colon, as in 'cuda:sm_80', concerns the compiler and is ignored here.
    """
    name, _ = split_target(name)
    make = backend_class(name)
    foreign = sorted(options.keys() - inspect.signature(make).parameters.keys()) if name not in _registered else []
    if foreign:
        raise BackendError(f"the {name} target has no option {foreign[0]!r}")
    return make(**options)
