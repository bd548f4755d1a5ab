"""Decoding and prefill beside llama.cpp, OpenVINO and PyTorch, in turns within one run, and the memory bandwidth used.

    make bench-llm                               writes benchmarks/results/cpu_llm_<CPU>.json
    make bench-llm ARGS=--table                  put the stored results into README.md and docs/performance.md
    make bench-llm ARGS=--quick                  SmolLM2-135M and few rounds: prints the table, writes nothing
    make bench-llm ARGS="--models smollm2-135m --threads 16 --out part.json"
    make bench-llm ARGS="--merge part.json"      replace models of this machine's results by those of a part

``optimum-cli`` exports OpenVINO's models. It needs an older transformers, which `make` installs into ``.venv-export``.

Architectures are exact; their random bfloat16 weights are written once to ``--work``. Every engine runs in a process of
its own on two threads (``llm_engines.py``); only one works at a time, and the others sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import bfloat16_file
from readme import ROOT, hardware, merged, publish, results_path, write_tables

sys.path.insert(0, str(ROOT))

KIND = "cpu_llm"  # of results
EXPORT = ROOT / ".venv-export" / "bin" / "optimum-cli"
THREADS = 2  # of the tables
ENGINES = ("npusim", "llama.cpp", "openvino", "torch")
FORMATS = {"llama.cpp": "gguf", "openvino": "openvino"}  # that engines read instead of the hub's
PROMPT, LONG, FAR = 128, 1024, 4096
LENGTHS = (1, 7, 33, PROMPT, 200)  # of the prompts whose logits are compared
REST = 0.25  # seconds between turns, in which threads of other engines stop spinning
METRICS = {
    "decode": f"decode at position {PROMPT}", "decode far": f"decode at position {FAR}",
    "prefill": f"prefill of {PROMPT}", "prefill long": f"prefill of {LONG}",
}  # fmt: skip
STEPS = 6  # tokens per turn: few, because the memory bandwidth changes by the minute

_COMMON = {
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "smollm2-135m": {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 1e5, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip


# -- checkpoints -------------------------------------------------------------------------------------------------------
def checkpoint(work: Path, name: str, formats: Collection[str]) -> Path:
    """Return a folder with the model in the hub's format and in ``formats``. Missing ones are written."""
    folder = work / name
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        import safetensors.numpy

        safetensors.numpy.save_file(weights(MODELS[name]), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
    if "gguf" in formats and not (folder / "model.gguf").exists():
        bfloat16_file(folder, MODELS[name])
    if "openvino" in formats and not (folder / "openvino" / "openvino_model.xml").exists():
        command = [str(EXPORT), "export", "openvino", "--model", str(folder)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", str(folder / "openvino")]
        subprocess.run(command, check=True)
    return folder


def formats_of(engines: Collection[str]) -> list[str]:
    """Return the formats that engines read, other than the hub's."""
    return [FORMATS[e] for e in engines if e in FORMATS]


def weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return normally distributed bfloat16 weights of the model's scale.

    One block is drawn and rotated for each tensor, so that no two are equal.
    """
    import ml_dtypes

    from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes

    block = (np.random.default_rng(0).standard_normal((1 << 24) + 7) * 0.02).astype(ml_dtypes.bfloat16)
    out = {}
    for number, (key, shape) in enumerate(parameter_shapes(LLMConfig.from_hf(config)).items()):
        values = np.resize(np.roll(block, 1013 * number), shape)
        out[key] = (values + 1).astype(values.dtype) if "norm" in key else values
    return out


# -- engines -----------------------------------------------------------------------------------------------------------
class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, str(Path(__file__).with_name("llm_engines.py")), name, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self.answer()

    def answer(self) -> Any:
        """Wait for the next answer. Raises ``RuntimeError`` if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended with code {self.process.wait()}: {self.process.args}")
        return json.loads(line)

    def ask(self, order: str) -> Any:
        """Send an order (see ``llm_engines.py``) and return its answer."""
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def verdict(folder: Path, ours: Worker, theirs: Worker, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Return the RMS error against float32 of the logits after prompts of several lengths, beside that of PyTorch eager
    in bfloat16."""
    exact = Worker("torch float32", folder)
    errors: dict[str, list[float]] = {"npusim": [], "torch": []}
    kept = True
    for length in lengths:
        want, a, b = (np.load(w.ask(f"logits {length}")).astype(np.float64) for w in (exact, ours, theirs))
        errors["npusim"].append(float(np.mean((a - want) ** 2)))
        errors["torch"].append(float(np.mean((b - want) ** 2)))
        top = np.sort(want)[-2:]
        clear = top[1] - top[0] > 4 * np.sqrt(errors["torch"][-1])
        kept = kept and (np.argmax(a) == np.argmax(want) or not clear)
    exact.close()
    ours_rms, eager_rms = (float(np.sqrt(np.mean(errors[k]))) for k in ("npusim", "torch"))
    within = ours_rms <= 1.1 * eager_rms
    return {"error": ours_rms, "eager_error": eager_rms, "within_gate": bool(within), "argmax_kept": bool(kept)}


def measure(
    workers: dict[str, Worker], probe: Worker, rounds: int, far_rounds: int, long_rounds: int = 0, spread: float = 0.0
) -> dict[str, dict[str, list]]:
    """Return the seconds of each round by metric and engine.

    Engines take turns in alternating order. The memory bandwidth is probed before and after each decode. A metric ends
    after half of its rounds if the ratio of each engine to npusim was within ``spread`` of its median in all of them.
    """
    times: dict[str, dict[str, list]] = {}

    def add(metric: str, name: str, values: list[float]) -> None:
        times.setdefault(metric, {}).setdefault(name, []).extend(values)

    def turn(metric: str, order: str, names: list[str], count: int) -> None:
        for name in names:
            workers[name].ask(order)
        for number in range(count):
            if 2 * number >= count and settled(times.get(metric, {}), spread):
                return
            for name in names if number % 2 == 0 else reversed(names):
                time.sleep(REST)
                probed = [probe.ask("decode 0 1")[0]] if metric.startswith("decode") else []
                add(metric, name, [statistics.median(workers[name].ask(order))])
                if probed:
                    add(f"{metric} probe", name, [(probed[0] + probe.ask("decode 0 1")[0]) / 2])

    names = list(workers)
    turn("decode", f"decode {PROMPT} {STEPS}", names, rounds)
    turn("prefill", f"prefill {PROMPT}", names, max(3, rounds // 2))
    if long_rounds:
        turn("prefill long", f"prefill {LONG}", names, long_rounds)
    if far_rounds:
        turn("decode far", f"decode {FAR} {STEPS}", [n for n in names if n != "torch"], far_rounds)
    return times


def settled(times: dict[str, list], spread: float) -> bool:
    """Whether each engine's ratio to npusim was within ``spread`` of its median in every round."""
    for seconds in times.values():
        ratios = [ours / theirs for ours, theirs in zip(times["npusim"], seconds, strict=True)]
        middle = statistics.median(ratios)
        if max(abs(r - middle) for r in ratios) > spread * middle:
            return False
    return bool(times)


def run(work: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model; return the results, ready for JSON."""
    folder = checkpoint(work, name, formats_of(args.engines))
    probe = Worker("probe", folder)
    workers = {e: Worker(e, folder) for e in args.engines}
    config = MODELS[name]
    stored = sum(np.prod(s) for s in _shapes(config)) * 2
    cache = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    cache *= config["hidden_size"] // config["num_attention_heads"]  # bytes per position
    lengths = (*LENGTHS, LONG) if args.long else LENGTHS
    checked = verdict(folder, workers["npusim"], workers["torch"], lengths) if "torch" in workers else {}
    times = measure(workers, probe, args.rounds, args.far, args.long)
    rows = []
    for metric in METRICS:
        for e, seconds in times.get(metric, {}).items():
            row: dict[str, Any] = {"engine": e, "metric": metric, "samples": len(seconds)}
            row |= {"median_ms": statistics.median(seconds) * 1e3, "min_ms": min(seconds) * 1e3}
            ours = times[metric].get("npusim", seconds)
            row["npusim_ratio"] = statistics.median(n / s for n, s in zip(ours, seconds, strict=True))
            row["ratio_of_minima"] = min(ours) / min(seconds)
            if metric.startswith("decode"):
                kv = cache * (FAR if "far" in metric else PROMPT)
                read = stored + kv
                probes = times[f"{metric} probe"][e]
                row["gb_per_s"] = read / row["median_ms"] / 1e6
                row["probe_gb_per_s"] = 1e-9 / statistics.median(probes)
                row["of_probe"] = statistics.median(read / s * p for s, p in zip(seconds, probes, strict=True))
                kept = (workers[e].facts["weight_bytes"] or stored) + kv
                row["kept_of_probe"] = row["of_probe"] * kept / read
            rows.append(row)
            print(f"{name:13s} {metric:10s} {e:10s} {row['median_ms']:9.2f} ms", _share(row), flush=True)
    facts = {e: w.facts for e, w in workers.items()}
    for w in (*workers.values(), probe):
        w.close()
    return {
        "model": name, "threads": args.threads, "weight_bytes": int(stored), "cache_bytes_per_position": cache,
        "verdict": checked, "rows": rows, "processes": facts,
    }  # fmt: skip


def _share(row: dict[str, Any]) -> str:
    share = ""
    if "of_probe" in row:
        share = f", {row['gb_per_s']:.1f} GB/s, {row['of_probe']:.0%} of the probe ({row['kept_of_probe']:.0%} read)"
    return f"npusim takes {row['npusim_ratio']:.2f} of it, {row['ratio_of_minima']:.2f} of its minimum{share}"


def _shapes(config: dict[str, Any]) -> list[tuple[int, ...]]:
    from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes

    return list(parameter_shapes(LLMConfig.from_hf(config)).values())


def key(model: dict[str, Any]) -> tuple[str, int]:
    """Return what a model's results measure."""
    return model["model"], model.get("threads", THREADS)


# -- the table ---------------------------------------------------------------------------------------------------------
def table(results: dict[str, Any]) -> str:
    """Return Markdown: median milliseconds of every model, metric and engine."""
    names = [e for e in ENGINES if any(r["engine"] == e for m in results["models"] for r in m["rows"])]
    lines = ["| model | " + " | ".join(names) + " | of bandwidth |", "|---|" + "---:|" * (len(names) + 1)]
    for m in results["models"]:
        mark = "" if m["verdict"].get("within_gate") and m["verdict"].get("argmax_kept") else " ✗"
        for metric, label in METRICS.items():
            by = {r["engine"]: r for r in m["rows"] if r["metric"] == metric}
            if "npusim" not in by:
                continue
            ratio = max((r["npusim_ratio"] for e, r in by.items() if e != "npusim"), default=float("nan"))
            ours = by["npusim"]
            best = min((r["min_ms"] for e, r in by.items() if e != "npusim"), default=float("nan"))
            cells = [f"**{ours['median_ms']:.1f}** (×{ratio:.2f}, ×{ours['min_ms'] / best:.2f}){mark}"]
            cells += [f"{by[e]['median_ms']:.1f}" if e in by else "" for e in names if e != "npusim"]
            share = f"{ours['of_probe']:.0%} ({ours['kept_of_probe']:.0%})" if "of_probe" in ours else ""
            label += f", {m['threads']} threads" if m.get("threads", THREADS) != THREADS else ""
            lines.append(f"| {m['model']}, {label} | " + " | ".join(cells) + f" | {share} |")
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    lines += [
        "",
        f"Median milliseconds (a token, or the whole prompt), bfloat16, {THREADS} threads unless stated, "
        f"{results['hardware']}, {results['date']}; in brackets the ratio to the fastest of the others, median of the "
        "rounds, and that of the minima. The last column is the size of weights and cache in 16 bits, divided by what "
        "a bandwidth probe read in that time; in brackets for the bytes that npusim read, which stores weights in 12 "
        "bits. OpenVINO "
        "holds float16 weights and computes in bfloat16. Random weights; npusim's logits passed the error gate (RMS "
        "error against float32 ≤ 1.1 × PyTorch eager's in bfloat16, same largest logit) unless "
        f"marked ✗. Versions: {versions}. Command: `{results['command']}`.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--far", type=int, default=8, help=f"rounds at position {FAR}")
    parser.add_argument("--long", type=int, default=6, help=f"rounds of prompts of {LONG}")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="where the models are kept (up to 12 GB)")
    parser.add_argument("--quick", action="store_true", help="--models smollm2-135m --rounds 3 --far 0 --long 0")
    parser.add_argument("--out", type=Path, help="default for a whole run: in benchmarks/results")
    parser.add_argument("--prepare", action="store_true", help="write the checkpoints only")
    parser.add_argument("--merge", type=Path, help="the results of a part of a run on this kind of machine")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.models, args.rounds, args.far, args.long = ["smollm2-135m"], 3, 0, 0
    if args.table:
        write_tables("llm", KIND, table)
        return
    if args.merge:
        part = json.loads(args.merge.read_text())
        path = results_path(KIND, part["hardware"])
        publish(merged(json.loads(path.read_text()), part, "models", key) if path.exists() else part, path)
        return
    if args.prepare:
        for name in args.models:
            checkpoint(args.work, name, formats_of(args.engines))
        return
    os.environ["NPU_BENCH_THREADS"] = str(args.threads)  # of the workers
    packages = {"llama.cpp": "llama-cpp-python", "openvino": "openvino", "torch": "torch"}
    results = {
        "command": "make bench-llm", "date": date.today().isoformat(), "hardware": hardware(),
        "versions": {p: version(p) for e, p in packages.items() if e in args.engines},
        "models": [run(args.work, name, args) for name in args.models],
    }  # fmt: skip
    print(table(results))
    whole = all(
        getattr(args, name) == parser.get_default(name)
        for name in ("models", "engines", "rounds", "far", "long", "threads")
    )
    publish(results, args.out or (results_path(KIND, hardware()) if whole else None))


if __name__ == "__main__":
    main()
