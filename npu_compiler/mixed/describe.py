"""Descriptions of a mixed model: :func:`describe` returns text, :func:`to_json` data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..artifact import describe as program_text
from ..aten.ir import DataSize, TensorSpec
from ..partitioning.plan import HOST
from ..support.text import json_safe, printable, si, table, tensor_text

if TYPE_CHECKING:
    from .program import MixedProgram


def totals(model: MixedProgram) -> dict[str, int]:
    """Return the totals of all programs by name, the transferred bytes of a run and the number of nodes on the host."""
    host_nodes = sum(len(p.nodes) for p in model.plan.partitions if p.device == HOST)
    more = {"transferred_bytes": model.plan.transferred_bytes, "host_nodes": host_nodes}
    return {**program_text.totals(*model.programs.values()), **more}


def describe(model: MixedProgram) -> str:
    """Return the whole model as text."""
    io = [("input", t.name, tensor_text(t.shape, t.dtype)) for t in model.inputs]
    io += [("output", t.name, tensor_text(t.shape, t.dtype)) for t in model.outputs]
    io += [("state", u.key, tensor_text(u.value.shape, u.value.dtype)) for u in model.plan.ir.state]
    t = totals(model)
    lines = [
        f"mixed model {model.name}: compiled for {model.device or model.target}, compute dtype {model.dtype}",
        f"  runs on the host, with PyTorch: {', '.join(model.host_ops) or 'nothing'}",
        *(f"  {key}: {value}" for key, value in model.build.items()),
        "",
        model.plan.describe(),
        "",
        "I/O",
        *table(("kind", "name", "tensor"), io),
        "",
        f"totals: {len(model.programs)} programs with {t['kernels']} kernels, {si(t['flops'], 'FLOP')}; "
        f"{t['host_nodes']} nodes on the host; {si(t['transferred_bytes'], 'B')} transferred per run; "
        f"{len(model.weights)} weights",
    ]
    text = "\n".join(printable(line) for block in lines for line in block.split("\n"))
    for id, program in model.programs.items():
        text += f"\n\npartition {id}\n{program_text.describe(program).rstrip()}"
    return text + "\n"


def to_json(model: MixedProgram) -> dict[str, Any]:
    """Return what :func:`describe` shows as JSON-safe data."""
    io = {"inputs": [_plain(t) for t in model.inputs], "outputs": [_plain(t) for t in model.outputs]}
    facts = {
        "kind": "mixed", "name": model.name, "target": model.target, "device": model.device, "dtype": model.dtype,
        "build": model.build, **io, "states": model.states, "weights": [w.key for w in model.weights],
        "host_ops": model.host_ops, "plan": model.plan.to_dict(),
        "programs": {str(id): program_text.to_json(p) for id, p in model.programs.items()}, "totals": totals(model),
    }  # fmt: skip
    safe: dict[str, Any] = json_safe(facts)
    return safe


def _plain(t: TensorSpec) -> dict[str, Any]:
    shape = [d.expression if isinstance(d, DataSize) else d for d in t.shape]
    return {"name": t.name, "shape": shape, "dtype": t.dtype}
