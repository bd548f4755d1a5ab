"""ATen IR -> core graph. One walk over the nodes collects every refusal, so one error lists them all.

In-place ops are lowered as their functional variants. Every later reader of the changed memory (the tensor, its views,
the tensor that it is a view of) is redirected to the new contents, as PyTorch defines aliasing. Tensors that are not
views are row-major. A weight that is written is state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..aten.data_dependent import data_dependence
from ..aten.ir import GETITEM, IRGraph, Key, OpNode, TensorSpec, dtype_contradiction, selected
from ..aten.op_names import is_in_place
from ..graph.expr import index
from ..graph.graph import VIEWS, Graph, Node, Value
from ..graph.verify import check_graph
from ..schedule.buffers import contiguous_strides
from ..schedule.kernel import Buffer, Operand
from ..schedule.strides import strided_view
from ..support.errors import CompileError, IRError, Reason, Unsupported
from . import Result, lower_call, result_of
from .access import fresh

Refusal = tuple[str, str, Reason]  # node, op type, why


def lower_ir(ir: IRGraph, dtype: str | None = None, refused: Sequence[Refusal] = ()) -> Graph:
    """Lower a whole model.

    ``dtype`` ('float16', 'bfloat16') stores float32 activations and matrices in that type; inputs and outputs keep the
    IR's dtypes. ``refused`` are nodes known to be unsupported, which are not tried again. Raises :class:`CompileError`
    with one Reason per refused node.
    """
    return _Lowering(ir, dtype, refused).run()


def lower_node(node: OpNode, weights: Collection[int] = ()) -> Graph:
    """Lower one node, other than a getitem, to a graph of its own. ``weights``: the inputs that are known when weights
    are loaded. Raises :class:`Unsupported`."""
    if (dependence := data_dependence(node)) is not None:
        raise Unsupported(dependence)
    graph = Graph()
    inputs = [
        graph.weight(str(i), t.shape, t.dtype) if i in weights else graph.input(str(i), t.shape, t.dtype)
        for i, t in enumerate(node.inputs)
    ]
    results = _conform(node, lower_call(graph, node.op_type, inputs, node.attrs), None)
    graph.outputs = [(str(i), value) for i, value in enumerate(results) if value is not None]
    try:
        check_graph(graph)  # arguments that the lowering let through, such as a dim that is named twice
    except ValueError as error:
        raise Unsupported(Reason("arguments", f"{node.op_type}: {error}")) from error
    return graph


def check_node(node: OpNode) -> Reason | None:
    """Return why this node cannot run on the NPU, or None, by a dry run of the lowering that compiles it."""
    try:
        if node.op_type != GETITEM:
            lower_node(node)
    except Unsupported as error:
        return error.reason
    return None


class _Lowering:
    def __init__(self, ir: IRGraph, dtype: str | None, refused: Sequence[Refusal]):
        self.ir, self.dtype = ir, dtype
        self.graph = Graph(ir.model_name)
        self.env: dict[Key, Value] = {}
        self.narrowed: set[Value] = set()  # float32 in the IR, stored in self.dtype here
        self.reasons = list(refused)
        self.weights: dict[str, tuple[str, Value]] = {}  # by state_dict key: placeholder, value before the run
        self.states: dict[str, Value] = {}  # by state_dict key
        self.writes = any(is_in_place(n.op_type) for n in ir.nodes)
        self.opaque: set[Value] = set()  # memory shared in a way that views cannot express

    def run(self) -> Graph:
        ir, graph = self.ir, self.graph
        self._leaves()
        refused = {name for name, _, _ in self.reasons}
        for node in ir.nodes:
            graph.sources = (node.name,)
            try:
                if node.name not in refused:
                    self._node(node)
                    continue
            except Unsupported as error:
                self.reasons.append((node.name, node.op_type, error.reason))
            for i, t in enumerate(node.outputs):  # go on, to report every refusal at once
                shape = tuple(max(d, 1) for d in t.shape)
                self.env[(node.name, i)] = graph.input(f"?{node.name}.{i}", shape, t.dtype)
        graph.sources = ()
        if self.reasons:
            lines = "\n".join(f"  {name} ({op}): {reason}" for name, op, reason in self.reasons)
            raise CompileError(
                f"{len(self.reasons)} node(s) of {ir.model_name!r} cannot run on the NPU:\n{lines}", self.reasons
            )
        for name, t in zip(ir.output_names(), ir.graph_outputs, strict=True):
            graph.outputs.append((name, self._read(t).cast(t.dtype)))
        self._updates()
        graph.clean()
        return graph

    def _updates(self) -> None:
        """Return the contents of states after a run: updates of the IR, and weights that in-place ops wrote."""
        for update in self.ir.state:
            if update.key not in self.states:
                raise IRError(
                    f"state {update.key!r} is not a weight of the model; declare it in weights and weight_name_mapping"
                )
            self.graph.updates.append((update.key, self._read(update.value).cast(self.states[update.key].dtype)))
        declared = {u.key for u in self.ir.state}
        for key, (placeholder, leaf) in self.weights.items():
            now = self.env[(placeholder, -1)]
            if key not in declared and _view_chain(now)[1] is not _view_chain(leaf)[1]:
                node = next(n for n in self.graph.nodes if n.op == "weight" and n.attrs["key"] == key)
                node.op = "state"
                self.graph.updates.append((key, now.cast(node.out.dtype)))

    def _leaves(self) -> None:
        ir, graph = self.ir, self.graph
        for t in ir.graph_inputs:
            self.env[(t.name, 0)] = self.env[(t.name, -1)] = self._narrow(graph.input(t.name, t.shape, t.dtype))
        mutated = {u.key for u in ir.state}
        specs = {w.name: w for w in ir.weights}
        constants = {key: graph.const(np.asarray(data)) for key, data in ir.constants.items() if key not in mutated}
        self.env.update({(key, -1): value for key, value in constants.items()})
        for placeholder, key in ir.weight_name_mapping.items():
            spec = specs.get(key)
            if key in constants:
                self.env[(placeholder, -1)] = constants[key]
                continue
            if spec is None:
                continue
            if key in mutated:
                value = self.states.get(key) or graph.state(key, spec.shape, spec.dtype)
                self.states[key] = value
            elif key in self.weights:  # tied
                value = self.weights[key][1]
            else:
                value = graph.weight(key, spec.shape, spec.dtype)
                # matrices follow the storage dtype; vectors (biases, norm statistics) stay exact, since they are small
                value = self._narrow(value) if value.rank >= 2 else value
                self.weights[key] = placeholder, value
            self.env[(placeholder, -1)] = value

    def _narrow(self, value: Value) -> Value:
        if self.dtype is None or value.dtype != "float32" or self.dtype == "float32":
            return value
        value = value.cast(self.dtype)
        self.narrowed.add(value)
        return value

    def _read(self, t: TensorSpec) -> Value:
        value = self.env.get(self.ir.key(t))
        if value is None:
            raise Unsupported(Reason("undefined", f"{t.name} is read before it is defined", "check the IR's producers"))
        return value

    def _node(self, node: OpNode) -> None:
        if (dependence := data_dependence(node)) is not None:
            raise Unsupported(dependence)
        if node.op_type == GETITEM:
            self.env[(node.name, 0)] = self._read(selected(node))
            return
        inputs = [self._read(t) for t in node.inputs]
        narrow = self.dtype if any(v in self.narrowed for v in inputs) else None
        attrs = {k: narrow if narrow and k == "dtype" and _is_float32(v) else v for k, v in node.attrs.items()}
        results = lower_call(self.graph, node.op_type, inputs, attrs)
        results = _conform(node, results, narrow)
        if self.writes:
            results = self._own_memory(node, inputs, results)
        for i, value in enumerate(results):
            if value is not None:
                if narrow and value.dtype == narrow and node.outputs[i].dtype == "float32":
                    self.narrowed.add(value)
                self.env[(node.name, i)] = value
        if is_in_place(node.op_type):
            self._mutate(node, inputs[0], self.env[(node.name, 0)])

    def _own_memory(self, node: OpNode, inputs: list[Value], results: list[Value | None]) -> list[Value | None]:
        """Return results that share memory with an input exactly where PyTorch's do."""
        declared = result_of(node.op_type)
        bases = {_view_chain(v)[1] for v in inputs}
        out: list[Value | None] = []
        for value in results:
            if value is None or is_in_place(node.op_type):
                out.append(value)
                continue
            shares = _view_chain(value)[1] in bases
            copied = node.attrs.get("copy") is True or not _shares_memory(declared, inputs, value)
            if shares and copied:
                value = fresh(value)
            elif not shares and declared is Result.VIEW:
                self.opaque |= {value, *bases}
            out.append(value)
        return out

    def _mutate(self, node: OpNode, old: Value, new: Value) -> None:
        """Redirect all readers of memory shared with ``old`` to ``new``."""
        chain, base = _view_chain(old)
        if base in self.opaque:
            raise Unsupported(
                Reason("alias", "a tensor is written in place that a gathered view reads", "call .clone() first")
            )
        for view in reversed(chain):
            new = _write_back(view, new)
        for key, value in self.env.items():
            views, root = _view_chain(value)
            if root is base:
                self.env[key] = self._replayed(views, new)
        self.env[(node.name, 0)] = self._replayed(chain, new)

    def _replayed(self, views: list[Node], base: Value) -> Value:
        value = _replay(views, base)
        if value.dtype == self.dtype:
            self.narrowed.add(value)
        return value


