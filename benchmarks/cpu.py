"""ResNet-18 and ResNet-50 on the CPU beside ONNX Runtime, OpenVINO and PyTorch, all interleaved in one process.

    make bench-cpu                                measure everything (about 10 minutes), write results/cpu_resnet.json
    make bench-cpu ARGS=--table                   put the stored results into README.md and docs/performance.md
    make bench-cpu ARGS=--quick                   ResNet-18, one image, a second for each contender
    make bench-cpu ARGS="--models resnet18 --batches 1 --seconds 5"

A run with other models, batches or seconds than the default prints its figures and writes nothing, unless `--out` names
a file. Contenders take turns in short bursts; as root the bursts run at real-time priority. A burst in which other
processes took more than 4 % of the CPUs is dropped. Every figure has a correctness verdict: its error against float64
is at most 1.1 times that of PyTorch eager in the same dtype (float32 eager for the float32 peers).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from readme import hardware, publish, real_time, write_section

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu_resnet.json"
THREADS = 2
FLOPS = {"resnet18": 3.628e9, "resnet50": 8.178e9}  # of one image
DTYPES = ("float32", "float16", "bfloat16")
FLOAT32_PEERS = ("onnxruntime float32", "openvino float32")
PEERS = {"float32": FLOAT32_PEERS, "float16": FLOAT32_PEERS, "bfloat16": ("openvino bfloat16",)}

PEAK_SOURCE = """
#include "simd.h"
using namespace npu;
// Sixteen accumulators in registers: enough to hide the latency of two multiply-adds a cycle.
#define EACH(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15)
static volatile float sink;
extern "C" __attribute__((visibility("default"))) double fma_flops(long n) {
  const vf x = splat<vf>(1.0001f), y = splat<vf>(1e-7f);
#define START(i) vf a##i = splat<vf>((float)i);
#define STEP(i) a##i = fma(a##i, x, y);
#define END(i) sink = a##i[0];
  EACH(START)
  for (long k = 0; k < n; k++) { EACH(STEP) __asm__ volatile(""); }
  EACH(END)
  return 2.0 * VL * 16 * n;
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
  return 4.0 * 16 * 16 * n;
#else
  return fma_flops(n);
#endif
}
"""


def peaks() -> dict[str, float]:
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
    with ThreadPoolExecutor(THREADS) as pool:
        for name, symbol in (("float32", "fma_flops"), ("bfloat16", "bf16_flops")):
            function = getattr(library, symbol)
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long]
            for _ in range(12):
                start = time.perf_counter()
                flops = sum(pool.map(function, [1_000_000] * THREADS))
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


def contenders(model: Any, x: Any) -> dict[str, tuple[Callable[[], np.ndarray], str]]:
    """Return name -> (run, dtype). Each run returns its output as a numpy array; inputs are float32 images."""
    import torch

    import npu_compiler
    from npu_compiler.frontend import capture, state_dict_numpy
    from npu_runtime import CPUBackend, Executor, load_weights

    made: dict[str, tuple[Callable[[], np.ndarray], str]] = {}
    ir, weights = capture(model, (x,)), state_dict_numpy(model)
    for dtype in DTYPES:
        program = npu_compiler.compile(ir, dtype=None if dtype == "float32" else dtype)
        backend = CPUBackend(threads=THREADS)
        executor = Executor(program, load_weights(program, weights, backend), backend)
        array, name = x.numpy(), program.entries["main"].outputs[0].name
        made[f"npusim {dtype}"] = (lambda e=executor, a=array, n=name: e.run([a])[n], dtype)
    made["onnxruntime float32"] = (_onnxruntime(model, x), "float32")
    made["openvino float32"] = (_openvino(model, x, "f32"), "float32")
    made["openvino bfloat16"] = (_openvino(model, x, "bf16"), "bfloat16")

    def eager() -> np.ndarray:
        with torch.no_grad():
            return model(x).numpy()

    made["torch eager float32"] = (eager, "float32")
    return made


def _onnxruntime(model: Any, x: Any) -> Callable[[], np.ndarray]:
    import onnxruntime
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        torch.onnx.export(
            model, (x,), path, input_names=["x"], output_names=["y"], dynamo=True, external_data=False, verbose=False
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return lambda: session.run(None, feed)[0]


def _openvino(model: Any, x: Any, precision: str) -> Callable[[], np.ndarray]:
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": THREADS,
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


# -- measuring
def _busy() -> float:
    """Return the CPU seconds that all processes used so far."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (fields[0] + fields[1] + fields[2] + fields[5] + fields[6] + fields[7]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Burst:
    """The times in seconds of a contender's runs in one turn. ``clean``: other processes used almost no CPU."""

    seconds: list[float]
    clean: bool


