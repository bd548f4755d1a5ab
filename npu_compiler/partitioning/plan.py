"""The result of ``partition``: partitions, the transfers between them, and why nodes run on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..aten.ir import IRGraph, Key, TensorSpec
from ..aten.json_reader import graph_weights_used, leaf_key
from ..support.errors import Reason
from ..support.text import html_table, html_text, table

NPU, HOST = "npu", "host"


@dataclass(frozen=True)
class TransferOp:
    """A copy of one value, (producer node, output index), between the devices; ``nbytes`` follows from its IR type."""

    value: Key
    src: str
    dst: str
    nbytes: int


@dataclass(repr=False)
class Partition:
    """Nodes that run together on ``device``. ``ir`` has them as a graph of its own, whose graph inputs and outputs are
    ``inputs`` and ``outputs``, in order, with the unique names of ``name_of``."""

    id: int
    device: str
    nodes: tuple[str, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    ir: IRGraph

    def __repr__(self) -> str:
        return f"<Partition {self.id} on {self.device}: {len(self.nodes)} node(s)>"


@dataclass(repr=False)
class PartitionPlan:
    """Partitions and transfers in the order they run. ``reasons`` has one entry for each node that is not on the NPU.

    ``ir`` is the partitioned graph. ``feeds`` are buffers (state_dict keys) that no single partition can own:
    partitions read them as inputs and return their new values.
    """

    steps: list[Partition | TransferOp]
    reasons: dict[str, Reason]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    ir: IRGraph
    feeds: dict[str, Key] = field(default_factory=dict)

    @property
    def partitions(self) -> list[Partition]:
        """The partitions, in the order they run."""
        return [s for s in self.steps if isinstance(s, Partition)]

    @property
    def transfers(self) -> list[TransferOp]:
        """The transfers, in the order they run."""
        return [s for s in self.steps if isinstance(s, TransferOp)]

    @property
    def transferred_bytes(self) -> int:
        """Bytes that a run transfers."""
        return sum(t.nbytes for t in self.transfers)

    @property
    def on_npu(self) -> bool:
        """Whether one NPU partition computes the whole model, so that its program alone can run it."""
        if len(self.partitions) != 1 or self.partitions[0].device != NPU or self.feeds:
            return False
        part, key = self.partitions[0], self.ir.key
        return part.inputs == (*map(key, self.inputs),) and part.outputs == (*map(key, self.outputs),)

    def host_weights(self) -> dict[str, TensorSpec]:
        """Return state_dict key -> spec of the weights that host partitions read, that are outputs of the model, or
        that are passed between partitions."""
        keys = {key for p in self.partitions if p.device == HOST for key in graph_weights_used(p.ir)} | set(self.feeds)
        keys |= {leaf_key(self.ir, t.name) for t in self.outputs if t.producer is None}
        keys |= {leaf_key(self.ir, name) for name, index in self.feeds.values() if index < 0}
        return {key: spec for key, spec in graph_weights_used(self.ir).items() if key in keys}

    def summary(self) -> str:
        """Return the plan in one line."""
        count = {device: sum(p.device == device for p in self.partitions) for device in (NPU, HOST)}
        head = f"{self.ir.model_name or 'model'}: {count[NPU]} NPU and {count[HOST]} host partition(s)"
        return f"{head}, {len(self.transfers)} transfer(s), {self.transferred_bytes} bytes"

    def __repr__(self) -> str:
        return f"<PartitionPlan {self.summary()}>"

    def describe(self) -> str:
        """Return the plan as text: one line per step, then every host node with its reason."""
        lines = [self.summary()]
        for step in self.steps:
            if isinstance(step, TransferOp):
                lines.append(f"  transfer {name_of(step.value)} {step.src} -> {step.dst}, {step.nbytes} bytes")
            else:
                reads, writes = (", ".join(map(name_of, keys)) or "nothing" for keys in (step.inputs, step.outputs))
                lines.append(f"  partition {step.id} on {step.device}: {len(step.nodes)} node(s), {reads} -> {writes}")
        rows = self._reasons()
        return "\n".join([*lines, "", *table(("host node", "op", "reason"), rows)] if rows else lines)

    __str__ = describe

    def _reasons(self) -> list[tuple[str, str, str]]:
        ops = {n.name: n.op_type for n in self.ir.nodes}
        return [(n, ops[n], str(r)) for n, r in self.reasons.items() if n in ops]

    def _repr_html_(self) -> str:
        """For notebooks."""
        steps = [
            (f"transfer {name_of(s.value)}", f"{s.src} → {s.dst}", f"{s.nbytes} bytes")
            if isinstance(s, TransferOp)
            else (f"partition {s.id}", s.device, f"{len(s.nodes)} node(s)")
            for s in self.steps
        ]
        text = html_text(self.summary()) + html_table(("step", "device", "size"), steps)
        rows = self._reasons()
        return text + html_table(("host node", "op", "reason"), rows) if rows else text

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready summary, without the graphs."""
        steps: list[dict[str, Any]] = []
        for step in self.steps:
            if isinstance(step, TransferOp):
                route = {"src": step.src, "dst": step.dst, "bytes": step.nbytes}
                steps.append({"step": "transfer", "node": step.value[0], "index": step.value[1], **route})
            else:
                io = {"inputs": [name_of(k) for k in step.inputs], "outputs": [name_of(k) for k in step.outputs]}
                place = {"id": step.id, "device": step.device, "nodes": list(step.nodes)}
                steps.append({"step": "partition", **place, **io})
        reasons = {n: {"rule": r.rule, "detail": r.detail, "fix": r.fix} for n, r in self.reasons.items()}
        return {
            "model": self.ir.model_name,
            "partitions": len(self.partitions),
            "transfers": len(self.transfers),
            "transferred_bytes": self.transferred_bytes,
            "steps": steps,
            "reasons": reasons,
        }


def name_of(key: Key) -> str:
    """Return the name of a value at partition boundaries: its node's, with the output index if that is not 0."""
    node, index = key
    return node if index <= 0 else f"{node}.{index}"
