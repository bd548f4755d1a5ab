"""Call overhead of tiny models, beside ONNX Runtime and PyTorch eager in one process.

    make bench-calls                              measure (about a minute), write results/calls_MACHINE.json
    make bench-calls ARGS=--quick                 a few seconds: prints the table, writes nothing
    make bench-calls ARGS=--table                 put the stored results into README.md and docs/performance.md

Every contender has one thread. They take turns: a round is a short burst of calls of each, in alternating order, and a
figure is the median over the rounds of a call's mean time. As root the bursts run at real-time priority. Every figure
has a correctness verdict: its error against float64 is at most 1.1 times that of PyTorch eager.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from readme import ROOT, hardware, publish, real_time, results_path, write_tables

sys.path.insert(0, str(ROOT))

COMMAND = "make bench-calls"
MODELS = {"Linear 8 × 8": [8, 8], "MLP 64 × 128 × 10": [64, 128, 10]}
OURS = ("npusim.Model", "npusim.Model, torch", "npu_runtime.Model", "npu_runtime, bound")
PEERS = ("onnxruntime", "onnxruntime, bound", "torch eager")
CALLS = 200  # per burst: short enough to end before the scheduler runs another process

Calls = dict[str, Callable[[], Any]]


def make_mlp(sizes: list[int]) -> Any:
    """Return linear layers of these sizes with random weights, and ReLU between them."""
    import torch

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).eval()


def onnx_session(model: Any, sizes: list[int]) -> Any:
    """Return an ONNX Runtime session of the same layers, on one thread."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    linear = [layer for layer in model if hasattr(layer, "weight")]
    nodes, weights, value = [], [], "x"
    for n, layer in enumerate(linear):
        weights.append(numpy_helper.from_array(layer.weight.detach().numpy(), f"weight{n}"))
        weights.append(numpy_helper.from_array(layer.bias.detach().numpy(), f"bias{n}"))
        result = "y" if layer is linear[-1] else f"linear{n}"
        nodes.append(helper.make_node("Gemm", [value, f"weight{n}", f"bias{n}"], [result], transB=1))
        if layer is not linear[-1]:
            nodes.append(helper.make_node("Relu", [result], [f"relu{n}"]))
        value = f"relu{n}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, sizes[0]])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, sizes[-1]])
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def contenders(model: Any, sizes: list[int], x: Any) -> tuple[Calls, Calls]:
    """Return the compared calls, each of which returns its output, and the cumulative steps of an npu_runtime call."""
    import torch

    import npu_runtime
    import npusim

    array, ours, theirs = x.numpy(), np.empty((1, sizes[-1]), np.float32), np.empty((1, sizes[-1]), np.float32)
    built = npusim.build(model, (x,), threads=1)
    runtime = npu_runtime.Model(built.programs[0], model.state_dict(), npu_runtime.CPUBackend(threads=1))
    executor = runtime.executor()
    bound = executor.bind([array], [ours])
    session = onnx_session(model, sizes)
    binding, names, feed = session.io_binding(), ["y"], {"x": array}
    binding.bind_input("x", "cpu", 0, np.float32, array.shape, array.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, theirs.shape, theirs.ctypes.data)

    def eager() -> Any:
        with torch.inference_mode():
            return model(x)

    compared: Calls = {
        "npusim.Model": lambda: built(array),
        "npusim.Model, torch": lambda: built(x),
        "npu_runtime.Model": lambda: runtime(array),
        "npu_runtime, bound": lambda: bound() or ours,
        "onnxruntime": lambda: session.run(names, feed)[0],
        "onnxruntime, bound": lambda: session.run_with_iobinding(binding) or theirs,
        "torch eager": eager,
    }
    launch, own = bound._launch, [array]
    steps: Calls = {
        "an empty Python call": lambda: None,
        "the native function": lambda: launch(None),
        "and the lock": bound,
        "and checks, a copy in and a copy out": lambda: executor.run_ordered(own),
        "and outputs by name": lambda: executor.run(own),
    }
    return compared, steps


def measure(runs: Calls, rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds per call: the median and the minimum of the rounds' means."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    for turn in range(rounds + 3):  # the first ones warm up
        for name, run in order if turn % 2 else order[::-1]:
            real_time(True)
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            taken[name].append((time.perf_counter() - start) / CALLS * 1e6)
            real_time(False)
    return {name: {"median_us": statistics.median(t[3:]), "min_us": min(t[3:])} for name, t in taken.items()}


def verdicts(model: Any, x: Any, compared: Calls) -> dict[str, dict[str, Any]]:
    """Return every contender's RMS error against float64, beside eager's."""
    import torch

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double()).numpy()
    rms = {name: _rms(np.asarray(run(), np.float64) - exact) for name, run in compared.items()}
    # So few elements may come out exact by chance: the gate is never below one rounding of a typical output.
    floor = _rms(exact) * float(np.finfo(np.float32).eps) / 2
    limit = max(1.1 * rms["torch eager"], floor)
    return {name: {"error": error, "within_gate": error <= limit} for name, error in rms.items()}


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def run_all(rounds: int) -> dict[str, Any]:
    """Measure all models and return the results, ready for JSON."""
    import torch

    torch.set_num_threads(1)
    rows, steps = [], {}
    for name, sizes in MODELS.items():
        model, x = make_mlp(sizes), torch.randn(1, sizes[0])
        compared, inside = contenders(model, sizes, x)
        checks, figures = verdicts(model, x, compared), measure(compared | inside, rounds)
        rows += [{"model": name, "contender": c, **figures[c], **checks[c]} for c in compared]
        steps[name] = {step: figures[step]["median_us"] for step in inside}
    return {
        "command": COMMAND, "date": date.today().isoformat(), "hardware": hardware(), "threads": 1, "rounds": rounds,
        "versions": {p: version(p) for p in ("torch", "onnxruntime", "numpy")} | {"python": sys.version.split()[0]},
        "rows": rows, "steps_us": steps,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Return Markdown: microseconds per call, and the steps of npu_runtime's."""
    by = {(r["model"], r["contender"]): r for r in results["rows"]}
    names = [*OURS, *PEERS]
    lines = ["| µs a call, batch 1 | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for model in dict.fromkeys(r["model"] for r in results["rows"]):
        cells = []
        for name in names:
            row = by[model, name]
            cell = f"{row['median_us']:.1f}" + ("" if row["within_gate"] else " ✗")
            cells.append(f"**{cell}**" if name in OURS else cell)
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    model, steps = next(iter(results["steps_us"].items()))
    parts = ", ".join(f"{step} {us:.1f}" for step, us in steps.items())
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    lines += [
        "",
        f"Median microseconds, one thread, {results['hardware']}, {results['date']}. numpy in and out unless said "
        "otherwise, all checks included; *bound*: inputs and outputs in fixed memory. All figures "
        "passed the error gate (RMS error against float64 ≤ 1.1 × PyTorch eager's) unless marked ✗. Where the time of "
        f"npu_runtime goes ({model}, µs up to and including): {parts}. Versions: {versions}. "
        f"Command: `{results['command']}`.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and nothing is written")
    parser.add_argument("--out", type=Path, help=f"default: {results_path('calls', hardware())}")
    parser.add_argument("--table", action="store_true", help="write the tables of the stored results")
    args = parser.parse_args()
    if args.table:
        write_tables("calls", "calls", table)
        return
    results = run_all(20 if args.quick else args.rounds)
    print(table(results))
    publish(results, args.out or (None if args.quick else results_path("calls", hardware())))


if __name__ == "__main__":
    main()
