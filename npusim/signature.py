"""How the arguments of a call become graph inputs, and graph outputs the result that the PyTorch model returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.host_arrays import is_torch, to_torch
from npu_runtime.backend import DeviceBuffer

if TYPE_CHECKING:
    import torch

__all__ = ["Signature"]


class Signature:
    """How arguments become graph inputs, and graph outputs the structure that the PyTorch model returns."""

    def __init__(self, model: torch.nn.Module, example_inputs: Any):
        from torch.utils import _pytree as pytree

        args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
        self._flatten, self._unflatten = pytree.tree_flatten, pytree.tree_unflatten
        self._examples, self._inputs = pytree.tree_flatten(args)
        self._outputs, self._structure = pytree.tree_flatten(_call(model, args))

    def leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """The tensors among ``args``, flattened in order."""
        values, structure = self._flatten(args)
        if structure != self._inputs:
            raise InputError(f"the arguments have the structure {structure}, the model was built for {self._inputs}")
        tensors = []
        for value, example in zip(values, self._examples, strict=True):
            if _is_tensor(example):
                tensors.append(value)
            elif _is_tensor(value) or value != example:
                raise InputError(f"argument {value!r}: the model was built for {example!r}, which is part of its code")
        return tensors

    def result(self, outputs: list[Any]) -> Any:
        """``outputs`` in the structure of the PyTorch model's; anything but tensors is as it was for the example."""
        if sum(map(_is_tensor, self._outputs)) != len(outputs):
            return tuple(outputs)
        values = iter(outputs)
        return self._unflatten([next(values) if _is_tensor(v) else v for v in self._outputs], self._structure)


def _is_tensor(value: Any) -> bool:
    return is_torch(value) or isinstance(value, np.ndarray | DeviceBuffer)


def _call(model: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    """The model's result, for its structure; the model's buffers and mode stay as they are."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = pytree.tree_map(lambda v: to_torch(v) if isinstance(v, np.ndarray) else v, args)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            return torch.func.functional_call(model, {**dict(model.named_parameters()), **buffers}, tensors)
    finally:
        for module, training in modes.items():
            module.training = training
