"""Run a language model through the partitioner: IR graphs, some ops on the host, caches passed from call to call.

python examples/run_qwen_graph.py --prompt "Hello"
python examples/run_qwen_graph.py PATH/TO/Qwen2.5-0.5B-Instruct --prompt "Hello" --force-cpu-ops aten.silu.default
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

import numpy as np
from common import positive, run, show
from qwen import add_model_argument, capture_graphs, checkpoint_of, compare, tokenizer_of, torch_logits

from npu_compiler import partition
from npu_compiler.aten.ir import IRGraph
from npu_compiler.support.errors import InputError
from npu_runtime import DAGExecutor


def executor(graph: IRGraph, force_cpu: list[str], weights: Any) -> DAGExecutor:
    """Partition a graph, print its partitions and compile them. ``force_cpu``: ops that run on the host."""
    plan = partition(graph, force_cpu=force_cpu)
    sizes = [(p.device, len(p.ir.nodes)) for p in plan.partitions]
    shown = ", ".join(f"{device} {count}" for device, count in sizes[:6]) + (" …" if len(sizes) > 6 else "")
    print(f"{graph.model_name}: {len(sizes)} partition(s), nodes in each: {shown}")
    return DAGExecutor(plan, "cpu", weights=weights)


def main(args: argparse.Namespace) -> None:
    """Run the example."""
    with checkpoint_of(args.model) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        prompt = tokenizer.encode(args.prompt)
        if not prompt:
            raise InputError("the prompt has no tokens; pass --prompt TEXT")
        length = len(prompt) + args.max_tokens
        first, second, mapping = capture_graphs(checkpoint, len(prompt), length)
        prefill = executor(first, args.force_cpu_ops, checkpoint.weights)
        decode = executor(second, args.force_cpu_ops, checkpoint.weights)
        tokens, rows = generate(prefill, decode, mapping, prompt, args.max_tokens, checkpoint.eos_ids)
        show(args.prompt + tokenizer.decode(tokens[len(prompt) :]))
        compare(rows, torch_logits(checkpoint, tokens[:-1], length)[len(prompt) - 1 :])


def generate(
    prefill: DAGExecutor,
    decode: DAGExecutor,
    mapping: dict[str, Any],
    prompt: list[int],
    count: int,
    eos_ids: Collection[int],
) -> tuple[list[int], np.ndarray]:
    """The prompt and up to ``count`` greedy tokens, and the logits float32[tokens, vocab] that chose them."""
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
    while len(logits) < count and tokens[-1] not in eos_ids:
        at = len(tokens) - 1
        made = decode({ids: np.array([[tokens[-1]]]), position: np.array([at]), **caches})
        logits.append(next(iter(made.values())))
        tokens.append(int(logits[-1].argmax()))
        for layer in mapping["layers"]:
            for kind in ("key", "value"):
                caches[layer[f"decode_{kind}_input"]] = made[layer[f"decode_{kind}_output"]]
    return tokens, np.concatenate(logits)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", default="Hello", help="the text to continue (default: Hello)")
    parser.add_argument("--force-cpu-ops", nargs="+", default=[], metavar="OP", help="op types to leave to PyTorch")
    parser.add_argument("--max-tokens", type=positive, default=16)
    run(main, parser)
