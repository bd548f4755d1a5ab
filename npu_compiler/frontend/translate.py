"""Translates an ``ExportedProgram`` to an ``IRGraph``.

torch.export records in-place operations as such. The IR is a graph of values, so an in-place operation *defines* a new
value here, and every later use of the tensor that it wrote to refers to the new value. This is correct unless another
tensor that shares the storage is read afterwards; then ``NeedsFunctionalForm`` asks for the program in functional form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..aten.complex_pairs import complex_as_pairs
from ..aten.data_dependent import ASSERTION, CONTROL_FLOW, NUMBER_OPS
from ..aten.ir import GETITEM, IRGraph, Key, OpNode, StateUpdate, TensorSpec
from ..support.errors import CaptureError
from .aliases import Aliases, row_major
from .arguments import STATIC_ADVICE, Arguments, Number, describe_node, read_arguments
from .flex_attention import flex_attention_graph
from .fx_values import is_idle_sparse, is_number, node_results, static_shape, value_spec
from .locations import location_of
from .shared_memory import check_writes, first_keys
from .tensors import dtype_name, tensor_to_numpy

__all__ = ["NeedsFunctionalForm", "translate"]

# Assertions that the export has already checked.
_CHECKS = ("aten._assert_tensor_metadata.", "aten._assert_async.", "aten.sym_constrain_range")
# Regions that set a mode for a subgraph -> position of the subgraph among the arguments; its operands follow.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
_WRITES_NO_DATA = ("aten.detach_.default", "aten.requires_grad_.default")
# They read memory by strides, which values of the IR do not have: a program keeps them dense, in row-major order.
_BY_STRIDES = frozenset((torch.ops.aten.as_strided, torch.ops.aten.as_strided_copy, torch.ops.aten.as_strided_scatter))


class NeedsFunctionalForm(Exception):
    """Raised for a program that must be translated from its functional form, because it writes through views, runs
    under autocast, calls function transforms such as vmap, or has weights that consist of several tensors. The message
    is the error if even the functional form has such parts."""


def translate(
    program: ExportedProgram,
    name: str,
    *,
    trust_storages: bool,
    notes: Mapping[str, str] | None = None,
    written: frozenset[str] = frozenset(),
) -> IRGraph:
    """Return the IR of ``program``.

    Args:
        name: the IR's ``model_name``.
        trust_storages: see ``Aliases``.
        notes: by node name; each becomes the note of its node.
        written: names of the inputs that the program may write to.

    Raises:
        NeedsFunctionalForm: never for a functional program.
        CaptureError: the program has no static, functional meaning.
    """
    return complex_as_pairs(_Translator(program, name, trust_storages, notes or {}, written).graph())


@dataclass
class _Multi:
    """The outputs of a node with several; ``position`` maps an index in torch's tuple to one in the IR."""

    specs: list[TensorSpec]
    position: dict[int, int]
    numbers: set[int]  # those of ``specs`` that are Python numbers