def measure(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[Burst]]:
    """Run one burst of about 0.25 s per contender and round for ``seconds`` per contender, in alternating order."""
    bursts: dict[str, list[Burst]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    end, forward = time.perf_counter() + seconds * len(runs), list(runs.items())
    while time.perf_counter() < end:
        for name, run in forward if len(bursts[forward[0][0]]) % 2 == 0 else forward[::-1]:
            bursts[name].append(_burst(run))
    return bursts


def _burst(run: Callable[[], Any]) -> Burst:
    time.sleep(0.1)  # until the threads of the previous contender stop spinning
    real_time(True)
    run()
    busy, mine, start = _busy(), time.process_time(), time.perf_counter()
    taken: list[float] = []
    while time.perf_counter() - start < 0.25 or len(taken) < 3:
        at = time.perf_counter()
        run()
        taken.append(time.perf_counter() - at)
    wall = time.perf_counter() - start
    foreign = _busy() - busy - (time.process_time() - mine)
    real_time(False)
    return Burst(taken, foreign < 0.04 * wall * THREADS + 0.02)


def _usable(*bursts: list[Burst]) -> list[tuple[list[float], ...]]:
    """Return the rounds in which all bursts are clean, or all rounds if fewer than three are."""
    clean = [r for r in zip(*bursts, strict=True) if all(b.clean for b in r)]
    return [tuple(b.seconds for b in r) for r in (clean if len(clean) >= 3 else zip(*bursts, strict=True))]


def summary(bursts: list[Burst]) -> dict[str, Any]:
    """Return one contender's median and minimum in milliseconds, ready for JSON."""
    use = [t for (taken,) in _usable(bursts) for t in taken]
    return {
        "median_ms": statistics.median(use) * 1e3,
        "min_ms": min(use) * 1e3,
        "samples": len(use),
        "undisturbed": sum(b.clean for b in bursts) >= 3,
    }


def ratio(ours: list[Burst], peers: list[list[Burst]]) -> float:
    """Return the ratio to the fastest peer: the median over the rounds, because the machine's speed drifts."""
    return max(
        statistics.median(statistics.median(a) / statistics.median(b) for a, b in _usable(ours, p)) for p in peers
    )


def verdicts(model: Any, x: Any, made: dict[str, tuple[Callable[[], np.ndarray], str]]) -> dict[str, dict[str, Any]]:
    """Return every contender's RMS error against float64, beside eager's in the contender's dtype."""
    import copy

    import torch

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double()).numpy()
        eager = {}
        for dtype in DTYPES:
            kind = getattr(torch, dtype)
            eager[dtype] = _rms(copy.deepcopy(model).to(kind)(x.to(kind)).double().numpy(), exact)
    out = {}
    for name, (run, dtype) in made.items():
        y = np.array(run(), np.float64)
        error = _rms(y, exact)
        same = bool((y.argmax(-1) == exact.argmax(-1)).all())
        out[name] = {
            "error": error,
            "eager_error": eager[dtype],
            "within_gate": error <= 1.1 * eager[dtype],
            "argmax_kept": same,
        }
    return out


def _rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)))


def one(name: str, batch: int, seconds: float) -> dict[str, Any]:
    """Measure one model with one batch size; return its rows and the peaks."""
    import torch

    torch.set_num_threads(THREADS)
    model = build_model(name)
    x = torch.randn(batch, 3, 224, 224)
    made = contenders(model, x)
    peak = peaks()
    checks = verdicts(model, x, made)
    bursts = measure({n: run for n, (run, _) in made.items()}, seconds)
    rows: list[dict[str, Any]] = [
        {"model": name, "batch": batch, "contender": n, "dtype": dtype, **summary(bursts[n]), **checks[n]}
        for n, (_, dtype) in made.items()
    ]
    for row in rows:
        if row["contender"].startswith("npusim"):
            row["ratio"] = ratio(bursts[row["contender"]], [bursts[p] for p in PEERS[row["dtype"]]])
    return {"rows": rows, "peak_gflops": {k: v / 1e9 for k, v in peak.items()}}


def add_rooflines(results: dict[str, Any]) -> None:
    """Add ``of_roofline`` to each row, relative to the best peak seen in the whole run, since one may have been
    disturbed. Winograd's algorithm can exceed 1, because the operations are those of direct convolution."""
    for r in results["rows"]:
        peak = max(p[r["dtype"]] for p in results["peak_gflops"].values()) * 1e9
        r["of_roofline"] = FLOPS[r["model"]] * r["batch"] / peak / (r["median_ms"] * 1e-3)


STARTS = """
import json, sys, time
cpu = time.process_time()
import npu_compiler, npu_runtime
cpu = time.process_time() - cpu
from npu_compiler.aten.json_reader import load_ir
ir = load_ir(sys.argv[1])
t = time.perf_counter()
program = npu_compiler.compile(ir, dtype="float16")
compiled = time.perf_counter() - t
program.save(sys.argv[2])
import numpy as np
rng = np.random.default_rng(0)
weights = {w.key: rng.uniform(0.5, 1, w.shape).astype(w.dtype) for w in program.weights}
t = time.perf_counter()
npu_runtime.load(sys.argv[2], weights)
loaded = time.perf_counter() - t
print(json.dumps([cpu, compiled, loaded, program.entries["main"].arena_bytes]))
"""


