"""Runs an ``IRGraph`` literally with torch, to compare it with the model it was captured from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from npu_compiler.aten.ir import IRGraph, OpNode
from npu_compiler.aten.json_reader import leaf_key
from npu_compiler.aten.tensor_lists import TensorLists

# Ops that refuse mixed float types; IR that older versions made on the meta device has them.
STRICT = ("aten.matmul.default", "aten.linear.default", "aten.index_copy.default")


def to_torch(array: np.ndarray) -> torch.Tensor:
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def run_ir(
    graph: IRGraph, weights: Mapping[str, np.ndarray], inputs: Sequence[torch.Tensor], double: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Graph outputs and new state of one run; in-place ops work on copies, so each value is computed once and stays.
    With ``double`` all floating tensors are float64."""

    def widen(t: torch.Tensor) -> torch.Tensor:
        return t.double() if double and t.is_floating_point() else t

    leaves = {k: widen(to_torch(v)) for k, v in {**weights, **graph.constants}.items()}
    values = {graph.key(spec): widen(t) for spec, t in zip(graph.graph_inputs, inputs, strict=True)}

    def value(t: Any) -> torch.Tensor:
        return values[t.producer] if t.producer is not None else leaves[leaf_key(graph, t.name)]

    with torch.no_grad():
        for node in graph.nodes:
            if node.op_type == "aten._assert_tensor_metadata.default":
                continue  # asserts the device of the export, too
            results = _call(node, [value(t) for t in node.inputs], double)
            for i, (spec, result) in enumerate(zip(node.outputs, results, strict=True)):
                assert tuple(result.shape) == spec.shape, node
                expected = torch.float64 if double and result.is_floating_point() else getattr(torch, spec.dtype)
                assert result.dtype == expected, node
                values[node.name, i] = result
        return [value(t) for t in graph.graph_outputs], {u.key: value(u.value) for u in graph.state}


def _call(node: OpNode, inputs: list[torch.Tensor], double: bool) -> list[torch.Tensor]:
    if node.op_type == "<built-in function getitem>":
        return [inputs[node.attrs["index"]]]
    namespace, op, overload = node.op_type.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    gap = False  # an argument was left at its default: those that follow go by name
    tensors = iter(promoted(inputs) if node.op_type in STRICT else inputs)
    left = len(inputs)
    lists = TensorLists(node.attrs)
    for argument in function._schema.arguments:
        kind, written = str(argument.type), argument.alias_info is not None and argument.alias_info.is_write
        if argument.name in node.attrs:
            found = _attr(node.attrs[argument.name], argument.name, double)
        elif "List[" in kind and "Tensor" in kind:
            found = [None if absent else copied(next(tensors), written) for absent in lists.take(left)]
            left -= sum(t is not None for t in found)
        elif "Tensor" in kind and left:
            found, left = copied(next(tensors), written), left - 1
        else:
            gap = True
            continue
        if gap or argument.kwarg_only:
            kwargs[argument.name] = found
        else:
            args.append(found)
    assert left == 0, node
    result = function(*args, **kwargs)
    return list(result) if isinstance(result, tuple | list) else [] if result is None else [result]


def copied(tensor: torch.Tensor, written: bool) -> torch.Tensor:
    """The tensor, or a copy if the op writes it. A copy of a view has another layout, for which ops may round
    differently."""
    return tensor.clone() if written else tensor


def promoted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Floating tensors in their common dtype."""
    common = functools.reduce(torch.promote_types, (t.dtype for t in tensors if t.is_floating_point()), torch.bfloat16)
    return [t.to(common) if t.is_floating_point() else t for t in tensors]


def _attr(value: Any, name: str, double: bool) -> Any:
    if name in ("dtype", "layout", "memory_format") and value is not None:
        found = getattr(torch, value)
        return torch.float64 if double and name == "dtype" and found.is_floating_point else found
    return value
