"""Registers the KV caches of transformers as pytrees, so that models can take and return them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["register_caches"]


@dataclass(frozen=True)
class _Leaf:
    """Stands for the tensor of this index."""

    index: int


@dataclass(frozen=True)
class _Object:
    """The attributes of an object, with leaves in place of tensors. Caches of equal structure compare equal."""

    cls: type
    attributes: dict[str, Any]


def register_caches(model: torch.nn.Module) -> None:
    """Register the cache classes of transformers, and of the files that ``model``'s modules come from, with pytree.

    Classes stay registered for the process. Classes that are registered already are skipped. Without transformers
    imported, nothing happens.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:
        return
    own = {sys.modules[type(m).__module__] for m in model.modules() if type(m).__module__.startswith("transformers.")}
    for cls in {*_subclasses(caches.Cache), *(c for module in own for c in _caches_of(module))}:
        if cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                cls, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys, serialized_type_name=_path(cls)
            )


def _subclasses(cls: Any) -> Iterator[type]:
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)


def _caches_of(module: Any) -> Iterator[type]:
    """The cache classes that a model's file defines, by the naming convention of transformers."""
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and value.__name__.endswith("Cache"):
            yield value


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    tensors: list[Any] = []
    return tensors, _describe(cache, tensors)


def _flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
    tensors, description = _flatten(cache)
    return [(pytree.SequenceKey(i), t) for i, t in enumerate(tensors)], description


def _unflatten(tensors: Iterable[Any], description: Any) -> Any:
    return _restore(description, list(tensors))


def _describe(value: Any, tensors: list[Any]) -> Any:
    """``value`` with every tensor replaced by its index in ``tensors``, to which it is appended."""
    if _is_leaf(value):
        tensors.append(value)
        return _Leaf(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)(_describe(v, tensors) for v in value)
    if type(value) is dict:
        return {k: _describe(v, tensors) for k, v in value.items()}
    if type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        return _Object(type(value), {k: _describe(v, tensors) for k, v in vars(value).items()})
    return value


def _is_leaf(value: Any) -> bool:
    """Return True for tensors and their substitutes: arrays, symbolic numbers, pytree's own placeholders."""
    plain = (bool, int, float, str, list, tuple, dict, type, torch.dtype, torch.device, torch.Size)
    if value is None or isinstance(value, plain):
        return False
    return not type(value).__module__.startswith("transformers.")


def _restore(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, _Leaf):
        return tensors[value.index]
    if type(value) in (list, tuple):
        return type(value)(_restore(v, tensors) for v in value)
    if type(value) is dict:
        return {k: _restore(v, tensors) for k, v in value.items()}
    if isinstance(value, _Object):
        restored: Any = object.__new__(value.cls)
        restored.__dict__.update({k: _restore(v, tensors) for k, v in value.attributes.items()})
        return restored
    return value
