"""Detects which of its arguments a model modifies: caches and other objects that hold tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..support.errors import CaptureError

__all__ = ["ArgumentChanges", "by_key"]


class ArgumentChanges:
    """A context that observes the calls of ``model``. Arguments are identified by position or keyword.

    Args:
        watch: False: observe nothing.

    Attributes:
        returned: the modified objects that are part of the result, such as caches -> their place in it: None for the
            result itself, else a key or an index.
        lost: the modified objects that are not part of the result.
    """

    def __init__(self, model: torch.nn.Module, watch: bool):
        self.model, self.watch = model, watch
        self.returned: dict[int | str, Any] = {}
        self.lost: list[int | str] = []
        self._before: dict[int | str, list[Any]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> ArgumentChanges:
        if self.watch:
            self._hooks = [
                self.model.register_forward_pre_hook(self._note, with_kwargs=True),
                self.model.register_forward_hook(self._compare, with_kwargs=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def check(self, label: str) -> None:
        """Raise ``CaptureError`` if a modification would be lost."""
        if self.lost:
            raise CaptureError(
                f"{label}: forward puts other tensors into its argument {self.lost[0]!r}, which is not part of the "
                "result; return it too"
            )

    def _note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = {k: pytree.tree_leaves(v) for k, v in by_key(args, kwargs).items()}

    def _compare(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for key, value in by_key(args, kwargs).items():
            if isinstance(value, torch.Tensor) or pytree.tree_is_leaf(value):
                continue
            places = [p for p, v in _parts(result) if v is value]
            known = {id(v) for v in self._before[key]}
            if places and not isinstance(value, list | tuple | dict):
                self.returned[key] = places[0]
            elif any(isinstance(v, torch.Tensor) and id(v) not in known for v in pytree.tree_leaves(value)):
                self.lost.append(key)


def by_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """Return the arguments of a call by position or keyword."""
    return dict([*enumerate(args), *kwargs.items()])


def _parts(result: Any) -> list[tuple[Any, Any]]:
    parts = (
        result.items() if isinstance(result, dict) else enumerate(result if isinstance(result, list | tuple) else [])
    )
    return [(None, result), *parts]