def _is_float32(value: Any) -> bool:
    return str(value).removeprefix("torch.") in ("float32", "float")


def _view_chain(value: Value) -> tuple[list[Node], Value]:
    """Return the view nodes between the base and ``v``, base first, and the base."""
    chain: list[Node] = []
    while value.op in VIEWS:
        chain.append(value.node)
        value = value.node.inputs[0]
    return chain[::-1], value


def _shares_memory(declared: Result, inputs: list[Value], result: Value) -> bool:
    """Whether the result of an op that is declared so is in the memory of its first input."""
    if not declared.may_copy:
        return declared.may_share
    source = inputs[0]
    memory = _window(source)
    if declared is Result.SELF_IF_CONTIGUOUS:
        return memory.contiguous
    return result is source or result.op != "reshape" or strided_view(memory, result) is not None


def _window(value: Value) -> Operand:
    chain, base = _view_chain(value)
    strides = contiguous_strides(base.shape)
    window = Operand(Buffer(-1, "arena", base.dtype, base.shape, ""), base.shape, strides)
    for node in chain:
        found = strided_view(window, node.out)
        if found is None:
            raise Unsupported(Reason("alias", "a view that no strides express", "use .reshape() instead of .view()"))
        window = found
    return window


def _replay(views: list[Node], base: Value) -> Value:
    for node in views:
        base = base.graph.add(node.op, [base], [(node.out.shape, base.dtype)], **node.attrs).out
    return base


