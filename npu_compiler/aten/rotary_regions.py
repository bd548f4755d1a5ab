"""Restores regions whose body an extractor lost, if shapes and dtypes allow only one meaning.

``torch_ir`` writes a ``torch.no_grad`` region as one ``wrap_with_set_grad_enabled`` node without its subgraph. In
decoder LLMs the region is the table of the rotary embedding: from ``inv_freq`` [D/2] and ``position_ids`` [..., S], in
either order, it computes the cosines and sines [..., S, D] of their products in float32. A factor on the table (called
attention scaling in YaRN and LongRoPE) is lost with the body: such models must be captured by
:func:`npu_compiler.capture`.
"""

from __future__ import annotations

from dataclasses import replace

from ..support import dtypes
from .ir import GETITEM, IRGraph, OpNode, StateUpdate, TensorSpec, selected

LOST = "wrap_with_set_grad_enabled"


def restore_regions(ir: IRGraph) -> IRGraph:
    """Return ``ir`` with every rotary table as ATen nodes; a region that may be anything else stays as it is."""
    found = {n.name: pair for n in ir.nodes if n.op_type == LOST and (pair := rotary_inputs(n)) is not None}
    if not found:
        return ir
    names = {n.name for n in ir.nodes} | {t.name for t in ir.graph_inputs} | set(ir.weight_name_mapping)
    moved: dict[tuple[str, int], tuple[str, int]] = {}

    def reads(t: TensorSpec) -> TensorSpec:
        return replace(t, producer=moved[t.producer]) if t.producer in moved else t

    nodes: list[OpNode] = []
    for node in ir.nodes:
        if node.name in found:
            positions, frequencies = found[node.name]
            table = _rotary_table(node, reads(positions), reads(frequencies), names)
            moved |= {(node.name, i): (half.name, 0) for i, half in enumerate(table[-2:])}
            nodes += table
        elif node.op_type == GETITEM and node.inputs[0].producer in moved:
            chosen = reads(selected(node))
            nodes.append(OpNode(node.name, "aten.alias.default", [chosen], node.outputs))
        else:
            nodes.append(replace(node, inputs=[reads(t) for t in node.inputs]))
    state = [StateUpdate(u.key, reads(u.value)) for u in ir.state]
    return replace(ir, nodes=nodes, graph_outputs=[reads(t) for t in ir.graph_outputs], state=state)


def rotary_inputs(node: OpNode) -> tuple[TensorSpec, TensorSpec] | None:
    """Return (positions, inverse frequencies) if the region can only be a rotary table, else None."""
    if len(node.inputs) != 2 or len(node.outputs) != 2:
        return None
    cos, sin = node.outputs
    if (cos.shape, cos.dtype) != (sin.shape, sin.dtype) or not dtypes.is_float(cos.dtype):
        return None
    orders = [tuple(node.inputs), tuple(reversed(node.inputs))]
    fitting = [
        (positions, frequencies)
        for positions, frequencies in orders
        if len(frequencies.shape) == 1
        and dtypes.is_float(frequencies.dtype)
        and cos.shape == (*positions.shape, 2 * frequencies.numel)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _rotary_table(node: OpNode, positions: TensorSpec, frequencies: TensorSpec, taken: set[str]) -> list[OpNode]:
    """Return the nodes; the last two compute the cosines and the sines."""
    nodes: list[OpNode] = []

    def add(label: str, op_type: str, *inputs: TensorSpec, shape: tuple[int, ...], **attrs: object) -> TensorSpec:
        name = f"{node.name}_{label}"
        while name in taken:
            name += "_"
        taken.add(name)
        dtype = str(attrs.get("dtype", "float32"))
        nodes.append(OpNode(name, op_type, list(inputs), [TensorSpec(name, shape, dtype)], dict(attrs)))
        return TensorSpec(name, shape, dtype, (name, 0))

    shape, half, result = positions.shape, frequencies.numel, node.outputs[0]
    at = add("positions", "aten.to.dtype", positions, shape=shape, dtype="float32")
    at = add("column", "aten.unsqueeze.default", at, shape=(*shape, 1), dim=-1)
    rates = add("frequencies", "aten.to.dtype", frequencies, shape=(half,), dtype="float32")
    angles = add("angles", "aten.mul.Tensor", at, rates, shape=(*shape, half))
    both = add("both", "aten.cat.default", angles, angles, shape=result.shape, _tensor_list_sizes=[2], dim=-1)
    tables = [add(label, f"aten.{label}.default", both, shape=result.shape) for label in ("cos", "sin")]
    for label, table in zip(("cosines", "sines"), tables, strict=True):
        add(label, "aten.to.dtype", table, shape=result.shape, dtype=result.dtype)
    return nodes
