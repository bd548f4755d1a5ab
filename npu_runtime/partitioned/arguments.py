"""The arguments of an op that runs on the host: tensors become slots, and attributes take the types of its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_compiler.aten.data_dependent import number_inputs
from npu_compiler.aten.ir import OpNode
from npu_compiler.aten.tensor_lists import ENCODING, TensorLists
from npu_compiler.support.errors import BackendError

if TYPE_CHECKING:
    import torch


class Unbound(Exception):
    """Raised for a node that no PyTorch op can run; the text says why."""


@dataclass(frozen=True)
class Slot:
    """A placeholder for a tensor among bound arguments; ``index`` is its position in the node's inputs."""

    index: int


@dataclass(frozen=True)
class Number(Slot):
    """A placeholder for the Python number in such a tensor."""


def import_torch() -> Any:
    """Return PyTorch, which a program needs only if ops run on the host. Raises ``BackendError`` without it."""
    try:
        import torch
    except ImportError as error:
        raise BackendError(f"host partitions need PyTorch, which cannot be imported: {error}") from None
    return torch


def with_numbers(value: Any) -> Any:
    """Return an attribute with slots for numbers that inputs hold, and with complex numbers decoded."""
    match value:
        case {"number": int(index)}:
            return Number(index)
        case {"complex": [int() | float() as real, int() | float() as imaginary]}:
            return complex(real, imaginary)
        case dict():
            raise Unbound(f"{value!r} is not an argument that an op takes")
    return type(value)(with_numbers(v) for v in value) if isinstance(value, tuple | list) else value


def resolve(op_type: str) -> tuple[Any, bool]:
    """Return the overload, and whether it is in-place because no functional overload exists."""
    torch = import_torch()
    parts = op_type.split(".")
    if len(parts) != 3:
        if op_type.startswith("wrap_with"):
            raise Unbound(f"the extractor lost the body of {op_type}; capture the model with npu_compiler.capture")
        raise Unbound(f"{op_type} is not an ATen op (namespace.name.overload)")
    namespace, name, overload = parts
    for spelling, twin in ((name, False), (f"{name}_", True)):
        packet = getattr(getattr(torch.ops, namespace, None), spelling, None)
        if isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads():
            return getattr(packet, overload), twin
    raise Unbound(f"PyTorch {torch.__version__} has no op {op_type}")


def bind_arguments(op: Any, node: OpNode) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments in schema order, with slots for tensors."""
    schema = op._schema
    attrs = {k: v for k, v in node.attrs.items() if k not in ENCODING}
    unknown = [k for k in attrs if k not in {a.name for a in schema.arguments}]
    if unknown:
        raise Unbound(f"{node.op_type} takes no argument {', '.join(unknown)}")
    slots = _Slots(node, [a for a in schema.arguments if a.name not in attrs])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.name in attrs:
            value = _value(argument, attrs[argument.name])
        elif "Tensor" in str(argument.type):
            value = slots.take(argument)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise Unbound(f"{node.op_type}: argument {argument.name} is missing")
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    if slots.left():
        raise Unbound(f"{node.op_type} takes {slots.left()} tensor(s) fewer than the node has")
    return tuple(args), kwargs


class _Slots:
    """Hands the node's inputs to the tensor arguments, in order."""

    def __init__(self, node: OpNode, arguments: list[Any]):
        self.node = node
        self.count, self.next = len(node.inputs) - len(set(number_inputs(node.attrs))), 0
        self.lists = TensorLists(node.attrs)
        # Tensors that later required arguments still need: an optional one must not take them.
        self.required = sum(str(a.type) == "Tensor" and not a.has_default_value() for a in arguments)

    def left(self) -> int:
        return self.count - self.next

    def _pop(self, argument: Any) -> Slot:
        if not self.left():
            raise Unbound(f"{self.node.op_type}: tensor argument {argument.name} is missing")
        self.next += 1
        return Slot(self.next - 1)

    def take(self, argument: Any) -> Any:
        kind = str(argument.type)
        if "List" in kind:
            if kind.startswith("Optional") and not self.lists:
                return None
            return [None if none else self._pop(argument) for none in self.lists.take(self.left() - self.required)]
        if kind.startswith("Optional"):
            return self._pop(argument) if self.left() > self.required else None
        if argument.has_default_value() and self.left() <= self.required:
            return argument.default_value
        self.required -= not argument.has_default_value()
        return self._pop(argument)


def _value(argument: Any, value: Any) -> Any:
    """Return an attribute in the schema's type. Dtypes and memory formats are given by name; the device is the host."""
    torch = import_torch()
    kind = str(argument.real_type)
    if value is None:
        return None
    if "Device" in kind:
        return torch.device("cpu")
    if isinstance(value, str) and any(k in kind for k in ("ScalarType", "Layout", "MemoryFormat")):
        resolved = getattr(torch, value.removeprefix("torch."), None)
        if resolved is None:
            raise Unbound(f"argument {argument.name}: PyTorch has no {value}")
        return resolved
    return with_numbers(value)


def fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return bound arguments with the tensors, or their numbers, in place of the slots."""
    if isinstance(value, Number):
        return tensors[value.index].item()
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, tuple | list):
        return type(value)(fill(v, tensors) for v in value)
    return value
