"""Single layers beside PyTorch eager on one NVIDIA GPU: attention of prompts, of batches of tokens that are decoded, of
drafts that are verified and with masks; and products, convolutions and a network in float32.

    python benchmarks/gpu_layers.py                 every case; results go to benchmarks/results/h200_layers.json
    python benchmarks/gpu_layers.py 'few*' --seconds 1
    python benchmarks/gpu_layers.py --tf32          the float32 layers, where both sides may round operands to TF32
    python benchmarks/gpu_layers.py --table         put the tables into docs/performance.md

Both sides run in turns within one run, on random data; times are medians of device events around bursts of back-to-back
runs. The verdict compares the RMS error against float64 with that of PyTorch in the same dtype on the same GPU. Without
--tf32, PyTorch does not round float32 to TF32. It times its convolutions (cudnn.benchmark) and has images in
channels-last layout.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import math
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from gpu_measure import Contender, Ours, bursts
from readme import write_section
from torch import nn

from npu_compiler.frontend import state_dict_numpy
from npu_compiler.frontend.tensors import tensor_to_numpy

RESULTS = Path(__file__).resolve().parent / "results" / "h200_layers.json"
LIMIT = 1.5  # of the ratio to PyTorch
COMPILERS = 8  # processes


@dataclass(frozen=True)
class Attention:
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

    def model(self) -> nn.Module:
        """Return the module that computes the case."""
        return Attend(self)

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f" on {self.kv_heads}" if self.heads != self.kv_heads else "")
        return f"{self.batch} × {heads} of {self.size}, {self.queries} × {self.keys}, {self.dtype}"


@dataclass(frozen=True)
class Layer:
    """A float32 layer, or a network of :mod:`npusim.models`, on random data of ``shape``."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def inputs(self) -> list[torch.Tensor]:
        """Return the input, on the CPU."""
        return [torch.randn(self.shape, generator=torch.Generator().manual_seed(1))]

    def model(self) -> nn.Module:
        """Return the module with random weights."""
        torch.manual_seed(0)
        return self.make().eval()

    def __str__(self) -> str:
        return " × ".join(map(str, self.shape))


def network(name: str) -> nn.Module:
    """Return a network of :mod:`npusim.models`."""
    from npusim import models

    made: nn.Module = getattr(models, name)()
    return made


class Attend(nn.Module):
    """The call of PyTorch's function for a case."""

    def __init__(self, case: Attention):
        super().__init__()
        self.causal, self.shared = case.mask == "causal", case.heads != case.kv_heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=self.shared)


CASES: dict[str, Attention | Layer] = {
    "prompt 2048": Attention(1, 12, 12, 2048, 2048, 128, mask="causal"),
    "prompt 2048, heads of 64": Attention(1, 16, 16, 2048, 2048, 64, mask="causal"),
    "prompt 2048, float32": Attention(1, 12, 12, 2048, 2048, 64, "float32", "causal"),
    "images, 1024 patches": Attention(4, 16, 16, 1024, 1024, 72, "float16"),
    "images, float32": Attention(1, 12, 12, 1024, 1024, 64, "float32"),
    "mask of bits": Attention(2, 12, 12, 1024, 1024, 64, "float16", "bool"),
    "mask in float16": Attention(2, 12, 12, 1024, 1024, 64, "float16", "float16"),
    "mask in float16, heads of 128": Attention(2, 16, 16, 1024, 1024, 128, "float16", "float16"),
    "few queries: 8 of 4096": Attention(1, 12, 2, 8, 4096, 128),
    "few queries: 8 of 4096, equal heads": Attention(1, 16, 16, 8, 4096, 128),
    "few queries: 64 of 8192": Attention(1, 16, 4, 64, 8192, 128),
    "few queries: 4 of 1024, float16, heads of 64": Attention(4, 12, 12, 4, 1024, 64, "float16"),
    "one query of 4096, batch 16": Attention(16, 16, 2, 1, 4096, 128),
    "one query of 2048, batch 32, equal heads": Attention(32, 16, 16, 1, 2048, 64, "float16"),
    "one query of 2048, batch 16, float32": Attention(16, 12, 12, 1, 2048, 64, "float32"),
    "batch 16 with a mask": Attention(16, 16, 4, 1, 2048, 128, "bfloat16", "bool"),
    "linear 4096 to 4096": Layer(partial(nn.Linear, 4096, 4096), (4096, 4096)),
    "linear 1024 to 1024": Layer(partial(nn.Linear, 1024, 1024), (1024, 1024)),
    "linear 1536 to 8960": Layer(partial(nn.Linear, 1536, 8960), (512, 1536)),
    "linear 1536 to 1536": Layer(partial(nn.Linear, 1536, 1536), (128, 1536)),
    "linear 768 to 3072": Layer(partial(nn.Linear, 768, 3072), (197, 768)),
    "linear 768 to 768": Layer(partial(nn.Linear, 768, 768), (3152, 768)),
    "convolution 3x3 to 64": Layer(partial(nn.Conv2d, 64, 64, 3, 1, 1), (32, 64, 56, 56)),
    "convolution 3x3 to 256": Layer(partial(nn.Conv2d, 256, 256, 3, 1, 1), (32, 256, 14, 14)),
    "convolution 3x3 to 256, one image": Layer(partial(nn.Conv2d, 256, 256, 3, 1, 1), (1, 256, 14, 14)),
    "convolution 1x1 to 64": Layer(partial(nn.Conv2d, 256, 64, 1), (32, 256, 56, 56)),
    "convolution 7x7 to 64, stride 2": Layer(partial(nn.Conv2d, 3, 64, 7, 2, 3), (32, 3, 224, 224)),
    "ResNet-50, one image": Layer(partial(network, "resnet50"), (1, 3, 224, 224)),
    "ResNet-50": Layer(partial(network, "resnet50"), (32, 3, 224, 224)),
}


