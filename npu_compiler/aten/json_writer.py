"""``IRGraph`` to IR JSON, which ``json_reader`` reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..support.files import write_atomic
from .ir import DataSize, IRGraph, TensorSpec
from .json_values import constant_to_dict, read_attrs


def ir_to_dict(graph: IRGraph) -> dict[str, Any]:
    """Return a document of JSON types that ``load_ir_from_dict`` reads back to an equal graph; floats may be NaN."""
    doc: dict[str, Any] = {
        "model_name": graph.model_name,
        "pytorch_version": graph.pytorch_version,
        "graph_inputs": [_tensor_dict(t, producer=False) for t in graph.graph_inputs],
        "graph_outputs": [_tensor_dict(t) for t in graph.graph_outputs],
        "weights": [_tensor_dict(t) for t in graph.weights],
        "weight_name_mapping": dict(graph.weight_name_mapping),
        "nodes": [
            {
                "name": n.name,
                "op_type": n.op_type,
                "inputs": [_tensor_dict(t) for t in n.inputs],
                "outputs": [_tensor_dict(t) for t in n.outputs],
                "attrs": read_attrs(n.attrs, f"nodes[{i}].attrs"),
                **({"note": n.note} if n.note else {}),
                **({"location": asdict(n.location)} if n.location is not None else {}),
                **({"graphs": {name: ir_to_dict(g) for name, g in n.graphs.items()}} if n.graphs else {}),
            }
            for i, n in enumerate(graph.nodes)
        ],
    }
    if graph.constants:
        doc["constants"] = {k: constant_to_dict(v) for k, v in graph.constants.items()}
    if graph.state:
        doc["state"] = [{"key": u.key, "value": _tensor_dict(u.value)} for u in graph.state]
    return doc


def _tensor_dict(t: TensorSpec, *, producer: bool = True) -> dict[str, Any]:
    shape = [d.expression if isinstance(d, DataSize) else d for d in t.shape]
    d: dict[str, Any] = {"name": t.name, "shape": shape, "dtype": t.dtype}
    if producer and t.producer is not None:
        d["producer_node"], d["producer_output_idx"] = t.producer
    return d


def save_ir(graph: IRGraph, path: str | os.PathLike[str]) -> None:
    """Write the IR JSON atomically: if anything fails, the file stays as it was. Raises ``OSError``."""
    data = json.dumps(ir_to_dict(graph), indent=2).encode()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
