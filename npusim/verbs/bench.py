"""``npusim bench``: latency and throughput, alone or in turns with PyTorch eager."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.support import env
from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target
from npu_runtime.model import Model

from ..builtin import BUILTINS
from ..console import Result, Table
from ..latency import HEADER, bound_call, interleaved, torch_call
from ..placement import plan_model, refuse_graph_options
from ..random_arrays import random_array, random_weights
from ..sources import (
    is_language_model,
    load_language_model,
    read_model,
    refuse_compiling,
    refuse_language_options,
)

if TYPE_CHECKING:
    from npu_runtime.partitioned.model import MixedModel


def run(args: argparse.Namespace) -> Result:
    """Measure single runs with inputs and outputs bound in advance; for language models, prefill and decode."""
    import npu_compiler
    import npu_runtime
    from npu_compiler.support.text import si
    from npu_runtime.model import weights_beside

    if is_language_model(args.model):
        return _language_model(args)
    refuse_language_options(args)
    module = None
    if args.model in BUILTINS:
        refuse_language_options(args, "activations")
        ir, weights, module = read_model(args.model, args.batch)
        target = args.target or default_target()
        program = npu_compiler.compile_plan(plan_model(ir, target, args), target, args.dtype, disable=args.disable)
        source: Any = weights
    else:
        if args.vs:
            raise InputError(f"--vs {args.vs} needs a built-in model: {', '.join(BUILTINS)}")
        refuse_compiling(args)
        program = npu_compiler.load_program(args.model)
        beside = weights_beside(args.model)
        source = args.weights or (beside if beside.exists() else random_weights(program))
    with npu_runtime.load(program, source, args.threads) as model:
        arrays = [random_array(s.shape, s.dtype) for s in model.inputs]
        calls: dict[str, Callable[[], Any]] = {"npusim": _call(model, arrays)}
        threads = args.threads or env.num_threads()
        if module is not None and args.vs == "torch":
            calls["torch eager"] = torch_call(module, arrays, threads)
        with step(f"measuring {program.name}"):
            found = interleaved(calls, args.seconds)
    batch = arrays[0].shape[0] if arrays and arrays[0].ndim else 1
    t, median = program.totals, found["npusim"].median
    data: dict[str, Any] = {
        "program": program.name, "dtype": program.dtype, "threads": threads, "batch": batch, "flops": t["flops"],
        "gflops": t["flops"] / median / 1e9,
        "results": {name: times.to_dict(batch) for name, times in found.items()},
    }  # fmt: skip
    head = f"{program.name}, {program.dtype}, batch {batch}, {threads} thread(s): {si(t['flops'] / median, 'FLOP/s')}"
    blocks: list[str | Table] = [head, Table(HEADER, [times.row(name, batch) for name, times in found.items()])]
    if "torch eager" in found:
        data["speedup"] = found["torch eager"].median / median
        blocks.append(f"{data['speedup']:.2f} × the speed of PyTorch eager (medians, alternating in one run)")
    return Result(data, blocks)


def _call(model: Model | MixedModel, arrays: list[np.ndarray]) -> Callable[[], Any]:
    """A run of ``model`` on ``arrays``: in device memory, except that a mixed model takes and returns arrays."""
    if isinstance(model, Model):
        return bound_call(model.executor(), arrays)
    return lambda: model.run_ordered(arrays)


def _language_model(args: argparse.Namespace) -> Result:
    """Measure greedy decoding after a random prompt, end tokens ignored."""
    from .. import llm_latency

    refuse_graph_options(args)
    needed = args.prompt_len + args.gen_len
    if args.max_len is None and not args.model.endswith(".npubin"):
        args.max_len = needed
    llm = load_language_model(args)
    if needed > llm.max_len:
        raise InputError(f"--prompt-len and --gen-len make {needed} tokens, but the context holds {llm.max_len}")
    threads = args.threads or env.num_threads()
    rounds: dict[str, llm_latency.Round] = {"npusim": llm_latency.native_round(llm)}
    if args.vs == "torch":
        if llm.path.suffix == ".npubin":
            raise InputError("--vs torch needs the checkpoint itself, not a .npubin")
        with step("loading the model into PyTorch"):
            rounds["torch eager"] = llm_latency.torch_round(llm.path, args.dtype, llm.max_len, threads)
    prompt = np.random.default_rng(0).integers(0, llm.vocab, args.prompt_len).tolist()
    with step(f"measuring {llm.manifest.name}"):
        speeds = llm_latency.measure(rounds, prompt, args.gen_len, args.seconds)
    return llm_latency.report(llm, speeds, threads, args.gen_len)