def compiled(name: str, precision: str) -> Any:
    """Compile the program of a case; needs no GPU."""
    import npu_compiler

    case = CASES[name]
    ir = npu_compiler.capture(case.model(), tuple(case.inputs()))
    return npu_compiler.compile(ir, target="cuda", float32_precision=precision)


def measure(name: str, program: Any, seconds: float) -> dict[str, Any]:
    """Return errors, milliseconds and the kernels of a case."""
    case = CASES[name]
    model, inputs = case.model(), case.inputs()
    images = inputs[0].dim() == 4 and isinstance(case, Layer)
    layout = torch.channels_last if images else torch.preserve_format
    on_gpu = [x.cuda().to(memory_format=layout) for x in inputs]
    ours = Ours(Path(), "", state_dict_numpy(model), program)
    ours.bind("main", [tensor_to_numpy(x) for x in inputs])
    wide = copy.deepcopy(model).cuda().double()
    exact = wide(*(x.double() if x.is_floating_point() else x for x in on_gpu)).cpu()
    theirs = model.cuda().to(memory_format=layout)
    ours.run()
    ours.run.finish()
    found = torch.from_numpy(ours.output.to_numpy().astype("float64")), theirs(*on_gpu).double().cpu()
    error, eager_error = (math.sqrt(float(torch.mean((x - exact) ** 2))) for x in found)
    contenders = {"npusim": ours.contender(), "torch": Contender(lambda: theirs(*on_gpu), torch.cuda.current_stream())}
    times = {k: statistics.median(t) for k, t in bursts(contenders, seconds).items()}
    return {
        "case": str(case), "error": error, "eager_error": eager_error, "within_gate": error <= 1.1 * eager_error,
        "kernels": len(ours.executor.entry.calls), "ms": times, "ratio": times["npusim"] / times["torch"],
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Return Markdown: attention and the float32 layers, the worst ratio of each first."""
    lines = []
    for title, kind, part in (
        ("attention", Attention, "cases"),
        ("float32", Layer, "cases"),
        ("TF32, both sides", Layer, "tf32"),
    ):
        lines += [f"| {title} | npusim | PyTorch | ratio | error, of PyTorch's |", "|---|---:|---:|---:|---:|"]
        found = {name: results[part][name] for name, case in CASES.items() if isinstance(case, kind)}
        for name, r in sorted(found.items(), key=lambda item: -item[1]["ratio"]):
            mark, error = "" if r["within_gate"] else " ✗", r["error"] / r["eager_error"]
            ours, theirs = (r["ms"][k] * 1e3 for k in ("npusim", "torch"))
            lines.append(f"| {name} ({r['case']}) | {ours:.1f}{mark} | {theirs:.1f} | {r['ratio']:.2f} | {error:.2f} |")
        lines.append("")
    text = (
        f"Median microseconds, {results['hardware']}, PyTorch {results['versions']['torch']}, eager, "
        f"{results['date']}. Errors are RMS against float64, at most 1.1 × PyTorch's unless marked ✗. "
        f"Command: `{results['command']}`, for TF32 with `--tf32`."
    )
    return "\n".join([*lines, text])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default="*", help="a glob of names of cases")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time per contender")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tf32", action="store_true", help="both sides may round the operands of float32 layers")
    parser.add_argument("--table", action="store_true", help="write the tables of the stored results")
    args = parser.parse_args()
    if args.table:
        write_section("gpu_layers", table(json.loads(args.out.read_text())), readme=False)
        return
    from gpu import environment

    names = [
        n for n in CASES if fnmatch.fnmatchcase(n, args.cases) and not (args.tf32 and isinstance(CASES[n], Attention))
    ]
    if not names:
        parser.error(f"no case is called {args.cases}; the cases are {', '.join(CASES)}")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    part, precision = ("tf32", "tf32") if args.tf32 else ("cases", "highest")
    with ProcessPoolExecutor(COMPILERS) as pool:
        programs = dict(zip(names, pool.map(partial(compiled, precision=precision), names), strict=True))
    results = json.loads(args.out.read_text()) if args.out.exists() else {"cases": {}, "tf32": {}}
    results |= environment() | {"date": date.today().isoformat(), "command": "python benchmarks/gpu_layers.py"}
    with torch.no_grad():
        for name, program in programs.items():
            r = results[part][name] = measure(name, program, args.seconds)
            verdict = ("ok" if r["within_gate"] else "WRONG") + (", slow" if r["ratio"] > LIMIT else "")
            times = f"{r['ms']['npusim'] * 1e3:8.1f} µs, torch {r['ms']['torch'] * 1e3:8.1f} µs, {r['ratio']:.2f}"
            print(f"{name:46s} {times}  {verdict}", flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
