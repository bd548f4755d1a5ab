"""The kernels as a graph for Model Explorer: nested by module, with times and bounds as attributes.

The format is the input of its visualizer, a graph collection: ``graphs``, each with ``nodes`` that have an ``id``, a
``label``, a ``namespace`` ('a/b/c'), ``attrs`` and ``incomingEdges``. Its user opens the file like a model.
"""

from __future__ import annotations

from typing import Any

from .records import Profile, Row, Section


def graphs(report: Profile) -> dict[str, Any]:
    """Return a collection with one graph for each section."""
    return {"label": report.model, "graphs": [_graph(section) for section in report.sections]}


def _graph(section: Section) -> dict[str, Any]:
    total = section.kernel_seconds or 1.0
    return {"id": section.title, "nodes": [_node(r, total) for r in section.rows]}


def _node(r: Row, total: float) -> dict[str, Any]:
    return {
        "id": str(r.index),
        "label": r.name,
        "namespace": r.places[0].module.replace(".", "/") if r.places else "",
        "attrs": [{"key": key, "value": value} for key, value in _attributes(r, total).items()],
        "incomingEdges": [
            {"sourceNodeId": str(index), "sourceNodeOutputId": "0", "targetNodeInputId": str(n)}
            for n, index in enumerate(r.after)
        ],
        "outputsMetadata": [
            {"id": str(n), "attrs": [{"key": "tensor", "value": text}]} for n, text in enumerate(r.outputs)
        ],
    }


def _attributes(r: Row, total: float) -> dict[str, str]:
    found = {
        "device": r.device, "kind": r.kind, "µs": f"{r.seconds * 1e6:.2f}", "share": f"{r.seconds / total:.2%}",
        "lost µs": f"{r.lost * 1e6:.2f}", "of roofline": f"{r.of_roof:.0%}" if r.roof else "", "bound by": r.bound,
        "GFLOP/s": f"{r.gflops:.1f}" if r.flops else "", "GB/s": f"{r.gbytes:.1f}", "inputs": ", ".join(r.inputs),
        "modules": r.module, "source": ", ".join(dict.fromkeys(p.source for p in r.places)), "ops": ", ".join(r.ops),
        "formula": r.text, "launch": r.launch,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value}
