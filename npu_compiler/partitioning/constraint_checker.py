"""Decides for each node whether a target supports it, and if not, why. compile(), partition() and explain() use it.

Shapes are static by construction of the IR. Rank and dtypes are limits of the :class:`TargetConfig`. A dry run of an
op's lowering, the same code that compiles it, tells whether it is supported with these attributes. To learn whether
the target has the kernels, the checker schedules the node on its own and asks the code generator.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..aten.ir import IRGraph, Key, OpNode, TensorSpec
from ..aten.json_reader import load_ir
from ..aten.op_names import STRUCTURAL, is_in_place
from ..graph.graph import Graph, Value
from ..ops.lower import Refusal, lower_ir, lower_node
from ..phases import State, fusions, run_fuse, run_rewrites, run_schedule
from ..support.dtypes import DTYPES
from ..support.errors import CompileError, Reason, Unsupported
from ..target_config import TargetConfig, target_config, target_names


class NodeChecker:
    """Tells why nodes cannot run on a target.

    Nodes with the same op, shapes and attributes are tried once per graph and its derived graphs: the results are kept
    in ``ir.dry_runs``. ``ir``: the graph of the nodes. It tells which inputs depend on weights alone and are therefore
    computed when weights are loaded. Without it, only the weights themselves count as such.
    """

    def __init__(self, target: str | TargetConfig = "cpu", ir: IRGraph | None = None):
        self.config = target_config(target)
        self._load_time = frozenset[Key]() if ir is None else load_time_values(ir)
        self._variable = frozenset[str]() if ir is None else variable_leaves(ir)
        self._known: dict[Hashable, tuple[Reason | None, str]] = {} if ir is None else ir.dry_runs

    def __call__(self, node: OpNode) -> Reason | None:
        """Return why ``node`` cannot run on the target, or None if it can."""
        if node.op_type.startswith("wrap_with"):
            detail = f"the extractor lost the body of this {node.op_type.removeprefix('wrap_with_')} region"
            return Reason("lost_region", detail, "capture the model with npu_compiler.capture")
        for t in (*node.inputs, *node.outputs):
            if (reason := tensor_reason(t, self.config)) is not None:
                return reason
        return None if node.op_type in STRUCTURAL else self._tried(node)[0]

    def advice(self, node: OpNode) -> str:
        """Return how a node that runs on the target could run faster, or ''."""
        return "" if node.op_type in STRUCTURAL else self._tried(node)[1]

    def _tried(self, node: OpNode) -> tuple[Reason | None, str]:
        weights = tuple(i for i, t in enumerate(node.inputs) if self._is_weight(t))
        inputs, outputs = (tuple((t.shape, t.dtype) for t in tensors) for tensors in (node.inputs, node.outputs))
        key = self.config, node.op_type, inputs, outputs, weights, repr(node.attrs)
        if key not in self._known:
            self._known[key] = self._dry_run(node, weights)
        return self._known[key]

    def _is_weight(self, t: TensorSpec) -> bool:
        return t.name not in self._variable if t.producer is None else t.producer in self._load_time

    def _dry_run(self, node: OpNode, weights: tuple[int, ...]) -> tuple[Reason | None, str]:
        try:
            graph = lower_node(node, weights)
        except Unsupported as error:
            return error.reason, ""
        if self.config.name not in target_names():  # a TargetConfig alone: its target is not registered
            return None, ""
        state = State(None, self.config, None, fusions(self.config), graph)
        run_fuse(state)
        run_schedule(state)
        run_rewrites(state)
        reason = next((reason for _, reason in state.refused_kernels()), None)
        return reason, next((hint for _, value in state.recipes if (hint := _padding(value))), "")


def _padding(weight: Value) -> str:
    """Return a hint if more than an eighth of a packed weight is padding of its last panel, else ''."""
    if weight.op != "pack":
        return ""
    columns, panel = weight.node.inputs[0].shape[1], weight.node.attrs["panel"]
    padded = -(-columns // panel) * panel
    if padded - columns <= columns // 8:
        return ""
    return f"{columns} output channels cost as much as {padded}: its weights are kept in panels of {panel}"


def variable_leaves(ir: IRGraph) -> frozenset[str]:
    """Return the names of the weights that the model writes."""
    states = {update.key for update in ir.state}
    written = {n.inputs[0].name for n in ir.nodes if is_in_place(n.op_type) and n.inputs and not n.inputs[0].producer}
    return frozenset(written | {p for p, key in ir.weight_name_mapping.items() if key in states})


def load_time_values(ir: IRGraph) -> frozenset[Key]:
    """Return the values (node name, output index) that depend only on weights that the model does not write."""
    variable, found = variable_leaves(ir), set[Key]()
    for node in ir.nodes:
        known = (t.producer in found if t.producer is not None else t.name not in variable for t in node.inputs)
        if node.inputs and all(known):
            found.update((node.name, i) for i in range(len(node.outputs)))
    return frozenset(found)


def tensor_reason(t: TensorSpec, config: TargetConfig) -> Reason | None:
    """Return why a target cannot hold a tensor, or None if it can."""
    if len(t.shape) > config.max_rank:
        detail = f"{t.name} has rank {len(t.shape)}, {config.name} takes at most {config.max_rank}"
        return Reason("rank", detail, "flatten dimensions that stay together")
    if t.dtype not in config.dtypes:
        held = ", ".join(name for name in DTYPES if name in config.dtypes)
        fix = "use real tensors" if DTYPES[t.dtype].kind == "complex" else f"cast it to one of {held}"
        return Reason("dtype", f"{t.name} is {t.dtype}, which {config.name} does not hold", fix)
    return None


def advice(node: OpNode, target: str | TargetConfig = "cpu") -> str:
    """Return how ``node`` could run faster on ``target``, or ''."""
    return NodeChecker(target).advice(node)


def passed_through(ir: IRGraph, config: TargetConfig) -> list[Refusal]:
    """Return the model's outputs that no node computes and that the target cannot hold."""
    made = {node.name for node in ir.nodes}
    kept = [t for t in ir.graph_outputs if ir.key(t)[0] not in made]
    return [(t.name, "graph output", reason) for t in kept if (reason := tensor_reason(t, config)) is not None]


def lower_checked(ir: IRGraph, config: TargetConfig, dtype: str | None = None) -> Graph:
    """Call :func:`lower_ir` for a target. ``dtype``: storage dtype of float32 tensors, or None to keep them.

    Raises ``CompileError`` with everything that the target refuses.
    """
    reason = NodeChecker(config, ir)
    refused = [(node.name, node.op_type, r) for node in ir.nodes if (r := reason(node)) is not None]
    return lower_ir(ir, dtype, refused + passed_through(ir, config))


def check(ir: Any, target: str | TargetConfig = "cpu") -> list[Refusal]:
    """Return (node name, op type, reason) of everything in an IR that ``target`` refuses; empty if it compiles.

    ``ir``: whatever ``load_ir`` takes. Raises ``IRError`` for malformed IR.
    """
    try:
        lower_checked(load_ir(ir), target_config(target))
    except CompileError as error:
        return error.reasons
    return []
