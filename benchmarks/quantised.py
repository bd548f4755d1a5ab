"""An int8 network on the CPU beside ONNX Runtime and OpenVINO, which get the same quantised network.

    make bench-quantised                         writes benchmarks/results/cpu_quantised_<CPU>.json
    make bench-quantised ARGS="--model resnet18 --threads 1 --rounds 10"      prints only
    make bench-quantised ARGS=--table            the table of the stored results of all machines again

The network is quantised by ``npusim quantize``'s code with random images, and the peers read it as ONNX. All take turns
in one process. The verdict compares the results: those of engines that round a value next to the middle of two integers
to different ones differ by a little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_file
from readme import ROOT, hardware, publish, results_path, stored, without_files, write_section
from turns import ratio, summary, take_turns

sys.path.insert(0, str(ROOT))

import npu_compiler
from npu_runtime import CPUBackend, Executor
from npusim.builtin import captured
from npusim.quantization import calibrate
from npusim.quantization.network import Network

PEERS = ("onnxruntime", "openvino")
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


def table(machines: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: a row for the results of each machine."""
    names = ["npusim", *PEERS]
    lines = ["| machine | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for results in machines:
        by = {row["engine"]: row for row in results["rows"]}
        cells = [f"{by[name]['median_ms']:.1f}" + ("" if by[name]["agrees"] else " ✗") for name in names]
        cells[0] = f"**{cells[0]}** (×{results['ratio']:.2f}, ×{results['ratio_of_minima']:.2f})"
        lines.append(f"| {results['hardware']} | " + " | ".join(cells) + " |")
    days, threads = sorted({r["date"] for r in machines}), {r["threads"] for r in machines}
    apart = max(row["difference"] for r in machines for row in r["rows"])
    versions = {f"{k} {v}" for r in machines for k, v in r["versions"].items()}
    lines += [
        "",
        f"Median milliseconds, ResNet-50 in 8 bits, batch 1, {', '.join(map(str, sorted(threads)))} threads, "
        f"{'/'.join(dict.fromkeys((days[0], days[-1])))}; in brackets the ratio to the faster of the others, median of "
        "the rounds, and that of the minima. All have the same quantised network, the others as ONNX. Results differ "
        f"from ONNX Runtime's by at most {apart:.1%} of the largest score, because engines round a value next to the "
        f"middle of two integers differently; ✗ marks more than {ALLOWED:.0%}. "
        f"Versions: {', '.join(sorted(versions))}. Command: `make bench-quantised`.",
    ]
    return "\n".join(lines)


def write_table() -> None:
    """Put the table of the stored results into the pages about performance."""
    machines = [r for r in stored("cpu_quantised") if (r["model"], r["batch"]) == ("resnet50", 1)]
    write_section("quantised", table(machines), readme=False)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if the results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=5, help="in a turn")
    parser.add_argument("--out", type=Path, help="default for a run without other arguments: in benchmarks/results")
    parser.add_argument("--table", action="store_true", help="write the table of the stored results")
    args = parser.parse_args(argv)
    if args.table:
        write_table()
        return 0
    calls, results = engines(args)
    turns = take_turns(calls, args.rounds, args.calls, args.threads)
    reference = results["onnxruntime"]
    rows = []
    for name, values in turns.items():
        difference = float(np.abs(results[name] - reference).max() / np.abs(reference).max())
        row = {"engine": name, **summary(values), "difference": difference, "agrees": difference <= ALLOWED}
        rows.append(row)
        print(f"{name:12} median {row['median_ms']:7.2f} ms, min {row['min_ms']:7.2f} ms, differs by {difference:.2%}")
    found = {
        "ratio": ratio(turns["npusim"], [turns[p] for p in PEERS]),
        "ratio_of_minima": rows[0]["min_ms"] / min(r["min_ms"] for r in rows if r["engine"] in PEERS),
    }
    print("ratio to the faster peer {ratio:.2f}, of minima {ratio_of_minima:.2f}".format(**found))
    agree = all(row["agrees"] for row in rows)
    print("results agree" if agree else "RESULTS DIFFER")
    usual = all(value == parser.get_default(name) for name, value in vars(args).items() if name != "out")
    shown = without_files(sys.argv[1:], ("--out",))
    facts = {
        "command": "make bench-quantised" + (f" ARGS='{' '.join(shown)}'" if shown else ""),
        "date": date.today().isoformat(), "hardware": hardware(),
        "model": args.model, "batch": args.batch, "threads": args.threads,
        "versions": {p: version(p) for p in PEERS}, **found, "rows": rows,
    }  # fmt: skip
    out = args.out or (results_path("cpu_quantised", hardware()) if usual else None)
    publish(facts, out)
    if out == results_path("cpu_quantised", hardware()):
        write_table()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
