"""An int8 network on the CPU beside ONNX Runtime and OpenVINO, which get the same quantised network.

    python benchmarks/quantised.py --model resnet50 --threads 1 --seconds 10 [--json FILE]

The network is quantised by ``npusim quantize``'s code with random images, and the peers read it as ONNX. All take turns
in one process. The verdict compares the results: those of engines that round a value next to the middle of two integers
to different ones differ by a little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_file

import npu_compiler
from npu_runtime import CPUBackend, Executor
from npusim.builtin import captured
from npusim.quantization import calibrate
from npusim.quantization.network import Network

PAUSE = 0.1  # seconds after which the threads of the engine before have stopped spinning
BURST = 0.2  # seconds
ALLOWED = 0.05  # largest difference from ONNX Runtime's logits, relative to the largest logit


def engines(args: argparse.Namespace) -> tuple[dict[str, Callable[[], Any]], dict[str, np.ndarray]]:
    """Return a call of each engine, and its results."""
    import onnxruntime
    import openvino

    _, ir, weights = captured(args.model, args.batch)
    rng = np.random.default_rng(0)
    samples = [{t.name: rng.standard_normal(t.shape).astype(np.float32) for t in ir.graph_inputs} for _ in range(2)]
    network = Network(ir, weights)
    seen = calibrate.observe(network, samples, "cpu")
    graph, stored = network.quantized(calibrate.parameters(network, seen, "minmax"))
    run = Executor(npu_compiler.compile(graph), stored, CPUBackend(threads=args.threads))
    (x,) = samples[0].values()
    out = np.empty(run.outputs[0].shape, np.float32)
    call = run.bind([x], [out])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_file.write(path, graph, stored)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
        request = core.compile_model(core.read_model(str(path)), "CPU", settings).create_infer_request()
    name = session.get_inputs()[0].name
    call()
    results = {"npusim": out.copy(), "onnxruntime": session.run(None, {name: x})[0]}
    results["openvino"] = next(iter(request.infer({0: x}).values())).copy()
    calls = {
        "npusim": call,
        "onnxruntime": lambda: session.run(None, {name: x}),
        "openvino": lambda: request.infer({0: x}),
    }
    return calls, results


def measure(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Return milliseconds of single runs; the engines take turns of BURST seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            time.sleep(PAUSE)
            call()  # warms the caches that the engine before has filled
            start = now = time.perf_counter()
            while now - start < BURST:
                begin = now
                call()
                now = time.perf_counter()
                times[name].append(1e3 * (now - begin))
    return times


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if the results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    calls, results = engines(args)
    times = measure(calls, args.seconds)
    reference = results["onnxruntime"]
    rows = {}
    for name, values in times.items():
        difference = float(np.abs(results[name] - reference).max() / np.abs(reference).max())
        rows[name] = {"median_ms": statistics.median(values), "min_ms": min(values), "difference": difference}
        median = rows[name]["median_ms"]
        print(f"{name:12} median {median:7.2f} ms, min {min(values):7.2f} ms, differs by {difference:.2%}")
    faster = min((rows[n] for n in ("onnxruntime", "openvino")), key=lambda r: r["median_ms"])
    for key in ("median_ms", "min_ms"):
        print(f"ratio to the faster peer, {key}: {rows['npusim'][key] / faster[key]:.3f}")
    correct = all(r["difference"] <= ALLOWED for r in rows.values())
    print("results agree" if correct else "RESULTS DIFFER")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "threads": args.threads, "rows": rows}) + "\n")
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
