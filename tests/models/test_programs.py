"""What a compiled ResNet-50 promises beyond its results: memory, reproducible bytes, a run without allocation."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import state_dict_numpy
from npu_compiler.support import dtypes
from npu_runtime import CPUBackend, Executor

from .random_models import image_model, images

ROOT = Path(__file__).parents[2]
RESNET50 = ROOT / "tests" / "data" / "ir" / "resnet50.json"
RESNET18 = RESNET50.with_name("resnet18.json")


def test_arena_of_resnet50() -> None:
    program = npu_compiler.compile(RESNET50, dtype="float16")
    entry = program.entries["main"]
    assert entry.arena_bytes <= 4_000_000
    largest = max(
        b.offset + np.prod(b.shape) * dtypes.DTYPES[b.dtype].size for b in program.buffers if b.kind == "arena"
    )
    assert largest <= entry.arena_bytes


def saved(path: Path) -> bytes:
    npu_compiler.compile(RESNET18).save(path)  # the kernels of test_ir_files.py
    return path.read_bytes()


def test_compiling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """In this process, and in another one, in which sets and dicts of strings have another order."""
    first = saved(tmp_path / "a.npubin")
    assert saved(tmp_path / "b.npubin") == first
    code = "import sys, npu_compiler; npu_compiler.compile(sys.argv[1]).save(sys.argv[2])"
    other = tmp_path / "c.npubin"
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(RESNET18), str(other)], check=True, env=environment)
    assert other.read_bytes() == first


def test_results_are_reproducible() -> None:
    """Bit by bit: from run to run, and whatever the number of threads."""
    program, weights = resnet50()
    x = images(1, 224).numpy()
    runs = [Executor(program, weights, CPUBackend(n)) for n in (1, 2, 3)]
    results = [next(iter(e.run([x]).values())) for e in runs for _ in range(2)]
    assert all(np.array_equal(r, results[0]) for r in results[1:])


def resnet50() -> tuple[CompiledProgram, dict[str, np.ndarray]]:
    return npu_compiler.compile(RESNET50, dtype="float16"), state_dict_numpy(image_model("resnet50", 64))


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Bytes that Python allocated at most inside the block."""
    peak: list[int] = []
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        gc.enable()


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
def test_a_run_of_resnet50_allocates_nothing() -> None:
    """Neither Python objects nor pages: the first run has touched all memory that any run needs."""
    program, weights = resnet50()
    executor = Executor(program, weights, CPUBackend())
    out = np.zeros((1, 1000), np.float32)
    bound = executor.bind([images(1, 224).numpy()], [out])
    for _ in range(3):
        bound()
    wanted = out.copy()
    pages = resident_pages()
    for _ in range(3):  # tracemalloc sees every thread, so a test runner's own may add to one of them
        with allocations() as peak:
            for _ in range(20):
                bound()
        if peak[0] < 2048:
            break
    assert peak[0] < 2048
    assert resident_pages() - pages < 64
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(("rows", "alone"), [(4, "true"), (4096, "false")])
def test_short_programs_run_on_the_calling_thread(rows: int, alone: str) -> None:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    program = npu_compiler.compile(npu_compiler.capture(torch.nn.Softmax(-1), (x,)))
    assert re.search(rf"static const Entry \w+ = {{.*, {alone}}};", program.sources["main.cpp"])
    (result,) = Executor(program, None, CPUBackend(2)).run([x.numpy()]).values()
    np.testing.assert_allclose(result, torch.softmax(x.double(), -1).numpy(), rtol=1e-5, atol=1e-8)
