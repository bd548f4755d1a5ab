"""What a decode step of language models costs on an Apple GPU in numbers that need no Mac: launches, barriers, bytes
and threadgroup memory.

Usage: ``python benchmarks/metal_counts.py`` compiles the models, which needs neither weights nor a GPU, and writes
``benchmarks/results/metal_counts.json`` and the table of docs/performance.md; ``--table`` only writes the table.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_cpu import MODELS
from readme import ROOT, publish, write_section

RESULTS = ROOT / "benchmarks" / "results" / "metal_counts.json"
TARGET = "metal:apple7"  # the oldest family, whose programs run on all
MAX_LEN = 2048
BITS = {"": 16, "bf16c12": 12}  # of a matrix's element, by weight format
AIMS = {"launches": 6, "barriers": 5, "read": 1.03}


def counts(name: str, weight_format: str, layers: int) -> dict[str, Any]:
    """Return the counts of the decode step of a model with its first ``layers`` layers, and the ``least`` bytes that it
    has to read: the cache, and each parameter once."""
    from npu_compiler.frontend.llm import llm_graphs
    from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes
    from npu_compiler.pipeline import compile_entries
    from npusim.launch_counts import launch_counts

    config = LLMConfig.from_hf({**MODELS[name], "num_hidden_layers": layers})
    graphs = llm_graphs(config, max_len=MAX_LEN, chunks=())
    program = compile_entries(graphs, TARGET, weights=weight_format or None)
    cache = sum(2 * math.prod(b.shape) for b in program.buffers if b.kind == "state")
    shapes = parameter_shapes(config).values()
    least = cache + sum(math.prod(s) * (BITS[weight_format] if len(s) > 1 else 16) // 8 for s in shapes)
    return {**asdict(launch_counts(program)["decode"]), "least_bytes": least}


def row(name: str, weight_format: str) -> dict[str, Any]:
    """Return the counts of a whole model, and of a layer in its middle: what one layer more adds."""
    layers = MODELS[name]["num_hidden_layers"]
    whole, less = (counts(name, weight_format, n) for n in (layers, layers - 1))
    layer = {key: whole[key] - less[key] for key in ("launches", "barriers", "bytes_read", "least_bytes")}
    return {"model": name, "weight_format": weight_format, **whole, "layer": layer}


def table(results: dict[str, Any]) -> str:
    """Return the section of docs/performance.md."""
    header = ("a decode step", "launches", "barriers", "a layer: launches", "a layer: barriers", "reads",
              "of weights and cache", "threadgroup memory")  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for r in results["rows"]:
        read = r["bytes_read"] / r["least_bytes"]
        cells = [
            f"{r['model']}, {r['weight_format'] or 'bfloat16'}", r["launches"], r["barriers"],
            _marked(r["layer"]["launches"], AIMS["launches"]), _marked(r["layer"]["barriers"], AIMS["barriers"]),
            f"{r['bytes_read'] / 1e6:.1f} MB", _marked(round(read, 3), AIMS["read"]),
            f"{r['shared_bytes'] / 1024:.1f} KiB",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    caption = (
        f"Counted in the program compiled for {results['target']}, with caches of {results['max_len']} positions. "
        "Nothing was timed: no program has run on Apple hardware yet. "
        "A barrier is counted before each launch that depends on one since the last barrier. "
        "*Of weights and cache* divides the bytes read by those of the cache and of each parameter once, in 16 or 12 "
        f"bits. Aims: {AIMS['launches']} launches and {AIMS['barriers']} barriers a layer, {AIMS['read']} of weights "
        "and cache; ✗ marks what misses its aim. Command: `python benchmarks/metal_counts.py`."
    )
    return "\n".join([*lines, "", caption])


def _marked(value: float, aim: float) -> str:
    return f"{value}{' ✗' if value > aim else ''}"


def main() -> None:
    """Count, unless only the table is asked for, and write."""
    if sys.argv[1:] != ["--table"]:
        rows = [row(name, weight_format) for name in MODELS for weight_format in BITS]
        publish({"target": TARGET, "max_len": MAX_LEN, "rows": rows}, RESULTS)
    text = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    print(text)
    write_section("metal", text, readme=False)


if __name__ == "__main__":
    main()
