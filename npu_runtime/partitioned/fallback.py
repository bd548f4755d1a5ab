"""The host fallback: PyTorch runs the ATen ops that the NPU does not.

An IR node holds its tensors in ``inputs`` and every other argument in ``attrs`` under its schema name. Binding is done
once, when the partition is loaded; a run then only looks values up and calls ops. In-place ops and views share memory
as they do in PyTorch, also across the partitions of one run: arrays are passed without copies. Only ops that
compute with tensors are called (:mod:`npu_runtime.partitioned.allowed_ops`), so IR from elsewhere need not be trusted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.aten.data_dependent import CONTROL_FLOW, NUMBER_OPS
from npu_compiler.aten.ir import IRGraph, Key, OpNode, TensorSpec, dtype_contradiction
from npu_compiler.aten.json_reader import graph_weights_used, leaf_key
from npu_compiler.aten.op_names import STRUCTURAL, is_in_place
from npu_compiler.support.errors import BackendError, CompileError, InputError, Reason, WeightError
from npu_compiler.support.host_arrays import to_array, to_torch

from .allowed_ops import ForbiddenOp, check_allowed
from .arguments import Number, Slot, Unbound, bind_arguments, fill, import_torch, resolve, with_numbers

if TYPE_CHECKING:
    import torch

# The exceptions of PyTorch's ops and of arithmetic on numbers.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, ArithmeticError, AssertionError)
_LISTED = 8  # ops that one message names


def execute_cpu_partition(
    ir_subgraph: IRGraph, inputs: Mapping[str, np.ndarray], weights: MutableMapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Run a graph once on the host. ``inputs`` by graph input name, ``weights`` by state_dict key; outputs by name.

    Arrays are shared, not copied: outputs may be views of inputs, and in-place ops write them, as in PyTorch. New
    contents of state buffers are put into ``weights``.

    Raises:
        CompileError: a node has no PyTorch op, or arguments that its schema does not take.
        InputError, WeightError: an input or weight is missing.
        BackendError: an op failed; the message names the node.
    """
    return HostPartition(ir_subgraph).run(inputs, {} if weights is None else weights)


