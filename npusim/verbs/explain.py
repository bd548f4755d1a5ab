"""``npusim explain``: which nodes run on the NPU, which do not, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from npu_compiler.target_config import default_target

from ..console import Result, Table
from ..placement import placement, plan_model
from ..sources import read_model

if TYPE_CHECKING:
    from npu_compiler.partitioning.explain import Explanation


def run(args: argparse.Namespace) -> Result:
    """Answer why an op does not run on the NPU; --plan adds the partitions, --no-fallback refuses such models."""
    from npu_compiler.partitioning.explain import explain

    target = args.target or default_target()
    ir, _, _ = read_model(args.model, 1)
    explanation = explain(ir, target, **placement(args))
    blocks = _blocks(explanation)
    data = explanation.to_dict()
    if args.plan or not args.fallback:
        plan = plan_model(ir, target, args)
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
