"""Explains on which device each node runs, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..aten.json_reader import load_ir
from ..support.errors import Reason
from ..support.text import html_table, html_text, table
from ..target_config import TargetConfig, target_config
from .constraint_checker import NodeChecker
from .partitioner import partition


@dataclass(frozen=True)
class NodeReport:
    """Where one node runs. ``device``: 'npu', 'host' (with a ``reason``) or 'dropped' (no output needs it)."""

    name: str
    op_type: str
    device: str
    reason: Reason | None
    advice: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """Where every node runs and why. ``partitions`` and ``transferred_bytes`` are those of the plan that would run."""

    model_name: str
    target: str
    nodes: tuple[NodeReport, ...]
    partitions: int
    transferred_bytes: int

    @property
    def npu_percent(self) -> float:
        """Percentage of the nodes that run on the NPU, of all nodes that run."""
        placed = [n.device for n in self.nodes if n.device != "dropped"]
        return 100.0 * placed.count("npu") / len(placed) if placed else 100.0

    def rows(self) -> list[tuple[str, int, str, str]]:
        """Return (op, count, reason, fix) of ops on the host, most frequent first."""
        counts = Counter((n.op_type, n.reason.detail, n.reason.fix) for n in self.nodes if n.reason is not None)
        return [(op, count, why, fix) for (op, why, fix), count in counts.most_common()]

    def hints(self) -> list[tuple[str, int, str]]:
        """Return (op, count, advice) of nodes that run on the NPU but could run faster."""
        counts = Counter((n.op_type, n.advice) for n in self.nodes if n.advice)
        return [(op, count, text) for (op, text), count in counts.most_common()]

    def summary(self) -> str:
        """Return the counts in one line."""
        devices = [n.device for n in self.nodes]
        placed = len(devices) - devices.count("dropped")
        share = f"{devices.count('npu')} of {placed} nodes on the NPU ({self.npu_percent:.0f} %)"
        traffic = f"{self.partitions} partition(s), {self.transferred_bytes} bytes transferred per run"
        return f"{self.model_name or 'model'}: {share}, {traffic}"

    def __str__(self) -> str:
        parts = [self.summary()]
        if rows := self.rows():
            parts.append("\n".join(table(("op", "count", "reason", "fix"), rows, indent="")))
        if hints := self.hints():
            parts.append("\n".join(table(("op", "count", "advice"), hints, indent="")))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return f"<Explanation {self.summary()}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        parts = [html_text(self.summary())]
        if rows := self.rows():
            parts.append(html_table(("op", "count", "reason", "fix"), rows))
        if hints := self.hints():
            parts.append(html_table(("op", "count", "advice"), hints))
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "model": self.model_name,
            "target": self.target,
            "npu_percent": self.npu_percent,
            "partitions": self.partitions,
            "transferred_bytes": self.transferred_bytes,
            "host_ops": [dict(zip(("op", "count", "reason", "fix"), row, strict=True)) for row in self.rows()],
            "nodes": [
                {
                    "name": n.name,
                    "op": n.op_type,
                    "device": n.device,
                    "rule": n.reason.rule if n.reason else None,
                    "reason": n.reason.detail if n.reason else None,
                    "fix": n.reason.fix if n.reason else None,
                    "advice": n.advice or None,
                }
                for n in self.nodes
            ],
        }


def explain(
    ir: Any,
    target: str | TargetConfig = "cpu",
    *,
    force_cpu: Collection[str] = (),
    minimise_transfers: bool = True,
) -> Explanation:
    """Explain an IR (whatever ``load_ir`` takes) node by node, as ``partition`` places it with these arguments."""
    config = target_config(target)
    graph = load_ir(ir)
    plan = partition(graph, target=config, force_cpu=force_cpu, minimise_transfers=minimise_transfers)
    reports = []
    live, checker = {node.name for node in plan.ir.nodes}, NodeChecker(config, plan.ir)
    for node in graph.nodes:
        reason = plan.reasons.get(node.name)
        device = "host" if reason else "npu" if node.name in live else "dropped"
        hint = checker.advice(node) if device == "npu" else ""
        reports.append(NodeReport(node.name, node.op_type, device, reason, hint))
    return Explanation(graph.model_name, config.name, tuple(reports), len(plan.partitions), plan.transferred_bytes)
