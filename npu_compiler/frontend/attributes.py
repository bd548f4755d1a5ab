"""The plain Python attributes of a module, which are neither parameters nor buffers, during an export.

torch.export treats their values as constants. This module detects changes of them, restores them after the export, and
presents attributes that are registered tensors to torch.export as the buffers they are.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Attributes"]

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", "training"})
_OPAQUE = (torch.nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
_MAX_CONTAINERS = 20_000  # bounds the search in a model that refers to a data set


@dataclass(frozen=True)
class _Container:
    """A list or a dict (which may be the attributes of an object), and its contents before the export."""

    path: str
    values: Any
    copy: Any
    skip: frozenset[Any] = frozenset()

    def items(self) -> Iterator[tuple[Any, Any]]:
        pairs = enumerate(self.copy) if isinstance(self.copy, list) else self.copy.items()
        return ((k, v) for k, v in pairs if k not in self.skip)

    def changed(self, registered: Collection[int]) -> Iterator[str]:
        """The paths of the values that changed, except tensors whose ids are ``registered``."""
        if isinstance(self.copy, list):
            if len(self.values) != len(self.copy):
                yield self.path
            now, before = dict(enumerate(self.values)), dict(enumerate(self.copy))
        else:
            now, before = self.values, self.copy
        for key in now.keys() | before.keys():
            if key not in self.skip and not _same(now.get(key, self), before.get(key, self), registered):
                yield self.at(key)

    def at(self, key: Any) -> str:
        return f"{self.path}.{key}".removeprefix(".") if isinstance(key, str) else f"{self.path}[{key!r}]"

    def restore(self) -> None:
        """Write only what changed: a container may refuse all writes, as the configurations of some libraries do."""
        if isinstance(self.copy, list):
            if list(map(id, self.values)) != list(map(id, self.copy)):
                self.values[:] = self.copy
            return
        for key in [k for k in self.values if k not in self.skip and k not in self.copy]:
            del self.values[key]
        for key, value in self.items():
            if key not in self.values or self.values[key] is not value:
                self.values[key] = value


@dataclass(frozen=True)
class _Tensor:
    """A tensor that is not registered, and its contents before the export."""

    path: str
    tensor: torch.Tensor
    copy: torch.Tensor
    version: int
    requires_grad: bool

    def changed(self, registered: Collection[int]) -> Iterator[str]:
        if self.tensor._version != self.version:
            yield self.path

    def restore(self) -> None:
        if self.tensor._version != self.version:
            with torch.no_grad():
                self.tensor.detach().copy_(self.copy)
        if self.tensor.requires_grad != self.requires_grad and not self.tensor._is_view():
            self.tensor.detach_().requires_grad_(self.requires_grad)


class Attributes:
    """A context in which calls of ``model`` may change plain attributes, including those in lists, dicts and objects.
    On exit all of them are restored.

    An export replaces parameters and buffers by other tensors. During a call, attributes that are a parameter or a
    buffer therefore refer to the tensor registered at that time, so that reads and writes through them are recorded as
    those of the buffer.

    Args:
        watch: False: do not rebind attributes and do not detect changes, for TorchDynamo, which would trace the hooks
            that do this.

    Attributes:
        changes: the paths of the attributes that calls have changed so far.
    """

    def __init__(self, model: torch.nn.Module, watch: bool):
        self.model, self.watch = model, watch
        self.changes: list[str] = []
        self._containers: list[_Container] = []
        self._tensors: list[_Tensor] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._aliases: list[tuple[_Container, Any, str]] = []
        self._registered = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}

    def __enter__(self) -> Attributes:
        if self.watch:
            pre, post = self.model.register_forward_pre_hook, self.model.register_forward_hook
            self._hooks = [pre(self._bind), post(self._compare)]
        self._find()  # after adding the hooks, which are attributes, too
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
        for hook in self._hooks:
            hook.remove()

    def _find(self) -> None:
        seen: set[int] = set()
        queue = [_Container(name, vars(m), dict(vars(m)), _REGISTERED) for name, m in self.model.named_modules()]
        while queue and len(self._containers) < _MAX_CONTAINERS:
            container = queue.pop()
            self._containers.append(container)
            for key, value in container.items():
                path = container.at(key)
                if id(value) in self._registered:
                    self._aliases.append((container, key, self._registered[id(value)]))
                elif id(value) in seen:
                    continue
                elif isinstance(value, torch.Tensor) and not value.is_inference():
                    copy = value.detach().clone()
                    self._tensors.append(_Tensor(path, value, copy, value._version, value.requires_grad))
                else:
                    queue += _inside(path, value)
                seen.add(id(value))

    def _bind(self, module: torch.nn.Module, args: Any) -> None:
        current = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for container, key, name in self._aliases:
            container.values[key] = current[name]

    def _compare(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        paths = (path for kept in self._kept() for path in kept.changed(self._registered))
        self.changes += [path for path in paths if path not in self.changes]

    def restore(self) -> None:
        """Give all attributes the values and contents that they had on entry."""
        for kept in self._kept():
            kept.restore()

    def _kept(self) -> list[_Container | _Tensor]:
        return [*self._containers, *self._tensors]

    def matter(self, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool) -> bool:
        """Return True if a call changes attributes such that a second call with equal arguments has another result.

        The model runs twice, starting from the current attributes, parameters and buffers, which are not changed.
        ``gradients``: run it with gradients enabled.
        """

        def call() -> list[Any]:
            torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs, for good
            values = {**dict(self.model.named_parameters()), **{n: b.clone() for n, b in self.model.named_buffers()}}
            inputs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return pytree.tree_leaves(torch.func.functional_call(self.model, values, *inputs))

        self.restore()
        with torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]):
            first, second = call(), call()
        self.restore()
        return len(first) != len(second) or not all(map(_equal, first, second))


def _inside(path: str, value: Any) -> list[_Container]:
    """The mutable containers in ``value``."""
    if isinstance(value, list | dict):  # copy() of a subclass may do anything
        return [_Container(path, value, list(value) if isinstance(value, list) else dict(value))]
    if isinstance(value, tuple):
        return [c for i, v in enumerate(value) for c in _inside(f"{path}[{i}]", v)]
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__") or type(value).__module__.startswith("torch."):
        return []
    return [_Container(path, vars(value), dict(vars(value)))]


def _same(now: Any, before: Any, registered: Collection[int]) -> bool:
    """True if two values are identical, or copies with identical tensors, because torch.export copies pytrees."""
    if now is before:
        return True
    (ours, our_structure), (theirs, their_structure) = pytree.tree_flatten(now), pytree.tree_flatten(before)
    return our_structure == their_structure and all(
        _tensor_id(b) in registered or n is b or (_plain(n) and type(n) is type(b) and n == b)
        for n, b in zip(ours, theirs, strict=True)
    )


def _tensor_id(value: Any) -> int:
    return id(value() if isinstance(value, weakref.ref) else value)


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str | bytes | torch.Size)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and torch.allclose(first, second, equal_nan=True)
    return first is second or bool(first == second)
