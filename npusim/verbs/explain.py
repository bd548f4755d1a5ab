"""``npusim explain``: which nodes run on the NPU, which do not, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from npu_compiler.target_config import default_target

from ..console import Result, Status, Table
from ..sources import read_model

if TYPE_CHECKING:
    from npu_compiler.partitioning.explain import Explanation


def run(args: argparse.Namespace, status: Status) -> Result:
    """Answer why an op does not run on the NPU; --plan adds the partitions, --no-fallback refuses such models."""
    from npu_compiler.partitioning.explain import explain
    from npu_compiler.partitioning.partitioner import partition

    from ..builder.specializations import require_npu

    target = args.target or default_target()
    placement = {"force_cpu": args.force_cpu, "minimise_transfers": not args.no_minimise_transfers}
    ir, _, _ = read_model(args.model, 1, status)
    with status(f"checking {ir.model_name}"):
        explanation = explain(ir, target, **placement)
    blocks = _blocks(explanation)
    data = explanation.to_dict()
    if args.plan or args.no_fallback:
        plan = partition(ir, target=target, **placement)
        if args.no_fallback:
            require_npu(plan)
        blocks += ["", str(plan)]
        data["plan"] = plan.to_dict()
    return Result(data, blocks)


def _blocks(explanation: Explanation) -> list[str | Table]:
    blocks: list[str | Table] = [explanation.summary()]
    if rows := explanation.rows():
        blocks += ["", Table(("op", "count", "reason", "fix"), rows)]
    if hints := explanation.hints():
        blocks += ["", Table(("op", "count", "advice"), hints)]
    return blocks
