"""Captures one of several layers that are alike, and repeats its nodes with the tensors of the others.

torch.export takes milliseconds for each operation and each weight, and nearly all of both belong to the layers of a
language model. Calls of layers are alike if they differ in the contents of tensors alone. ``traced_once`` makes a model
in which one of them is left between two marks, and each of the others is one mark. Marks are ops of this module.
``repeated`` replaces them, so that the graph is the one that torch.export makes of the whole model.
"""

from __future__ import annotations

import copy
import re
from collections import ChainMap
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..aten.ir import IRGraph, Key, Location, OpNode, StateUpdate, TensorSpec
from ..support.errors import CaptureError
from .aliases import storage_id

__all__ = ["repeated", "traced_once"]

# Marks. ``module`` is the path of a layer in the model, ``operands`` are the tensors among its arguments,
# and ``traced`` is the path of the layer that is alike, ``like`` its result. The results stand for the first operand
# and for the layer's result.
torch.library.define("npusim_layers::begin", "(Tensor[] operands, str module) -> Tensor")
torch.library.define("npusim_layers::end", "(Tensor result) -> Tensor")
torch.library.define("npusim_layers::repeat", "(Tensor[] operands, Tensor like, str module, str traced) -> Tensor")
torch.library.register_fake("npusim_layers::begin", lambda operands, module: torch.empty_like(operands[0]))
torch.library.register_fake("npusim_layers::end", lambda result: torch.empty_like(result))
torch.library.register_fake("npusim_layers::repeat", lambda operands, like, *paths: torch.empty_like(like))
_MARKS = torch.ops.npusim_layers
_BEGIN, _END, _REPEAT = (f"npusim_layers.{name}.default" for name in ("begin", "end", "repeat"))

_MODULE_FIELDS = frozenset(vars(nn.Module())) | {"forward"}
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


# ------------------------------------------------------------------------------------------------------------- tracing


@contextmanager
def traced_once(model: nn.Module, layers: Iterable[nn.Module], example: Sequence[Tensor]) -> Iterator[None]:
    """A context in which ``model`` has marks in place of layers that are alike; pass its graph to ``repeated``.

    Args:
        model: on the meta device.
        layers: modules of ``model`` that do not contain each other. ``model`` calls each once, with positional
            arguments. Their first argument and their result are tensors. They use tensors that are among their
            arguments, parameters or buffers only. No other part of the model uses a buffer after a layer wrote it.
        example: the arguments of ``model``.
    """
    marked = set(layers)
    paths = {module: path for path, module in model.named_modules() if module in marked}
    calls = _calls(model, paths, example)
    results: dict[str, Tensor] = {}

    def traced(layer: nn.Module, path: str) -> Any:
        def forward(*args: Any) -> Tensor:
            x = _MARKS.begin(_operands(args), path)
            results[path] = _MARKS.end(type(layer).forward(layer, x, *args[1:]))
            return results[path]

        return forward

    def mark(path: str, like: str) -> nn.Module:
        module = nn.Module()
        module.forward = lambda *args: _MARKS.repeat(_operands(args), results[like], path, like)
        return module

    with ExitStack() as restore:
        for layer, like in calls.items():
            path = paths[layer]
            if like is layer:
                layer.forward = traced(layer, path)
                restore.callback(delattr, layer, "forward")
            else:
                model.set_submodule(path, mark(path, paths[like]))
                restore.callback(model.set_submodule, path, layer)
        yield


def _calls(model: nn.Module, layers: Iterable[nn.Module], example: Sequence[Tensor]) -> dict[nn.Module, nn.Module]:
    """The layers in the order in which ``model`` calls them -> the first that is called alike."""
    calls: dict[nn.Module, nn.Module] = {}
    first: dict[Hashable, tuple[nn.Module, Tensor]] = {}

    def forward(layer: nn.Module, *args: Any) -> Tensor:
        assert layer not in calls
        kind = _kind(args, layer, []), _layer_kind(layer)
        if kind not in first:
            first[kind] = layer, type(layer).forward(layer, *args)
        calls[layer], result = first[kind]
        return torch.empty_like(result)

    with ExitStack() as restore, torch.no_grad():
        for layer in layers:
            layer.forward = lambda *args, layer=layer: forward(layer, *args)
            restore.callback(delattr, layer, "forward")
        model(*example)
    return calls


