"""The values of FX nodes, tensors and Python numbers, as types of the IR."""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import InputKind, InputSpec

from ..aten.ir import DataSize, TensorSpec
from ..support.errors import CaptureError
from .arguments import STATIC_ADVICE
from .tensors import dtype_name


def is_number(value: Any) -> bool:
    """Whether a value is a Python number, known or symbolic."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def value_spec(name: str, value: Any, where: str) -> TensorSpec:
    """Return the type of a node's result: of a tensor, or of a Python number as a 0-dim tensor.

    Raises ``CaptureError``, which begins with ``where``, for a type or a shape that the IR does not have.
    """
    if isinstance(value, bool | torch.SymBool):
        return TensorSpec(name, (), "bool")
    if is_number(value):
        return TensorSpec(name, (), "float64" if isinstance(value, float | torch.SymFloat) else "int64")
    if isinstance(value, list | tuple):
        raise CaptureError(f"{where}: its result has a list of tensors among others, which the IR does not express")
    return TensorSpec(name, static_shape(value, where), dtype_name(value.dtype, where))


def is_idle_sparse(node: torch.fx.Node, spec: InputSpec) -> bool:
    """Whether ``node`` is a sparse buffer or parameter, which the IR cannot hold, and nothing reads it."""
    value = node.meta["val"]
    sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
    return sparse and not node.users and spec.kind is not InputKind.USER_INPUT


def static_shape(value: torch.Tensor, where: str) -> tuple[int, ...]:
    """Return the shape of a dense tensor; dimensions that depend on data are ``DataSize``.

    Raises ``CaptureError``, which begins with ``where``, for other dynamic dimensions and other layouts.
    """
    if value.layout != torch.strided:
        raise CaptureError(f"{where}: {value.layout} tensors are not supported; call to_dense()")
    return tuple(_dim(d, i, where) for i, d in enumerate(value.shape))


def _dim(d: int | torch.SymInt, i: int, where: str) -> int:
    if isinstance(d, int):
        return d
    if all(str(symbol).startswith("u") for symbol in d.node.expr.free_symbols):
        return DataSize(str(d)) if d.node.expr.free_symbols else int(d)
    raise CaptureError(f"{where}: dimension {i} of its result is dynamic ({d}); {STATIC_ADVICE}")


def node_results(node: torch.fx.Node) -> dict[int, Any]:
    """Return the results of a node by position in the op's result; None is left out."""
    value = node.meta.get("val")
    results = list(value) if isinstance(value, list | tuple) else [value]
    return {i: r for i, r in enumerate(results) if r is not None}