def _write_back(view: Node, new: Value) -> Value:
    """Return the contents of a view's source after the view was overwritten with ``new``."""
    source = view.inputs[0]
    if view.op == "reshape":
        return new.reshape(*source.shape)
    if view.op == "permute":
        return new.permute(*np.argsort(view.attrs["perm"]).tolist())
    if view.op == "slice":
        idx = [
            index(d) * st + s for d, (s, st) in enumerate(zip(view.attrs["starts"], view.attrs["steps"], strict=True))
        ]
        return source.graph.scatter(source, new.cast(source.dtype), [], idx)
    raise Unsupported(Reason("alias", "an expanded tensor is written in place", "call .clone() before the in-place op"))


def _conform(node: OpNode, results: list[Value | None], narrow: str | None) -> list[Value | None]:
    """Check shapes against the IR and cast to its dtypes (``narrow`` in place of float32)."""
    if len(results) < len(node.outputs):
        raise Unsupported(
            Reason("outputs", f"{node.op_type}: {len(node.outputs)} outputs expected, lowering gives {len(results)}")
        )
    if (problem := dtype_contradiction(node)) is not None:
        raise Unsupported(Reason("dtype", f"{node.op_type}: {problem}", "re-export the model"))
    out: list[Value | None] = []
    for value, spec in zip(results, node.outputs, strict=False):
        if value is None:
            out.append(None)
            continue
        if value.shape != spec.shape:
            detail = f"{node.op_type}: the IR states shape {list(spec.shape)}, the op gives {list(value.shape)}"
            raise Unsupported(Reason("shape", detail, "re-export the model"))
        out.append(value.cast(narrow if narrow and spec.dtype == "float32" else spec.dtype))
    return out
