"""Quantised GGUF files beside llama.cpp on the same file, in turns within one run, with a verdict beside each figure.

    make bench-gguf                              writes benchmarks/results/cpu_gguf_<CPU>.json
    make bench-gguf ARGS="--models smollm2"      measures one model again; the results of the others stay
    make bench-gguf ARGS="--merge PART.json"     adds the models of a run on another machine to that machine's file
    make bench-gguf ARGS=--quick                 SmolLM2-135M and few rounds: prints the table, writes nothing

A model is ARCHITECTURE:MIX, an exact architecture with random weights in the types that ``llama-quantize`` would choose
(``gguf_models.py``), or 'smollm2', the real SmolLM2-135M-Instruct in q4_1. Engines run on two threads, or on
``NPU_BENCH_THREADS``. The results of a model are stored as soon as it is measured, with the day.

On a CPU with AMX, llama.cpp as GCC 12 compiles it stops with SIGILL at its first tile instruction: this compiler's
``_tile_loadconfig`` does not declare all memory that it reads, so the stores before it are dropped. Build
llama-cpp-python with a compiler barrier, ``asm volatile("" :: "r"(&tc) : "memory")``, in front of that call in
``ggml-cpu/amx/mmq.cpp``, and with ``-DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import MIXES, quantised_file
from gguf_reference import reference_logits
from llm_cpu import FAR, LENGTHS, MODELS, PROMPT, Worker, measure
from llm_engines import THREADS, prompt
from readme import ROOT, hardware, merged, publish, results_path, without_files, write_tables

sys.path.insert(0, str(ROOT))

ENGINES = ("npusim", "llama.cpp")
PACKAGES = {"llama.cpp": "llama-cpp-python"}
REAL = "smollm2"
DEFAULT = ("qwen2.5-1.5b:q4_0", "qwen2.5-1.5b:q4_k_m", "qwen2.5-1.5b:q8_0", REAL)
SPREAD = 0.02  # of the ratios of rounds, below which half of the rounds suffice
METRICS = {
    "decode": f"decode at position {PROMPT}",
    "decode far": f"decode at position {FAR}",
    "prefill": f"prefill of {PROMPT}",
}


def model_folder(work: Path, name: str) -> Path:
    """Return the folder with ``model.gguf``; a missing one is written."""
    folder = work / name.replace(":", "-")
    if name == REAL:
        from npusim.models.llm_weights import smollm2_135m

        folder.mkdir(parents=True, exist_ok=True)
        if not (link := folder / "model.gguf").exists():
            link.unlink(missing_ok=True)  # the file it led to is gone
            link.symlink_to(smollm2_135m())
        return folder
    architecture, _, mix = name.partition(":")
    if architecture not in MODELS or mix not in MIXES:
        raise SystemExit(f"{name}: a model is {REAL} or one of {', '.join(MODELS)}, a colon and {', '.join(MIXES)}")
    return quantised_file(folder, MODELS[architecture], mix).parent


def verdict(folder: Path, workers: dict[str, Worker]) -> dict[str, Any]:
    """Return the errors of logits against float32 on the dequantised weights: RMS and KL divergence, by engine and for
    PyTorch eager in bfloat16; and whether ours is within 1.1 x eager's."""
    last = [n - 1 for n in LENGTHS]
    found = {"eager": None, **{name: None for name in workers}}
    reference = reference_logits(folder / "model.gguf", prompt(max(LENGTHS)), last)
    exact = reference["float32"].astype(np.float64)
    found["eager"] = reference["bfloat16"]
    for name, worker in workers.items():
        found[name] = np.stack([np.load(worker.ask(f"logits {n}")) for n in LENGTHS])
    out: dict[str, Any] = {}
    for name, logits in found.items():
        wide = logits.astype(np.float64)
        p, q = _log_softmax(exact), _log_softmax(wide)
        out[name] = {
            "rms": float(np.sqrt(np.mean((wide - exact) ** 2))),
            "kl": float(np.mean(np.sum(np.exp(p) * (p - q), -1))),
        }
    top = np.sort(exact, -1)
    clear = top[:, -1] - top[:, -2] > 4 * out["eager"]["rms"]
    kept = (found["npusim"].argmax(-1) == exact.argmax(-1)) | ~clear
    out["within_gate"] = bool(out["npusim"]["rms"] <= 1.1 * out["eager"]["rms"] and kept.all())
    return out


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def run(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model; return the results, ready for JSON."""
    begin = time.perf_counter()
    probe = Worker("probe", folder)
    workers = {e: Worker(e, folder) for e in args.engines}
    ready = time.perf_counter()
    checked = verdict(folder, workers) if args.verdict else {}
    judged = time.perf_counter()
    times = measure(workers, probe, args.rounds, args.far, spread=SPREAD)
    spent = {"loading": ready - begin, "verdict": judged - ready, "measuring": time.perf_counter() - judged}
    print(name, ", ".join(f"{what} {seconds:.0f} s" for what, seconds in spent.items()), flush=True)
    file_bytes = (folder / "model.gguf").stat().st_size
    found = []
    for metric in METRICS:
        for e, seconds in times.get(metric, {}).items():
            ours = times[metric]["npusim"]
            row = {
                "engine": e, "metric": metric, "samples": len(seconds),
                "median_ms": statistics.median(seconds) * 1e3, "min_ms": min(seconds) * 1e3,
                "npusim_ratio": statistics.median(n / s for n, s in zip(ours, seconds, strict=True)),
                "ratio_of_minima": min(ours) / min(seconds),
            }  # fmt: skip
            if metric != "prefill":
                row["probe_gb_per_s"] = 1e-9 / statistics.median(times[f"{metric} probe"][e])
            found.append(row)
    facts = {e: w.facts for e, w in workers.items()}
    for w in (*workers.values(), probe):
        w.close()
    result = {
        "model": name, "date": date.today().isoformat(), "file_bytes": file_bytes, "verdict": checked, "rows": found,
        "processes": facts,
    }  # fmt: skip
    print(*rows([result]), json.dumps(checked), json.dumps(facts), sep="\n", flush=True)
    return result


def rows(models: list[dict[str, Any]]) -> list[str]:
    """Return Markdown: milliseconds by model, metric and engine."""
    lines = ["| GGUF file | npusim | llama.cpp | of bandwidth |", "|---|---:|---:|---:|"]
    for m in models:
        mark = "" if m["verdict"] and m["verdict"]["within_gate"] else " ✗"
        for metric, label in METRICS.items():
            by = {r["engine"]: r for r in m["rows"] if r["metric"] == metric}
            if "npusim" not in by:
                continue
            ours, theirs = by["npusim"], by.get("llama.cpp")
            cell, peer, share = f"**{ours['median_ms']:.1f}**", "", ""
            if theirs is not None:
                cell += f" (×{theirs['npusim_ratio']:.2f}, ×{theirs['ratio_of_minima']:.2f})"
                peer = f"{theirs['median_ms']:.1f}"
            if metric == "decode":
                read = m["processes"]["npusim"]["weight_bytes"] / ours["median_ms"] / 1e6
                share = f"{read / ours['probe_gb_per_s']:.0%}"
            lines.append(f"| {m['model']}, {label} | {cell}{mark} | {peer} | {share} |")
    return lines


def table(results: dict[str, Any]) -> str:
    """Return Markdown: the rows of all models, and a caption."""
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    caption = (
        f"Median milliseconds (a token, or the whole prompt), {results['threads']} threads, {results['hardware']}, "
        f"{results['date']}; in brackets the ratio to llama.cpp on the same file, median of the rounds, and that of "
        "the minima. Random weights in the types that `llama-quantize` would choose, but smollm2 is "
        "SmolLM2-135M-Instruct in q4_1. The last column is what npusim read of the weights, divided by what a "
        "bandwidth probe read in that time. npusim's logits passed the error gate (RMS error against float32 with the "
        "decoded weights ≤ 1.1 × PyTorch eager's in bfloat16) unless marked ✗. "
        f"Versions: {versions}. Command: `{results['command']}`."
    )
    return "\n".join([*rows(results["models"]), "", caption])


def begun(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the results in the file ``path``, where every model has its day, or ``results`` if the file does not exist
    or has other versions of a package."""
    if not path.exists():
        return results
    old = json.loads(path.read_text())
    for model in old["models"]:
        model.setdefault("date", old["date"])
    try:
        return merged(old, results, "models", lambda m: m["model"])
    except ValueError as error:
        print(f"{path} is replaced: {error}")
        return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--far", type=int, default=4, help=f"rounds at position {FAR}")
    parser.add_argument("--quick", action="store_true", help=f"--models {REAL} --rounds 3 --far 0")
    parser.add_argument("--no-verdict", dest="verdict", action="store_false", help="do not compare logits")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="where the models are kept (up to 4 GB)")
    parser.add_argument("--out", type=Path, help="default for a whole run: in benchmarks/results")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="results that --out wrote on other machines")
    parser.add_argument("--table", action="store_true", help="write the stored results into the pages")
    args = parser.parse_args()
    if args.table:
        write_tables("gguf", "cpu_gguf", table, readme=False)
        return
    for path in args.merge:
        part = json.loads(path.read_text())
        stored = results_path("cpu_gguf", part["hardware"])
        publish(merged(begun(part, stored), part, "models", lambda m: m["model"]), stored)
    if args.merge:
        return
    if args.quick:
        args.models, args.rounds, args.far = [REAL], 3, 0
    shown = without_files(sys.argv[1:], ("--out", "--work"))
    usual = all(getattr(args, n) == parser.get_default(n) for n in ("engines", "rounds", "far"))
    whole = usual and args.verdict and THREADS == 2
    out = args.out or (results_path("cpu_gguf", hardware()) if whole else None)
    results = {
        "command": "make bench-gguf" + (f" ARGS='{' '.join(shown)}'" if shown else ""),
        "date": date.today().isoformat(), "hardware": hardware(), "threads": THREADS,
        "versions": {p: version(p) for e, p in PACKAGES.items() if e in args.engines}, "models": [],
    }  # fmt: skip
    folders = {name: model_folder(args.work, name) for name in args.models}  # all, before the first is measured
    kept = begun(results, out) if out else results
    for name, folder in folders.items():
        kept = merged(kept, results | {"models": [run(name, folder, args)]}, "models", lambda m: m["model"])
        publish(kept, out)
    print(table(kept))
    if out == results_path("cpu_gguf", hardware()):
        write_tables("gguf", "cpu_gguf", table, readme=False)


if __name__ == "__main__":
    main()