def start_times() -> dict[str, float]:
    """Measure ResNet-50 in float16 in fresh processes: seconds to import (CPU time), to compile with an empty and with
    a filled cache, and to load the program with its weights; bytes of its arena. Medians of five, except for the empty
    cache."""
    source = ROOT / "tests" / "data" / "ir" / "resnet50.json"
    with tempfile.TemporaryDirectory() as cache:
        # Byte code is written, as for an installed package.
        settings = {"NPU_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": f"{cache}/python", "PYTHONPATH": str(ROOT)}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | settings
        command = [sys.executable, "-c", STARTS, str(source), f"{cache}/resnet50.npubin"]
        runs = [
            json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(6)
        ]
    imports, compiled, loaded, arena = (list(column) for column in zip(*runs, strict=True))
    return {
        "cold_s": compiled[0],
        "warm_s": statistics.median(compiled[1:]),
        "load_s": statistics.median(loaded[1:]),
        "import_cpu_s": statistics.median(imports[1:]),
        "arena_bytes_resnet50_float16_batch1": arena[0],
    }


# -- results
def table(results: dict[str, Any]) -> str:
    """Return Markdown: milliseconds and the ratio to the faster float32 peer, or to OpenVINO's bfloat16."""
    names = [
        "npusim float32",
        "npusim float16",
        "onnxruntime float32",
        "openvino float32",
        "torch eager float32",
        "npusim bfloat16",
        "openvino bfloat16",
    ]
    by = {(r["model"], r["batch"], r["contender"]): r for r in results["rows"]}
    lines = ["| model, batch | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for model, batch in dict.fromkeys((r["model"], r["batch"]) for r in results["rows"]):
        cells = []
        for n in names:
            r = by[model, batch, n]
            cell = f"{r['median_ms']:.1f}"
            if n.startswith("npusim"):
                mark = "" if r["within_gate"] and r["argmax_kept"] else " ✗"
                cell = f"**{cell}** (×{r['ratio']:.2f}){mark}"
            cells.append(cell)
        lines.append(f"| {model}, {batch} | " + " | ".join(cells) + " |")
    t, versions = results["compile"], ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    lines += [
        "",
        f"Median milliseconds, {THREADS} threads, {results['hardware']}, {results['date']}; in brackets the ratio "
        "to the faster of ONNX Runtime and OpenVINO in float32 (for bfloat16: to OpenVINO's bfloat16), median of the "
        "rounds. float16 is a "
        "storage type here, arithmetic is float32. All figures of npusim passed the error gate (RMS error against "
        "float64 ≤ 1.1 × PyTorch eager's in the same dtype) unless marked ✗. "
        f"Compiling ResNet-50 takes {t['cold_s']:.1f} s cold and {t['warm_s']:.2f} s warm, loading it with its weights "
        f"{t['load_s']:.2f} s, importing the packages {t['import_cpu_s']:.2f} s of CPU time; its float16 arena is "
        f"{t['arena_bytes_resnet50_float16_batch1'] / 1e6:.2f} MB. Versions: {versions}. "
        f"Command: `{results['command']}`.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per contender")
    parser.add_argument("--quick", action="store_true", help="--models resnet18 --batches 1 --seconds 1")
    parser.add_argument("--out", type=Path, help=f"default for a whole run: {RESULTS}")
    parser.add_argument("--table", action="store_true", help="write the table of the stored results")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.models, args.batches, args.seconds = ["resnet18"], [1], 1.0
    if args.table:
        write_section("cpu", table(json.loads(RESULTS.read_text())))
        return
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.seconds)))
        return
    results: dict[str, Any] = {
        "command": "make bench-cpu", "date": date.today().isoformat(), "hardware": hardware(),
        "threads": THREADS,
        "versions": {p: version(p) for p in ("torch", "onnxruntime", "openvino", "numpy")},
        "compile": start_times(), "rows": [], "peak_gflops": {},
    }  # fmt: skip
    for model in args.models:
        for batch in args.batches:
            command = [sys.executable, __file__, "--one", model, str(batch), "--seconds", str(args.seconds)]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
            part = json.loads(done.stdout.splitlines()[-1])
            results["rows"] += part["rows"]
            results["peak_gflops"][f"{model} {batch}"] = part["peak_gflops"]
            for r in part["rows"]:
                verdict = (
                    "ok"
                    if r["within_gate"] and r["argmax_kept"]
                    else f"error {r['error']:.2e} against {r['eager_error']:.2e}"
                )
                print(
                    f"{model:9s} {batch}  {r['contender']:22s} {r['median_ms']:8.2f} ms  {verdict}",
                    flush=True,
                )
    add_rooflines(results)
    print(table(results))
    whole = all(getattr(args, name) == parser.get_default(name) for name in ("models", "batches", "seconds"))
    publish(results, args.out or (RESULTS if whole else None))


if __name__ == "__main__":
    main()
