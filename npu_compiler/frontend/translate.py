"""An ``ExportedProgram`` as an ``IRGraph``.

torch.export records in-place operations as they happened. The IR is a graph of values, so an in-place operation here
*defines* a new value, and every later use of the tensor it wrote to means that new value. This is right as long as no
other tensor that shares the storage is read afterwards; where one is, ``NeedsFunctionalForm`` asks for the program in
functional form.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

from npu_compiler.errors import CaptureError
from npu_compiler.frontend.aliases import Aliases, Key, storage_id
from npu_compiler.frontend.arguments import STATIC_ADVICE, Arguments, describe_node, read_arguments
from npu_compiler.frontend.tensors import dtype_name, tensor_to_numpy
from npu_compiler.ir import IRGraph, OpNode, StateUpdate, TensorSpec

__all__ = ["NeedsFunctionalForm", "translate"]

# Facts about tensors that the export has already established.
_CHECKS = ("aten._assert_tensor_metadata.", "aten._assert_async.", "aten._assert_scalar.", "aten.sym_constrain_range")
# Regions that are only a mode around a subgraph -> position of the subgraph among the arguments; operands follow it.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
_WRITES_NO_DATA = ("aten.detach_.default", "aten.requires_grad_.default")


class NeedsFunctionalForm(Exception):
    """The program writes through views or runs under autocast; only its functional form spells out what that does."""


def translate(program: ExportedProgram, name: str, *, trust_storages: bool) -> IRGraph:
    """The IR of ``program``; for ``trust_storages`` see ``Aliases``.

    Raises:
        NeedsFunctionalForm: never for a functional program.
        CaptureError: the program has no static, functional meaning.
    """
    return _Translator(program, name, trust_storages).graph()


@dataclass
class _Multi:
    """The outputs of a multi-output node; ``position`` maps the index in torch's tuple to the one in the IR."""

    specs: list[TensorSpec]
    position: dict[int, int]


