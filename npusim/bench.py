"""Latency and throughput, alone or in turns with PyTorch eager."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import dtypes, env
from npu_compiler.support.errors import InputError
from npu_compiler.target_config import default_target

from .builtin import BUILTINS
from .commands import disabled, read_model
from .console import Result, Status, Table

if TYPE_CHECKING:
    from npu_runtime.executor import Executor

PERCENTILES = (10, 50, 90, 99)
_WARMUP = 3


@dataclass(frozen=True)
class Latencies:
    """Wall times of single calls, in seconds."""

    seconds: np.ndarray

    def percentile(self, p: float) -> float:
        return float(np.percentile(self.seconds, p))

    @property
    def median(self) -> float:
        return self.percentile(50)

    def to_dict(self, batch: int) -> dict[str, float]:
        times = {f"p{p}_ms": self.percentile(p) * 1e3 for p in PERCENTILES}
        return {**times, "runs": len(self.seconds), "per_second": batch / self.median}

    def row(self, name: str, batch: int) -> tuple[object, ...]:
        times = (f"{self.percentile(p) * 1e3:.3f}" for p in PERCENTILES)
        return (name, *times, f"{batch / self.median:.1f}", len(self.seconds))


HEADER = ("", *(f"p{p} ms" for p in PERCENTILES), "per second", "runs")


def interleaved(calls: Mapping[str, Callable[[], Any]], seconds: float, least: int = 10) -> dict[str, Latencies]:
    """Call each function in turn, for ``seconds`` in total but at least ``least`` times each: what disturbs the machine
    disturbs all of them alike."""
    for call in calls.values():
        for _ in range(_WARMUP):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: Latencies(np.array(t)) for name, t in times.items()}


def run(args: argparse.Namespace, status: Status) -> Result:
    """Time single runs, inputs and outputs bound beforehand."""
    import npu_runtime
    from npu_compiler.artifact.describe import totals
    from npu_compiler.support.text import si

    from .generate import is_language_model

    if is_language_model(args.model):
        from . import llm_bench

        return llm_bench.run(args, status)
    module = None
    if args.model in BUILTINS:
        from npu_compiler.pipeline import compile_ir

        ir, weights, module = read_model(args.model, args.batch, status)
        with status(f"compiling {args.model}"):
            program = compile_ir(ir, args.target or default_target(), args.dtype, disabled(args))
        source: Any = weights
    else:
        if args.vs:
            raise InputError(f"--vs {args.vs} needs a built-in model: {', '.join(BUILTINS)}")
        program = CompiledProgram.load(args.model)
        beside = Path(args.model).with_suffix(".safetensors")
        source = args.weights or (beside if beside.exists() else random_weights(program))
    with npu_runtime.load(program, source, args.threads) as model:
        executor = model.executor()
        arrays = [_example(s.shape, s.dtype) for s in executor.inputs]
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


def bound_call(executor: Executor, arrays: list[np.ndarray]) -> Callable[[], None]:
    """A run whose inputs and outputs stay in the device's memory, to its end."""
    backend = executor.backend
    outputs = [backend.allocate_zeros(s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.outputs]
    run = executor.bind([backend.allocate_buffer(a) for a in arrays], outputs)

    def call() -> None:
        run()
        run.finish()

    return call


def torch_call(module: Any, arrays: list[np.ndarray], threads: int) -> Callable[[], Any]:
    """The PyTorch model on the same inputs and as many threads."""
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(a) for a in arrays]

    def call() -> Any:
        with torch.inference_mode():
            return module(*tensors)

    return call


def random_weights(program: CompiledProgram) -> dict[str, np.ndarray]:
    """Small random numbers for every weight: as fast as real ones."""
    rng = np.random.default_rng(0)
    return {w.key: _random(rng, w.shape, w.dtype) for w in program.weights}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtypes.is_float(dtype):
        return rng.uniform(0.01, 0.1, shape).astype(dtypes.numpy_dtype(dtype))
    return np.zeros(shape, dtypes.numpy_dtype(dtype))


def _example(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return _random(np.random.default_rng(1), shape, dtype)
