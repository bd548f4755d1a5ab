"""The headers of CPU kernels, precompiled once for all programs that a run of the tests compiles.

Reading <immintrin.h> is half of what g++ needs for a small program. The objects are the same, byte for byte; where a
precompiled header does not fit (another compiler, other flags), g++ reads the plain one.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import time

from npu_compiler.support import env
from npu_compiler.support.cache import make_folders
from npu_compiler.support.errors import ToolchainError
from npu_compiler.targets.cpu.compilers import compile_flags, find_compiler
from npu_compiler.targets.cpu.target import KERNELS
from npu_compiler.targets.cpu.toolchain import _Headers

HEADER = "loops.h"  # what the units of every program include first


def use_precompiled_headers() -> None:
    """Let this process and its children compile with it, through NPU_CXX; does nothing where that is set already, or
    where the compiler is not g++. The header is kept beside the cache of objects, which it must not make stale."""
    if env.cxx() or os.environ.get("CXX"):
        return
    try:
        compiler = find_compiler()
    except ToolchainError:
        return
    if compiler.kind != "gcc":
        return
    flags = compile_flags("native", compiler)
    made_of = compiler.identity, flags, _Headers(KERNELS).digest(f'#include "{HEADER}"')
    folder = env.cache_dir() / "precompiled" / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    header = folder / f"{HEADER}.gch"
    if not header.exists():
        make_folders(folder)
        part = header.with_suffix(f".{os.getpid()}")
        command = [*compiler.argv, *flags, "-iquote", str(KERNELS), "-x", "c++-header", str(KERNELS / HEADER)]
        if subprocess.run([*command, "-o", str(part)], capture_output=True).returncode:
            return
        part.rename(header)
        for old in folder.parent.iterdir():  # of earlier versions: 30 MB each
            if old.stat().st_mtime < time.time() - 24 * 3600:
                shutil.rmtree(old, ignore_errors=True)
    os.environ["NPU_CXX"] = shlex.join([*compiler.argv, "-iquote", str(folder)])