class _Translator:
    def __init__(self, program: ExportedProgram, name: str, trust_storages: bool):
        self.program = program
        self.out = IRGraph(name, [], [], [], {}, [], pytorch_version=torch.__version__)
        self.names: set[str] = set()
        self.aliases = Aliases(trust_storages)
        self.renamed: dict[Key, TensorSpec] = {}  # overwritten value -> the value that replaced it
        self.buffer_of: dict[Key, str] = {}  # current and former values of a whole buffer or parameter -> its key
        self.state: dict[str, TensorSpec] = {}  # key -> its current value, once an in-place node has written it

    def graph(self) -> IRGraph:
        top = self.program.graph_module
        placeholders = [n for n in top.graph.nodes if n.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        self.names.update(spec.arg.name for spec in specs)
        env = {n: self._placeholder(n, spec) for n, spec in zip(placeholders, specs, strict=True)}
        self._map_tied_weights()
        self._results(self._region(top, env))
        self.out.allowed_ops = frozenset(n.op_type for n in self.out.nodes)  # the process that runs it registered them
        return self.out

    # ------------------------------------------------------------------------------------------------ leaves

    def _placeholder(self, node: torch.fx.Node, spec: Any) -> Any:
        name = spec.arg.name  # copies of a program may rename the node
        where = f"input {name!r}"
        if isinstance(spec.arg, ConstantArgument):
            return spec.arg.value
        if not isinstance(spec.arg, TensorArgument):
            raise CaptureError(f"{where}: a {type(spec.arg).__name__} cannot be a graph input; pass tensors")
        value = node.meta["val"]
        shape, dtype = _shape(value, where), dtype_name(value.dtype, where)
        if spec.kind is InputKind.USER_INPUT:
            t = TensorSpec(name, shape, dtype, (name, 0))
            self.out.graph_inputs.append(t)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            t = TensorSpec(name, shape, dtype)
            self.out.weights.append(TensorSpec(spec.target, shape, dtype))
            self.out.weight_name_mapping[name] = spec.target
            self._store_constant(spec.target)
            if spec.kind is not InputKind.CONSTANT_TENSOR:
                self.buffer_of[self.out.key(t)] = spec.target
        else:
            raise CaptureError(f"{where}: {spec.kind.name} inputs are not supported")
        self.aliases.define(self.out.key(t), value, leaf=True)
        return t

    def _store_constant(self, key: str) -> None:
        """Lifted tensors and non-persistent buffers are in no state_dict, so the IR carries their values."""
        value = self.program.constants.get(key)
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:  # nothing to lose, even on the meta device
                value = torch.empty(value.shape, dtype=value.dtype)
            if not value.is_meta:
                self.out.constants[key] = tensor_to_numpy(value).copy()

    def _map_tied_weights(self) -> None:
        """Placeholders of tied weights all map to the first key: checkpoints often hold no other."""
        first: dict[Any, str] = {}
        for placeholder, key in self.out.weight_name_mapping.items():
            t = self.program.state_dict.get(key)
            if isinstance(t, torch.Tensor) and t.numel():
                identity = (storage_id(t), t.storage_offset(), t.dtype, t.shape, t.stride())
                self.out.weight_name_mapping[placeholder] = first.setdefault(identity, key)

    # ------------------------------------------------------------------------------------------------- nodes

    def _region(self, module: torch.fx.GraphModule, env: dict[torch.fx.Node, Any]) -> Any:
        """Translate the nodes of a graph whose placeholders are in ``env``; returns what its output node holds."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(module)
            elif node.op == "call_function":
                env[node] = self._call(node, env)
            elif node.op == "output":
                return torch.fx.node.map_arg(node.args[0], lambda n: self._resolve(env[n]))
        raise CaptureError("the exported graph has no output node")

    def _resolve(self, value: Any) -> Any:
        """What a use of ``value`` means at this point of the program."""
        if isinstance(value, _Multi):
            return [self._resolve(t) for t in value.specs]
        if not isinstance(value, TensorSpec):
            return value
        while (newer := self.renamed.get(self.out.key(value))) is not None:
            value = newer
        if self.aliases.is_stale(self.out.key(value)):
            raise NeedsFunctionalForm
        return value

    def _call(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            return self._getitem(node, env)
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, env)
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(f"{describe_node(node)}: calculates a size at run time; {STATIC_ADVICE}")
        return None if str(target).startswith(_CHECKS) else self._operation(node, target, env)

    def _inline(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        kind = str(node.target)
        if kind not in _REGIONS:
            advice = "decide in Python from constants, or compute both sides and use torch.where"
            raise CaptureError(f"{describe_node(node)}: control flow is not supported; {advice}")
        if kind == "wrap_with_autocast" and node.args[2]:
            raise NeedsFunctionalForm  # autocast inserts its casts when the region runs: they are not in its graph
        at = _REGIONS[kind]
        body, *operands = [env[a] if isinstance(a, torch.fx.Node) else a for a in node.args[at:]]
        assert isinstance(body, torch.fx.GraphModule)
        parameters = [n for n in body.graph.nodes if n.op == "placeholder"]
        return self._region(body, dict(zip(parameters, operands, strict=True)))

    def _getitem(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        source: Any = env[node.args[0]]  # type: ignore[index]
        index: Any = node.args[1]
        if not isinstance(source, _Multi):
            return source[index]  # a result of an inlined region
        if index not in source.position:
            return None
        position = source.position[index]
        picked = source.specs[position]
        name = self._unique(node.name)
        output = TensorSpec(name, picked.shape, picked.dtype)
        inputs = [self._resolve(t) for t in source.specs]
        self.out.nodes.append(OpNode(name, "<built-in function getitem>", inputs, [output], {"index": position}))
        self.aliases.define((name, 0), node.meta["val"], [self.out.key(picked)])
        return TensorSpec(name, picked.shape, picked.dtype, (name, 0))

    def _operation(self, node: torch.fx.Node, op: torch._ops.OpOverload, env: dict[torch.fx.Node, Any]) -> Any:
        where = describe_node(node)
        arguments = read_arguments(node, op, lambda n: self._resolve(env[n]))
        _refuse_training(arguments, where)
        values = _result_tensors(node)
        name = self._unique(node.name)
        multi = isinstance(node.meta.get("val"), list | tuple)
        outputs = [
            TensorSpec(f"{name}_{i}" if multi else name, _shape(v, where), dtype_name(v.dtype, where))
            for i, v in values.items()
        ]
        specs = [TensorSpec(t.name, t.shape, t.dtype, (name, i)) for i, t in enumerate(outputs)]
        self.out.nodes.append(OpNode(name, str(op), arguments.inputs, outputs, arguments.attrs))
        if arguments.written and str(op) not in _WRITES_NO_DATA:
            self._overwrite(arguments.written, specs)
        for spec, value in zip(specs, values.values(), strict=True):
            self.aliases.define(self.out.key(spec), value, [self.out.key(t) for t in arguments.aliased])
        if multi:
            return _Multi(specs, {raw: i for i, raw in enumerate(values)})
        return specs[0] if specs else None

    def _overwrite(self, written: list[TensorSpec], results: list[TensorSpec]) -> None:
        """An in-place op may write to a temporary or a whole buffer; anything else needs the functional form."""
        if len(written) != 1 or len(results) != 1:
            raise NeedsFunctionalForm
        old, new = self.out.key(written[0]), results[0]
        buffer = self.buffer_of.get(old)
        if buffer is not None:
            self.buffer_of[self.out.key(new)] = buffer
            self.state[buffer] = new
        elif self.aliases.touches_leaf(old):
            raise NeedsFunctionalForm
        self.aliases.write(old)
        self.renamed[old] = new

    def _unique(self, name: str) -> str:
        candidate, n = name, 0
        while candidate in self.names:
            n += 1
            candidate = f"{name}_{n}"
        self.names.add(candidate)
        return candidate

    # ----------------------------------------------------------------------------------------------- results

    def _results(self, results: Any) -> None:
        """``results`` are the values of the output node, in the order of the signature."""
        for spec, value in zip(self.program.graph_signature.output_specs, results, strict=True):
            if not isinstance(value, TensorSpec):
                continue  # None and Python numbers have no place in the IR
            kind = spec.kind.name
            if kind == "USER_OUTPUT":
                self.out.graph_outputs.append(value)
            elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
                self.state[str(spec.target)] = value
            elif kind == "USER_INPUT_MUTATION":
                advice = f"work on a copy ({spec.target} = {spec.target}.clone()) or make it a buffer of the model"
                raise CaptureError(f"forward writes to its input {spec.target!r}; {advice}")
            else:
                raise CaptureError(f"output {value.name!r}: {kind} outputs are not supported")
        self.out.state = [StateUpdate(key, value) for key, value in self.state.items()]


def _shape(value: torch.Tensor, where: str) -> tuple[int, ...]:
    for i, d in enumerate(value.shape):
        if not isinstance(d, int):
            cause = "depends on tensor data" if "u" in str(d) else "is dynamic"
            raise CaptureError(f"{where}: dimension {i} of its result {cause} ({d}); {STATIC_ADVICE}")
    if value.layout != torch.strided:
        raise CaptureError(f"{where}: {value.layout} tensors are not supported; call to_dense()")
    return tuple(value.shape)


def _result_tensors(node: torch.fx.Node) -> dict[int, torch.Tensor]:
    """Position in the op's result -> tensor."""
    value = node.meta.get("val")
    results = list(value) if isinstance(value, list | tuple) else [value]
    if any(r is not None and not isinstance(r, torch.Tensor) for r in results):
        raise CaptureError(f"{describe_node(node)}: makes a Python number from tensor data; keep it a tensor")
    return {i: r for i, r in enumerate(results) if r is not None}


def _refuse_training(arguments: Arguments, where: str) -> None:
    attrs = arguments.attrs
    statistics = bool(attrs.get("training")) and "running_mean" in arguments.named
    if statistics or (attrs.get("train") and attrs.get("p")):
        raise CaptureError(f"{where}: was exported in training mode; call model.eval() before torch.export")
