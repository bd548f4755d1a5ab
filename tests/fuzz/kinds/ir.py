"""IR documents: real models (cut short), and small graphs of calls from the op registry's samples, with anything
changed. They are read, checked, partitioned and compiled up to the memory plan, for Metal up to the text of its
kernels; nothing is run."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from npu_compiler.aten.json_reader import load_ir
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.ops import REGISTRY
from npu_compiler.partitioning.constraint_checker import check
from npu_compiler.partitioning.explain import explain
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import NPU
from npu_compiler.pipeline import run_phases
from npu_compiler.support import dtypes

from ...conformance.cases import Case
from ..mutations import mutate_tree, odd_value, places

_DATA = Path(__file__).parents[2] / "data" / "ir"
_MODELS = ("mlp", "simple_convnet_ir", "convnet", "qwen2_decode", "qwen2_prefill_tf5.23", "resnet18")
_MOST_NODES = 16
_TARGETS = ("cpu", "cpu", "metal", "cuda")


def case(rng: random.Random, folder: Path) -> None:
    document = _prefix(rng) if rng.random() < 0.3 else _calls(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _damage(rng, document)
    source: Any = document
    if rng.random() < 0.3:
        source = folder / "model.json"
        source.write_text(json.dumps(document), encoding="utf-8", errors="replace")
    ir = load_ir(source)
    load_ir(ir_to_dict(ir))
    target = rng.choice(_TARGETS)
    check(ir, target)
    explain(ir, target=target)
    plan = partition(ir, target=target)
    assert plan.describe() and json.dumps(plan.to_dict())
    for part in plan.partitions:
        if part.device == NPU:
            run_phases(part.ir, target, until="memory")
    last = "codegen" if target == "metal" else "memory"  # the others call a compiler
    run_phases(ir, target, rng.choice((None, None, "float16")), until=last)


def _damage(rng: random.Random, document: dict[str, Any]) -> None:
    """Mostly in what nodes say, which takes most understanding; sometimes the same change wherever a type occurs, which
    the reader cannot object to."""
    if rng.random() < 0.15:
        _retype(rng, document)
        return
    nodes = document.get("nodes")
    if not (isinstance(nodes, list) and nodes and rng.random() < 0.75):
        mutate_tree(rng, document)
        return
    node = rng.choice(nodes)
    attrs = node.get("attrs") if isinstance(node, dict) else None
    match rng.randrange(6):
        case 0 | 1 if isinstance(attrs, dict) and attrs:
            attrs[rng.choice(list(attrs))] = rng.choice(_attr_values()) if rng.random() < 0.5 else odd_value(rng)
        case 2 if isinstance(attrs, dict):
            name = rng.choice(_parameters(node.get("op_type")))
            attrs[name] = rng.choice(_attr_values()) if rng.random() < 0.5 else odd_value(rng)
        case 3 if isinstance(node, dict):
            node["op_type"] = rng.choice(_op_types())
        case 4 if isinstance(attrs, dict):
            mutate_tree(rng, attrs)
        case _:
            mutate_tree(rng, node if isinstance(node, dict) else nodes)


def _retype(rng: random.Random, document: dict[str, Any]) -> None:
    """One shape, size or dtype becomes another one in the whole document."""
    specs = [inner for inner, key in places(document) if key == "shape" and isinstance(inner, dict)]
    specs = [t for t in specs if isinstance(t["shape"], list) and isinstance(t.get("dtype"), str)]
    if not specs:
        return
    chosen = rng.choice(specs)
    shape, dtype = list(chosen["shape"]), chosen["dtype"]
    match rng.randrange(3):
        case 0:
            wanted = rng.choice((*dtypes.DTYPES, "complex64", "float8"))
            for t in specs:
                t["dtype"] = wanted if t["dtype"] == dtype else t["dtype"]
        case 1 if shape:
            old, new = rng.choice(shape), rng.choice((0, 1, 2, 3, 17, 1000, 2**20, 2**31, 2**39))
            for t in specs:
                t["shape"] = [new if n == old else n for n in t["shape"]]
        case _:
            wanted_shape = [rng.choice((0, 1, 2, 5, 64, 2**16)) for _ in range(rng.randrange(7))]
            for t in specs:
                t["shape"] = list(wanted_shape) if t["shape"] == shape else t["shape"]


@cache
def _op_types() -> list[str]:
    return [*REGISTRY, "<built-in function getitem>", "aten.relu_.default", "aten.view.dtype", "aten.nothing.default"]


def _parameters(op_type: Any) -> list[str]:
    op = REGISTRY.get(op_type) if isinstance(op_type, str) else None
    common = ["index", "dim", "dtype", "_tensor_list_sizes", "_tensor_list_none_masks"]
    return [*common, *(p.name for p in op.params)] if op else common


@cache
def _attr_values() -> list[Any]:
    """Every value that a sample gives to a parameter."""
    found: dict[str, Any] = {}
    for number in range(0, len(_cases()), 7):
        for value in _encoded(number)[1].values():
            found.setdefault(repr(value), value)
    return list(found.values())


# -- real models ------------------------------------------------------------------------------------------------------
@cache
def _model(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text())
    return document


def _prefix(rng: random.Random) -> dict[str, Any]:
    """The first few nodes of a model; its output is what the last of them makes."""
    whole = _model(rng.choice(_MODELS))
    count = min(len(whole["nodes"]), rng.randint(1, _MOST_NODES))
    document = {k: v if k == "nodes" else copy.deepcopy(v) for k, v in whole.items()}
    document["nodes"] = copy.deepcopy(whole["nodes"][:count])
    last = document["nodes"][-1]
    document["graph_outputs"] = [
        {**t, "producer_node": last["name"], "producer_output_idx": i} for i, t in enumerate(last["outputs"])
    ]
    return document


# -- calls from the samples of the op registry ------------------------------------------------------------------------
@cache
def _cases() -> list[Case]:
    return [
        Case(op_type, op, number, op.dtypes[number % len(op.dtypes)])
        for op_type, op in REGISTRY.items()
        for number in range(len(op.samples))
    ]


@cache
def _encoded(number: int) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Inputs, attributes and outputs of a call, without names."""
    case = _cases()[number]
    inputs, attrs = case.encoded
    return [_spec(t) for t in inputs], attrs, [_spec(t) for t in case.eager]


