"""The C++ compiler of this machine, and what tests of the toolchain do with it."""

from __future__ import annotations

import ctypes
import shutil
import time
from pathlib import Path

import pytest

from npu_compiler.targets.cpu import toolchain

ROOT = Path(toolchain.__file__).parents[3]
EXPORT = '#include "api.h"\nAPI '
CXX = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)

needs_cxx = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def load(tmp_path: Path, binary: bytes) -> ctypes.CDLL:
    path = tmp_path / f"{time.monotonic_ns()}.so"
    path.write_bytes(binary)
    return ctypes.CDLL(str(path))