class _Translator:
    def __init__(
        self,
        program: ExportedProgram,
        name: str,
        trust_storages: bool,
        notes: Mapping[str, str],
        written: frozenset[str] = frozenset(),
    ):
        self.program, self.written = program, written
        self.notes = notes
        self.out = IRGraph(name, [], [], [], {}, [], pytorch_version=torch.__version__)
        self.names: set[str] = set()
        self.aliases = Aliases(trust_storages)
        self.renamed: dict[Key, TensorSpec] = {}  # overwritten value -> its new value
        self.buffer_of: dict[Key, str] = {}  # present and past values of a whole buffer or parameter -> its key
        self.writable: set[Key] = set()  # the same for the inputs that may be written to
        self.first_key: dict[str, str] = {}  # key of a tied weight -> the first of its keys
        self.state: dict[str, TensorSpec] = {}  # first key -> its current value, once an in-place node has written it
        self.numbers: set[str] = set()  # nodes that make a Python number from tensor data

    def graph(self) -> IRGraph:
        top = self.program.graph_module
        placeholders = [n for n in top.graph.nodes if n.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        self.names.update(spec.arg.name for spec in specs)
        held = [(n, spec) for n, spec in zip(placeholders, specs, strict=True) if not is_idle_sparse(n, spec)]
        env = {n: self._placeholder(n, spec) for n, spec in held}
        self._map_tied_weights()
        self._results(self._region(top, env))
        self._drop_idle_numbers()
        self._allow_ops()
        return self.out

    def branch(self, module: torch.fx.GraphModule) -> IRGraph:
        """The IR of a subgraph, which receives everything it reads as inputs."""
        env: dict[torch.fx.Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                spec = value_spec(self._unique(node.name), node.meta["val"], f"input {node.name!r}")
                spec = TensorSpec(spec.name, spec.shape, spec.dtype, (spec.name, 0))
                self.out.graph_inputs.append(spec)
                if is_number(node.meta["val"]):
                    env[node] = Number(spec)
                else:
                    env[node] = spec
                    self.aliases.define(self.out.key(spec), node.meta["val"], leaf=True)
        results = self._region(module, env)
        self.out.graph_outputs = self._operands(list(results) if isinstance(results, list | tuple) else [results])
        self._drop_idle_numbers()
        self._allow_ops()
        return self.out

    def _allow_ops(self) -> None:
        """Allow all ops of the graph: the process that runs a captured model has registered them."""
        inner = [g.allowed_ops for n in self.out.nodes for g in n.graphs.values()]
        self.out.allowed_ops = frozenset(n.op_type for n in self.out.nodes).union(*inner)

    def _drop_idle_numbers(self) -> None:
        """Remove the numbers that only assertions read, and these assertions."""
        nodes = self.out.nodes
        assertions = [n for n in nodes if n.op_type == ASSERTION]
        live = {n.name for n in nodes} - self.numbers - {n.name for n in assertions}
        live |= {t.producer[0] for t in self.out.graph_outputs if t.producer}
        self._mark_operands(live)
        producers = {n.name: n for n in nodes}
        live |= {n.name for n in assertions if self._sources(n, producers) <= live}
        self._mark_operands(live)
        self.out.nodes = [n for n in nodes if n.name in live]

    def _mark_operands(self, live: set[str]) -> None:
        for node in reversed(self.out.nodes):
            if node.name in live:
                live.update(t.producer[0] for t in node.inputs if t.producer)

    def _sources(self, node: OpNode, producers: dict[str, OpNode]) -> set[str]:
        """The nodes that convert tensors to the numbers that ``node`` depends on."""
        found: set[str] = set()
        pending = [node]
        while pending:
            for t in pending.pop().inputs:
                if t.producer and (made_by := producers.get(t.producer[0])) is not None:
                    if made_by.op_type in NUMBER_OPS:
                        pending.append(made_by)
                    else:
                        found.add(made_by.name)
        return found

    # ------------------------------------------------------------------------------------------------ leaves

    def _placeholder(self, node: torch.fx.Node, spec: Any) -> Any:
        name = spec.arg.name  # copies of a program may rename the node
        where = f"input {name!r}"
        if isinstance(spec.arg, ConstantArgument):
            return spec.arg.value
        if not isinstance(spec.arg, TensorArgument):
            raise CaptureError(f"{where}: a {type(spec.arg).__name__} cannot be a graph input; pass tensors")
        value = node.meta["val"]
        if is_traceable_wrapper_subclass(value):
            raise NeedsFunctionalForm(f"{where}: {type(value).__name__} tensors are not supported; pass dense ones")
        shape, dtype = static_shape(value, where), dtype_name(value.dtype, where)
        if spec.kind is InputKind.USER_INPUT:
            t = TensorSpec(name, shape, dtype, (name, 0))
            self.out.graph_inputs.append(t)
            if name in self.written:
                self.writable.add(self.out.key(t))
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

    def _constant(self, value: torch.Tensor, hint: str) -> TensorSpec:
        """Store a tensor of the program, or a number in place of a tensor, as a constant of the IR."""
        key = self._unique(hint)
        self.out.constants[key] = np.array(tensor_to_numpy(value))
        t = TensorSpec(key, tuple(value.shape), dtype_name(value.dtype, f"constant {hint!r}"))
        self.aliases.define(self.out.key(t), value, leaf=True)
        return t

    def _store_constant(self, key: str) -> None:
        """Store the values of a lifted tensor or non-persistent buffer in the IR, because no state_dict has them."""
        value = self.program.constants.get(key)
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:  # nothing to lose, even on the meta device
                value = torch.empty(value.shape, dtype=value.dtype)
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                cause = f"{key!r} was made inside a function transform such as torch.func.grad, which is not supported"
                raise CaptureError(cause)
            if not value.is_meta:
                self.out.constants[key] = tensor_to_numpy(value).copy()

    def _map_tied_weights(self) -> None:
        """Placeholders of tied weights all map to the first key: checkpoints often hold no other."""
        keys = self.out.weight_name_mapping
        self.first_key = first_keys(self.program, keys.values())
        keys.update({placeholder: self.first_key.get(key, key) for placeholder, key in keys.items()})

    # ------------------------------------------------------------------------------------------------- nodes

    def _region(self, module: torch.fx.GraphModule, env: dict[torch.fx.Node, Any]) -> Any:
        """Translate the nodes of a graph whose placeholders are in ``env``; returns what its output node holds."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                env[node] = self._constant(value, node.name) if isinstance(value, torch.Tensor) else value
            elif node.op == "call_function":
                env[node] = self._call(node, env)
            elif node.op == "output":
                return torch.fx.node.map_arg(node.args[0], lambda n: self._resolve(env[n]))
        raise CaptureError("the exported graph has no output node")

    def _resolve(self, value: Any) -> Any:
        """Return the current meaning of ``value`` at this point of the program."""
        if isinstance(value, _Multi):
            return [Number(t) if i in value.numbers else self._resolve(t) for i, t in enumerate(value.specs)]
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
        if _needs_unwrapping(target):
            raise NeedsFunctionalForm(f"{describe_node(node)}: this function transform is not supported")
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, env)
        if isinstance(target, torch._ops.OpOverload):
            if any(a.is_out for a in target._schema.arguments):
                raise NeedsFunctionalForm(f"{describe_node(node)}: leave out the argument 'out'")
            return None if str(target).startswith(_CHECKS) else self._operation(node, target, env)
        return self._arithmetic(node, target, env)

    def _arithmetic(self, node: torch.fx.Node, function: Callable[..., Any], env: dict[torch.fx.Node, Any]) -> Any:
        """Arithmetic on Python numbers that depend on tensor data."""
        where = describe_node(node)
        op_type = f"number.{getattr(function, '__name__', '').removeprefix('sym_')}"
        if op_type not in NUMBER_OPS or not is_number(node.meta.get("val")):
            raise CaptureError(f"{where}: calculates a size at run time; {STATIC_ADVICE}")
        arguments = Arguments()
        args = arguments.plain(torch.fx.node.map_arg(node.args, lambda n: env[n]), "args", node)
        arguments.close()
        name = self._unique(node.name)
        output = value_spec(name, node.meta["val"], where)
        self.out.nodes.append(OpNode(name, op_type, arguments.inputs, [output], {"args": args}))
        self.numbers.add(name)
        return Number(TensorSpec(name, (), output.dtype, (name, 0)))

    def _inline(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        kind = str(node.target)
        if f"higher_order.{kind}" in CONTROL_FLOW:
            return self._control_flow(node, f"higher_order.{kind}", env)
        if kind == "flex_attention":
            graph, sources = flex_attention_graph(node)
            places = [n for n in graph.graph.nodes if n.op == "placeholder"]
            return self._region(graph, {p: env[n] for p, n in zip(places, sources, strict=True)})
        if kind not in _REGIONS:
            advice = "use torch.cond or while_loop, or compute both sides and use torch.where"
            raise CaptureError(f"{describe_node(node)}: this form of control flow is not supported; {advice}")
        if kind == "wrap_with_autocast" and node.args[2]:
            raise NeedsFunctionalForm  # autocast inserts its casts when the region runs: they are not in its graph
        at = _REGIONS[kind]
        body, *operands = [env[a] if isinstance(a, torch.fx.Node) else a for a in node.args[at:]]
        assert isinstance(body, torch.fx.GraphModule)
        parameters = [n for n in body.graph.nodes if n.op == "placeholder"]
        return self._region(body, dict(zip(parameters, operands, strict=True)))

    def _control_flow(self, node: torch.fx.Node, op_type: str, env: dict[torch.fx.Node, Any]) -> Any:
        where = describe_node(node)
        args: Any = torch.fx.node.map_arg(node.args, lambda n: env[n])
        flat = [v for a in args for v in (a if isinstance(a, list | tuple) else [a])]
        modules = [a for a in flat if isinstance(a, torch.fx.GraphModule)]
        graphs = {}
        for graph, module in zip(CONTROL_FLOW[op_type], modules, strict=True):
            label = f"{self.out.model_name}.{graph}"
            graphs[graph] = _Translator(self.program, label, self.aliases.trust_storages, {}).branch(module)
        inputs = self._operands([a for a in flat if not isinstance(a, torch.fx.GraphModule)])
        name, values = self._unique(node.name), node_results(node)
        outputs = [value_spec(f"{name}_{i}", v, where) for i, v in values.items()]
        attrs = {} if op_type == "higher_order.cond" else {"carried": len(args[2])}
        self.out.nodes.append(OpNode(name, op_type, inputs, outputs, attrs, graphs, location=location_of(node)))
        specs = [TensorSpec(t.name, t.shape, t.dtype, (name, i)) for i, t in enumerate(outputs)]
        return self._define(specs, values, inputs)

    def _operands(self, values: list[Any]) -> list[TensorSpec]:
        """Operands and results of nested graphs, all as tensors."""
        specs = []
        for value in values:
            if isinstance(value, int | float):
                kind = torch.float64 if isinstance(value, float) else None
                value = self._constant(torch.tensor(value, dtype=kind), "number")
            value = value.spec if isinstance(value, Number) else self._resolve(value)
            if not isinstance(value, TensorSpec):
                raise CaptureError(f"{self.out.model_name}: control flow takes and gives tensors, not {value!r}")
            specs.append(value)
        return specs

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
        inputs = [t if i in source.numbers else self._resolve(t) for i, t in enumerate(source.specs)]
        self.out.nodes.append(OpNode(name, GETITEM, inputs, [output], {"index": position}))
        if position in source.numbers:
            return Number(TensorSpec(name, picked.shape, picked.dtype, (name, 0)))
        self.aliases.define((name, 0), node.meta["val"], [self.out.key(picked)])
        return TensorSpec(name, picked.shape, picked.dtype, (name, 0))

    def _operation(self, node: torch.fx.Node, op: torch._ops.OpOverload, env: dict[torch.fx.Node, Any]) -> Any:
        where = describe_node(node)
        if op.overloadpacket in _BY_STRIDES:
            _check_strides(node, op)
        arguments = read_arguments(node, op, lambda n: self._resolve(env[n]))
        arguments.refuse_training(where)
        values = node_results(node)
        name = self._unique(node.name)
        multi = isinstance(node.meta.get("val"), list | tuple)
        outputs = [value_spec(f"{name}_{i}" if multi else name, v, where) for i, v in values.items()]
        specs = [TensorSpec(t.name, t.shape, t.dtype, (name, i)) for i, t in enumerate(outputs)]
        note = self.notes.get(node.name, "")
        made = OpNode(name, str(op), arguments.inputs, outputs, arguments.attrs, note=note, location=location_of(node))
        self.out.nodes.append(made)
        if arguments.written and str(op) not in _WRITES_NO_DATA:
            self._overwrite(arguments.written, specs)
        result = self._define(specs, values, arguments.aliased)
        if multi:
            return result
        if result.numbers:
            self.numbers.add(name)
            return Number(specs[0])
        return specs[0] if specs else None

    def _define(self, specs: list[TensorSpec], values: dict[int, Any], sources: list[TensorSpec]) -> _Multi:
        """The results of one node, which may share storage with ``sources``."""
        numbers = {i for i, v in enumerate(values.values()) if is_number(v)}
        for i, (spec, value) in enumerate(zip(specs, values.values(), strict=True)):
            if i not in numbers:
                self.aliases.define(self.out.key(spec), value, [self.out.key(t) for t in sources])
        return _Multi(specs, {raw: i for i, raw in enumerate(values)}, numbers)

    def _overwrite(self, written: list[TensorSpec], results: list[TensorSpec]) -> None:
        """An in-place op may write to a temporary or a whole buffer; anything else needs the functional form."""
        if len(written) != 1 or len(results) != 1:
            raise NeedsFunctionalForm
        old, new = self.out.key(written[0]), results[0]
        buffer = self.buffer_of.get(old)
        if buffer is not None:
            self.buffer_of[self.out.key(new)] = buffer
            self.state[self.first_key.get(buffer, buffer)] = new
        elif old in self.writable:
            self.writable.add(self.out.key(new))
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
            if isinstance(value, Number):
                value = value.spec
            if not isinstance(value, TensorSpec):
                continue  # None and Python numbers that are part of the code have no place in the IR
            kind = spec.kind.name
            if kind == "USER_OUTPUT":
                self.out.graph_outputs.append(value)
            elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
                self.state[self.first_key.get(str(spec.target), str(spec.target))] = value
            elif kind == "USER_INPUT_MUTATION" and spec.target in self.written:
                continue  # it is part of the result
            elif kind == "USER_INPUT_MUTATION":
                advice = f"work on a copy ({spec.target} = {spec.target}.clone()) or make it a buffer of the model"
                raise CaptureError(f"forward writes to its input {spec.target!r}; {advice}")
            else:
                raise CaptureError(f"output {value.name!r}: {kind} outputs are not supported")
        check_writes(self.program, self.state)
        for key, value in self.state.items():
            held = self.program.state_dict.get(key, self.program.constants.get(key))
            if isinstance(held, torch.Tensor) and tuple(held.shape) != value.shape:
                change = f"forward changes the shape of {key!r} from {list(held.shape)} to {list(value.shape)}"
                raise CaptureError(f"{change}, which the next call would find; write to a view, such as {key}[None]")
        self.out.state = [StateUpdate(key, value) for key, value in self.state.items()]


def _needs_unwrapping(target: Any) -> bool:
    """Calls that only torch can turn into operations: of function transforms (vmap), to parts of tensor subclasses."""
    transform = getattr(target, "__module__", "").startswith("torch._functorch")
    return transform or str(target) == "export.access_subclass_inner_tensor.default"


def _check_strides(node: torch.fx.Node, op: torch._ops.OpOverload) -> None:
    """Raise ``CaptureError`` unless the op would find the same elements in a dense copy of its argument."""
    given: dict[str, Any] = dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)) | node.kwargs
    x = given["self"].meta["val"]
    last = (given.get("storage_offset") or 0) + sum(
        (n - 1) * step for n, step in zip(given["size"], given["stride"], strict=True)
    )
    if not row_major(x) or x.storage_offset() or last >= x.numel() > 0:
        advice = "call it on a contiguous copy, x.clone(memory_format=torch.contiguous_format)"
        cause = "reads memory outside of its argument, or in another order"
        raise CaptureError(f"{describe_node(node)}: {cause}; {advice}")
