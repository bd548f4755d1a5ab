"""Tracks which values of a program share storage, and which of them an in-place operation has overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..aten.ir import Key

__all__ = ["Aliases", "row_major", "storage_id", "writes_strided_memory"]


def storage_id(value: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage, which aliases in one trace share; None for types without storage."""
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def row_major(value: torch.Tensor) -> bool:
    """Return whether a tensor is dense, in row-major order; False if that depends on data, as its shape may."""
    try:
        return bool(value.is_contiguous())
    except GuardOnDataDependentSymNode:
        return False


class Aliases:
    """Groups of values that may share a storage.

    Args:
        trust_storages: derive aliases from the storages of the traced tensors, which is exact right after an export.
            A program that was saved and loaded has new storages; False derives aliases from the operators' schemas,
            which is safe but less exact.
    """

    def __init__(self, trust_storages: bool):
        self.trust_storages = trust_storages
        self._group: dict[Key, int] = {}
        self._by_storage: dict[int, int] = {}
        self._leaf_groups: set[int] = set()
        self._stale: set[Key] = set()

    def define(self, key: Key, value: torch.Tensor, may_alias: Iterable[Key] = (), *, leaf: bool = False) -> None:
        """Add a value.

        Args:
            may_alias: values that it may share storage with, according to the schema.
            leaf: it is a weight, a constant or a graph input.
        """
        storage = storage_id(value)
        groups = [] if self.trust_storages else [self._group[k] for k in may_alias]
        if storage in self._by_storage:
            groups.append(self._by_storage[storage])
        group = groups[0] if groups else len(self._group)
        for other in set(groups[1:]) - {group}:
            self._merge(other, group)
        if storage is not None:
            self._by_storage[storage] = group
        self._group[key] = group
        if leaf:
            self._leaf_groups.add(group)

    def _merge(self, old: int, new: int) -> None:
        self._group = {k: new if g == old else g for k, g in self._group.items()}
        self._by_storage = {s: new if g == old else g for s, g in self._by_storage.items()}
        if old in self._leaf_groups:
            self._leaf_groups.add(new)

    def write(self, key: Key) -> None:
        """Record an in-place write to ``key``: every value defined so far that may share its storage becomes stale."""
        group = self._group[key]
        self._stale.update(k for k, g in self._group.items() if g == group)

    def is_stale(self, key: Key) -> bool:
        """Return True if an in-place operation has overwritten the value."""
        return key in self._stale

    def touches_leaf(self, key: Key) -> bool:
        """Return True if a write to ``key`` may change a weight, a constant or a graph input."""
        return self._group[key] in self._leaf_groups


def writes_strided_memory(program: ExportedProgram, trust_storages: bool) -> bool:
    """Whether an op writes in place while a result or an input is not in row-major order, or to a copy of one.

    The IR has no strides: it takes every tensor for dense and row-major. Whether a reshape or contiguous() of another
    one is a view or a copy, it cannot tell.
    """
    nodes = [n for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
    calls = [n for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    written = {_storage(a) for n in calls for a in _written_arguments(n)}
    inputs = (n.meta.get("val") for n in nodes if n.op == "placeholder")
    strided = {storage_id(x) for x in inputs if written and isinstance(x, torch.Tensor) and not row_major(x)}
    for node in calls if written else ():
        results = node.meta.get("val")
        sources = {_storage(n) for n in node.all_input_nodes}
        for value in results if isinstance(results, list | tuple) else [results]:
            if not isinstance(value, torch.Tensor) or (own := storage_id(value)) in sources:
                continue
            if not row_major(value):
                strided.add(own)
            elif own in written and strided & sources:
                return True
    return bool(strided if not trust_storages else strided & written)


def _written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    target: Any = node.target
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
    names = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [n for name in names if isinstance(n := given.get(name), torch.fx.Node)]


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, torch.Tensor) else None
