"""The registry: which files declare ops, and in which order."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import npu_compiler
from npu_compiler.ops import REGISTRY

FAMILY = """
from npu_compiler.graph.expr import Expr
from npu_compiler.ops.registry import pointwise


@pointwise("demo.twice.default", samples=())
def twice(self: Expr) -> Expr:
    return self * 2
"""
CODE = "from npu_compiler.ops import REGISTRY; print(*REGISTRY)"


def test_a_new_file_is_a_new_family(tmp_path: Path) -> None:
    """No list names it; the other ops and their order stay the same, whatever is imported first."""
    source = Path(npu_compiler.__file__).parent
    shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    (tmp_path / source.name / "ops" / "zero_demo.py").write_text(FAMILY)
    for first in ("", "import npu_compiler.ops.zero_demo; ", "import npu_compiler.ops.lower; "):
        command = [sys.executable, "-c", first + CODE]
        found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
        assert found == [*REGISTRY, "demo.twice.default"]
