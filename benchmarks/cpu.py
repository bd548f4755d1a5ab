"""ResNet-18 and ResNet-50 on the CPU beside ONNX Runtime, OpenVINO and PyTorch, all interleaved in one process.

    make bench-cpu                                everything (15 minutes), to benchmarks/results/cpu_resnet_<CPU>.json
    make bench-cpu ARGS=--table                   put the stored results into README.md and docs/performance.md
    make bench-cpu ARGS=--quick                   ResNet-18, one image, 5 rounds
    make bench-cpu ARGS="--models resnet50 --batches 1 --dtypes bfloat16 --threads 1 2 4 8 16 --out part.json"
    make bench-cpu ARGS="--merge part.json"       replace rows of this machine's results by those of a part

A run with other options than the default prints its figures and writes nothing, unless `--out` names a file.
Contenders take short turns (turns.py); as root the turns run at real-time priority. A turn in which other processes
took more than 4 % of the CPUs is dropped. Every figure has a correctness verdict: its error against float64 is at most
1.1 times that of PyTorch eager in the same dtype (float32 eager for the float32 peers), and it has the largest score
and the five largest ones of every image, except for those that are closer to the next one than 4 times eager's error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from readme import ROOT, hardware, merged, publish, real_time, results_path, without_files, write_tables
from starts import start_times
from turns import ratio, summary, take_turns

KIND = "cpu_resnet"  # of results
THREADS = 2  # of the tables
FLOPS = {"resnet18": 3.628e9, "resnet50": 8.178e9}  # of one image
DTYPES = ("float32", "float16", "bfloat16")
FLOAT32_PEERS = ("onnxruntime float32", "openvino float32")
PEERS = {"float32": FLOAT32_PEERS, "float16": FLOAT32_PEERS, "bfloat16": ("openvino bfloat16",)}
COLUMNS = (
    "npusim float32", "npusim float16", *FLOAT32_PEERS, "torch eager float32",
    "npusim bfloat16", "openvino bfloat16", "torch eager bfloat16",
)  # fmt: skip

PEAK_SOURCE = """
#include "simd.h"
using namespace npu;
// Twelve accumulators hide the latency of two multiply-adds a cycle, and fit in 16 registers beside two operands.
#define EACH(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)
static volatile float sink;
extern "C" __attribute__((visibility("default"))) double fma_flops(long n) {
  const vf x = splat<vf>(1.0001f), y = splat<vf>(1e-7f);
#define START(i) vf a##i = splat<vf>((float)i);
#define STEP(i) a##i = fma(a##i, x, y);
#define END(i) sink = a##i[0];
  EACH(START)
  for (long k = 0; k < n; k++) { EACH(STEP) __asm__ volatile(""); }
  EACH(END)
  return 2.0 * VL * 12 * n;
}
extern "C" __attribute__((visibility("default"))) double bf16_flops(long n) {
#if NPU_AMX
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, 16, 64);
  if (!Amx::request()) return 0;
  Amx::configure(shapes);
  for (long k = 0; k < n; k++)
    Amx::dpbf16ps<0, 4, 6>(), Amx::dpbf16ps<1, 4, 7>(), Amx::dpbf16ps<2, 5, 6>(), Amx::dpbf16ps<3, 5, 7>();
  Amx::release();
  return 4.0 * 2 * 16 * 16 * 32 * n;
#elif defined(__AVX512BF16__)
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80), y = (__m512bh)_mm512_set1_epi32(0x33803380);
#define DOT(i) a##i = (vf)_mm512_dpbf16_ps((__m512)a##i, x, y);
  EACH(START)
  for (long k = 0; k < n; k++) { EACH(DOT) __asm__ volatile(""); }
  EACH(END)
  return 4.0 * 16 * 12 * n;
#else
  return fma_flops(n);
