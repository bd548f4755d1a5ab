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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from npu_compiler.support import env
from npu_compiler.support.cache import make_folders
from npu_compiler.support.errors import ToolchainError
from npu_compiler.targets.cpu.compilers import Compiler, compile_flags, find_compiler
from npu_compiler.targets.cpu.devices import DEVICES
from npu_compiler.targets.cpu.host import host_cpu
from npu_compiler.targets.cpu.target import KERNELS
from npu_compiler.targets.cpu.toolchain import _Headers

HEADER = "loops.h"  # what the units of every program include first
_KEPT_S = 24 * 3600


def use_precompiled_headers() -> None:
    """Let this process and its children compile with them, through NPU_CXX; does nothing where that is set already, or
    where the compiler is not g++. They are kept beside the cache of objects, which they must not make stale."""
    if env.cxx() or os.environ.get("CXX"):
        return
    try:
        compiler = find_compiler()
    except ToolchainError:
        return
    if compiler.kind != "gcc":
        return
    flags = [compile_flags(march, compiler) for march in _marches()]
    made_of = compiler.identity, flags, _Headers(KERNELS).digest(f'#include "{HEADER}"')
    folder = env.cache_dir() / "precompiled" / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    headers = folder / f"{HEADER}.gch"  # of the headers in a folder of this name, g++ takes the one that fits its flags
    make_folders(headers)
    with ThreadPoolExecutor(env.usable_cpus()) as pool:
        if not all(pool.map(lambda march: _precompile(compiler, march, headers), _marches())):
            return
    for old in folder.parent.iterdir():  # of earlier versions: 30 MB each
        if old != folder and old.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(old, ignore_errors=True)
    os.environ["NPU_CXX"] = shlex.join([*compiler.argv, "-iquote", str(folder)])


def _marches() -> list[str]:
    """What tests compile for on this machine: its CPU, an older one and any of its architecture."""
    names = ("avx2", "portable") if host_cpu().arch == "x86_64" else ("portable",)
    return list(dict.fromkeys(["native", *(d.march for d in DEVICES if d.name in names)]))


def _precompile(compiler: Compiler, march: str, headers: Path) -> bool:
    """Write the header for one CPU unless it is there. Returns whether it is there now."""
    header = headers / f"{march or 'any'}.gch"
    if header.exists():
        return True
    part = headers.parent / f"{header.name}.{os.getpid()}"
    command = [*compiler.argv, *compile_flags(march, compiler), "-iquote", str(KERNELS), "-x", "c++-header"]
    if subprocess.run([*command, str(KERNELS / HEADER), "-o", str(part)], capture_output=True).returncode:
        part.unlink(missing_ok=True)
        return False
    part.rename(header)
    return True
