"""The cost of host partitions: ResNets through the DAGExecutor, plans and PyTorch interleaved in one process.

    make bench-partitioned                                        ResNet-18 and ResNet-50
    make bench-partitioned ARGS="--models resnet18 --seconds 2"   a short form of it

The plans place nothing, one op or every activation on the host, in PyTorch. Times are medians of single calls, with
numpy arrays in and out. "transferred" counts the bytes that a call passes between the devices; the CPU target shares
the host's memory, so they are not copied. Every plan has a correctness verdict: its RMS error against float64 is at
most 1.1 times PyTorch eager's, else it is marked ✗.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PLANS = {
    "all on the NPU": [],
    "max_pool2d on the host": ["aten.max_pool2d.default"],
    "relu on the host": ["aten.relu_.default"],
}
EAGER = "torch eager"


def rows(name: str, threads: int, seconds: float) -> list[tuple[object, ...]]:
    """Return (model, plan, partitions, transfers, MB, median ms, × eager) of every plan, and of PyTorch."""
    import torch

    import npu_compiler
    from npu_runtime import CPUBackend, DAGExecutor
    from npusim.builtin import captured
    from npusim.latency import interleaved, torch_call

    module, ir, weights = captured(name, 1)
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    plans = {label: npu_compiler.partition(ir, force_cpu=ops, minimise_transfers=False) for label, ops in PLANS.items()}
    executors = {label: DAGExecutor(plan, CPUBackend(threads), weights=weights) for label, plan in plans.items()}
    calls: dict[str, Any] = {label: lambda e=e: e.execute_ordered([x])[0] for label, e in executors.items()}
    calls[EAGER] = torch_call(module, [x], threads)
    with torch.inference_mode():
        exact = copy.deepcopy(module).double()(torch.from_numpy(x).double()).numpy()
    error = {label: _rms(np.asarray(call(), np.float64) - exact) for label, call in calls.items()}
    times = interleaved(calls, seconds)
    lines: list[tuple[object, ...]] = []
    for label, latency in times.items():
        plan = plans.get(label)
        counts = (
            ("", "", "")
            if plan is None
            else (len(plan.partitions), len(plan.transfers), f"{plan.transferred_bytes / 1e6:.2f}")
        )
        verdict = "" if error[label] <= 1.1 * error[EAGER] else " ✗"
        ratio = f"{latency.median / times[EAGER].median:.2f}"
        lines.append((name, label, *counts, f"{latency.median * 1e3:.2f}{verdict}", ratio))
    return lines


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["resnet18", "resnet50"], default=["resnet18", "resnet50"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure a model (default: 10)")
    args = parser.parse_args()
    from npu_compiler.support.text import table

    header = ("model", "plan", "partitions", "transfers", "transferred MB", "ms", "× eager")
    measured = [row for name in args.models for row in rows(name, args.threads, args.seconds)]
    print("\n".join(table(header, measured, indent="")))


if __name__ == "__main__":
    main()
