"""Which nodes of a model run on the host: the options that ``compile``, ``bench`` and ``explain`` share."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from npu_compiler.aten.ir import IRGraph
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, PartitionPlan
from npu_compiler.support.errors import InputError

from .builder.specializations import require_npu
from .sources import refuse


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``partition`` and ``explain`` that correspond to the options of a verb."""
    return {"force_cpu": args.force_cpu, "minimise_transfers": args.minimise_transfers}


def plan_model(ir: IRGraph, target: str, args: argparse.Namespace) -> PartitionPlan:
    """Partition a model with the options of a verb.

    Raises:
        CompileError: a node runs on the host although --no-fallback forbids it, or it can run nowhere (this is checked
            where PyTorch is installed).
        ConfigError: --force-cpu names neither a node nor an op.
    """
    plan = partition(ir, target=target, **placement(args))
    if not args.fallback:
        require_npu(plan)
    on_host = [p for p in plan.partitions if p.device == HOST]
    if on_host and find_spec("torch") is not None:
        from npu_runtime.partitioned.fallback import HostPartition

        for part in on_host:
            HostPartition(part.ir)
    return plan


def refuse_graph_options(args: argparse.Namespace) -> None:
    """Raise ``InputError`` for options of single graphs, which language models do not have."""
    if args.force_cpu or not args.minimise_transfers:
        raise InputError(
            "--force-cpu and --no-minimise-transfers do not apply to a language model: its program runs whole on the "
            "NPU, because prompt and step share caches; examples/run_qwen_graph.py runs one through the partitioner"
        )
    refuse(args, ("batch", "disable", "weights"), f"does not apply to a language model, and {args.model} is one")