def _spec(tensor: Any) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": dtypes.parse(tensor.dtype)}


def _calls(rng: random.Random) -> dict[str, Any]:
    """One to four calls; an input is the result of an earlier call where one has its type, else an input or a weight of
    the graph."""
    document: dict[str, Any] = {
        "model_name": "calls", "pytorch_version": "", "graph_inputs": [], "graph_outputs": [], "weights": [],
        "weight_name_mapping": {}, "nodes": [], "constants": {}, "state": [],
    }  # fmt: skip
    made: list[dict[str, Any]] = []
    for number in range(rng.choice((1, 1, 2, 4))):
        chosen = rng.randrange(len(_cases()))
        inputs, attrs, outputs = copy.deepcopy(_encoded(chosen))
        name = f"call_{number}"
        node = {"name": name, "op_type": _cases()[chosen].op_type, "inputs": [], "outputs": outputs, "attrs": attrs}
        for i, t in enumerate(inputs):
            fitting = [m for m in made if (m["shape"], m["dtype"]) == (t["shape"], t["dtype"])]
            node["inputs"].append(dict(rng.choice(fitting)) if fitting else _leaf(rng, document, t, f"x_{number}_{i}"))
        for i, t in enumerate(outputs):
            t["name"] = f"{name}_{i}"
            made.append({**t, "producer_node": name, "producer_output_idx": i})
        document["nodes"].append(node)
    document["graph_outputs"] = copy.deepcopy(made[-3:])
    return document


def _leaf(rng: random.Random, document: dict[str, Any], spec: dict[str, Any], name: str) -> dict[str, Any]:
    if rng.random() < 0.1:
        document["constants"][name] = {**spec, "fill": rng.choice((0, 1))}
        document["weight_name_mapping"][f"c_{name}"] = name
        return {**spec, "name": f"c_{name}"}
    if rng.random() < 0.2:
        document["weights"].append({**spec, "name": name})
        document["weight_name_mapping"][f"p_{name}"] = name
        return {**spec, "name": f"p_{name}"}
    document["graph_inputs"].append({**spec, "name": name})
    return {**spec, "name": name, "producer_node": name, "producer_output_idx": 0}
