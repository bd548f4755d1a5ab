"""Maps the arguments of a call to graph inputs, and graph outputs to the result that the PyTorch model returns."""

from __future__ import annotations

import inspect
import itertools
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.support.errors import InputError
from npu_compiler.support.host_arrays import is_torch
from npu_compiler.support.text import tensor_text
from npu_runtime.backends.base import DeviceBuffer

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

    from npu_compiler.frontend.export import Capture

__all__ = ["Signature"]


class Signature:
    """The structure of arguments and result of the call that was captured.

    A call may pass an argument by position or by keyword, whichever the capture used. Tensors become graph inputs. All
    other values are part of the compiled code, so they must equal those of the capture.
    """

    def __init__(self, call: Capture):
        from torch.utils import _pytree as pytree

        from npu_compiler.frontend.export import NUMBER, TENSOR

        self._flatten, self._unflatten = pytree.tree_flatten, pytree.tree_unflatten
        self._parameters = call.parameters
        self._examples = self._by_name(call.args, call.kwargs)
        self._positional, self._keywords = len(call.args), tuple(call.kwargs)
        self._outlines = {name: _OUTLINE.repr(value) for name, value in self._examples.items()}
        self._inputs = {name: pytree.tree_flatten(value) for name, value in self._examples.items()}
        for leaves, _ in self._inputs.values():
            leaves[:] = [TENSOR if _is_tensor(v) else v for v in leaves]
        self._examples.clear()  # they may hold large tensors
        self._tensor, self._number = TENSOR, NUMBER
        self._plain = all(leaves == [TENSOR] and structure.is_leaf() for leaves, structure in self._inputs.values())
        self._outputs, self._structure = call.leaves, call.structure
        keys = self._by_name(tuple(range(len(call.args))), {k: k for k in call.kwargs})
        self._returned = [(name, call.returned[k]) for name, k in keys.items() if k in call.returned]
        self._single = self._structure.is_leaf() and self._outputs == [TENSOR]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out annotations, which may be classes that another process does not have."""
        parameters = self._parameters
        if parameters is not None:
            plain = [p.replace(annotation=p.empty) for p in parameters.parameters.values()]
            parameters = parameters.replace(parameters=plain, return_annotation=parameters.empty)
        return {**self.__dict__, "_parameters": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import torch

        from npu_compiler.frontend.pytrees import register_caches

        register_caches(torch.nn.Module())  # the structures may hold caches
        self.__dict__.update(state)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the tensors among the arguments, in the order of the graph's inputs.

        Raises:
            InputError: an argument is missing, unknown, or differs from the one of the capture.
        """
        if self._plain and len(args) == self._positional and len(kwargs) == len(self._keywords):
            values = (*args, *map(kwargs.get, self._keywords)) if kwargs else args
            if all(map(_is_tensor, values)):
                return values
        given = self._by_name(args, kwargs)
        tensors: list[Any] = []
        for name, (examples, structure) in self._inputs.items():
            value = given.pop(name) if name in given else self._default(name)
            leaves = self._leaves_like(structure, value)
            if leaves is None or not all(
                _is_tensor(v) if e is self._tensor else _same(v, e) for v, e in zip(leaves, examples, strict=True)
            ):
                outline, expected = _OUTLINE.repr(value), self._outlines[name]
                but = f"the model was built for {expected}"
                if outline == expected:
                    but = "the one that the model was built for has other values, tensors or order of keys"
                raise InputError(f"argument {name!r} has the structure {outline}, {but}")
            tensors += [v for v, e in zip(leaves, examples, strict=True) if e is self._tensor]
        for name, value in given.items():
            if not _same(value, self._default(name)):
                raise InputError(f"argument {name!r} was not among the example arguments the model was built for")
        return tensors

    def _leaves_like(self, structure: TreeSpec, value: Any) -> list[Any] | None:
        """Return the leaves of ``value``, or None if its structure differs; a larger structure is not read in full."""
        nodes = itertools.count(1)

        def check_size(node: Any) -> bool:
            if next(nodes) > structure.num_nodes:
                raise _TooLarge
            return False

        try:
            leaves, found = self._flatten(value, is_leaf=check_size)
        except _TooLarge:
            return None
        return leaves if found == structure else None

    def result(self, outputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``outputs`` in the structure of the PyTorch model's result. Values other than tensors are those of the
        capture.

        Arguments that the PyTorch model modifies and returns, such as caches, are modified and returned.
        """
        if self._single:
            return outputs[0]
        values = iter(outputs)
        leaves = [
            next(values) if v is self._tensor else next(values).item() if v is self._number else v
            for v in self._outputs
        ]
        result = self._unflatten(leaves, self._structure)
        if self._returned:
            given = self._by_name(args, kwargs)
            for name, place in self._returned:
                result = _with_argument(result, place, given[name])
        return result

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments in the order of the call, by the names of forward's parameters, or for keyword
        arguments by their own names."""
        if self._parameters is None:
            return {**{f"{i}": v for i, v in enumerate(args)}, **kwargs}
        try:
            bound = self._parameters.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InputError(f"{error}; forward takes {self._parameters}") from None
        variadic = {p.name for p in self._parameters.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD}
        return {**{k: v for k, v in bound.items() if k not in kwargs and k not in variadic}, **kwargs}

    def _default(self, name: str) -> Any:
        """Return the default value of a parameter of forward; ``_MISSING`` if it has none."""
        parameter = self._parameters.parameters.get(name) if self._parameters else None
        return _MISSING if parameter is None or parameter.default is parameter.empty else parameter.default


def _with_argument(result: Any, place: Any, given: Any) -> Any:
    """``result`` with ``given`` in ``place``; before, ``given`` takes over the contents of what was there."""
    made = result if place is None else result[place]
    vars(given).clear()
    vars(given).update(vars(made))
    if place is None:
        return given
    if isinstance(result, tuple):
        parts = [given if i == place else v for i, v in enumerate(result)]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    result[place] = given
    return result


class _TooLarge(Exception):
    """Raised for a value with more nodes than the structure that it should have."""


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


_WORDS = 160  # characters of an outline


class _Outline(reprlib.Repr):
    """A short description of nested arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother = 3, 80

    def repr(self, x: Any) -> str:
        text = super().repr(x)
        return text if len(text) <= _WORDS else f"{text[:_WORDS]} …"

    def repr1(self, x: Any, level: int) -> str:
        return _tensor_text(x) if _is_tensor(x) else super().repr1(x, level)


_OUTLINE = _Outline()


def _tensor_text(value: Any) -> str:
    return tensor_text(value.shape, str(value.dtype).removeprefix("torch."))


def _is_tensor(value: Any) -> bool:
    return is_torch(value) or isinstance(value, np.ndarray | DeviceBuffer)


def _same(value: Any, example: Any) -> bool:
    """Return True if a Python value is equivalent to that of the capture. 2 and 2.0 are not: their dtypes differ."""
    if value is example:
        return True
    numbers = (bool, int, float, complex)
    if _is_tensor(value) or (type(value) is not type(example) and isinstance(example, numbers)):
        return False
    if isinstance(example, float | complex):
        return repr(value) == repr(example)  # NaN is NaN here, and -0.0 is not 0.0
    return bool(value == example)
