"""Decomposes ops without a lowering by PyTorch's own decompositions, if all resulting ops are native.

A decomposition is traced op by op until all ops have a lowering. It replaces the op only if that succeeds: running a
part in PyTorch would cost more than running the whole op there. Ops with a lowering are kept. Loops over a sequence are
unrolled, up to ``MAX_OPS`` ops. An in-place op becomes its functional variant, whose result is copied back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..aten.data_dependent import CONTROL_FLOW
from ..aten.ir import OpNode, TensorSpec
from ..aten.op_names import functional_name
from ..ops.lower import check_node
from ..ops.registry import find
from ..support.errors import CaptureError
from .arguments import describe_node, read_arguments
from .copied import writable
from .locations import LOCATION_KEYS
from .own_decompositions import OWN_DECOMPOSITIONS
from .tensors import dtype_name

__all__ = ["MAX_OPS", "decompose"]

MAX_OPS = 8192  # limit for one program, which then takes about 7 s of CPU time to capture and 16 s to compile
_MAX_DEPTH = 8
_MESSAGE = 120  # characters of an error of PyTorch in a note


class _Stays(Exception):
    """Raised for an op that is not decomposed; the message says why."""


def decompose(program: ExportedProgram, *, in_place: bool) -> tuple[ExportedProgram, dict[str, str]]:
    """Decompose the ops that have no lowering.

    Args:
        program: not changed unless ``in_place``.

    Returns:
        The program, and by node name why an op without a lowering was not decomposed.

    Raises:
        CaptureError: an op was exported in training mode.
    """
    decomposer = _Decomposer()
    plans, notes = [], {}
    for where, module in enumerate(_native_graphs(program)):
        for node in module.graph.nodes:
            if decomposer.lacks_lowering(node):
                try:
                    plans.append((where, node.name, decomposer.spelled_out(node)))
                except _Stays as why:
                    notes[node.name] = str(why)
    if plans:
        program = writable(program, in_place)
        modules = _native_graphs(program)
        for where, name, body in plans:
            node = next(n for n in modules[where].graph.nodes if n.name == name)
            _replace(program, modules[where], node, body)
        for module in modules:
            module.recompile()
    return program, notes


def _native_graphs(program: ExportedProgram) -> list[torch.fx.GraphModule]:
    """The program's graph and its subgraphs, except those of control flow, which PyTorch runs."""
    found: list[torch.fx.GraphModule] = []

    def visit(module: torch.fx.GraphModule) -> None:
        found.append(module)
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                names = [a.target for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
                inner = [operator.attrgetter(str(name))(module) for name in names]
                if f"higher_order.{node.target}" not in CONTROL_FLOW:
                    for graph in inner:
                        if isinstance(graph, torch.fx.GraphModule):
                            visit(graph)

    visit(program.graph_module)
    return found


class _Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a trace with ``_Stays`` after ``left`` ops."""

    def __init__(self, left: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Stays(f"PyTorch's decomposition unrolls it into more than {MAX_OPS} ops")
        return func(*args, **(kwargs or {}))


class _Decomposer:
    def __init__(self) -> None:
        self.left = MAX_OPS
        self._known: dict[str, bool] = {}

    def lacks_lowering(self, node: torch.fx.Node) -> bool:
        """True if ``node`` is a call of an op that has no lowering for these arguments."""
        op = node.target
        if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
            return False
        values = [v for v in pytree.tree_leaves(node.meta.get("val")) if v is not None]
        if not values or not all(_is_static(v) for v in values):
            return False  # assertions, and ops whose shapes depend on data
        if isinstance(node.meta["val"], list | tuple) and any(u.target is not operator.getitem for u in node.users):
            return False  # its list of results is used as a whole
        call = _as_ir(node, op)
        if call is None:
            return False
        key = repr((call.op_type, [(t.shape, t.dtype) for t in (*call.inputs, *call.outputs)], call.attrs))
        if key not in self._known:
            self._known[key] = find(call.op_type) is None or check_node(call) is not None
        return self._known[key]

    def spelled_out(self, node: torch.fx.Node) -> torch.fx.GraphModule:
        """The op as a graph of ops that all have a lowering; they count towards ``MAX_OPS``. Raises ``_Stays``."""
        spent = self.left
        body = self._expand(node, 0)
        self.left = spent - sum(n.op == "call_function" for n in body.graph.nodes)
        if self.left < 0:
            self.left = spent
            raise _Stays(f"the decompositions of this model would have more than {MAX_OPS} ops")
        return body

    def _expand(self, node: torch.fx.Node, depth: int) -> torch.fx.GraphModule:
        op = _functional_variant(node.target)
        if op is None or depth == _MAX_DEPTH:
            raise _Stays(f"{node.target} has no lowering, and no decomposition that means the same")
        body = self._trace(node, op)
        outputs = next(n for n in body.graph.nodes if n.op == "output").args[0]
        if any(new is None for _, new in _results(node, outputs)):
            raise _Stays(f"{op} has no lowering, and its decomposition lacks a result that is used")
        for inner in list(body.graph.nodes):
            if inner.op == "call_function":
                known = isinstance(inner.target, torch._ops.OpOverload) or inner.target is operator.getitem
            else:
                known = inner.op in ("placeholder", "output")
            if not known or inner.target is op:
                raise _Stays(f"{op} has no lowering, and its decomposition needs {inner.target}")
            if self.lacks_lowering(inner):
                _splice(body.graph, inner, self._expand(inner, depth + 1))
        if op is not node.target:
            _copy_back(body.graph)
        body.graph.eliminate_dead_code()
        return body

    def _trace(self, node: torch.fx.Node, op: Any) -> torch.fx.GraphModule:
        """One step of decomposition, traced with the fake tensors of the export."""
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        values, structure = pytree.tree_flatten(arguments)
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        function = OWN_DECOMPOSITIONS.get(str(op)) or decomposition_table.get(op)
        if function is None and op._can_decompose():
            function = op.decompose
        mode = detect_fake_mode(tensors)
        if function is None or mode is None or len(tensors) != len(list(_operands(node))):
            raise _Stays(f"{op} has no lowering and no decomposition")

        def call(*traced: torch.Tensor) -> Any:
            rest = iter(traced)
            args, kwargs = pytree.tree_unflatten(
                [next(rest) if isinstance(v, torch.Tensor) else v for v in values], structure
            )
            with _Limit(2 * self.left):  # views of views are counted, and then gone
                result = function(*args, **kwargs)
                if result is NotImplemented:
                    raise _Stays(f"{op} runs best as it is, for these shapes and arguments")
                return tuple(result) if isinstance(result, tuple) else result  # a plain tuple, not a named one

        try:
            with mode, torch.no_grad(), _recurrent_cells(op):
                traced: torch.fx.GraphModule = make_fx(functionalize(call, remove="mutations"))(*tensors)
        except _Stays:
            raise
        except Exception as error:  # decompositions document no exception types
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            why = why if len(why) <= _MESSAGE else f"{why[:_MESSAGE]} …"
            raise _Stays(f"PyTorch's decomposition of {op} failed: {why}") from error
        return traced


def _functional_variant(op: Any) -> Any:
    """Return ``op`` itself if it writes to none of its arguments, the functional variant of an in-place op, or None."""
    if not op._schema.is_mutable:
        return op
    namespace, name, overload = functional_name(str(op)).split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return found if found is not None and not found._schema.is_mutable else None


def _copy_back(graph: torch.fx.Graph) -> None:
    """Let the graph of a functional variant write its result to its first tensor, and return that."""
    written, output = next(iter(graph.nodes)), next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        output.args = (graph.call_function(torch.ops.aten.copy_.default, (written, output.args[0])),)


@contextmanager
def _recurrent_cells(op: Any) -> Iterator[None]:
    """Disable oneDNN for LSTMs, so that they decompose into cells instead of oneDNN's own ops."""
    enabled = str(op).startswith("aten.lstm") and torch._C._get_mkldnn_enabled()
    if enabled:
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        if enabled:
            torch._C._set_mkldnn_enabled(True)


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(d, int) for d in value.shape)