def _layer_kind(layer: nn.Module) -> Hashable:
    """All of a layer but the contents of its tensors: classes, shapes and plain attributes."""

    def part(module: nn.Module) -> dict[str, Any]:
        attributes = {k: v for k, v in vars(module).items() if k not in _MODULE_FIELDS}
        return module._parameters | module._buffers | attributes

    return tuple(
        (path, type(module), *((name, _kind(value, layer, [])) for name, value in part(module).items()))
        for path, module in layer.named_modules()
    )


def _operands(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the arguments of a layer."""
    operands: list[Tensor] = []
    _kind(args, None, operands)
    return operands


def _kind(value: Any, layer: nn.Module | None, operands: list[Tensor]) -> Hashable:
    """All of an argument or attribute of ``layer`` but the contents of its tensors, which are added to ``operands``."""
    if isinstance(value, Tensor):
        operands.append(value)
        shared = [storage_id(t) for t in operands].index(storage_id(value))  # the first operand with its storage
        return Tensor, value.shape, value.dtype, value.stride(), value.storage_offset(), shared
    if isinstance(value, nn.Module):
        inside = [] if layer is None else [path for path, m in layer.named_modules() if m is value]
        return nn.Module, *(inside or [id(value)])
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_kind(getattr(value, f.name), layer, operands) for f in fields(value))
    if isinstance(value, tuple | list):
        return type(value), *(_kind(v, layer, operands) for v in value)
    return (type(value), value) if isinstance(value, Hashable) else id(value)


# ----------------------------------------------------------------------------------------------------------- repeating


@dataclass
class _Body:
    """A traced layer, in values of the captured graph."""

    module: str
    operands: Sequence[TensorSpec]
    argument: Key  # stands for the first operand
    nodes: list[OpNode] = field(default_factory=list)
    result: TensorSpec | None = None


def repeated(graph: IRGraph, names: Sequence[str]) -> IRGraph:
    """Return a copy of a graph that was captured in ``traced_once``, with the nodes and weights of all layers, and no
    marks. It shares the arrays of constants with ``graph``.

    Args:
        names: the parameters and buffers of the whole model, in its order.

    Raises:
        CaptureError: the model uses a buffer outside of the layer that writes it.
    """
    return _Repeater(graph).graph(names)


class _Repeater:
    def __init__(self, captured: IRGraph):
        self.captured = captured
        self.out = replace(
            captured, graph_inputs=list(captured.graph_inputs), nodes=[], state=[],
            constants=dict(captured.constants), dry_runs={},
        )  # fmt: skip
        self.values: ChainMap[Key, TensorSpec] = ChainMap()  # of the captured graph -> of the result
        self.bodies: dict[str, _Body] = {}
        self.updates = {captured.key(u.value): u.key for u in captured.state}
        self.written: set[str] = set()  # keys of buffers that repeated layers have written
        self.keys = dict(captured.weight_name_mapping)
        self.leaves = list(zip(captured.weights, self.keys, strict=True))  # weights and their placeholders
        self.taken = {*(t.name for t in captured.graph_inputs), *self.keys, *captured.constants}
        self.numbers: dict[str, Iterator[int]] = {}  # by base of a name

    def graph(self, names: Sequence[str]) -> IRGraph:
        body = None
        for node in self.captured.nodes:
            if node.op_type == _BEGIN:
                body = _Body(node.attrs["module"], node.inputs, (node.name, 0))
                self.values[body.argument] = self._value(node.inputs[0], self.values)
            elif node.op_type == _END:
                assert body is not None
                body.result = node.inputs[0]
                self.values[node.name, 0] = self._value(body.result, self.values)
                self.bodies[body.module], body = body, None
            elif node.op_type == _REPEAT:
                traced, module = self.bodies[node.attrs["traced"]], node.attrs["module"]
                *operands, _ = (self._value(t, self.values) for t in node.inputs)
                self.values[node.name, 0] = self._repeat(traced, operands, module)
            else:
                self._copy(node, self.values, {}, node.location)
                if body is not None:
                    body.nodes.append(node)
        self.out.graph_outputs = [self._value(t, self.values) for t in self.captured.graph_outputs]
        self.out.allowed_ops = self.captured.allowed_ops - {_BEGIN, _END, _REPEAT}
        order = {name: i for i, name in enumerate(names)}
        self.leaves.sort(key=lambda leaf: order.get(leaf[0].name, len(order)))
        self.out.weights = [weight for weight, _ in self.leaves]
        self.out.weight_name_mapping = {placeholder: self.keys[placeholder] for _, placeholder in self.leaves}
        return self.out

    def _repeat(self, body: _Body, operands: list[TensorSpec], module: str) -> TensorSpec:
        """Add the nodes and weights of the layer ``module``, which is like ``body``; returns its result."""
        assert body.result is not None
        keys = [self.captured.key(t) for t in body.operands]
        values = self.values.new_child(dict(zip(keys, operands, strict=True)))
        values[body.argument] = operands[0]
        buffers = self._buffers(body.operands, operands) | self._add_weights(body.module, module, values)
        for node in body.nodes:
            location = node.location
            if location is not None:
                location = replace(location, module=_moved(location.module, body.module, module))
            self._copy(node, values, buffers, location)
        return self._value(body.result, values)

    def _buffers(self, traced: Sequence[TensorSpec], operands: Sequence[TensorSpec]) -> dict[str, str | None]:
        """The keys of the operands that take the place of weights, by the keys of those; None for computed values."""
        pairs = [(a, b) for a, b in zip(traced, operands, strict=True) if a.producer is None and a.name in self.keys]
        return {self.keys[a.name]: self.keys.get(b.name) if b.producer is None else None for a, b in pairs}

    def _add_weights(self, traced: str, module: str, values: ChainMap[Key, TensorSpec]) -> dict[str, str | None]:
        """Add the weights of a layer to the graph and to ``values``, where they take the place of the traced layer's.
        Returns their keys by those of the traced layer's."""
        moved: dict[str, str | None] = {}
        mapping = self.captured.weight_name_mapping
        for weight, (placeholder, key) in zip(self.captured.weights, mapping.items(), strict=True):
            if (name := _moved(weight.name, traced, module)) != weight.name:
                made = placeholder.replace(traced.replace(".", "_"), module.replace(".", "_"), 1)
                self.leaves.append((replace(weight, name=name), made))
                self.keys[made] = moved[key] = _moved(key, traced, module)
                self.taken.add(made)
                values[placeholder, -1] = replace(weight, name=made)
        return moved

    def _copy(
        self, node: OpNode, values: ChainMap[Key, TensorSpec], buffers: dict[str, str | None], location: Location | None
    ) -> None:
        """Add a copy of ``node``, which reads ``values``, and add its results to them. ``buffers``: the keys of buffers
        by the keys of those that ``node`` writes."""
        name = self._name(node.name)
        inputs = [self._value(t, values) for t in node.inputs]
        outputs = [replace(t, name=name + t.name.removeprefix(node.name)) for t in node.outputs]
        attrs, graphs = copy.deepcopy((node.attrs, node.graphs))
        self.out.nodes.append(OpNode(name, node.op_type, inputs, outputs, attrs, graphs, node.note, location))
        for i, t in enumerate(outputs):
            values[node.name, i] = made = replace(t, producer=(name, i))
            if (key := self.updates.get((node.name, i))) is not None:
                self.out.state.append(StateUpdate(self._written(key, buffers), made))

    def _written(self, key: str, buffers: dict[str, str | None]) -> str:
        """The key of the buffer that takes the place of ``key``."""
        if key not in buffers:
            return key
        if (written := buffers[key]) is None:
            raise self._shared(key)
        self.written.add(written)
        return written

    def _value(self, t: TensorSpec, values: ChainMap[Key, TensorSpec]) -> TensorSpec:
        value = values.get(self.captured.key(t), t)
        if value.producer is None and (key := self.keys.get(value.name)) in self.written:
            raise self._shared(str(key))
        return value

    def _shared(self, buffer: str) -> CaptureError:
        return CaptureError(f"{self.out.model_name}: {buffer} is used outside of the repeated layer that writes it")

    def _name(self, name: str) -> str:
        """Number names as torch.export does: by base, in the order of nodes."""
        match = _NUMBERED.fullmatch(name)
        assert match is not None
        base, number = match.group(1, 2)
        numbers = self.numbers.setdefault(base, count(int(number or 0)))
        made = next(m for n in numbers if (m := f"{base}_{n}" if n else base) not in self.taken)
        self.taken.add(made)
        return made


def _moved(path: str, traced: str, module: str) -> str:
    """The path in ``module`` of what has this path in ``traced``; a path outside of ``traced`` as it is."""
    return module + path.removeprefix(traced) if f"{path}.".startswith(f"{traced}.") else path
