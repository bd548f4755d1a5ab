"""NVIDIA's compute-sanitizer over a bounded part of the tests, on a GPU.

    python tests/sanitize.py                 memcheck: one sample of every operator, long rows, two small models
    python tests/sanitize.py racecheck       one operator of each family of kernels, and the models: it is slow

The exit status is the sanitizer's: 0 if it found nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Kernels of each kind: loops, rows, products, convolutions, attention, scans, sorting, gathers, scatters.
FAMILIES = tuple(
    f"aten.{name}"
    for name in (
        "gelu.default softmax.int layer_norm.default mm.default bmm.default addmm.default convolution.default "
        "scaled_dot_product_attention.default cumsum.default sort.default topk.default embedding.default "
        "index_put.default argmax.default max_pool2d.default var_mean.correction cat.default scatter_add.default"
    ).split()
)


def operators(tool: str) -> None:
    """One program of the chosen samples, run once, with the results checked."""
    from .conformance.cases import cases_for, check, compile_cases, run_on_cuda

    first = {case.op_type: case for case in reversed(cases_for("cuda"))}
    batch = compile_cases([case for name, case in first.items() if tool == "memcheck" or name in FAMILIES])
    results = run_on_cuda(batch.graph, batch.inputs)
    for case, names in batch.outputs.items():
        check(case, [np.asarray(results[n]) for n in names], batch.summing[case])
    print(f"{tool}: {len(batch.outputs)} operators are right", flush=True)


def rows(tool: str) -> None:
    """Sums of many updates and scans of long rows, whose kernels samples of operators are too small for."""
    from .targets.simt.test_scatters import test_sums_on_a_gpu_do_not_depend_on_the_order as sums
    from .targets.simt.test_sorts import test_scans_are_exact_in_integers as scans

    sums("cuda")
    scans("cuda")
    print(f"{tool}: scattered sums and scans are right", flush=True)


def models(tool: str) -> None:
    """The matrix unit, split sums, attention of prompts and of single tokens."""
    from npu_runtime.llm.model import LLM

    from .llm import small_model
    from .models.gate import compile_and_run, expect
    from .models.random_models import image_model, images
    from .support.cuda_gpu import backend

    model, runs = image_model("resnet18", 64), [(images(2, 64),)]
    expect(model, runs, "float16").check(compile_and_run(model, runs, "float16", backend()))
    with tempfile.TemporaryDirectory() as folder:
        path = small_model.write_model(Path(folder) / "small", hidden_size=256, torch_dtype="bfloat16")
        llm = LLM.load(path, target="cuda", max_len=200, cache=False)
        answer = llm.generate(list(range(3, 140)), max_tokens=3, ignore_eos=True, stream=False)
    print(f"{tool}: two models ran, {len(answer.tokens)} tokens", flush=True)


def run(tool: str) -> None:
    """In the sanitizer."""
    import cupy

    cupy.cuda.set_allocator(None)  # a pool hides where an allocation ends
    operators(tool)
    rows(tool)
    models(tool)


def main() -> int:
    tool = sys.argv[1] if len(sys.argv) > 1 else TOOLS[0]
    if tool not in TOOLS:
        print(f"{tool}: choose among {', '.join(TOOLS)}", file=sys.stderr)
        return 1
    if sys.argv[2:] == ["inside"]:
        run(tool)
        return 0
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if shutil.which(program) is None:
        print(f"{program} is missing: it comes with NVIDIA's CUDA toolkit", file=sys.stderr)
        return 1
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.sanitize", tool, "inside"]
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
