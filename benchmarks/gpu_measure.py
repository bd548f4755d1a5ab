"""Measures programs of ours and PyTorch's on one GPU: bursts in turns, errors of rows of scores, the host's share."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_table import EAGER, GRAPH, OURS

BURST_MS, MIN_BURSTS = 25.0, 9


@dataclass
class Contender:
    """``run`` enqueues one run on ``stream``; ``compile_s``: seconds until it was ready."""

    run: Callable[[], Any]
    stream: Any
    compile_s: float = 0.0


def bursts(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds per run of each burst. Contenders take turns for ``seconds`` per contender."""
    import torch

    def burst(c: Contender, count: int) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(c.stream)
        for _ in range(count):
            c.run()
        last.record(c.stream)
        last.synchronize()
        return first.elapsed_time(last) / count

    counts = {name: max(1, round(BURST_MS / burst(c, 5))) for name, c in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds * len(contenders)
    while time.perf_counter() < end or min(map(len, times.values())) < MIN_BURSTS:
        for name, c in contenders.items():
            times[name].append(burst(c, counts[name]))
    return times


def rows(times: dict[str, list[float]], contenders: dict[str, Contender]) -> list[dict[str, Any]]:
    """Return one row of results per contender, ready for JSON."""
    return [
        {"contender": name, "median_ms": statistics.median(t), "min_ms": min(t), "bursts": len(t),
         "compile_s": round(contenders[name].compile_s, 1)}
        for name, t in times.items()
    ]  # fmt: skip


def torch_contenders(model: Any, inputs: tuple[Any, ...], kinds: list[str]) -> dict[str, Contender]:
    """Return runs of a PyTorch ``model`` on ``inputs``, by kind (eager, CUDA graph, modes of torch.compile), warmed up.

    A kind that fails prints its error and is left out.
    """
    import torch

    def ready(kind: str) -> Callable[[], Any]:
        if kind == EAGER:
            return lambda: model(*inputs)
        if kind != GRAPH:
            torch._dynamo.reset()
            compiled = torch.compile(model, mode=kind.split()[-1], fullgraph=True)
            return lambda: compiled(*inputs)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                model(*inputs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            model(*inputs)
        return graph.replay

    found = {}
    for kind in kinds:
        start = time.perf_counter()
        try:
            run = ready(kind)
            for _ in range(8):
                run()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        found[kind] = Contender(run, torch.cuda.current_stream(), time.perf_counter() - start)
        print(f"  {kind}: ready after {found[kind].compile_s:.1f} s", flush=True)
    return found


def verdict(ours: np.ndarray, eager: np.ndarray, exact: np.ndarray, top: int) -> dict[str, Any]:
    """Return the RMS errors of rows of scores, float64[rows, scores], and whether the ``top`` largest scores agree.

    Scores that are closer than PyTorch's own error may change places.
    """
    error, eager_error = (float(np.sqrt(np.mean((x - exact) ** 2))) for x in (ours, eager))
    kept = True
    for want, got in zip(exact, ours, strict=True):
        order = np.argsort(-want)
        for k in {1, top}:
            if want[order[k - 1]] - want[order[k]] > 4 * eager_error:
                kept = kept and set(np.argsort(-got)[:k]) == set(order[:k])
    within = bool(error <= 1.1 * eager_error)
    return {"error": error, "eager_error": eager_error, "within_gate": within, "top_kept": bool(kept), "top": top}


def host_microseconds(run: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return the host time of a launch in microseconds, while the device is idle."""
    times = []
    for _ in range(50):
        wait()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    wait()
    return statistics.median(times) * 1e6


class Ours:
    """A program on the GPU with one entry point bound: ``program``, or the one of that name in ``work``."""

    def __init__(self, work: Path, name: str, weights: Any, program: Any = None):
        import torch
        from gpu_models import programs

        from npu_compiler.artifact.program import CompiledProgram
        from npu_runtime import load_weights
        from npu_runtime.backends.cuda import CUDABackend

        self.backend = CUDABackend()
        self.program = program or CompiledProgram.load(programs(work)[name])
        self.weights = load_weights(self.program, weights, self.backend)
        self.stream = torch.cuda.ExternalStream(self.backend.stream.ptr)

    def bind(self, entry: str, inputs: list[np.ndarray], state: Any = None) -> None:
        """Prepare runs of an entry point with these inputs and one output, in device memory."""
        from npu_compiler.support import dtypes
        from npu_runtime import Executor

        self.executor = Executor(self.program, self.weights, self.backend, entry, state)
        self.inputs = [self.backend.allocate_buffer(x) for x in inputs]
        (spec,) = self.executor.outputs
        self.output = self.backend.allocate_empty(spec.shape, dtypes.numpy_dtype(spec.dtype))
        self.run = self.executor.bind(self.inputs, [self.output])

    def contender(self) -> Contender:
        """Return the bound entry point as a contender."""
        return Contender(self.run, self.stream)

    def result(self, *inputs: np.ndarray) -> np.ndarray:
        """Run once on other inputs of the bound shapes; return the output as float64."""
        for buffer, value in zip(self.inputs, inputs, strict=True):
            self.backend.copy(buffer, value)
        self.run()
        self.run.finish()
        return self.output.to_numpy().astype(np.float64)

    def facts(self) -> dict[str, Any]:
        """Return the number of kernels, the host time of a launch in microseconds, and the bytes of weights and of the
        arena in device memory."""
        entry = self.executor.entry
        memory = {"weight_bytes": self.weights.nbytes, "arena_bytes": entry.arena_bytes}
        return {"kernels": len(entry.calls), "host_us": host_microseconds(self.run, self.run.finish), **memory}


def compare(ours: Ours, model: Any, inputs: tuple[Any, ...], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure ``ours`` in turns with the ``args.peers`` of PyTorch; return one row of results per contender."""
    contenders = {OURS: ours.contender(), **torch_contenders(model, inputs, args.peers)}
    args.turn()
    return rows(bursts(contenders, args.seconds), contenders)
