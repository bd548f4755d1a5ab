"""The results of ``gpu.py``: the file that its parts are merged into, and its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS, EAGER, GRAPH = "npusim", "eager", "eager + CUDA graph"
AUTOTUNE, OVERHEAD = "torch.compile max-autotune", "torch.compile reduce-overhead"
DENOISERS = {"sd15unet": "UNet of Stable Diffusion 1.5", "sdvae": "its decoder", "ditxl": "DiT-XL/2"}
ORDER = ("decode", "prefill", "resnet18", "resnet50", *DENOISERS)


@contextmanager
def merged(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the results so far; additions are written."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    yield results
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any], compared: bool = False) -> str:
    """Return Markdown: median milliseconds of every part and contender. With ``compared``, only of parts that have a
    contender beside npusim."""
    kinds = [AUTOTUNE, OVERHEAD, GRAPH, EAGER]
    lines = ["| | npusim | " + " | ".join(kinds) + " |", "|---|" + "---:|" * (len(kinds) + 1)]
    least = 2 if compared else 1
    measured = {name: part for name, part in results["parts"].items() if len(part.get("rows", ())) >= least}
    for name, part in sorted(measured.items(), key=lambda item: _place(item[0])):
        by = {r["contender"]: r["median_ms"] for r in part["rows"]}
        best = min((ms for kind, ms in by.items() if kind != OURS), default=float("nan"))
        v = part["verdict"]
        mark = "" if v["within_gate"] and v["top_kept"] else " ✗"
        speedup = [f"×{best / by[OURS]:.2f}"] if len(by) > 1 else []
        notes = "; ".join([*speedup, *_rate(name, part, by[OURS])])
        ours = f"**{by[OURS]:.3f}** ({notes}){mark}"
        cells = [ours, *(f"{by[k]:.3f}" if k in by else "" for k in kinds)]
        lines.append(f"| {_label(name)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _caption(results)])


def _place(name: str) -> tuple[int, int, str]:
    kind, number, *format = name.split("-")
    return ORDER.index(kind), int(number), "".join(format)


def _label(name: str) -> str:
    kind, number, *format = name.split("-")
    weights, _, activations = "".join(format).partition("+")
    stored = f"bfloat16, weights in {weights} only" if weights else "bfloat16"
    stored += f", activations in {activations}" if activations else ""
    if kind == "decode":
        return f"Qwen2.5-1.5B, {stored}, one token at position {int(number):,}"
    if kind == "prefill":
        return f"Qwen2.5-1.5B, {stored}, a prompt of {number}"
    if kind in DENOISERS:
        return f"{DENOISERS[kind]}, float16, batch {number}"
    return f"{kind.replace('resnet', 'ResNet-')}, {format[0] if format else 'float16'}, batch {number}"


def _rate(name: str, part: dict[str, Any], ms: float) -> list[str]:
    if "bytes_read" in part:
        return [f"{1000 / ms:.0f} tokens/s, {part['bytes_read'] / ms / 1e9:.2f} TB/s"]
    if "flops" in part:
        return [f"{part['flops'] / ms / 1e9:.0f} TFLOP/s"]
    return [f"{part['batch'] * 1000 / ms:,.0f} images/s"] if part["batch"] > 1 else []


def _caption(results: dict[str, Any]) -> str:
    found, versions = results["parts"], ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    days = sorted({p["date"] for p in found.values()})
    measured = days[0] if len(days) == 1 else f"{days[0]}/{days[-1]}"
    text = [
        f"Median milliseconds, {results['hardware']}, CUDA {results['driver']} driver, {measured}; in brackets "
        "the speedup over the fastest of the others. Random weights and inputs, but 8-bit ResNet-50 has trained "
        "weights and photographs. Errors against float32 "
        "(ResNet: float64) are at most 1.1 × PyTorch eager's in the same dtype, and the largest scores the same, "
        "unless marked ✗. TB/s counts bytes actually read: npusim stores the weights that a token reads in 12 bits, "
        "without loss. 8-bit networks have the CPU target's results, bit for bit, with an error of at most 5 % of the "
        "largest score; PyTorch runs them in float16. Prompts in bfloat16 are measured with `--speed-over-memory`, "
        "which keeps the elements of the weights too; by default, a prompt decodes them in every run."
    ]
    host = [p["host_us"] for p in found.values() if "host_us" in p]
    if host:
        text.append(f"A launch takes {min(host):.0f} to {max(host):.0f} µs on the host.")
    if "bandwidth" in found:
        text.append(f"A kernel that only reads runs at {found['bandwidth']['read_tb_per_s']:.2f} TB/s.")
    if "cold-start" in found:
        text.append(
            f"A process that loads the compiled Qwen2.5-1.5B with its packed weights cached has its first token after "
            f"{found['cold-start']['seconds']:.1f} s and calls no compiler."
        )
    return " ".join([*text, f"Versions: {versions}. Command: `python benchmarks/gpu.py all`."])