def _as_ir(node: torch.fx.Node, op: torch._ops.OpOverload) -> OpNode | None:
    """The node as the IR will have it, or None if that depends on other nodes."""

    def spec(n: torch.fx.Node) -> Any:
        value = n.meta.get("val")
        if isinstance(value, list | tuple):
            return [tensor(f"{n.name}_{i}", v, (n.name, i)) for i, v in enumerate(value)]
        return tensor(n.name, value, (n.name, 0)) if isinstance(value, torch.Tensor) else value

    def tensor(name: str, value: Any, producer: tuple[str, int]) -> TensorSpec:
        if not _is_static(value):
            raise CaptureError(f"{name} is not a tensor of a static shape")
        return TensorSpec(name, tuple(value.shape), dtype_name(value.dtype, name), producer)

    try:
        arguments = read_arguments(node, op, spec)
        results = [v for v in pytree.tree_leaves(node.meta["val"]) if v is not None]
        outputs = [tensor(node.name, v, (node.name, i)) for i, v in enumerate(results)]
    except CaptureError:
        return None
    arguments.refuse_training(describe_node(node))
    return OpNode(node.name, str(op), arguments.inputs, outputs, arguments.attrs)


def _operands(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The FX nodes of a call's tensors, in the order in which ``_trace`` passes them."""
    for leaf in pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda v: isinstance(v, torch.fx.Node)):
        if isinstance(leaf, torch.fx.Node):
            yield leaf


def _splice(graph: torch.fx.Graph, node: torch.fx.Node, body: torch.fx.GraphModule) -> dict[str, torch.fx.Node]:
    """Replace ``node`` by ``body``. Returns the new nodes of its results, by the names of the old ones."""
    inputs = iter(_operands(node))
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    outputs: Any = None
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                outputs = inner.args[0]
            else:
                env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta.update({key: node.meta[key] for key in LOCATION_KEYS if key in node.meta})
        made = set(env.values()) - set(_operands(node))
        renamed = {}
        for old, new in _results(node, outputs):
            value = old.meta["val"]
            result = env[new]
            if result not in made:  # an input, or the same value twice
                result = graph.call_function(torch.ops.aten.clone.default, (result,))
            made.discard(result)
            result.meta["val"] = value  # the original one has the right storage
            old.replace_all_uses_with(result)
            renamed[old.name] = result
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)
    return renamed


def _results(node: torch.fx.Node, outputs: Any) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """Pairs of a replaced node and the node of the decomposition that computes its value."""
    if not isinstance(node.meta["val"], list | tuple):
        return [(node, outputs[0] if isinstance(outputs, list | tuple) else outputs)]
    return [(user, outputs[user.args[1]]) for user in node.users if user.users]


def _replace(program: ExportedProgram, module: torch.fx.GraphModule, node: torch.fx.Node, body: Any) -> None:
    for old, new in _splice(module.graph, node, body).items():
        if module is program.graph_module:
            program.graph_signature.replace_all_uses(old, new.name)
