"""A mixed model in a ``.npubin`` file: a msgpack map, in the container of ``npu_compiler/artifact/container.py``.

============ ============================================================================================
field        contents
============ ============================================================================================
version      of this map: 1
target       of all programs; ``device``, ``dtype`` and ``build`` as in a program
ir           the partitioned graph as IR JSON: the host partitions run from it
partitions   in the order they run: ``device``, names of ``nodes``, and on the NPU the fields of a ``program``
reasons      why nodes run on the host: (node, rule, detail, fix)
============ ============================================================================================

The file does not contain the inputs and outputs of partitions, the transfers and the owners of buffers, because they
follow from the graph and the partitions (:mod:`npu_compiler.partitioning.cut`). The reader derives them, and every
program must have exactly the inputs, outputs, weights and buffers of its partition.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..artifact import container
from ..artifact import serialize as program_file
from ..artifact.program import CompiledProgram, IOSpec
from ..aten.ir import IRGraph, OpNode, TensorSpec
from ..aten.json_reader import graph_weights_used, load_ir_from_dict
from ..aten.json_writer import ir_to_dict
from ..partitioning.cut import cut
from ..partitioning.plan import HOST, NPU, Partition, PartitionPlan
from ..support.errors import ArtifactError, IRError, Reason
from ..support.records import Field, parse_json

if TYPE_CHECKING:
    from .program import MixedProgram

VERSION = 1
_FIELDS = ("version", "target", "device", "dtype", "build", "ir", "partitions", "reasons")
_MAX_IR = 2**31  # characters


# -- writing ----------------------------------------------------------------------------------------------------------
def dumps(model: MixedProgram) -> bytes:
    """Return the bytes of the file. Raises ``ArtifactError`` for a model that would not load again as it is."""
    plan = model.plan
    if plan.on_npu:
        raise ArtifactError("one NPU program computes the whole model: save that program, not a MixedProgram")
    nodes = {n.name: n for n in plan.ir.nodes}
    runs = [(p.device, [nodes[name] for name in p.nodes]) for p in plan.partitions]
    again = cut(plan.ir, runs, plan.reasons)
    if [(p.inputs, p.outputs) for p in again.partitions] != [(p.inputs, p.outputs) for p in plan.partitions]:
        raise ArtifactError("the plan was changed after partition() made it: its partitions exchange other values")
    _check(model.plan, model.programs, model.target, model.device)
    return container.pack(container.MIXED, to_plain(model))


def to_plain(model: MixedProgram) -> dict[str, Any]:
    """Return the model as dicts, lists, text, numbers and bytes."""
    programs = {id: program_file.program_to_plain(p) for id, p in model.programs.items()}
    return {
        "version": VERSION,
        "target": model.target,
        "device": model.device,
        "dtype": model.dtype,
        "build": model.build,
        "ir": json.dumps(ir_to_dict(model.plan.ir), separators=(",", ":")),
        "partitions": [
            {"device": p.device, "nodes": list(p.nodes), "program": programs.get(p.id)} for p in model.plan.partitions
        ],
        "reasons": [[node, r.rule, r.detail, r.fix] for node, r in model.plan.reasons.items()],
    }


# -- reading ----------------------------------------------------------------------------------------------------------
def parse(plain: Any, allowed_ops: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a :class:`MixedProgram` from the body of a file. Raises ``ArtifactError`` with the path of
    what is wrong."""
    body = Field(plain)
    version = body.get("version").integer()
    if version != VERSION:
        raise ArtifactError(f"version: {version}, this build reads {VERSION}; compile the model again")
    f = body.record(_FIELDS)
    target, device = f["target"].text(32, program_file.TARGET_NAME), f["device"].text(96, program_file.DEVICE_NAME)
    ir = _graph(f["ir"])
    runs: list[tuple[str, list[OpNode]]] = []
    programs: dict[int, CompiledProgram] = {}
    nodes, placed = {n.name: n for n in ir.nodes}, set[str]()
    for i, row in enumerate(f["partitions"].items()):
        part = row.record(("device", "nodes", "program"))
        if part["device"].text() not in (NPU, HOST):
            part["device"].fail(f"{NPU!r} or {HOST!r}")
        runs.append((part["device"].text(), _nodes(ir, part["nodes"], nodes, placed)))
        if part["device"].text() == NPU:
            programs[i] = _program(part["program"])
        elif part["program"].value is not None:
            part["program"].fail("null: the partition runs on the host")
    if missing := next((n.name for n in ir.nodes if n.name not in placed), None):
        raise ArtifactError(f"partitions: node {missing!r} is in none of them")
    on_host = {n.name for on, run in runs for n in run if on == HOST}
    plan = cut(replace(ir, allowed_ops=frozenset(allowed_ops)), runs, _reasons(f["reasons"], on_host))
    _check(plan, programs, target, device)
    build = program_file.free_map(f["build"])
    return {
        "plan": plan, "programs": programs, "target": target, "dtype": f["dtype"].dtype(), "device": device,
        "build": build,
    }  # fmt: skip


