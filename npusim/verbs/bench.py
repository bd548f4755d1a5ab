"""``npusim bench``: latency and throughput, alone or in turns with PyTorch eager."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import env
from npu_compiler.support.errors import InputError
from npu_compiler.target_config import default_target

from ..builtin import BUILTINS
from ..console import Result, Status, Table
from ..latency import HEADER, bound_call, interleaved, torch_call
from ..random_arrays import random_array, random_weights
from ..sources import is_language_model, load_language_model, read_model


def run(args: argparse.Namespace, status: Status) -> Result:
    """Measure single runs with inputs and outputs bound beforehand; of language models, prefill and decode."""
    import npu_runtime
    from npu_compiler.artifact.describe import totals
    from npu_compiler.support.text import si

    if is_language_model(args.model):
        return _language_model(args, status)
    module = None
    if args.model in BUILTINS:
        from npu_compiler.pipeline import compile_ir

        ir, weights, module = read_model(args.model, args.batch, status)
        with status(f"compiling {args.model}"):
            program = compile_ir(ir, args.target or default_target(), args.dtype, args.disable)
        source: Any = weights
    else:
        if args.vs:
            raise InputError(f"--vs {args.vs} needs a built-in model: {', '.join(BUILTINS)}")
        program = CompiledProgram.load(args.model)
        beside = Path(args.model).with_suffix(".safetensors")
        source = args.weights or (beside if beside.exists() else random_weights(program))
    with npu_runtime.load(program, source, args.threads) as model:
        executor = model.executor()
        arrays = [random_array(s.shape, s.dtype) for s in executor.inputs]
        calls: dict[str, Callable[[], Any]] = {"npusim": bound_call(executor, arrays)}
        threads = args.threads or env.num_threads()
        if module is not None and args.vs == "torch":
            calls["torch eager"] = torch_call(module, arrays, threads)
        with status(f"measuring {program.name}"):
            found = interleaved(calls, args.seconds)
    batch = arrays[0].shape[0] if arrays and arrays[0].ndim else 1
    t, median = totals(program), found["npusim"].median
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


def _language_model(args: argparse.Namespace, status: Status) -> Result:
    """Measure greedy decoding after a random prompt, end tokens ignored."""
    from .. import llm_latency

    needed = args.prompt_len + args.gen_len
    if args.max_len is None and not args.model.endswith(".npubin"):
        args.max_len = needed
    if args.batch != 1:
        raise InputError("language models run one sequence at a time: leave out --batch")
    llm = load_language_model(args, status)
    if needed > llm.max_len:
        raise InputError(f"--prompt-len and --gen-len make {needed} tokens, but the context holds {llm.max_len}")
    threads = args.threads or env.num_threads()
    rounds: dict[str, llm_latency.Round] = {"npusim": llm_latency.native_round(llm)}
    if args.vs == "torch":
        if llm.path.suffix == ".npubin":
            raise InputError("--vs torch needs the checkpoint itself, not a .npubin")
        with status("loading the model into PyTorch"):
            rounds["torch eager"] = llm_latency.torch_round(llm.path, args.dtype, llm.max_len, threads)
    prompt = np.random.default_rng(0).integers(0, llm.vocab, args.prompt_len).tolist()
    with status(f"measuring {llm.manifest.name}"):
        speeds = llm_latency.measure(rounds, prompt, args.gen_len, args.seconds)
    return llm_latency.report(llm, speeds, threads, args.gen_len)
