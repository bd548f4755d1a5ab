"""Run a Qwen2.5 checkpoint through the partitioner: IR graphs, some ops on the host, caches passed from call to call.

python examples/run_qwen_graph.py PATH/TO/Qwen2.5-0.5B-Instruct --force-cpu-ops aten.silu.default
python examples/run_qwen_graph.py --tiny --force-cpu-ops aten.silu.default aten.rsqrt.default
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from qwen import capture_graphs, checkpoint_of, torch_logits

from npu_compiler import partition
from npu_compiler.aten.ir import IRGraph
from npu_runtime import DAGExecutor


def executor(graph: IRGraph, force_cpu: list[str], weights: Any) -> DAGExecutor:
    """Partition a graph, print its partitions and compile them. ``force_cpu``: ops that run on the host."""
    plan = partition(graph, force_cpu=force_cpu)
    sizes = [(p.device, len(p.ir.nodes)) for p in plan.partitions]
    shown = ", ".join(f"{device} {count}" for device, count in sizes[:6]) + (" …" if len(sizes) > 6 else "")
    print(f"{graph.model_name}: {len(sizes)} partition(s), nodes in each: {shown}")
    return DAGExecutor(plan, "cpu", weights=weights)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory with config.json and safetensors")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead")
    parser.add_argument("--force-cpu-ops", nargs="*", default=[], metavar="OP", help="op types to leave to PyTorch")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=64)
    args = parser.parse_args()
    prompt = [7, 42, 99, 3, 128, 5]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(args.model, args.tiny, Path(folder) / "tiny-qwen2")
        first, second, mapping = capture_graphs(checkpoint, len(prompt), args.max_len)
        prefill = executor(first, args.force_cpu_ops, checkpoint.weights)
        decode = executor(second, args.force_cpu_ops, checkpoint.weights)
        tokens, rows = generate(prefill, decode, mapping, prompt, args.max_tokens)
        reference = torch_logits(checkpoint, tokens[:-1], args.max_len)[len(prompt) - 1 :]
    print("tokens:", *tokens[len(prompt) :])
    error = np.abs(rows - reference).max() / np.abs(reference).max()
    agree = int((rows.argmax(1) == reference.argmax(1)).sum())
    print(
        f"against PyTorch: largest logit error {error:.2e} of the largest logit, {agree} of {len(rows)} choices agree"
    )


def generate(
    prefill: DAGExecutor, decode: DAGExecutor, mapping: dict[str, Any], prompt: list[int], count: int
) -> tuple[list[int], np.ndarray]:
    """Return ``prompt`` with its greedy continuation, and the logits float32[count, vocab] that chose the tokens."""
    made = prefill([np.array([prompt]), np.arange(len(prompt))])
    caches: dict[str, np.ndarray] = {}
    for layer in mapping["layers"]:
        for kind in ("key", "value"):
            rows = made[layer[f"prefill_{kind}_output"]]
            cache = np.zeros((*rows.shape[:2], mapping["max_cache_len"], rows.shape[3]), rows.dtype)
            cache[:, :, : len(prompt)] = rows
            caches[layer[f"decode_{kind}_input"]] = cache
    ids, position = (t.name for t in decode.plan.inputs[:2])
    logits = [next(iter(made.values()))]
    tokens = [*prompt, int(logits[-1].argmax())]
    while len(logits) < count:
        at = len(tokens) - 1
        made = decode({ids: np.array([[tokens[-1]]]), position: np.array([at]), **caches})
        logits.append(next(iter(made.values())))
        tokens.append(int(logits[-1].argmax()))
        for layer in mapping["layers"]:
            for kind in ("key", "value"):
                caches[layer[f"decode_{kind}_input"]] = made[layer[f"decode_{kind}_output"]]
    return tokens, np.concatenate(logits)


if __name__ == "__main__":
    main()
