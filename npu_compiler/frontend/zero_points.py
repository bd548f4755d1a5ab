"""Zero points that are zero everywhere leave a quantised model, as symmetric quantisation has them.

PT2E keeps the zero points of weights in buffers. Only products of weights without zero points are products of integers
(:mod:`npu_compiler.passes.integer_products`), and whether there are any must be known when the model is compiled.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from .copied import writable

_OPS = (
    "quantized_decomposed.dequantize_per_channel.default",
    "quantized_decomposed.dequantize_per_channel_group.default",
)
_ARGUMENT = 2


def without_zero_points(program: ExportedProgram, in_place: bool) -> ExportedProgram:
    """Return the program with None for the zero points of dequantised weights whose values are known to be zero."""

    def calls(p: ExportedProgram) -> list[torch.fx.Node]:
        found = [
            n for n in p.graph.nodes
            if n.op == "call_function" and str(n.target) in _OPS and len(n.args) > _ARGUMENT
            and isinstance(n.args[_ARGUMENT], torch.fx.Node)
        ]  # fmt: skip
        known = _zeros(p) if found else set()
        return [n for n in found if n.args[_ARGUMENT].name in known]

    if not calls(program):
        return program
    program = writable(program, in_place)
    for node in calls(program):
        node.update_arg(_ARGUMENT, None)
    program.graph_module.recompile()
    return program


def _zeros(program: ExportedProgram) -> set[str]:
    """Return the names of the placeholders of buffers and constants whose elements are all zero and are not written."""
    values = {**program.state_dict, **program.constants}
    written = set(program.graph_signature.buffers_to_mutate.values())
    found = set()
    for spec in program.graph_signature.input_specs:
        value = values.get(spec.target) if spec.kind is not InputKind.USER_INPUT and spec.target else None
        if isinstance(value, torch.Tensor) and not value.is_meta and spec.target not in written and not value.any():
            found.add(spec.arg.name)
    return found
