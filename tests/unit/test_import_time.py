"""What an import costs and what it must not drag in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERBS = sorted((Path(__file__).parents[2] / "npusim" / "verbs").glob("[a-z]*.py"))


def child_seconds(code: str, pycache: Path, tries: int = 5) -> float:
    """CPU seconds of a Python child that runs ``code``, the best of a few tries; ``pycache`` keeps its bytecode."""
    measure = (
        "import resource, subprocess, sys\n"
        f"for _ in range({tries}):\n"
        "    before = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)\n"
        "    after = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(pycache)
    command = [sys.executable, "-c", measure, *code.split("\0")]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return min(map(float, out.stdout.split()))


def modules_after(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], check=True, capture_output=True, text=True
    )
    return set(out.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import npu_compiler, npu_runtime, npusim",
        "import npu_compiler.pipeline, npu_compiler.partitioner",
        "import npu_compiler.partitioning.explain, npu_compiler.ops.table",
        "import npu_runtime.executor, npu_runtime.partitioned.dag_executor, npu_runtime.partitioned.fallback",
        "import npusim.cli, npusim.builder.model, " + ", ".join(f"npusim.verbs.{p.stem}" for p in VERBS),
    ],
)
def test_no_heavy_imports(code: str) -> None:
    loaded = modules_after(code)
    assert not loaded & {"torch", "rich", "transformers", "PIL", "pytest"}


def test_help_loads_only_argparse() -> None:
    loaded = modules_after("import npusim.cli; npusim.cli.parser()")
    assert not loaded & {"numpy", "msgpack", "safetensors", "ml_dtypes"}


def test_import_time(tmp_path: Path) -> None:
    """Importing the packages, or asking the command for help, costs less than importing NumPy on the same machine."""
    numpy = child_seconds("-c\0import numpy", tmp_path)
    assert child_seconds("-c\0import npu_compiler, npu_runtime", tmp_path) < numpy
    assert child_seconds("-m\0npusim.cli\0--help", tmp_path) < numpy