@dataclass(frozen=True)
class _Call:
    """A node ready to run: ``op`` takes ``args`` and ``kwargs``, whose slots are filled from ``inputs``."""

    node: OpNode
    op: Callable[..., Any]
    inputs: tuple[Key, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class HostPartition:
    """A graph bound to PyTorch's ops. Raises ``CompileError`` with a reason for every node that cannot be bound."""

    def __init__(self, ir: IRGraph):
        """``ir.allowed_ops`` are those of nested graphs too."""
        import_torch()
        self.ir = ir
        self.calls: list[_Call] = []
        reasons: list[tuple[str, str, Reason]] = []
        for node in ir.nodes:
            try:
                self.calls.append(_bind(ir, node))
            except Unbound as error:
                reasons.append((node.name, node.op_type, Reason("cpu_fallback", str(error))))
        if reasons:
            lines = "\n".join(f"  {name} ({op}): {reason.detail}" for name, op, reason in reasons)
            raise CompileError(
                f"{len(reasons)} node(s) of {ir.model_name!r} cannot run on any device:\n{lines}", reasons
            )
        used = {ir.key(t) for n in ir.nodes for t in n.inputs} | {ir.key(t) for t in _results(ir)}
        self._leaves = [(key, leaf_key(ir, key[0])) for key in used if key[1] < 0]
        self._needed = graph_weights_used(ir)
        self._dead = _last_uses(ir)
        # A getitem reads one result of its node. The shapes of the others are not checked: those that PyTorch states
        # for results that models seldom use, such as the bag sizes of embedding_bag, may differ from what it computes.
        self._read = {key for call in self.calls for key in call.inputs} | {ir.key(t) for t in _results(ir)}

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        weights: MutableMapping[str, np.ndarray],
        times: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """See :func:`execute_cpu_partition`. ``times``: None, or float64 [len(calls) + 1] that receives the start and
        each op's end in seconds."""
        env = self._bind_leaves(inputs, weights)
        with import_torch().no_grad():
            self._evaluate(env, times)
        for update in self.ir.state:
            weights[update.key] = np.array(to_array(env[self.ir.key(update.value)]))  # a copy: it may be an input
        named = zip(self.ir.output_names(), self.ir.graph_outputs, strict=True)
        return {name: to_array(env[self.ir.key(t)]) for name, t in named}

    def call(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of a graph without weights. ``tensors``: its inputs in order."""
        env = {(t.name, 0): value for t, value in zip(self.ir.graph_inputs, tensors, strict=True)}
        env.update({key: to_torch(np.array(self.ir.constants[name])) for key, name in self._leaves})
        self._evaluate(env)
        return [env[self.ir.key(t)] for t in self.ir.graph_outputs]

    def _evaluate(self, env: dict[Key, torch.Tensor], times: np.ndarray | None = None) -> None:
        if times is not None:
            times[0] = time.perf_counter()
        for number, (call, dead) in enumerate(zip(self.calls, self._dead, strict=True)):
            results = _execute(call, [env[k] for k in call.inputs])
            for i, (value, spec) in enumerate(itertools.zip_longest(results, call.node.outputs)):
                if (call.node.name, i) in self._read:
                    env[(call.node.name, i)] = _conform(call.node, value, spec)
            if times is not None:
                times[number + 1] = time.perf_counter()
            for key in dead:
                env.pop(key, None)

    def _bind_leaves(
        self, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
    ) -> dict[Key, torch.Tensor]:
        env: dict[Key, torch.Tensor] = {}
        for t in self.ir.graph_inputs:
            if t.name not in inputs:
                raise InputError(f"input {t.name!r} is missing; expected {t.dtype}{list(t.shape)}")
            env[(t.name, 0)] = _checked(inputs[t.name], t, InputError, "input")
        for key, name in self._leaves:
            if name in self.ir.constants:
                env[key] = to_torch(np.array(weights.get(name, self.ir.constants[name])))  # a copy: nodes may write it
            elif name not in weights:
                raise WeightError(f"weight {name!r} is missing")
            else:
                env[key] = _checked(weights[name], self._needed[name], WeightError, "weight")
        return env


def _results(ir: IRGraph) -> list[TensorSpec]:
    return [*ir.graph_outputs, *(u.value for u in ir.state)]


def _last_uses(ir: IRGraph) -> list[tuple[Key, ...]]:
    """Return for each node the values that nothing reads after it, so that their memory can be freed."""
    kept = {ir.key(t) for t in _results(ir)}
    dead: list[tuple[Key, ...]] = []
    for node in reversed(ir.nodes):
        keys = dict.fromkeys([ir.key(t) for t in node.inputs] + [(node.name, i) for i in range(len(node.outputs))])
        dead.append(tuple(k for k in keys if k not in kept and k[1] >= 0))
        kept.update(keys)
    return dead[::-1]


def _checked(array: np.ndarray, spec: TensorSpec, error: type[Exception], what: str) -> torch.Tensor:
    if not spec.fits(array.shape):
        raise error(f"{what} {spec.name!r} has shape {list(array.shape)}, expected {list(spec.shape)}")
    if not array.flags.writeable or any(s < 0 for s in array.strides):
        array = array.copy()  # torch accepts neither
    tensor = to_torch(array)
    dtype = getattr(import_torch(), spec.dtype)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


# ------------------------------------------------------------------------------------------------------------ binding


def require_torch(model: str, nodes: Iterable[OpNode]) -> None:
    """Raise ``BackendError`` if nodes run on the host and PyTorch is not installed; the message names their ops."""
    ops = sorted({n.op_type for n in nodes if n.op_type not in STRUCTURAL})
    if ops and find_spec("torch") is None:
        more = f" and {len(ops) - _LISTED} more" if len(ops) > _LISTED else ""
        raise BackendError(
            f"{model or 'the model'} runs {len(ops)} op(s) on the host, in PyTorch, which is not installed: "
            f"{', '.join(ops[:_LISTED])}{more}; install it (pip install 'npusim[torch]'), or change the model so that "
            "it compiles with --no-fallback"
        )


def _bind(ir: IRGraph, node: OpNode) -> _Call:
    keys = tuple(ir.key(t) for t in node.inputs)
    if node.op_type in STRUCTURAL:
        index = node.attrs.get("index")
        if not isinstance(index, int) or not -len(keys) <= index < len(keys):
            raise Unbound(f"getitem index {index!r} does not select one of its {len(keys)} inputs")
        return _Call(node, lambda x: x, (keys[index],), (Slot(0),), {})
    if node.op_type in NUMBER_OPS:
        return _number_op(node, keys)
    if node.op_type in CONTROL_FLOW:
        return _control_flow(ir, node, keys)
    if (problem := dtype_contradiction(node)) is not None:
        raise Unbound(problem)
    op, functional = resolve(node.op_type)
    try:
        check_allowed(op, node.op_type, ir.allowed_ops)
    except ForbiddenOp as error:
        raise Unbound(str(error)) from None
    args, kwargs = bind_arguments(op, node)
    if functional:  # only the in-place variant exists: run it on a copy
        in_place = op

        def op(first: torch.Tensor, *rest: Any, **named: Any) -> Any:
            return in_place(first.clone(), *rest, **named)

    return _Call(node, op, keys, args, kwargs)


def _number_op(node: OpNode, keys: tuple[Key, ...]) -> _Call:
    args = node.attrs.get("args")
    operands = with_numbers(args) if isinstance(args, list) else [None]
    flat = [v for a in operands for v in (a if isinstance(a, list) else [a])]
    if len(node.attrs) != 1 or not all(isinstance(v, Number | int | float) for v in flat):
        raise Unbound(f"{node.op_type} takes one attribute: args, a list of numbers")
    return _Call(node, NUMBER_OPS[node.op_type], keys, tuple(operands), {})


def _control_flow(ir: IRGraph, node: OpNode, keys: tuple[Key, ...]) -> _Call:
    names = CONTROL_FLOW[node.op_type]
    if set(node.graphs) != set(names):
        raise Unbound(f"{node.op_type} needs the graphs {' and '.join(names)}")
    first, second = (HostPartition(replace(node.graphs[name], allowed_ops=ir.allowed_ops)) for name in names)
    if node.op_type == "higher_order.cond":
        operands = len(keys) - 1
        function: Callable[..., Any] = partial(_cond, first, second)
    else:
        operands, carried = len(keys), node.attrs.get("carried")
        if not isinstance(carried, int) or len(node.outputs) != carried:
            raise Unbound(f"{node.op_type} gives as many results as its attribute carried says")
        if len(second.ir.graph_outputs) != carried or len(first.ir.graph_outputs) != 1:
            raise Unbound(f"{node.op_type}: cond gives one result, body gives {carried}")
        function = partial(_while_loop, first, second, carried)
    for name, graph in zip(names, (first, second), strict=True):
        if len(graph.ir.graph_inputs) != operands:
            raise Unbound(f"{node.op_type}: graph {name} takes {len(graph.ir.graph_inputs)} inputs, not {operands}")
    return _Call(node, function, keys, tuple(Slot(i) for i in range(len(keys))), {})


def _cond(yes: HostPartition, no: HostPartition, condition: torch.Tensor, *operands: torch.Tensor) -> Any:
    return (yes if bool(condition) else no).call(*operands)


def _while_loop(cond: HostPartition, body: HostPartition, carried: int, *operands: torch.Tensor) -> Any:
    values, extra = operands[:carried], operands[carried:]
    while bool(cond.call(*values, *extra)[0]):
        values = tuple(body.call(*values, *extra))
    return values


# ---------------------------------------------------------------------------------------------------------- execution


def _execute(call: _Call, tensors: list[torch.Tensor]) -> list[Any]:
    node = call.node
    try:
        result = call.op(*fill(call.args, tensors), **{k: fill(v, tensors) for k, v in call.kwargs.items()})
        values = [_as_tensor(v) for v in _flatten(result)]
    except BackendError:  # of a nested graph
        raise
    except _FAILURES as error:
        same = _promoted(tensors)
        if same is None or (is_in_place(node.op_type) and same[0] is not tensors[0]):  # it would write to a copy
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BackendError(f"node {node.name!r} ({node.op_type}) failed on the host: {why}") from error
        return _execute(call, same)
    if len(values) < len(node.outputs):
        detail = f"gave {len(values)} result(s), the IR states {len(node.outputs)}"
        raise BackendError(f"node {node.name!r} ({node.op_type}) {detail}")
    return values


def _flatten(result: Any) -> Iterator[Any]:
    """Yield the results of an op in the IR's order; lists inside tuples are flattened."""
    if isinstance(result, tuple | list):
        for value in result:
            yield from _flatten(value)
    else:
        yield result


def _as_tensor(value: Any) -> Any:
    """Return a result as a tensor: the Python numbers of ``item`` and sizes become 0-dim tensors."""
    torch = import_torch()
    if not isinstance(value, int | float | complex):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _promoted(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return mixed floating inputs in their common dtype. IR from the meta device of older PyTorch may be ill-typed."""
    torch = import_torch()
    found = {t.dtype for t in tensors if t.is_floating_point()}
    if len(found) < 2:
        return None
    common = torch.empty((), dtype=found.pop())
    for dtype in found:
        common = common.to(torch.promote_types(common.dtype, dtype))
    return [t.to(common.dtype) if t.is_floating_point() else t for t in tensors]


def _conform(node: OpNode, value: Any, spec: TensorSpec | None) -> Any:
    """Return the value in the IR's dtype. Raises if its shape is not the IR's, or if the dtype cannot hold its kind of
    numbers: a cast would drop fractions or imaginary parts."""
    torch = import_torch()
    if spec is None or value is None:
        return value
    if not spec.fits(tuple(value.shape)):
        detail = f"gives shape {list(value.shape)}, the IR states {list(spec.shape)}"
        raise BackendError(f"node {node.name!r} ({node.op_type}) {detail}; re-export the model")
    dtype = getattr(torch, spec.dtype)
    if not torch.can_cast(value.dtype, dtype):
        detail = f"gives {str(value.dtype).removeprefix('torch.')}, the IR states {spec.dtype}"
        raise BackendError(f"node {node.name!r} ({node.op_type}) {detail}; re-export the model")
    return value if value.dtype == dtype else value.to(dtype)
