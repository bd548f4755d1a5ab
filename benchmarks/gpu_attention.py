"""Attention beside PyTorch's ``scaled_dot_product_attention`` on one NVIDIA GPU: shapes of prompts, of batches of
tokens that are decoded, of drafts that are verified, of masks.

    python benchmarks/gpu_attention.py                 every case; results go to benchmarks/results/h200_attention.json
    python benchmarks/gpu_attention.py 'few*' --seconds 1
    python benchmarks/gpu_attention.py --table         put the table into docs/performance.md

Both sides run in turns within one run, on random data; times are medians of device events around bursts of back-to-back
runs. The verdict compares the RMS error against float64 with that of PyTorch in the same dtype.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from gpu_measure import Contender, Ours, bursts
from readme import write_section
from torch import nn

from npu_compiler.frontend.tensors import tensor_to_numpy

RESULTS = Path(__file__).resolve().parent / "results" / "h200_attention.json"
LIMIT = 1.5  # of the ratio to PyTorch
COMPILERS = 8  # processes


@dataclass(frozen=True)
class Case:
    """Attention of ``queries`` to ``keys``. ``kv_heads`` of the ``heads`` have keys. ``mask``: '', 'causal', or the
    dtype of a mask, of one for all heads."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    dtype: str = "bfloat16"
    mask: str = ""

    def inputs(self) -> list[torch.Tensor]:
        """Return queries, keys and values, and the mask if there is one, on the CPU."""
        g = torch.Generator().manual_seed(1)
        shapes = ((self.heads, self.queries), (self.kv_heads, self.keys), (self.kv_heads, self.keys))
        found = [torch.randn(self.batch, *s, self.size, generator=g).to(getattr(torch, self.dtype)) for s in shapes]
        if self.mask not in ("", "causal"):
            mask = torch.randn(self.batch, 1, self.queries, self.keys, generator=g)
            found.append(mask > -1 if self.mask == "bool" else mask.to(getattr(torch, self.mask)))
        return found


class Attention(nn.Module):
    """The call of PyTorch's function for a case."""

    def __init__(self, case: Case):
        super().__init__()
        self.causal, self.shared = case.mask == "causal", case.heads != case.kv_heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=self.shared)


CASES = {
    "prompt 2048": Case(1, 12, 12, 2048, 2048, 128, mask="causal"),
    "prompt 2048, heads of 64": Case(1, 16, 16, 2048, 2048, 64, mask="causal"),
    "prompt 2048, float32": Case(1, 12, 12, 2048, 2048, 64, "float32", "causal"),
    "images, 1024 patches": Case(4, 16, 16, 1024, 1024, 72, "float16"),
    "images, float32": Case(1, 12, 12, 1024, 1024, 64, "float32"),
    "mask of bits": Case(2, 12, 12, 1024, 1024, 64, "float16", "bool"),
    "mask in float16": Case(2, 12, 12, 1024, 1024, 64, "float16", "float16"),
    "mask in float16, heads of 128": Case(2, 16, 16, 1024, 1024, 128, "float16", "float16"),
    "few queries: 8 of 4096": Case(1, 12, 2, 8, 4096, 128),
    "few queries: 8 of 4096, equal heads": Case(1, 16, 16, 8, 4096, 128),
    "few queries: 64 of 8192": Case(1, 16, 4, 64, 8192, 128),
    "few queries: 4 of 1024, float16, heads of 64": Case(4, 12, 12, 4, 1024, 64, "float16"),
    "one query of 4096, batch 16": Case(16, 16, 2, 1, 4096, 128),
    "one query of 2048, batch 32, equal heads": Case(32, 16, 16, 1, 2048, 64, "float16"),
    "one query of 2048, batch 16, float32": Case(16, 12, 12, 1, 2048, 64, "float32"),
    "batch 16 with a mask": Case(16, 16, 4, 1, 2048, 128, "bfloat16", "bool"),
}