def _graph(f: Field) -> IRGraph:
    document = parse_json(f.text(_MAX_IR), f.path, ArtifactError)
    try:
        return load_ir_from_dict(document)
    except IRError as error:
        raise ArtifactError(f"{f.path}: {error}") from None


def _nodes(ir: IRGraph, f: Field, nodes: Mapping[str, OpNode], placed: set[str]) -> list[OpNode]:
    """Return the nodes of one partition; ``placed`` has those of the partitions before it, and gets these."""
    found = []
    for item in f.items():
        name = item.text()
        if name not in nodes or name in placed:
            item.fail("a node of the graph, each once")
        for t in nodes[name].inputs:
            source = ir.key(t)[0]
            if source in nodes and source not in placed:
                raise ArtifactError(f"{item.path}: {name!r} reads {source!r}, which runs later")
        placed.add(name)
        found.append(nodes[name])
    return found


def _program(f: Field) -> CompiledProgram:
    try:
        return program_file.parse(f.value, CompiledProgram)
    except ArtifactError as error:
        inner, _, problem = str(error).partition(": ")
        raise ArtifactError(f"{f.path}{'' if inner == 'body' else f'.{inner}'}: {problem}") from None


def _reasons(f: Field, on_host: Collection[str]) -> dict[str, Reason]:
    reasons: dict[str, Reason] = {}
    for row in f.items():
        node, *texts = row.row(4)
        if node.text() not in on_host or node.text() in reasons:
            node.fail("a node on the host, each once")
        reasons[node.text()] = Reason(*(t.text() for t in texts))
    return reasons


# -- how the fields fit together --------------------------------------------------------------------------------------
def _check(plan: PartitionPlan, programs: Mapping[int, CompiledProgram], target: str, device: str) -> None:
    """Check that every program computes its partition for the model's target."""
    on_npu = {p.id: p for p in plan.partitions if p.device == NPU}
    if on_npu.keys() != programs.keys():
        raise ArtifactError("partitions: the programs are not those of the NPU partitions")
    for id, program in programs.items():
        path = f"partitions[{id}].program"
        if (program.target, program.device) != (target, device):
            made_for = program.device or program.target
            raise ArtifactError(f"{path}.device: it was compiled for {made_for}, the model for {device or target}")
        _check_program(program, on_npu[id], path)


def _check_program(program: CompiledProgram, part: Partition, path: str) -> None:
    if len(program.entries) != 1:
        raise ArtifactError(f"{path}.entries: there are {len(program.entries)}, expected one")
    entry, ir = program.entry(), part.ir
    results = [replace(t, name=name) for name, t in zip(ir.output_names(), ir.graph_outputs, strict=True)]
    for what, found, expected in (("inputs", entry.inputs, ir.graph_inputs), ("outputs", entry.outputs, results)):
        if _types(found) != _types(expected):
            raise ArtifactError(f"{path}.entries[0].{what}: they are not those of the partition")
    used = {key: (spec.shape, spec.dtype) for key, spec in graph_weights_used(ir).items()}
    for at, w in enumerate(program.weights):
        if used.get(w.key) != (w.shape, w.dtype):
            raise ArtifactError(f"{path}.weights[{at}]: {w.key!r} is not a weight of the partition with this type")
    states = sorted(b.name for b in program.buffers if b.kind == "state")
    if states != sorted(u.key for u in ir.state):
        raise ArtifactError(f"{path}.buffers: the states {states} are not the buffers that the partition writes")


def _types(specs: Iterable[IOSpec] | Iterable[TensorSpec]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(s.name, tuple(s.shape), s.dtype) for s in specs]
