"""Caches that a graph takes and returns become state that the runtime keeps.

A decode step that another tool extracted takes each cache as an input, writes a row into it and returns all of it. As
state, a cache is allocated once and written in place, so that it is neither copied nor passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..aten.ir import IRGraph, StateUpdate, TensorSpec
from ..ops import Result, result_of
from ..support.errors import IRError


def loop_carried(ir: IRGraph) -> dict[str, str]:
    """Return the graph inputs that are returned with parts replaced: input name -> output name.

    Output names are those of :meth:`IRGraph.output_names`. An output that is returned twice, or that depends on several
    such inputs, is left out.
    """
    source = {(t.name, 0): t.name for t in ir.graph_inputs}
    for node in ir.nodes:
        if result_of(node.op_type) is Result.UPDATE and (key := ir.key(node.inputs[0])) in source:
            source[node.name, 0] = source[key]
    keys = [ir.key(t) for t in ir.graph_outputs]
    pairs: dict[str, list[str]] = {}
    for name, key in zip(ir.output_names(), keys, strict=True):
        if key in source and key != (source[key], 0) and keys.count(key) == 1:
            pairs.setdefault(source[key], []).append(name)
    return {name: outputs[0] for name, outputs in pairs.items() if len(outputs) == 1}


def as_state(ir: IRGraph, pairs: Mapping[str, str] | None = None) -> IRGraph:
    """Return ``ir`` with the inputs in ``pairs`` (input name -> output name) turned into states of the same name.

    ``pairs`` defaults to :func:`loop_carried`. A state starts at zero unless the weights have a tensor of its name.
    Each run stores the output in the state; callers pass neither the input nor get the output.

    Raises ``IRError`` for a pair that does not exist, or whose shapes or dtypes differ.
    """
    pairs = loop_carried(ir) if pairs is None else dict(pairs)
    inputs = {t.name: t for t in ir.graph_inputs}
    outputs = dict(zip(ir.output_names(), ir.graph_outputs, strict=True))
    for carried, result in pairs.items():
        for name, known, what in ((carried, inputs, "input"), (result, outputs, "output")):
            if name not in known:
                raise IRError(f"{ir.model_name!r} has no {what} {name!r}; it has {', '.join(known) or 'none'}")
        a, b = inputs[carried], outputs[result]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
            raise IRError(f"input {carried!r} and output {result!r} cannot be one state: they are {found}")
        if any(w.name == carried for w in ir.weights) or carried in ir.constants:
            raise IRError(f"input {carried!r} cannot become state: a weight has its name")

    def reads(t: TensorSpec) -> TensorSpec:
        return replace(t, producer=None) if t.producer is not None and t.producer[0] in pairs else t

    kept = set(pairs.values())
    return replace(
        ir,
        graph_inputs=[t for t in ir.graph_inputs if t.name not in pairs],
        graph_outputs=[reads(t) for name, t in outputs.items() if name not in kept],
        weights=[*ir.weights, *(TensorSpec(n, inputs[n].shape, inputs[n].dtype) for n in pairs)],
        weight_name_mapping={**ir.weight_name_mapping, **{n: n for n in pairs}},
        nodes=[replace(n, inputs=[reads(t) for t in n.inputs]) for n in ir.nodes],
        state=[*ir.state, *(StateUpdate(name, reads(outputs[result])) for name, result in pairs.items())],
    )