#endif
}
"""


def peaks(threads: int) -> dict[str, float]:
    """Return the peak FLOP/s of all threads: of float32 multiply-adds, and of products of AMX tiles or the bfloat16 dot
    product if there are such."""
    from concurrent.futures import ThreadPoolExecutor

    from npu_compiler.targets.cpu.target import KERNELS
    from npu_compiler.targets.cpu.toolchain import build_shared

    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(build_shared({"peak.cpp": PEAK_SOURCE}, KERNELS))
        file.flush()
        library = ctypes.CDLL(file.name)
    best: dict[str, float] = {}
    real_time(True)  # the threads of the pool inherit it
    with ThreadPoolExecutor(threads) as pool:
        for name, symbol in (("float32", "fma_flops"), ("bfloat16", "bf16_flops")):
            function = getattr(library, symbol)
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long]
            for _ in range(12):
                start = time.perf_counter()
                flops = sum(pool.map(function, [1_000_000] * threads))
                best[name] = max(best.get(name, 0.0), flops / (time.perf_counter() - start))
    real_time(False)
    return best | {"float16": best["float32"]}


# -- models ------------------------------------------------------------------------------------------------------------
def build_model(name: str) -> Any:
    """Return a model with random weights and calibrated batch-norm statistics, so that activations keep their scale."""
    import torch

    from npusim import models

    torch.manual_seed(0)
    model = getattr(models, name)()
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.momentum = None
            torch.nn.init.uniform_(m.weight, 0.5, 1.5)
            torch.nn.init.uniform_(m.bias, -0.2, 0.2)
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 224, 224))
    return model.eval()


Contenders = dict[str, tuple[Callable[[], np.ndarray], str]]


def contenders(model: Any, x: Any, dtypes: Sequence[str], threads: int) -> Contenders:
    """Return name -> (run, dtype): npusim in ``dtypes``, and its peers. Each run returns its output as a numpy array;
    inputs are float32 images."""
    import npu_compiler
    from npu_compiler.frontend import capture, state_dict_numpy
    from npu_runtime import CPUBackend, Executor, load_weights

    made: Contenders = {}
    ir, weights = capture(model, (x,)), state_dict_numpy(model)
    for dtype in dtypes:
        program = npu_compiler.compile(ir, dtype=None if dtype == "float32" else dtype)
        backend = CPUBackend(threads=threads)
        executor = Executor(program, load_weights(program, weights, backend), backend)
        array, name = x.numpy(), program.entries["main"].outputs[0].name
        made[f"npusim {dtype}"] = (lambda e=executor, a=array, n=name: e.run([a])[n], dtype)
    if {"float32", "float16"} & set(dtypes):
        made["onnxruntime float32"] = (_onnxruntime(model, x, threads), "float32")
        made["openvino float32"] = (_openvino(model, x, "f32", threads), "float32")
        made["torch eager float32"] = (_eager(model, x, "float32"), "float32")
    if "bfloat16" in dtypes:
        made["openvino bfloat16"] = (_openvino(model, x, "bf16", threads), "bfloat16")
        made["torch eager bfloat16"] = (_eager(model, x, "bfloat16"), "bfloat16")
    return made


def _eager(model: Any, x: Any, dtype: str) -> Callable[[], np.ndarray]:
    import copy

    import torch

    kind = getattr(torch, dtype)
    own, images = copy.deepcopy(model).to(kind), x.to(kind)

    def run() -> np.ndarray:
        with torch.no_grad():
            return own(images).float().numpy()

    return run


def _onnxruntime(model: Any, x: Any, threads: int) -> Callable[[], np.ndarray]:
    import onnxruntime
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        torch.onnx.export(
            model, (x,), path, input_names=["x"], output_names=["y"], dynamo=True, external_data=False, verbose=False
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return lambda: session.run(None, feed)[0]


def _openvino(model: Any, x: Any, precision: str, threads: int) -> Callable[[], np.ndarray]:
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
    }
    converted = openvino.convert_model(model, example_input=x, input=[tuple(x.shape)])
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    request.set_input_tensor(openvino.Tensor(x.numpy()))

    def run() -> np.ndarray:
        request.infer()
        return request.get_output_tensor().data

    return run


# -- measuring ---------------------------------------------------------------------------------------------------------
def verdicts(model: Any, x: Any, made: Contenders) -> dict[str, dict[str, Any]]:
    """Return every contender's RMS error against float64 beside that of eager in its dtype, and whether it finds the
    largest scores."""
    import copy

    import torch

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double()).numpy()
    eager = {d: _rms(_eager(model, x, d)().astype(np.float64), exact) for d in {dtype for _, dtype in made.values()}}
    out = {}
    for name, (run, dtype) in made.items():
        y = np.array(run(), np.float64)
        error, near = _rms(y, exact), 4 * eager[dtype]
        out[name] = {
            "error": error,
            "eager_error": eager[dtype],
            "within_gate": error <= 1.1 * eager[dtype],
            "argmax_kept": largest_kept(y, exact, 1, near),
            "top5_kept": largest_kept(y, exact, 5, near),
        }
    return out


def largest_kept(y: np.ndarray, exact: np.ndarray, count: int, near: float) -> bool:
    """Whether the ``count`` largest scores of each row are those of ``exact``, apart from scores that are less than
    ``near`` above the next one."""
    for got, want in zip(y, exact, strict=True):
        order = np.argsort(-want)
        clear = [c for c in order[:count] if want[c] - want[order[count]] > near]
        if not set(clear) <= set(np.argsort(-got)[:count]):
            return False
    return True


def _rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)))


def passed(row: dict[str, Any]) -> bool:
    """Whether a figure has passed all checks. Rows of older runs have no ``top5_kept``."""
    return bool(row["within_gate"] and row["argmax_kept"] and row.get("top5_kept", True))


def one(name: str, batch: int, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model with one batch size and number of threads; return its rows and the peaks."""
    import torch

    torch.set_num_threads(threads)
    model = build_model(name)
    x = torch.randn(batch, 3, 224, 224)
    made = contenders(model, x, args.dtypes, threads)
    peak = peaks(threads)
    checks = verdicts(model, x, made)
    turns = take_turns({n: run for n, (run, _) in made.items()}, args.rounds, args.calls, threads)
    what = {"model": name, "batch": batch, "threads": threads}
    rows: list[dict[str, Any]] = [
        {**what, "contender": n, "dtype": d, **summary(turns[n]), **checks[n]} for n, (_, d) in made.items()
    ]
    for row in rows:
        if row["contender"].startswith("npusim"):
            row["ratio"] = ratio(turns[row["contender"]], [turns[p] for p in PEERS[row["dtype"]]])
    return {"rows": rows, "peak_gflops": {k: v / 1e9 for k, v in peak.items()}}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row measures."""
    return row["model"], row["batch"], row.get("threads", THREADS), row["contender"]


def best_rooflines(results: dict[str, Any]) -> None:
    """Make ``of_roofline`` of each row relative to the best peak that was seen in the whole run with its number of
    threads, since one may have been disturbed. Winograd's algorithm can exceed 1, because the operations are those of
    direct convolution."""
    best: dict[tuple[str, int], float] = {}
    for name, peak in results["peak_gflops"].items():
        for dtype, value in peak.items():
            at = dtype, int(name.split()[2]) if name.count(" ") == 2 else THREADS
            best[at] = max(best.get(at, 0.0), value)
    for r in results["rows"]:
        peak = best[r["dtype"], r.get("threads", THREADS)] * 1e9
        r["of_roofline"] = FLOPS[r["model"]] * r["batch"] / peak / (r["median_ms"] * 1e-3)


# -- results -----------------------------------------------------------------------------------------------------------
def ratio_of_minima(row: dict[str, Any], by: dict[tuple[Any, ...], dict[str, Any]]) -> float:
    """Return the minimum of npusim divided by that of the fastest peer."""
    peers = [by[(*key(row)[:3], p)]["min_ms"] for p in PEERS[row["dtype"]]]
    return float(row["min_ms"] / min(peers))


def table(results: dict[str, Any]) -> str:
    """Return Markdown: milliseconds, the ratio to the faster float32 peer or to OpenVINO's bfloat16, and that of the
    minima."""
    by = {key(r): r for r in results["rows"]}
    names = [c for c in COLUMNS if any(r["contender"] == c for r in results["rows"])]
    lines = ["| model, batch | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for model, batch, threads in dict.fromkeys(key(r)[:3] for r in results["rows"]):
        cells = []
        for n in names:
            r = by.get((model, batch, threads, n))
            cell = f"{r['median_ms']:.1f}" if r else ""
            if r and n.startswith("npusim"):
                mark = "" if passed(r) else " ✗"
                cell = f"**{cell}** (×{r['ratio']:.2f}, ×{ratio_of_minima(r, by):.2f}){mark}"
            cells.append(cell)
        label = f"{model}, {batch}" + (f", {threads} threads" if threads != THREADS else "")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    caption = [
        f"Median milliseconds, {THREADS} threads unless stated, {results['hardware']}, {results['date']}; in brackets "
        "the ratio to the faster of ONNX Runtime and OpenVINO in float32 (for bfloat16: to OpenVINO's bfloat16), "
        "median of the rounds, and that of the minima.",
    ]
    if any("float16" in r["dtype"] for r in results["rows"] if r["dtype"] != "bfloat16"):
        caption.append("float16 is a storage type here, arithmetic is float32.")
    scores = "five largest scores" if all("top5_kept" in r for r in results["rows"]) else "largest score"
    caption.append(
        "All figures of npusim passed the error gate (RMS error against float64 ≤ 1.1 × PyTorch eager's in the same "
        f"dtype, same {scores}) unless marked ✗."
    )
    if t := results.get("compile"):
        caption.append(
            f"Compiling ResNet-50 takes {t['cold_s']:.1f} s cold and {t['warm_s']:.2f} s warm, loading it with its "
            f"weights {t['load_s']:.2f} s; its float16 arena is "
            f"{t['arena_bytes_resnet50_float16_batch1'] / 1e6:.2f} MB."
        )
    caption.append(f"Versions: {versions}. Command: `{results['command']}`.")
    return "\n".join([*lines, "", " ".join(caption)])


def show(row: dict[str, Any]) -> None:
    """Print a figure and its verdict."""
    verdict = "ok" if passed(row) else f"✗ argmax {row['argmax_kept']}, top 5 {row['top5_kept']}"
    error = f"error {row['error']:.2e}, eager's {row['eager_error']:.2e}"
    against = f"ratio {row['ratio']:.3f}" if "ratio" in row else ""
    print(
        f"{row['model']} {row['batch']} {row['threads']:2d} threads  {row['contender']:21s} {row['median_ms']:8.2f} ms "
        f"(min {row['min_ms']:8.2f}, {row['samples']} calls) {against:11s} {error} {verdict}",
        flush=True,
    )


def measure(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure everything that the options ask for, each model, batch and number of threads in a process of its own."""
    packages = ["torch", "openvino", "numpy"] + ["onnxruntime"] * (args.dtypes != ["bfloat16"])
    results: dict[str, Any] = {
        "command": command, "date": date.today().isoformat(), "hardware": hardware(),
        "versions": {p: version(p) for p in packages}, "rows": [], "peak_gflops": {},
    }  # fmt: skip
    if args.whole:
        results["compile"] = start_times()
    options = ["--rounds", str(args.rounds), "--calls", str(args.calls), "--dtypes", *args.dtypes]
    for model in args.models:
        for batch in args.batches:
            for threads in args.threads:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", model, str(batch), str(threads), *options],
                    check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": _path()},
                )  # fmt: skip
                part = json.loads(done.stdout.splitlines()[-1])
                results["rows"] += part["rows"]
                results["peak_gflops"][f"{model} {batch} {threads}"] = part["peak_gflops"]
                for row in part["rows"]:
                    show(row)
    best_rooflines(results)
    return results


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"], choices=list(FLOPS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[THREADS])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=5, help="calls of a contender in a round")
    parser.add_argument("--quick", action="store_true", help="--models resnet18 --batches 1 --rounds 5")
    parser.add_argument("--out", type=Path, help="default for a whole run: in benchmarks/results")
    parser.add_argument("--merge", type=Path, help="the results of a part of a run on this kind of machine")
    parser.add_argument("--table", action="store_true", help="write the tables of the stored results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.models, args.batches, args.rounds = ["resnet18"], [1], 5
    if args.table:
        write_tables("cpu", KIND, table)
        return
    if args.one:
        name, batch, threads = args.one
        print(json.dumps(one(name, int(batch), int(threads), args)))
        return
    if args.merge:
        part = json.loads(args.merge.read_text())
        path = results_path(KIND, part["hardware"])
        if path.exists():
            whole = json.loads(path.read_text())
            peaks = whole["peak_gflops"] | part["peak_gflops"]
            part = merged(whole, part, "rows", key) | {"peak_gflops": peaks}
            best_rooflines(part)
        publish(part, path)
        return
    measured = ("models", "batches", "dtypes", "threads", "rounds", "calls")
    args.whole = all(getattr(args, name) == parser.get_default(name) for name in measured)
    shown = without_files(sys.argv[1:], ("--out",))
    results = measure(args, "make bench-cpu" + (f" ARGS='{' '.join(shown)}'" if shown else ""))
    print(table(results))
    publish(results, args.out or (results_path(KIND, hardware()) if args.whole else None))


if __name__ == "__main__":
    main()