def compiled(name: str) -> Any:
    """Compile the program of a case; needs no GPU."""
    import npu_compiler

    case = CASES[name]
    graph = npu_compiler.capture(Attention(case), tuple(case.inputs()))
    return npu_compiler.compile(graph, target="cuda")


def measure(name: str, program: Any, seconds: float) -> dict[str, Any]:
    """Return errors, milliseconds and the kernels of a case."""
    case = CASES[name]
    inputs, model = case.inputs(), Attention(case)
    on_gpu = [x.cuda() for x in inputs]
    ours = Ours(Path(), "", {}, program)
    ours.bind("main", [tensor_to_numpy(x) for x in inputs])
    exact = model(*(x.double() if x.is_floating_point() else x for x in on_gpu)).cpu()
    ours.run()
    ours.run.finish()
    found = torch.from_numpy(ours.output.to_numpy().astype("float64")), model(*on_gpu).double().cpu()
    error, eager_error = (math.sqrt(float(torch.mean((x - exact) ** 2))) for x in found)
    contenders = {"npusim": ours.contender(), "torch": Contender(lambda: model(*on_gpu), torch.cuda.current_stream())}
    times = {k: statistics.median(t) for k, t in bursts(contenders, seconds).items()}
    kernels = [c.name for c in ours.executor.entry.calls]
    return {
        "case": case.__dict__, "error": error, "eager_error": eager_error, "within_gate": error <= 1.1 * eager_error,
        "kernels": kernels, "ms": times, "ratio": times["npusim"] / times["torch"],
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Return Markdown, the worst ratio first."""
    lines = ["| attention | npusim, µs | PyTorch, µs | ratio |", "|---|---:|---:|---:|"]
    for name, r in sorted(results["cases"].items(), key=lambda item: -item[1]["ratio"]):
        c, mark = r["case"], "" if r["within_gate"] else " ✗"
        heads = f"{c['heads']} heads" + (f" on {c['kv_heads']}" if c["heads"] != c["kv_heads"] else "")
        shape = f"{c['batch']} × {heads} of {c['size']}, {c['queries']} × {c['keys']}, {c['dtype']}"
        cells = f"{r['ms']['npusim'] * 1e3:.1f}{mark} | {r['ms']['torch'] * 1e3:.1f} | {r['ratio']:.2f}"
        lines.append(f"| {name} ({shape}) | {cells} |")
    text = (
        f"{results['hardware']}, PyTorch {results['versions']['torch']}, {results['date']}. Errors against float64 are "
        f"at most 1.1 × PyTorch's, unless marked ✗. Command: `{results['command']}`."
    )
    return "\n".join([*lines, "", text])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default="*", help="a glob of names of cases")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time per contender")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the table of the stored results")
    args = parser.parse_args()
    if args.table:
        write_section("gpu_attention", table(json.loads(args.out.read_text())), readme=False)
        return
    from gpu import environment

    names = [name for name in CASES if fnmatch.fnmatchcase(name, args.cases)]
    if not names:
        parser.error(f"no case is called {args.cases}; the cases are {', '.join(CASES)}")
    with ProcessPoolExecutor(COMPILERS) as pool:
        programs = dict(zip(names, pool.map(compiled, names), strict=True))
    results = json.loads(args.out.read_text()) if args.out.exists() else {"cases": {}}
    results |= environment() | {"date": date.today().isoformat(), "command": "python benchmarks/gpu_attention.py"}
    with torch.no_grad():
        for name, program in programs.items():
            r = results["cases"][name] = measure(name, program, args.seconds)
            verdict = ("ok" if r["within_gate"] else "WRONG") + (", slow" if r["ratio"] > LIMIT else "")
            times = f"{r['ms']['npusim'] * 1e3:8.1f} µs, torch {r['ms']['torch'] * 1e3:8.1f} µs, {r['ratio']:.2f}"
            print(f"{name:46s} {times}  {verdict}  {' + '.join(r['kernels'])}", flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
