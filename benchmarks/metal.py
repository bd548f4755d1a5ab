"""npusim on a Mac's GPU beside MLX, PyTorch (MPS) and llama.cpp, as far as they are installed.

    make test-metal                     tests, then all figures, into benchmarks/results/metal-<chip>.json
    make test-metal ARGS=--quick        the small models and few rounds; prints figures and writes nothing

Networks also run with their kernels encoded for each run, which shows what indirect command buffers bring. The peers
come with ``pip install mlx-lm llama-cpp-python``; PyTorch is there anyway. Contenders take turns. Every figure of
npusim has a verdict: its RMS error is at most 1.1 times that of PyTorch eager in the same dtype, against float64
(networks) or float32 (language models), and the largest scores are the same. Without a Mac, this script says so and
measures nothing. It has not run on a Mac yet.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from llm_cpu import MODELS, PROMPT, Worker, checkpoint, verdict
from readme import ROOT, hardware, publish

# Engine of language models -> the modules that it needs.
ENGINES = {
    "npusim metal": (), "torch mps": ("torch", "transformers"), "mlx": ("mlx", "mlx_lm"),
    "llama.cpp metal": ("llama_cpp", "gguf"),
}  # fmt: skip
PACKAGES = ("torch", "transformers", "mlx", "mlx-lm", "llama-cpp-python", "pyobjc-framework-Metal", "numpy")
RESNETS = (("resnet18", 1), ("resnet18", 32), ("resnet50", 1), ("resnet50", 32))
STEPS = 16  # decoded tokens of a turn


def obstacles() -> list[str]:
    """Return why nothing can be measured here, or []."""
    from npu_runtime.registry import backend_class

    return backend_class("metal").missing()


def available() -> tuple[list[str], list[str]]:
    """Return the engines that are installed, and a sentence about each one that is not."""
    lacking = {name: [m for m in modules if find_spec(m) is None] for name, modules in ENGINES.items()}
    skipped = [f"{name} is skipped: not installed: {', '.join(needed)}" for name, needed in lacking.items() if needed]
    return [name for name, needed in lacking.items() if not needed], skipped


# -- convolutional networks ----------------------------------------------------------------------------------------
def resnet(name: str, batch: int, seconds: float) -> dict[str, Any]:
    """Measure a network in float16 in turns with PyTorch on MPS; return medians in milliseconds and the verdict."""
    import torch
    from cpu import build_model

    import npu_compiler
    from npu_compiler.frontend import state_dict_numpy
    from npu_runtime import Executor, get_backend, load_weights
    from npusim.latency import interleaved

    model = build_model(name)
    x = torch.randn(batch, 3, 224, 224)
    half = copy.deepcopy(model).half()
    program = npu_compiler.compile(npu_compiler.capture(half, (x.half(),)), target="metal")
    backend = get_backend("metal")
    weights = load_weights(program, state_dict_numpy(half), backend)
    executor, images, result = Executor(program, weights, backend), x.half().numpy(), program.outputs[0].name
    with patch.dict(os.environ, NPU_METAL_INDIRECT="0"):
        listed = Executor(program, weights, backend)
    calls: dict[str, Callable[[], np.ndarray]] = {
        "npusim": lambda: executor.run([images])[result],
        "npusim, NPU_METAL_INDIRECT=0": lambda: listed.run([images])[result],
    }
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double()).numpy()
        eager = half(x.half()).double().numpy()
        if torch.backends.mps.is_available():
            theirs = copy.deepcopy(half).to("mps")
            calls["torch mps"] = lambda: theirs(x.half().to("mps")).cpu().numpy()
        times = interleaved(calls, seconds)
    ours = calls["npusim"]().astype(np.float64)
    error, reference = (float(np.sqrt(np.mean((y - exact) ** 2))) for y in (ours, eager))
    return {
        "model": name, "batch": batch, "dtype": "float16",
        "median_ms": {engine: found.median * 1e3 for engine, found in times.items()},
        "verdict": {"error": error, "eager_error": reference, "within_gate": error <= 1.1 * reference,
                    "argmax_kept": bool((ours.argmax(-1) == exact.argmax(-1)).all())},
    }  # fmt: skip


# -- language models -----------------------------------------------------------------------------------------------
def language_model(work: Path, name: str, engines: list[str], rounds: int) -> dict[str, Any]:
    """Measure prefill and decode of a model in bfloat16; return medians in milliseconds and the verdict."""
    folder = checkpoint(work, name, ("gguf",) if "llama.cpp metal" in engines else ())
    workers = {engine: Worker(engine, folder) for engine in engines}
    checked: dict[str, Any] = {"missing": "needs PyTorch and transformers"}
    if "torch mps" in workers:
        checked = verdict(folder, workers["npusim metal"], workers["torch mps"])
    found: dict[str, dict[str, float]] = {}
    for metric, order in (("prefill", f"prefill {PROMPT}"), ("decode", f"decode {PROMPT} {STEPS}")):
        taken: dict[str, list[float]] = {engine: [] for engine in engines}
        for worker in workers.values():
            worker.ask(order)
        for turn in range(rounds):
            for engine in engines if turn % 2 == 0 else engines[::-1]:
                taken[engine].append(statistics.median(workers[engine].ask(order)))
        found[metric] = {engine: statistics.median(seconds) * 1e3 for engine, seconds in taken.items()}
    for worker in workers.values():
        worker.close()
    return {"model": name, "dtype": "bfloat16", "prompt": PROMPT, "median_ms": found, "verdict": checked}


# -- all -----------------------------------------------------------------------------------------------------------
def result_file(chip: str) -> Path:
    """Return the path of the results of a chip, whose name is such as 'Apple M3 Max'."""
    words = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"metal-{words}.json"


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def failed(results: dict[str, Any]) -> list[str]:
    """Return the models whose verdict is not good."""
    rows = [*results["resnets"], *results["language_models"]]
    return [r["model"] for r in rows if not (r["verdict"].get("within_gate") and r["verdict"].get("argmax_kept"))]


def main(argv: list[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a verdict is not good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ResNet-18 and SmolLM2, few rounds; writes nothing")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="where the models are kept (up to 8 GB)")
    args = parser.parse_args(argv)
    if missing := obstacles():
        print(f"benchmarks/metal.py is skipped: no figure is measured and nothing is written: {'; '.join(missing)}")
        return 0
    engines, skipped = available()
    print(*skipped, sep="\n")
    resnets, models, rounds = (RESNETS[:1], ["smollm2-135m"], 3) if args.quick else (RESNETS, list(MODELS), 20)
    results = {
        "command": "make test-metal", "date": date.today().isoformat(), "hardware": hardware(),
        "macos": platform.mac_ver()[0], "versions": versions(), "skipped": skipped,
        "resnets": [resnet(name, batch, 2.0 if args.quick else 10.0) for name, batch in resnets],
        "language_models": [language_model(args.work, name, engines, rounds) for name in models],
    }  # fmt: skip
    for row in (*results["resnets"], *results["language_models"]):
        print(row["model"], row.get("batch", ""), row["median_ms"], row["verdict"])
    publish(results, None if args.quick else result_file(results["hardware"]))
    for name in failed(results):
        print(f"{name}: the verdict is not good", file=sys.stderr)
    return 1 if failed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
