"""The common interface of models in memory: a call takes inputs in order or by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from npu_compiler.artifact.program import IOSpec
from npu_compiler.aten.ir import TensorSpec
from npu_compiler.support.errors import InputError
from npu_compiler.support.host_arrays import is_torch, to_torch

from .arguments import Inputs, ordered


class LoadedModel(ABC):
    """A model with its weights, ready to run."""

    @property
    @abstractmethod
    def inputs(self) -> Sequence[IOSpec | TensorSpec]:
        """Name, shape and dtype of the inputs, in order."""

    @property
    @abstractmethod
    def outputs(self) -> Sequence[IOSpec | TensorSpec]:
        """Name, shape and dtype of the outputs, in order."""

    @abstractmethod
    def run_ordered(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """Run once with all inputs in order; return the outputs in order, in new arrays."""

    @abstractmethod
    def reset(self) -> None:
        """Return all buffers that the model writes to their initial contents."""

    @abstractmethod
    def close(self) -> None:
        """Free weights, arenas and threads. Outputs that were returned stay valid."""

    def run(self, inputs: Inputs) -> dict[str, np.ndarray]:
        """Run once with inputs by name or in order, and return the outputs by name, in new arrays. Raises
        ``InputError`` with the tensor's name and what was expected."""
        names = (s.name for s in self.outputs)
        return dict(zip(names, self.run_ordered(ordered(self.inputs, inputs, "input")), strict=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once with inputs in order or by name. Returns the output, or a tuple of outputs: torch tensors if an
        input is one, else numpy arrays."""
        specs = self.inputs
        values = args if not kwargs and len(args) == len(specs) else self._named(specs, args, kwargs)
        outputs: list[Any] = self.run_ordered(values)
        if any(map(is_torch, args)) or any(map(is_torch, kwargs.values())):
            outputs = [to_torch(o) for o in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _named(self, specs: Sequence[IOSpec | TensorSpec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the inputs in order."""
        names = [s.name for s in specs]
        if len(args) > len(names):
            raise InputError(f"got {len(args)} inputs, expected {len(names)} ({', '.join(names) or 'none'})")
        inputs = dict(zip(names, args, strict=False))
        twice = sorted(inputs.keys() & kwargs.keys())
        if twice:
            raise InputError(f"input {twice[0]!r} is given twice")
        return ordered(specs, {**inputs, **kwargs}, "input")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
