"""Splits the arguments of an ATen call by its schema into tensors (IR inputs) and other values (IR attributes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..aten.ir import TensorSpec
from ..aten.json_values import read_attrs
from ..aten.tensor_lists import list_attrs
from ..support.errors import CaptureError, IRError

__all__ = ["STATIC_ADVICE", "Arguments", "Number", "describe_node", "read_arguments"]

STATIC_ADVICE = "export with static shapes (no dynamic_shapes) and fixed sizes in forward"


def describe_node(node: torch.fx.Node) -> str:
    """Return the beginning of an error message: the node, its op and the line of the model that it comes from."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [line.strip() for line in trace if line.strip().startswith("File ")]
    return f"node {node.name!r} ({node.target})" + (f", {lines[-1]}" if lines else "")


@dataclass(frozen=True)
class Number:
    """A Python number that depends on tensor data; the IR holds it as the 0-dim tensor ``spec``."""

    spec: TensorSpec


@dataclass
class Arguments:
    """The arguments of one call.

    Attributes:
        inputs: tensors in schema order, lists flattened, then the numbers that depend on data.
        attrs: all other arguments by name.
        named: the tensors that are not in lists, by argument name.
        written: the inputs that the op writes to.
        aliased: the inputs that outputs may share storage with.
        numbers: the numbers that depend on data, each with the reference to it in ``attrs``.
    """

    inputs: list[TensorSpec] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    named: dict[str, TensorSpec] = field(default_factory=dict)
    written: list[TensorSpec] = field(default_factory=list)
    aliased: list[TensorSpec] = field(default_factory=list)
    numbers: list[tuple[TensorSpec, dict[str, int]]] = field(default_factory=list)

    def plain(self, value: Any, name: str, node: torch.fx.Node) -> Any:
        """Return the attribute for an argument that is not a tensor. Numbers that depend on data become references.

        Raises:
            CaptureError: the value is known only at run time.
        """
        if isinstance(value, list | tuple):
            return [self.plain(v, name, node) for v in value]
        if isinstance(value, Number):
            self.numbers.append((value.spec, {"number": len(self.numbers)}))
            return self.numbers[-1][1]
        if isinstance(value, torch.fx.Node | torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(f"{describe_node(node)}: argument {name!r} is known only at run time; {STATIC_ADVICE}")
        return {"complex": [value.real, value.imag]} if isinstance(value, complex) else value

    def refuse_training(self, where: str) -> None:
        """Raise ``CaptureError`` if the op was exported in training mode."""
        statistics = bool(self.attrs.get("training")) and "running_mean" in self.named
        if statistics or (self.attrs.get("train") and self.attrs.get("p")):
            raise CaptureError(f"{where}: was exported in training mode; call model.eval() before torch.export")

    def close(self) -> None:
        """Append the numbers to the inputs, after the last tensor."""
        for _, reference in self.numbers:
            reference["number"] += len(self.inputs)
        self.inputs += [spec for spec, _ in self.numbers]


def read_arguments(
    node: torch.fx.Node, op: torch._ops.OpOverload, resolve: Callable[[torch.fx.Node], Any]
) -> Arguments:
    """Return the arguments of ``node``, a call of ``op``.

    Args:
        resolve: returns the tensor, list of tensors or constant of an FX node.

    Raises:
        CaptureError: the IR cannot represent an argument (a dynamic size).
    """
    result = Arguments()
    lists: list[Sequence[TensorSpec | None]] = []
    absent: list[str] = []  # tensor arguments that are None, written only if a tensor follows
    plain: dict[str, Any] = {}
    for i, argument in enumerate(op._schema.arguments):
        is_tensor = "Tensor" in str(argument.type)
        if i < len(node.args):
            value: Any = node.args[i]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        elif is_tensor:
            value = None
        else:
            continue
        value = resolve(value) if isinstance(value, torch.fx.Node) else value
        if is_tensor and value is None:
            absent.append(argument.name)
            continue
        tensors = _tensors(value, is_tensor, resolve)
        if tensors is None:
            value = torch.fx.node.map_arg(value, resolve)
            plain[argument.name] = result.plain(value, argument.name, node)
            continue
        plain.update(dict.fromkeys(absent))
        absent.clear()
        present = [t for t in tensors if t is not None]
        if isinstance(value, TensorSpec):
            result.named[argument.name] = value
        else:
            lists.append(tensors)
        result.inputs += present
        if argument.alias_info is not None:
            result.aliased += present
            if argument.alias_info.is_write:
                result.written += present
    result.close()
    try:
        result.attrs = read_attrs({**list_attrs(lists), **plain}, "attrs")
    except IRError as e:
        raise CaptureError(f"{describe_node(node)}: {e}") from e
    return result


def _tensors(
    value: Any, is_tensor: bool, resolve: Callable[[torch.fx.Node], Any]
) -> Sequence[TensorSpec | None] | None:
    """The tensors of an argument, or None if it is a plain value, such as a Python scalar in place of a tensor."""
    if isinstance(value, TensorSpec):
        return [value]
    if not is_tensor or not isinstance(value, list | tuple):
        return None
    return [resolve(v) if isinstance(v, torch.fx.Node) else v for v in value]
